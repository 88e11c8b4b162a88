"""State that watchers know, and the news for them: `changes` for those who watch, `whole` for those who come.

A part is a section of an update and its items, in the order in which static/state.js applies them; `events` makes JSON of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ft.dashboard.history import LANES, History
from ft.dashboard.view import HEALTH, Row, View

MOST_BYTES = 48_000  # of one message
Parts = dict[str, list[Any]]
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Told:
    """State up to the newest update, whoever watches."""

    def __init__(self, view: View, history: History, **constants: Any) -> None:
        """constants: said first to each who comes."""
        self._view, self._history = view, history
        self._constants = {"health": HEALTH, "lanes": LANES, **constants}
        self._changes = 0  # of the history
        self._names: dict[
            str, tuple[Any, ...]
        ] = {}  # of the ids that are shown; begins with a key: short, not used twice
        self._rows: dict[str, Row] = {}
        self._job: dict[str, Any] = {}
        self._heals: list[Any] = []
        self._phases = 0
        self._next_key = 1

    @property
    def groups(self) -> int:
        return len(self._rows)

    @property
    def is_behind(self) -> bool:
        """Something has happened: an event, or a step."""
        return self._history.changes > self._changes

    def changes(self) -> Parts:
        """News since the last call, which are taken for told."""
        view, history, since = self._view, self._history, self._changes
        rows, old = view.rows(), self._rows
        gone = [self._names.pop(i)[0] for i in old if i not in rows]
        # how many ranks a group has may not have been known when it was named
        named = [i for i in rows if i not in old or (not self._names[i][2] and view.lasting(i)[1])]
        for i in named:
            key = self._names[i][0] if i in old else self._next_key
            self._next_key = max(self._next_key, key + 1)
            self._names[i] = (key, *view.lasting(i))
        keys, job = {i: name[0] for i, name in self._names.items()}, view.job(rows)
        heals = [
            (keys[i], [keys[source] for source in sources if source in keys], done, total)
            for i, (sources, done, total) in view.heals().items()
            if i in keys
        ]
        parts: Parts = {
            "gone": gone,
            "phases": view.phases[self._phases :],
            "names": [self._names[i] for i in named],
            "rows": [(keys[i], *row) for i, row in rows.items() if old.get(i) != row],
            "job": [job] if job != self._job else [],
            "heals": [heals] if heals != self._heals else [],
            "cut": [history.cut_at[1]] if history.cut_at[0] > since else [],
            **self._of_history(since, history.changes),
        }
        self._rows, self._job, self._heals, self._phases = rows, job, heals, len(view.phases)
        self._changes = history.changes
        return parts

    def whole(self) -> Parts:
        """State for a watcher that knows nothing: all that was told until now."""
        return {
            "begin": [self._constants],
            "phases": self._view.phases[: self._phases],
            "names": list(self._names.values()),
            "rows": [(self._names[i][0], *row) for i, row in self._rows.items()],
            "job": [self._job],
            "heals": [self._heals],
            **self._of_history(0, self._changes),
        }

    def _of_history(self, since: int, until: int) -> Parts:
        history = self._history
        lists: dict[str, Iterable[Any]] = {"points": history.points, "sizes": history.sizes, "events": history.events}
        return {name: [x.to_json() for x in them if since < x.changed <= until] for name, them in lists.items()}


def messages(parts: Parts, now_s: float) -> list[str]:
    """JSON objects of at most MOST_BYTES each, one at least; section -> items. now_s: since 1970."""
    made: list[str] = []
    sections: dict[str, list[str]] = {"now": [f"{now_s:.1f}"]}
    size = 0
    for section, items in parts.items():
        for item in items:
            text = _encode(item)
            size += len(text) + len(section) + 8
            if size > MOST_BYTES:
                made.append(_object(sections))
                sections, size = {}, len(text) + len(section) + 8
            sections.setdefault(section, []).append(text)
    return [*made, _object(sections)]


def _object(sections: dict[str, list[str]]) -> str:
    return "{" + ",".join(f'"{name}":[{",".join(items)}]' for name, items in sections.items()) + "}"

"""The lighthouse's live page in a browser, with 3 and with 1,000 groups: time until it can be used, until it shows a death, and bytes.

    python bench/page.py

A real lighthouse in a process of its own, groups that speak to it as ours do (page_job.py: they only say that they train), and Debian's
chromium, headless. What the page costs the lighthouse: bench/quorum.py --watchers 5.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench import lighthouse_load as load
from bench.page_job import Herd
from bench.pairs import spread, table

SIZES = (3, 1000)
OPENED, DEATHS = 5, 7  # times that each is measured
WATCH = """(what) => {
    window.seen = 0;
    window.watcher?.disconnect();
    const look = () => { if (!window.seen && document.querySelector(what)) window.seen = Date.now(); };
    window.watcher = new MutationObserver(look);
    window.watcher.observe(document.body, {subtree: true, childList: true, attributes: true});
    look();
}"""


class PageJob(Herd):
    """A lighthouse and its groups, in a quorum."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.token = count, secrets.token_urlsafe(18)
        (folder / "token").write_text(self.token)
        self.server = load.ours(count, http="127.0.0.1:0", token_file=folder / "token")
        self.page = self.server.line()
        super().__init__(f"http://{self.server.address}", self.token)
        names = (f"{i}" if count < 100 else f"rack{i // 25:02}-{i % 25:02}" for i in range(count))
        self.ids = [f"{name}:{secrets.token_hex(4)}" for name in names]
        self.open(self.ids)
        self.form()

    def come_back(self, place: int) -> None:
        """Opens the group again under a new id, and heals it."""
        self.ids[place] = f"{self.ids[place].partition(':')[0]}:{secrets.token_hex(4)}"
        self.open([self.ids[place]])
        self.form(failed=True)
        self.heal(self.ids[place], 1.0)
        self.beat()

    def close(self) -> None:
        super().close()
        self.server.close()


def main() -> int:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("page.py: there is no chromium here; Debian: apt-get install chromium", file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    rows = []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        with closing(playwright.chromium.launch(executable_path=chromium, args=arguments)) as browser:
            for groups in SIZES:
                with closing(PageJob(groups, Path(folder))) as job:
                    rows.append(_measure(browser, job))
                print(f"{groups} groups done", file=sys.stderr)
    figures = ("usable after ms", "a death after ms", "KB to begin", "largest event KB", "a step of all KB")
    print(table(["groups", *figures], rows))
    return 0


def _measure(browser: Any, job: PageJob) -> list[str]:
    job.beat()
    usable = []
    for _ in range(OPENED):
        page, took_ms = _open(browser, job)
        usable.append(took_ms)
        page.context.close()
    page, _ = _open(browser, job)
    deaths = []
    for place in range(DEATHS):
        page.evaluate(WATCH, "tr[data-health='lost']")
        began_ms = time.time() * 1000
        job.lose(job.ids[place % job.count])
        deaths.append(_seen(page) - began_ms)
        job.come_back(place % job.count)
        page.evaluate(WATCH, "#counts:not(:has([data-health='lost'], [data-health='healing']))")
        _seen(page)
    page.context.close()
    begin, largest, step = _bytes(job)
    figures = (spread(all_of, ".0f") for all_of in (usable, deaths))
    return [str(job.count), *figures, *(f"{size / 1000:.1f}" for size in (begin, largest, step))]


def _open(browser: Any, job: PageJob) -> tuple[Any, float]:
    """A page that shows all groups, and how long after the log-in, milliseconds."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(f"{job.page}/")
    page.fill("#token", job.token)
    few = f"#table tbody tr:nth-child({job.count})"
    page.evaluate(WATCH, few if job.count < 100 else f"#grid span:nth-child({job.count})")
    began_ms = page.evaluate("() => { document.querySelector('#log-in form').requestSubmit(); return Date.now(); }")
    return page, _seen(page) - began_ms


def _seen(page: Any) -> float:
    """Waits for the element that is watched for. Returns when it was there, in milliseconds since 1970."""
    while not (seen_ms := page.evaluate("window.seen")):
        page.wait_for_timeout(5)
    return float(seen_ms)


def _bytes(job: PageJob) -> tuple[int, int, int]:
    """Sizes of the updates that begin the stream, of the largest event in it, and of those that tell a step of all groups."""
    request = urllib.request.Request(f"{job.page}/events", headers={"Authorization": f"Bearer {job.token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:

        def update() -> list[int]:
            """Sizes of the events up to the one with an id, which ends an update."""
            sizes, ends = list[int](), False
            while not ends:
                event = [*iter(answer.readline, b"\n"), b"\n"]
                ends = any(line.startswith(b"id: ") for line in event)
                sizes.append(sum(map(len, event)))
            return sizes

        begin = update()
        job.beat(1000)
        steps = [update() for _ in range(3)]
    return sum(begin), max(map(max, [begin, *steps])), max(map(sum, steps))


if __name__ == "__main__":
    sys.exit(main())

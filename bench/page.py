"""Measures the lighthouse's dashboard in a browser, and takes its screenshots.

    python bench/page.py                      3 and 1,000 groups: time until it is usable, until it shows a death, and bytes
    python bench/page.py --pictures docs      docs/page.png, page_dark.png, page_phone.png, and with 1,000 groups page_1000.png

A real lighthouse in a separate process, simulated groups (lighthouse_load.py), and headless chromium from Debian. For the dashboard's cost
to the lighthouse see bench/quorum.py --watchers 5.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench import lighthouse_load as load
from bench.pairs import parser, spread, table

SIZES = (3, 1000)
COLOURS = 192  # of a screenshot; halves its size
OPENED, DEATHS = 5, 7  # repetitions
PICTURES = {
    3: {"page": ("light", 1280), "page_dark": ("dark", 1280), "page_phone": ("dark", 390)},
    1000: {"page_1000": ("light", 1280)},
}
WATCH = """(what) => {
    window.seen = 0;
    window.watcher?.disconnect();
    const look = () => { if (!window.seen && document.querySelector(what)) window.seen = Date.now(); };
    window.watcher = new MutationObserver(look);
    window.watcher.observe(document.body, {subtree: true, childList: true, attributes: true});
    look();
}"""


class PageJob(load.Herd):
    """A lighthouse, and simulated groups in a quorum."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.token = count, secrets.token_urlsafe(18)
        (folder / "token").write_text(self.token)
        self.server = load.ours(count, http="127.0.0.1:0", token_file=folder / "token")
        self.page = self.server.line().strip()
        super().__init__(f"http://{self.server.address}", self.token)
        unique = [f"{i * 2654435761 & 0xFFFFFFFF:08x}" for i in range(count)]
        self.ids = [f"{i}:{x}" if count < 100 else f"rack{i // 25:02}-{i % 25:02}:{x}" for i, x in enumerate(unique)]
        self.open(self.ids)
        self.form()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.beat()
            time.sleep(0.3)  # spreads the points of the curve in time

    def come_back(self, place: int, share: float) -> None:
        """Restarts a group under a new id, with `share` of its state healed."""
        self.ids[place] = f"{self.ids[place].partition(':')[0]}:{secrets.token_hex(4)}"
        self.open([self.ids[place]])
        self.form(failed=True)
        self.heal(self.ids[place], share)
        self.train(1)

    def close(self) -> None:
        super().close()
        self.server.close()


def main(argv: Sequence[str]) -> int:
    options = parser(__doc__, pictures=(Path, "folder for screenshots; no measurements")).parse_args(argv)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("page.py: chromium is not installed; on Debian: apt-get install chromium", file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    rows = []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        with closing(playwright.chromium.launch(executable_path=chromium, args=arguments)) as browser:
            for groups in SIZES:
                with closing(PageJob(groups, Path(folder))) as job:
                    if options.pictures:
                        _picture(browser, job, options.pictures)
                    else:
                        rows.append(_measure(browser, job))
                print(f"{groups} groups done", file=sys.stderr)
    if rows:
        figures = ("usable, ms", "death shown, ms", "first data, KB", "largest event, KB", "update of a step, KB")
        print(table(["groups", *figures], rows))
    return 0


def _measure(browser: Any, job: PageJob) -> list[str]:
    job.train(3)
    usable = []
    for _ in range(OPENED):
        page, took_ms = _open(browser, job, "light", 1280)
        usable.append(took_ms)
        page.context.close()
    page, _ = _open(browser, job, "light", 1280)
    deaths = []
    for place in range(DEATHS):
        page.evaluate(WATCH, "tr[data-health='lost']")
        began_ms = time.time() * 1000
        job.lose(job.ids[place % job.count])
        deaths.append(_seen(page) - began_ms)
        job.come_back(place % job.count, 1.0)
        page.evaluate(WATCH, "#counts:not(:has([data-health='lost'], [data-health='healing']))")
        _seen(page)
    page.context.close()
    begin, largest, step = _bytes(job)
    figures = (spread(all_of, ".0f") for all_of in (usable, deaths))
    return [str(job.count), *figures, *(f"{size / 1000:.1f}" for size in (begin, largest, step))]


def _open(browser: Any, job: PageJob, scheme: str, width: int) -> tuple[Any, float]:
    """Opens the dashboard. Returns the page when it shows all groups, and the milliseconds since the log-in."""
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    page.goto(f"{job.page}/")
    page.fill("#token", job.token)
    few = f"#table tbody tr:nth-child({job.count})"
    page.evaluate(WATCH, few if job.count < 100 else f"#grid span:nth-child({job.count})")
    began_ms = page.evaluate("() => { document.querySelector('#log-in form').requestSubmit(); return Date.now(); }")
    return page, _seen(page) - began_ms


def _seen(page: Any) -> float:
    """Waits for the watched element. Returns the time when it appeared, in milliseconds since 1970."""
    while not (seen_ms := page.evaluate("window.seen")):
        page.wait_for_timeout(5)
    return float(seen_ms)


def _bytes(job: PageJob) -> tuple[int, int, int]:
    """Returns the size of the stream's first update, of its largest event, and of the update for a step of all groups."""
    stream = urllib.request.Request(f"{job.page}/events", headers={"Authorization": f"Bearer {job.token}"})
    sizes: list[int] = []  # of events
    with urllib.request.urlopen(stream, timeout=60) as answer:

        def update() -> int:
            """Reads an update, the events up to one with an id. Returns its bytes."""
            before, ends = len(sizes), False
            while not ends:
                lines = list(iter(answer.readline, b"\n"))  # an event ends with an empty line
                sizes.append(sum(map(len, lines)) + 1)
                ends = any(line.startswith(b"id: ") for line in lines)
            return sum(sizes[before:])

        begin = update()
        job.beat(1000)
        step = max(update() for _ in range(3))
    return begin, max(sizes), step


def _picture(browser: Any, job: PageJob, folder: Path) -> None:
    """Takes the screenshots, after some faults, with one group healing and one lost."""
    first, second, third = (0, 1, 2) if job.count == 3 else (417, 733, 88)
    job.train(24)
    job.lose(job.ids[third])
    job.train(3)
    job.come_back(third, 0.4)
    job.train(3)
    job.heal(job.ids[third], 1.0)
    job.train(12)
    words = f"after step {job.step} the weights of rank 0 of group {job.ids[second].partition(':')[0]} differ"
    job.tell(job.ids[0], "corruption", f"{words} from those of 2 other groups")
    job.train(10)
    job.lose(job.ids[second])
    job.train(2)
    job.come_back(second, 0.625)
    job.lose(job.ids[first])
    job.train(8)
    for picture, (scheme, width) in PICTURES[job.count].items():
        page, _ = _open(browser, job, scheme, width)
        page.evaluate(WATCH, "#heal-list progress[value='62']")
        _seen(page)
        job.train(2)
        page.wait_for_timeout(1500)  # the curve is drawn once a second
        image = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
        image = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        image.save(folder / f"{picture}.png", optimize=True)
        page.context.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

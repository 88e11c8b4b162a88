"""The page in a real browser, over a real lighthouse, with answers in between that are cut off, refused or hostile."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.dashboard.house import THREE, TOKEN, Herds, House, Houses, Jobs

pytestmark = pytest.mark.timeout(400)  # the first one may install the browser
WAIT_MS = 30_000
Open = Callable[..., Any]
HOSTILE = (
    "<img src=x onerror=alert(1)>:1",
    "</script><script>alert(1)</script>:1",
    "\"'><svg onload=alert(1)>:1",
    "{{constructor}}${alert(1)}:1",
    "שלום עולם:1",
    "x" * 510 + ":1",
)


@pytest.fixture
def tab(browser: Any) -> Iterator[Open]:
    """Opens a page and logs in. Afterwards: no error of it, and no request to anybody else."""
    contexts, complaints, strangers = [], list[str](), list[str]()

    def build(of: House, *, log_in: bool = True, width: int = 1280, **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: complaints.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda asked: None if asked.url.startswith(of.url) else strangers.append(asked.url))
        page.goto(of.url)
        if of.token and log_in:
            page.fill("#token", of.token)
            page.press("#token", "Enter")
        return page

    yield build
    for context in contexts:
        context.close()
    refused = re.compile(r"status of (401|403)|ERR_CONNECTION_REFUSED|ERR_INCOMPLETE|ERR_EMPTY|ERR_CONNECTION_RESET")
    assert not [text for text in complaints if not refused.search(text)], "Chromium says itself what HTTP refused"
    assert not strangers


def row(page: Any, replica_id: str) -> Any:
    return page.locator("tbody tr", has=page.get_by_text(replica_id, exact=True))


def until(page: Any, expression: str) -> None:
    """playwright's own wait_for_function lets the page evaluate a string, which the page's policy does not allow."""
    end_s = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end_s, f"not within {WAIT_MS} ms: {expression}"
        page.wait_for_timeout(20)


def test_groups_come_and_go_and_a_death_is_seen_at_once(job: Jobs, tab: Open):
    one, groups = job()
    page = tab(one)
    page.wait_for_selector("tbody tr:nth-child(3)")
    assert page.inner_text("#headline").endswith("Training") and page.title().startswith("Training · 1")
    assert [x.inner_text() for x in page.locator("tbody th .id").all()] == list(THREE)
    page.evaluate("""() => {
        new MutationObserver(() => {
            if (document.querySelector('tr[data-health="lost"]')) window.seen ??= Date.now();
        }).observe(document.querySelector("#table"), {subtree: true, childList: true, attributes: true});
    }""")
    began_ms = page.evaluate("Date.now()")
    groups.lose("1:b")
    until(page, "window.seen")
    print(f"a death stands on the page after {page.evaluate('window.seen') - began_ms:.0f} ms")
    assert "its connection broke" in row(page, "1:b").inner_text()
    until(page, "document.querySelector('#live').textContent.includes('1:b is lost')")  # and is read out
    assert page.locator("#event-list li").first.get_attribute("data-grade") == "bad"
    groups.open(["1:d"])
    groups.form(failed=True)
    groups.heal("1:d", 0.25)
    groups.beat(0)
    page.wait_for_selector("#heal-list progress[value='25']")
    assert "1:d ← from 0:a and 2:c" in page.inner_text("#heal-list")
    assert row(page, "1:b").count() == 0
    groups.heal("1:d", 1.0)
    groups.beat()
    page.wait_for_selector("#heals", state="hidden")
    assert page.locator("#chart .sign.bad").count() >= 1 and page.locator("#chart .line").get_attribute("d")


def test_nothing_is_shown_before_the_token_and_after_log_out(job: Jobs, tab: Open):
    one, _ = job()
    page = tab(one, log_in=False)
    page.wait_for_selector("#log-in[open]")
    assert "0:a" not in page.content()
    for impossible in ("short", "16 characters and", "\u05d0" * 20):  # no header could carry the last one
        page.fill("#token", impossible)
        page.press("#token", "Enter")
        assert page.locator("#log-in[open]").count() == 1 and page.evaluate("sessionStorage.length") == 0
    for _ in range(3):  # Chromium closes it at the second
        page.press("#token", "Escape")
        page.wait_for_selector("#log-in[open]")
    page.fill("#token", "0123456789abcdee")
    page.press("#token", "Enter")
    until(page, "document.querySelector('#log-in-error').textContent.includes('refuses that token')")
    assert "0:a" not in page.content()
    page.fill("#token", TOKEN)
    page.press("#token", "Enter")
    page.wait_for_selector("tbody tr:nth-child(3)")
    assert page.url == one.url and TOKEN not in page.content()
    kept = page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
    assert kept == [[TOKEN], [], ""]
    page.reload()
    page.wait_for_selector("tbody tr:nth-child(3)")  # the tab keeps it
    page.click("#log-out")
    page.wait_for_selector("#log-in[open]")
    until(page, "!document.querySelector('tbody tr')")
    assert page.evaluate("sessionStorage.length") == 0 and "0:a" not in page.content()


def test_a_group_is_drained_and_another_killed(job: Jobs, tab: Open):
    one, groups = job()
    page = tab(one)
    row(page, "1:b").get_by_role("button", name="Drain 1:b").click()
    assert page.locator("#order").get_by_text("1:b").count() == 1
    assert "2 groups would be left. That is too few: the job needs 3" in page.inner_text("#order-text")
    page.click("#order-no")
    row(page, "1:b").get_by_role("button", name="Drain 1:b").click()
    page.click("#order-yes")
    page.wait_for_selector("tr[data-health='left']")
    assert "drained by an operator" in row(page, "1:b").inner_text()
    row(page, "2:c").get_by_role("button", name="Kill 2:c").press("Enter")
    page.press("#order-yes", "Enter")
    page.wait_for_selector("tr[data-health='lost']")
    assert groups.obeyed == [("drain", "1:b"), ("kill", "2:c")]
    status = page.evaluate("""async () => (await fetch("orders", {method: "POST", headers: {"Content-Type": "application/json"},
        body: JSON.stringify({order: "kill", replica_id: "0:a"})})).status""")
    # the token goes along in a header, and in nothing that a browser sends by itself
    assert status == 401 and len(groups.obeyed) == 2


def test_an_order_that_is_refused_says_why(job: Jobs, tab: Open):
    one, groups = job()
    page = tab(one)
    page.evaluate("sessionStorage.setItem('pharos-token', 'another token')")
    row(page, "1:b").get_by_role("button", name="Kill 1:b").click()
    page.click("#order-yes")
    until(page, "document.querySelector('#order-error').textContent === 'Not done: this job has a token'")
    assert not groups.obeyed


def test_without_a_token_the_buttons_are_off_and_the_page_says_why(job: Jobs, tab: Open):
    one, _ = job(token="")
    page = tab(one)
    page.wait_for_selector("tbody tr:nth-child(3)")
    assert page.locator("tbody button:enabled").count() == 0
    assert "--token_file" in page.inner_text("#orders-note")


def test_a_cut_connection_is_made_again_and_catches_up(job: Jobs, tab: Open):
    one, groups = job()
    page = tab(one)
    page.wait_for_selector("tbody tr:nth-child(3)")
    page.evaluate("document.querySelector('tbody tr').id = 'the-same'")  # all anew would make another one

    def cut() -> None:
        for watcher in one.feed.watchers:
            watcher.abort()

    one.loop.call_soon_threadsafe(cut)
    page.wait_for_selector("#connection[data-state='bad']")
    assert page.locator("body.stale").count() == 1, "what is shown is old"
    groups.lose("2:c")
    page.wait_for_selector("tr[data-health='lost']")
    page.wait_for_selector("#connection[data-state='good']")
    assert page.locator("#the-same").count() == 1 and page.locator("body.stale").count() == 0


def test_another_life_of_the_lighthouse_is_told_from_its_beginning(job: Jobs, tab: Open):
    one, _ = job()
    page = tab(one)
    page.wait_for_selector("tbody tr:nth-child(3)")
    page.evaluate("document.querySelector('tbody tr').id = 'of-old'")

    def begin_anew() -> None:
        one.feed.process_tag = "another"  # what was said before means nothing now
        for watcher in one.feed.watchers:
            watcher.abort()

    one.loop.call_soon_threadsafe(begin_anew)
    page.wait_for_selector("#of-old", state="detached")
    page.wait_for_selector("tbody tr:nth-child(3)")
    assert [x.inner_text() for x in page.locator("tbody th .id").all()] == list(THREE)


def test_what_groups_say_is_text(job: Jobs, tab: Open):
    one, groups = job(HOSTILE)
    groups.beat(phase="\u202ednuora\x00<b onclick=alert(1)>bold</b>")
    groups.tell(HOSTILE[0], "corruption", "\u202e<img src=x onerror=alert(1)>" + "y" * 400)
    for width in (1280, 360):
        page = tab(one, width=width)
        page.wait_for_selector(f"tbody tr:nth-child({len(HOSTILE)})")
        page.wait_for_selector("#event-list [data-grade='bad']")
        shown = page.eval_on_selector_all("tbody th .id", "all => all.map((x) => x.textContent)")
        assert sorted(shown) == sorted(HOSTILE), "to the letter, and at full length"
        phases = set(page.eval_on_selector_all("tbody .phase", "all => all.map((x) => x.textContent)"))
        assert phases == {"\ufffddnuora\ufffd<b onclick=alert(1)>bold</b>"}
        assert page.locator("tbody img, tbody svg, tbody script, tbody b b, #event-list img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"nothing sticks out at {width}"
        page.context.close()


def test_a_name_of_ten_kilobytes_does_not_come_in(house: Houses, herd: Herds):
    one = house()
    herd(one).open(["y" * 10_000])
    with one.watch() as reader:
        reader.next()
        assert not reader.names
    assert not one.service.streams


def test_a_thousand_groups_the_worst_first(job: Jobs, tab: Open):
    ids = [f"replica_{i:05d}:0f0e0d0c-0000-4000-8000-{i:012d}" for i in range(1000)]
    one, groups = job(ids)
    page = tab(one, log_in=False)
    page.wait_for_selector("#log-in[open]")
    page.fill("#token", one.token)
    page.evaluate("""() => {
        window.began = performance.now();
        new MutationObserver(() => {
            if (document.querySelector("#grid").childElementCount === 1000) window.usable ??= performance.now();
        }).observe(document.querySelector("#grid"), {childList: true});
        document.querySelector("#log-in form").requestSubmit();
    }""")
    until(page, "window.usable")
    print(f"1,000 groups stand there {page.evaluate('window.usable - window.began'):.0f} ms after the log-in")
    groups.lose(ids[700])
    page.wait_for_selector(f"tbody tr[data-health='lost'] >> text={ids[700].partition(':')[0]}")
    assert page.locator("tbody tr").count() == 1 and "1 of 1,000 groups need attention" in page.inner_text(
        "#groups-note"
    )
    page.fill("#find", "CA_00042")
    until(page, "document.querySelectorAll('tbody tr').length === 1")
    assert "replica_00042" in page.inner_text("tbody tr")
    page.fill("#find", "")
    page.focus("#grid")
    for key in ("End", "ArrowLeft", "ArrowUp", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("tbody tr[data-chosen='true'] >> text=replica_00998")
    assert "replica_00998" in (page.locator("#grid .active").get_attribute("aria-label") or "")
    assert page.get_attribute("#grid", "aria-activedescendant") == page.locator("#grid .active").get_attribute("id")


@pytest.mark.parametrize("width", [360, 1280])
def test_a_keyboard_and_a_screen_reader_find_everything(job: Jobs, tab: Open, width: int):
    one, _ = job()
    page = tab(one, width=width)
    page.wait_for_selector("tbody tr:nth-child(3)")
    assert [page.get_by_role(role).count() for role in ("banner", "main", "table", "slider")] == [1] * 4
    for name in ("Loss, quorum and faults", "Groups", "Events"):
        assert page.get_by_role("region", name=name, exact=True).count() == 1
    assert page.get_by_role("row").count() == 4 and page.get_by_role("cell").count() == 21, "a table on a phone, too"
    assert page.get_by_label("Find a group").count() == 1
    unnamed = "all => all.filter((x) => !(x.textContent.trim() || x.ariaLabel)).map((x) => x.id)"
    assert page.eval_on_selector_all("button", unnamed) == ["order-yes"], "which has a name where it is shown"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        outline = "[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
        found, style = page.evaluate(outline)
        reached.add(found)
        assert found == "" or style != "none", f"{found} has the focus, and nobody sees it"
    assert {"log-out", "chart", "find", "lane-0", "lane-3"} <= reached
    page.focus("#chart")
    page.keyboard.press("Home")
    assert page.get_attribute("#chart", "aria-valuetext").startswith("step 1: loss ")
    small = "all => all.filter((x) => x.getBoundingClientRect().height < (innerWidth < 760 ? 44 : 24)).length"
    assert page.eval_on_selector_all("tbody button", small) == 0, "large enough for a finger"

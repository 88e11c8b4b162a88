"""The page's files, without a browser: nothing inline, nothing from elsewhere, contrast in both palettes, and modules that one can read."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ft.dashboard.server import FILES as SERVED
from ft.dashboard.server import FOLDER, POLICY
from ft.dashboard.view import HEALTH

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.name: path.read_text() for path in sorted(FOLDER.iterdir())}
TEXTS, GROUNDS = ("ink", "soft", "accent", "good", "busy", "bad"), ("card", "ground")


class Found(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_markup_has_no_script_style_or_address_of_its_own():
    parser = Found()
    parser.feed(FILES["index.html"])
    assert ("script", {"type": "module", "src": "page.js"}) in parser.tags
    for tag, attributes in parser.tags:
        assert tag != "style" and (tag != "script" or "src" in attributes)
        for name, value in attributes.items():
            assert not name.startswith("on") and name != "style"
            if name in ("src", "href"):
                assert value in FILES or (value or "").startswith("#")
    ids = [attributes["id"] for _, attributes in parser.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_a_module_makes_no_markup_and_fits_a_screen_or_two(name: str):
    text = FILES[name]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|\.style\b|localStorage", text
    )
    addresses = set(re.findall(r"https?://\S+", text))
    assert addresses <= {
        'http://www.w3.org/2000/svg";',
        "https://html.spec.whatwg.org/multipage/server-sent-events.html",
    }
    assert text.count("\n") < 300
    assert set(re.findall(r'from "\./(\w+\.js)"', text)) <= set(FILES)


def test_the_package_brings_all_of_them():
    assert set(FILES) <= {"index.html", *(path.lstrip("/") for path in SERVED)}
    assert '"ft.dashboard" = ["static/*"]' in (ROOT / "pyproject.toml").read_text()
    assert "unsafe" not in POLICY and "*" not in POLICY


def test_every_state_has_a_sign():
    signs = FILES["glyphs.js"]
    assert [word for word in HEALTH if not re.search(rf'(?:"{word}"|\b{word}): "', signs)] == []


def test_text_can_be_read_in_both_palettes():
    """WCAG 2.2, 1.4.3: 4.5 to 1; signs and bars (1.4.11): 3 to 1."""
    light, dark = re.findall(r":root \{(.*?)\}", FILES["page.css"], re.DOTALL)
    before = dict(re.findall(r"--([\w-]+): (#\w{6});", light))
    for colours in (before, {**before, **dict(re.findall(r"--([\w-]+): (#\w{6});", dark))}):
        pairs = [(text, ground) for text in TEXTS for ground in GROUNDS]
        pairs += [(tone, f"{tone}-ground") for tone in ("good", "busy", "bad")]
        low = {pair: round(contrast(*(colours[name] for name in pair)), 2) for pair in pairs}
        assert not {pair: ratio for pair, ratio in low.items() if ratio < 4.5}
        assert contrast(colours["loss"], colours["card"]) >= 3


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

"""README.md stays short and true: its tree names what exists, its claims name commands and figures that exist; docs/index.md reaches
every page."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from tests.unit.test_documents import anchor

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?x?(?!\w)")  # 1.05x, too


def section(title: str) -> str:
    """Returns the text between a heading of README.md and the next one."""
    [text] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", README.read_text(), re.MULTILINE | re.DOTALL)
    return text


def tree() -> dict[str, str]:
    """Returns path -> description of each line of the tree; four spaces of indentation are one folder."""
    [block] = re.findall(r"^```\n(.*?)^```$", section("The tree"), re.MULTILINE | re.DOTALL)
    folders: list[str] = []
    lines: dict[str, str] = {}
    for line in block.splitlines():
        name, _, words = line.strip().partition(" ")
        depth, rest = divmod(len(line) - len(line.lstrip()), 4)
        assert rest == 0, line
        assert depth <= len(folders), line
        folders[depth:] = [name]
        lines["".join(folders)] = words.strip()
    return lines


def claims() -> list[tuple[str, str, str]]:
    """Returns the rows of the table of claims: (claim, command, page)."""
    rows = re.findall(
        r"^\| (.*) \| (.*) \| (.*) \|$", section("Claims, and the test or measurement of each"), re.MULTILINE
    )
    return [row for row in rows if row[0] != "claim"]


def linked(link: str) -> str:
    """Returns the text of a page, or of the section that the link names, without its subsections."""
    name, _, fragment = link.partition("#")
    page = ROOT / name
    if not fragment:
        return page.read_text()
    sections = re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE)[1:]
    [found] = [text for text in sections if anchor(text.partition("\n")[0]) == fragment]
    return found


def numbers(text: str) -> set[str]:
    """Returns the numbers of a text, without thousands separators."""
    return set(NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text)))


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150
    assert len(tree()) <= 30


def test_the_tree_names_what_exists():
    assert tree()
    missing = [
        path for path in tree() if not ((ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file())
    ]
    assert not missing
    assert not [path for path, words in tree().items() if not words]


def test_the_tree_names_each_top_level_folder():
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line and line[0] != "#"]
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    folders = {name for name in folders if not any(fnmatch(name, pattern) for pattern in ignored)}
    assert {path.rstrip("/") for path in tree() if path.count("/") == 1 and path.endswith("/")} == folders


def test_the_commands_of_the_claims_exist():
    """The tests, scripts and make targets of the claims exist; they are not run here."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(claims()) > 20
    for claim, command, _ in claims():
        [*codes] = re.findall(r"`([^`]+)`", command)
        words = [word for code in codes for word in code.split()]
        assert words, claim
        assert not [word for word in words if "/" in word and not (ROOT / word).exists()], claim
        assert not [code for code in codes if code.startswith("make ") and code.split()[1] not in targets], claim


def test_the_numbers_of_the_claims_are_in_the_pages():
    for claim, _, page in claims():
        links = re.findall(r"\]\(([^)]+)", page)
        assert links, claim
        told = numbers("\n".join(map(linked, links)))
        assert numbers(claim) <= told, f"{claim}: {sorted(numbers(claim) - told)} not in {links}"


def test_the_index_reaches_every_page():
    """Each page is linked at least once, and each question has one link."""
    rows = re.findall(r"^\| (.*) \| (.*) \|$", INDEX.read_text(), re.MULTILINE)
    links = [re.findall(r"\]\(([^)]+)\)", answer) for question, answer in rows if question.endswith("?")]
    assert links and all(len(found) == 1 for found in links)
    reached = {link.partition("#")[0] for [link] in links}
    assert {page.name for page in INDEX.parent.glob("*.md")} - {"index.md"} <= reached


def test_the_glossary_names_code_that_exists():
    """The glossary fits on a screen, in alphabetical order; each term's file exists and has the identifier that is given for it."""
    page = INDEX.parent / "glossary.md"
    assert len(page.read_text().splitlines()) <= 60
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (.*) \|$", page.read_text(), re.MULTILINE)[1:]
    terms = [term for term, _, _ in rows]
    assert len(rows) > 20
    assert terms == sorted(set(terms))
    ft = "\n".join(path.read_text() for path in (ROOT / "ft").rglob("*.py"))
    for term, meaning, code in rows:
        [(name, file)] = re.findall(r"^`(\w+)` in `([\w/]+\.py)`$", code)
        text = (ROOT / file).read_text()
        assert re.search(rf"\b{name}\b", text), f"{term}: {name} is not in {file}"
        assert meaning.endswith("."), term
        words = [word for code in re.findall(r"`([^`]+)`", meaning) for word in re.findall(r"\w+", code)]
        assert not [word for word in words if not re.search(rf"\b{word}\b", ft)], term

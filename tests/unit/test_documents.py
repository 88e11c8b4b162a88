"""Names on the pages exist: links, files, settings, metrics of the lighthouse, and the texts of log messages."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

import ft
import training
from configs.keys import walk
from configs.load import section_types
from configs.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "tests" / "README.md", *(ROOT / "docs").glob("*.md")])
GENERATED = ("parity.md", "parity_8_ranks.md", "parity_experts.md", "parity_experts_8_ranks.md", "config.md")
SECTIONS = section_types(RunConfig)
BLOCK = re.compile(r"^```(.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)  # language, content


@pytest.fixture(scope="module")
def sources() -> str:
    """Returns the text of all sources: strings split over lines are joined, placeholders become NUL."""
    packages = ("ft", "training", "scripts", "tools", "contrib", "configs", "parallelisms")
    files = [ROOT / "train.py", *(path for package in packages for path in sorted((ROOT / package).rglob("*.py")))]
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r"\{[^{}]*\}|%[ds]|%\.\w+", "\0", re.sub(r'"\s*\n\s*f?"', "", text))


def anchor(heading: str) -> str:
    """Returns the fragment of a heading as GitHub does: lower case, without punctuation, hyphens for spaces."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Returns the fragments of a page's headings, with -1 for a repetition."""
    found = [anchor(heading) for heading in re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)]
    return {name if (n := found[:at].count(name)) == 0 else f"{name}-{n}" for at, name in enumerate(found)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    """Links to files and headings resolve, including images; web links are not checked."""
    text = BLOCK.sub("", page.read_text())
    found = re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", text)
    for link in (link or image for link, image in found):
        if "://" in link:
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{link}: no such file"
        if fragment:
            there = anchors(target)
            assert fragment in there, f"{link}: no such heading; there are {sorted(there)}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_settings_and_files_that_are_named_exist(page: Path):
    """Checks the text, and blocks without a language, which no test runs."""
    blocks = "".join(body for language, body in BLOCK.findall(page.read_text()) if not language)
    text = BLOCK.sub("", page.read_text())
    keys = {name for section, kind in SECTIONS.items() for name, _ in walk(kind, section)}
    named = re.findall(rf"`(?:--)?((?:{'|'.join(SECTIONS)})\.(?!py|json)\w+)(?: =[^`]*)?`", text)
    named += re.findall(r"--(\w+\.\w+)", blocks)
    assert not [name for name in named if name not in keys]
    file = r"(?:configs|models|parallelisms|training|ft|scripts|bench|tests|examples|docs)/[\w/.-]+\.(?:py|sh|toml|md|txt|svg)"
    files = {*re.findall(rf"`({file})`", text), *re.findall(rf"(?<![\w/.]){file}\b", blocks)}
    files -= {"models/relu2.py", "models/mine.py", "configs/tiny_qwen3.toml"}  # which a page tells the reader to write
    assert not [name for name in files if not (ROOT / name).exists()]


def test_members_of_classes_that_are_named_exist(sources: str):
    """Checks names such as `Roster.find_absent`: a class of that name contains the member."""
    for page in PAGES:
        for owner, name in re.findall(r"`([A-Z]\w*[a-z]\w*)\.(\w+)(?:\(\))?`", page.read_text()):
            bodies = re.findall(rf"^class {owner}\b.*?(?=^\S|\Z)", sources, re.MULTILINE | re.DOTALL)
            assert any(re.search(rf"\b{name}\b", body) for body in bodies), f"{page.name}: {owner}.{name}"


def defined(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Returns the functions and classes of a module or class, each with its body, and the assigned names."""
    named = {
        one.name: one.body for one in body if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assigned = [target for one in body if isinstance(one, ast.Assign) for target in one.targets]
    return named | {target.id: [] for target in assigned if isinstance(target, ast.Name)}


@pytest.mark.parametrize(("package", "folder"), [(ft, ROOT / "ft"), (training, ROOT)], ids=["ft", "training"])
def test_the_map_of_a_package_names_what_exists(package: ModuleType, folder: Path):
    """Each "file.py:Class.method" exists, with paths relative to `folder`; each of the ten questions has at least two."""
    assert package.__doc__
    places = re.findall(r"([\w/]+\.py)(?::([\w.]+\w))?", package.__doc__.partition("?")[2])
    assert sum(bool(name) for _, name in places) >= 20
    for file, name in places:
        assert (folder / file).exists(), file
        body = ast.parse((folder / file).read_text()).body
        for part in name.split(".") if name else ():
            assert part in defined(body), f"{file}:{name}"
            body = defined(body)[part]


def test_the_page_about_torchft_has_the_names_of_ft():
    """Checks the names of ft that replace torchft's; the seam's are Pharos's own."""
    page = (ROOT / "docs" / "torchft.md").read_text()
    text = page.partition("## ")[0]
    named = {name for code in re.findall(r"`([^`]+)`", text) for name in re.findall(r"\b[A-Z]\w+\b", code)}
    seam = {"Commit", "DataAssignment", "Seam", "SoloManager", "StepTotals"}
    classes = {name for name in ft.__all__ if name[0].isupper()}
    assert named == classes - seam
    assert all(f"`ft.{function}(" in page for function in set(ft.__all__) - classes)


def test_the_metrics_to_watch_are_served():
    """Every metric named on the page is served; Prometheus appends _total to a counter."""
    page = (ROOT / "docs" / "operating.md").read_text()
    named = {name.removesuffix("_total") for name in re.findall(r"`(pharos_\w+)`", page)}
    served = set(re.findall(r'"(pharos_\w+)"', (ROOT / "ft" / "dashboard" / "server.py").read_text()))
    assert named and named <= served


def test_every_alarm_that_is_explained_is_said(sources: str):
    """Each message in the table has three consecutive words, free of figures and names, that occur in the sources."""
    page = (ROOT / "docs" / "operating.md").read_text()
    [table] = re.findall(r"^## Log messages\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    said = [line for cell in cells for line in re.findall(r"`([^`]+)`", cell)]
    assert len(said) > 10
    for line in said:
        runs = [run.split() for run in re.split(r"\.\.\.|\S*\d\S*|\(.*?\)|\[.*?\]|data loading", line)]
        pieces = [" ".join(run[at : at + 3]) for run in runs for at in range(max(1, len(run) - 2)) if run]
        longest = max(map(len, map(str.split, pieces)))
        assert any(len(piece.split()) == longest and piece in sources for piece in pieces), f"nobody says {line!r}"

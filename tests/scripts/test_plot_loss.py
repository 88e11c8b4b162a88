"""scripts/plot_loss.py as a user would run it, from any folder and before anything is installed."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "plot_loss.py"


def plot(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", SCRIPT, *arguments]  # -S: no packages, as on a bare machine
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=False)


def write_run(folder: Path, steps: int) -> Path:
    rows: list[dict[str, float | None]] = [{"step": step, "loss": 1 + 4 / step} for step in range(1, steps + 1)]
    rows[1:1] = [{"step": 0, "validation_loss": 5.5}, {"step": 1, "validation_loss": 5.0}, {"step": 2, "loss": None}]
    run = folder / "a<b"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '7\n{"loss": 1}\n{"step": 999, "lo'
    )
    return run


@pytest.mark.parametrize(("steps", "drawn"), [(30, 30), (5000, 770)])
def test_a_curve_with_its_smoothed_and_its_held_out_line(tmp_path: Path, steps: int, drawn: int) -> None:
    run = write_run(tmp_path, steps)
    done = plot("a<b", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{Path('a<b') / 'loss.svg'}: {steps} steps, 2 validations\n"
    svg = ElementTree.parse(run / "loss.svg").getroot()
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    lines = {line.attrib["class"]: line.attrib["points"].split() for line in reversed(svg.findall("{*}polyline"))}
    assert len(lines["c2"]) == 2 and len(lines["raw"]) == len(lines["c1"]) == pytest.approx(drawn, rel=0.1)
    for point in lines["raw"] + lines["c1"] + lines["c2"]:
        x, y = map(float, point.split(","))
        assert 0 < x < width and 0 < y < height
    texts = [text.text for text in svg.findall("{*}text")]
    assert "a<b" in texts and "validation 5.000" in texts


def test_another_file(tmp_path: Path) -> None:
    run = write_run(tmp_path, 10)
    assert plot(run, "--out", "curve.svg", folder=tmp_path).returncode == 0
    assert (tmp_path / "curve.svg").exists() and not (run / "loss.svg").exists()


def test_a_name_beyond_the_encoding_of_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, 10).rename(tmp_path / "é")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    command = [sys.executable, SCRIPT, run.name]  # -I would leave the variable out
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "\\xe9/loss.svg: 10 steps, 2 validations\n"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("outputs/llma", "outputs/llma/metrics.jsonl: No such file or directory"),
        (".", "metrics.jsonl: 1 steps; a curve needs 2"),
    ],
)
def test_no_curve_is_one_line(tmp_path: Path, run: str, said: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
    done = plot(run, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"plot_loss: {said}\n")

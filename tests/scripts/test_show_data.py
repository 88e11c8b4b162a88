"""scripts/show_data.py: positions before the first launch, and bad input. After a change of settings: e2e/test_interventions.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import prepare_data, show_data
from tests.scripts.tiny_job import CONFIG
from tests.unit.data_corpus import write_jsonl


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "c4.jsonl", [f"document {number}." for number in range(40)])
    assert prepare_data.main(["c4.jsonl", "--out", "c4", "--processes=1", "--held-out=0"]) == 0
    config = CONFIG.replace('dataset = "files"\ndataset_path = "text/*.txt"', 'dataset = "store"\ndataset_path = "c4"')
    (tmp_path / "run.toml").write_text(config)
    skip = 'skip = [{source = "c4", first = 3, end = 41}]\n\n[lr_scheduler]'
    (tmp_path / "skip.toml").write_text(config.replace("[lr_scheduler]", skip))


def test_documents_have_their_numbers_in_the_store(capsys: pytest.CaptureFixture[str]):
    assert show_data.main(["run.toml", "0-19"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        f"position {position}: sequence {position} of c4" for position in range(20)
    ]
    whole = [line for line in lines if line.endswith(".'") and ": 'document " in line]
    assert len(whole) > 10
    for line in whole:
        number, text = line.removeprefix("  document ").partition(",")[0], line.partition("'document ")[2]
        assert text == f"{number}.'"


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["run.toml", "9-8"], "positions = 9-8: legal: one, such as 40, or a range with its last, such as 40-47"),
        (["outputs/none", "1"], "outputs/none: no such file"),
        (["skip.toml", "1"], "training.skip[0].end = 41: the store c4 has 40 documents; nearest: 40"),
    ],
)
def test_bad_input(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]):
    assert show_data.main(argv) == 2
    assert capsys.readouterr().err == f"show_data: {error}\n"

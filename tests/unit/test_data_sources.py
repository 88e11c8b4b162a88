"""Sources of documents: the files that are found, the documents read from them, and the message of each bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_corpus import files_config, write_jsonl
from tests.unit.fakes import set_package
from training.config import TrainingConfig
from training.data.sources import LONG_TEXT_BYTES, PART_BYTES, TextSource, check_sources, find_source
from training.metrics import MetricsConfig
from training.tokenizer import build_tokenizer


def documents(config: TrainingConfig) -> list[bytes]:
    source = find_source(config)
    assert isinstance(source, TextSource)
    return [document for file in source.files for document in source.documents(file)]


def test_stdlib_is_sorted_source_without_tests_and_installed_packages() -> None:
    source = find_source(TrainingConfig())
    names = [file.name for file in source.files]
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names)
    left_out = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
    assert not any(left_out & set(Path(name).parts) for name in names)
    check_sources(TrainingConfig())


def test_folders_globs_and_names_are_read_once_each_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(files_config(tmp_path)) == [b"a.txt", b"b.txt", b"deep/c.txt"]
    assert documents(files_config(f"{tmp_path}/*.txt")) == [b"a.txt", b"b.txt"]
    assert documents(files_config(f"{tmp_path}/**/*.txt")) == [b"a.txt", b"b.txt", b"deep/c.txt"]
    assert documents(files_config(f"{tmp_path}/b.txt, {tmp_path}")) == [b"b.txt", b"a.txt", b"deep/c.txt"]


def test_the_name_of_a_file_is_not_where_it_lies(tmp_path: Path) -> None:
    names = []
    for folder in ("one", "two"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "sub" / "a.txt").write_text("a")
        names.append([file.name for file in find_source(files_config(tmp_path / folder)).files])
    assert names == [["sub/a.txt"], ["sub/a.txt"]]


def test_jsonl_gives_a_document_per_line_under_the_key_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"body": "é"}, ensure_ascii=False) + '\n\n{"body": ""}\n{"body": null}\n{"body": "two\\nlines"}'
    )
    assert documents(files_config(path, dataset_text_key="body")) == ["é".encode(), b"two\nlines"]


def test_a_field_that_is_no_text_is_not_proposed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "one"}]}\n')
    with pytest.raises(ValueError, match=r"""line 1 has no "text", only 'messages'$"""):
        check_sources(files_config(tmp_path))


def test_parquet_gives_a_document_per_row(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet, table

    parquet.write_table(table({"text": ["one", None, "", "é"], "n": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    assert documents(files_config(tmp_path)) == [b"one", "é".encode()]
    with pytest.raises(
        ValueError, match=r'a.parquet has no "body", only \'text\', \'n\'; nearest: training.dataset_te'
    ):
        check_sources(files_config(tmp_path, dataset_text_key="body"))
    (tmp_path / "b.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"^training.dataset_path = .* file .*b.parquet is not parquet: "):
        check_sources(files_config(tmp_path))


@pytest.mark.parametrize("line", ["é" * 50 + "\n", "€" * 49, "x\n"], ids=["lines", "one line", "short lines"])
def test_a_long_text_is_read_in_parts_that_break_neither_lines_nor_characters(tmp_path: Path, line: str) -> None:
    text = (line * (LONG_TEXT_BYTES // len(line) + 100)).encode()
    (tmp_path / "long.txt").write_bytes(text)
    parts = documents(files_config(tmp_path))
    assert b"".join(parts) == text
    assert all(PART_BYTES <= len(part) <= 2 * PART_BYTES + 3 for part in parts[:-1])
    assert len(parts) > 5
    for part in parts[:-1]:
        part.decode()
        assert part.endswith(b"\n") or "\n" not in line
    (tmp_path / "long.txt").write_text(line * 10)
    assert documents(files_config(tmp_path)) == [(line * 10).encode()]


FILES: dict[str, bytes] = {
    "good.txt": b"text",
    "empty.txt": b"",
    "latin.txt": "caf\u00e9".encode("latin1"),
    "late.txt": b"x" * 70000 + b"\xff" + b"x" * LONG_TEXT_BYTES,
    "blank.jsonl": b"\n\n",
    "torn.jsonl": b'{"text": "a"}\n{"text": ',
    "deep.jsonl": b"[" * 100_000,
    "list.jsonl": b"[1]\n",
    "keys.jsonl": b'{"texts": "a", "n": 1}\n',
    "number.jsonl": b'{"text": 3}\n',
    "surrogate.jsonl": b'{"text": "\\ud800"}\n',
    "late.jsonl": b'{"text": "a"}\n{"text": "\xe9"}\n',
    "notes.md": b"text",
    "odd.bin": b"abc",
    "empty.bin": b"",
    "wide.bin": np.arange(1, 200, dtype=np.uint32).tobytes() + b"\0" * 4,
    "torn.npy": b"no",
}
ARRAYS: dict[str, np.ndarray] = {
    "good.npy": np.arange(300, dtype=np.uint16),
    "float.npy": np.zeros(3),
    "flat.npy": np.zeros((2, 2), dtype=np.uint16),
}
LEGAL = ".txt, .jsonl, .json, .parquet (also with .gz or .zst) files, globs and folders, comma-separated"
OTHER_VOCABULARY = "set model.tokenizer_path to the tokenizer that made the file, or model.vocab_size to its size"
OTHER_KEY = 'nearest: training.dataset_text_key = "texts"'
CONVERT = "convert it, for instance: iconv -f latin1 -t utf-8 {d}"
BAD = [
    ("files", "none/x.txt", "no file matches {d}/none/x.txt; there is no folder {d}/none"),
    ("files", "god.txt", "no file matches {d}/god.txt; nearest: {d}/good.txt"),
    ("files", "q*q.txt", f"no file matches {{d}}/q*q.txt; legal: {LEGAL}"),
    (
        "files",
        "notes.md",
        "file {d}/notes.md ends in '.md'; legal: .txt, .jsonl, .json, .parquet (also with .gz or .zst)",
    ),
    ("files", "empty.txt", "the corpus is empty: no text in 1 file; name files with text"),
    ("files", "blank.jsonl", "the corpus is empty: no text in 1 file; name files with text"),
    ("files", "latin.txt", f"file {{d}}/latin.txt is not UTF-8 at byte 3; {CONVERT}/latin.txt"),
    ("files", "late.txt", f"file {{d}}/late.txt is not UTF-8 at byte 70000; {CONVERT}/late.txt"),
    ("files", "late.jsonl", f"file {{d}}/late.jsonl is not UTF-8 at byte 24; {CONVERT}/late.jsonl"),
    ("files", "torn.jsonl", "file {d}/torn.jsonl line 2 is not JSON: Expecting value: line 1 column 10 (char 9)"),
    ("files", "deep.jsonl", "file {d}/deep.jsonl line 1 is nested too deeply"),
    ("files", "list.jsonl", 'file {d}/list.jsonl line 1 is not an object like {{"text": "..."}}'),
    ("files", "keys.jsonl", f"file {{d}}/keys.jsonl line 1 has no \"text\", only 'texts', 'n'; {OTHER_KEY}"),
    ("files", "number.jsonl", 'file {d}/number.jsonl line 1: "text" is int, not a string'),
    ("files", "surrogate.jsonl", 'file {d}/surrogate.jsonl line 1: "text" is not Unicode at character 0'),
    ("tokens", "good.txt", "file {d}/good.txt ends in '.txt'; legal: .npy, .bin"),
    (
        "tokens",
        "odd.bin",
        "file {d}/odd.bin has 3 bytes, not a whole number of uint16 ids; see training.dataset_token_dtype",
    ),
    ("tokens", "empty.bin", "the corpus is empty: no text in 1 file; name files with text"),
    (
        "tokens",
        "wide.bin",
        'file {d}/wide.bin has 800 bytes that look like uint32 ids; set training.dataset_token_dtype = "uint32"',
    ),
    (
        "tokens",
        "float.npy",
        "file {d}/float.npy is float64 of shape [3]; legal: one axis of uint16 or uint32, not empty",
    ),
    (
        "tokens",
        "flat.npy",
        "file {d}/flat.npy is uint16 of shape [2, 2]; legal: one axis of uint16 or uint32, not empty",
    ),
    (
        "tokens",
        "good.npy",
        f"file {{d}}/good.npy has id 259 at token 259, but the vocabulary has 259 ids; {OTHER_VOCABULARY}",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    for name, array in ARRAYS.items():
        np.save(path / name, array)
    return path


@pytest.mark.parametrize(("dataset", "name", "message"), BAD, ids=[f"{kind}-{name}" for kind, name, _ in BAD])
def test_bad_input(folder: Path, dataset: Any, name: str, message: str) -> None:
    config = TrainingConfig(dataset=dataset, dataset_path=f"{folder}/{name}")
    with pytest.raises(ValueError) as caught:
        check_sources(config, vocab_size=259)
    assert str(caught.value) == f'training.dataset_path = "{folder}/{name}": {message.format(d=folder)}'


def test_a_torn_npy_and_an_empty_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^training.dataset_path = .*torn.npy is not a .npy of ids: "):
        check_sources(TrainingConfig(dataset="tokens", dataset_path=f"{folder}/torn.npy"))
    with pytest.raises(
        ValueError, match=r"folder .* has no .txt, .jsonl, .json, .parquet \(also with .gz or .zst\) file$"
    ):
        check_sources(files_config(tmp_path))
    with pytest.raises(ValueError, match=r'^training.dataset_path = " , ": is empty; legal: .txt, '):
        check_sources(files_config(" , "))


@pytest.mark.parametrize(
    ("check", "setting", "package", "extra"),
    [
        (
            lambda: check_sources(TrainingConfig(dataset="huggingface", dataset_path="a/b")),
            'training.dataset = "huggingface"',
            "datasets",
            "hf",
        ),
        (lambda: check_sources(files_config("x.parquet")), 'training.dataset_path = "x.parquet"', "pyarrow", "parquet"),
        (lambda: build_tokenizer("x.json"), 'model.tokenizer_path = "x.json"', "tokenizers", "hf"),
        (lambda: MetricsConfig(enable_wandb=True).check(), "metrics.enable_wandb = true", "wandb", "wandb"),
    ],
)
def test_missing_package(
    check: Callable[[], object], setting: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x.parquet", "x.json"):
        (tmp_path / name).write_text("any")
    monkeypatch.chdir(tmp_path)
    set_package(monkeypatch, package, None)
    with pytest.raises(ValueError) as caught:
        check()
    assert str(caught.value) == (
        f"{setting}: needs the package {package}, which is not installed; "
        f'in the repository: {sys.executable} -m pip install -e ".[{extra}]"'
    )


def test_the_check_reads_a_few_megabytes_at_most(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * (LONG_TEXT_BYTES - 1))
    (tmp_path / "9.txt").write_bytes(b"\xff")
    check_sources(files_config(tmp_path))


def test_records_may_hold_more_than_text(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "b.jsonl").write_text('{"id": 1, "text": "two", "meta": {"x": []}}\n')
    assert documents(files_config(tmp_path)) == [b"one", b"two"]

"""scripts/prepare_data.py: one store from the same text, however it is packed, divided among processes, or interrupted."""

from __future__ import annotations

import gzip
import hashlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import pytest

from scripts import prepare_data
from tests.scripts.tiny_job import ROOT, finished, python
from tests.unit.data_corpus import write_jsonl
from training.data.sources import ZSTD, SourceFile, stamp_of, text_source
from training.data.store import Store
from training.tokenizer import ByteTokenizer

DOCUMENTS = [
    f"Document {number}: " + "word " * (number % 7 * 9) + "\N{GREEK SMALL LETTER OMEGA}" for number in range(300)
]
# Ends itself by SIGKILL at the given batch, in the middle of a shard or at its end
KILLED = """
import os, signal, sys
from scripts import prepare_data
from training.data.store import StoreWriter
def end_batch(self, file, document):
    global left
    left -= 1
    whole(self, file, document)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    left, whole = int(sys.argv.pop(1)), StoreWriter.end_batch
    prepare_data.BATCH_BYTES, StoreWriter.end_batch = 2000, end_batch
    sys.exit(prepare_data.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prepare_data, "BATCH_BYTES", 2000)
    monkeypatch.chdir(tmp_path)


def prepare(*arguments: object) -> int:
    return prepare_data.main([*map(str, arguments), "--processes=1"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert prepare(*arguments) == 2
    return capsys.readouterr().err.removeprefix("prepare_data: ").rstrip()


def documents(folder: str) -> list[str]:
    """Returns the texts of a store of bytes, held-out ones last in each shard."""
    store, found = Store(Path(folder), ""), []
    for index, ids in enumerate(store.shards):
        bounds = store.bounds(index)
        found += [ByteTokenizer().decode(ids[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    return found


def hash_of(text: str) -> str:
    """Returns text that cannot be compressed much."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_all_kinds(folder: Path) -> None:
    """Writes the documents as every kind of file, each kind with all of them, or as one .txt per document."""
    from pyarrow import Table, parquet

    folder.mkdir()
    write_jsonl(folder / "a.jsonl", DOCUMENTS)
    (folder / "a.json").write_bytes((folder / "a.jsonl").read_bytes())
    parquet.write_table(Table.from_pydict({"text": DOCUMENTS}), folder / "a.parquet")
    for plain in ("a.jsonl", "a.json", "a.parquet"):
        content = (folder / plain).read_bytes()
        (folder / f"{plain}.gz").write_bytes(gzip.compress(content))
        with import_module(ZSTD).open(folder / f"{plain}.zst", "wb") as file:
            file.write(content)


KINDS = [f"{kind}{packed}" for kind in ("a.jsonl", "a.json", "a.parquet") for packed in ("", ".gz", ".zst")]


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path):
    write_all_kinds(tmp_path / "in")
    digests = set()
    for kind in KINDS:
        assert prepare(f"in/{kind}", "--out", kind, "--held-out", 0) == 0
        assert documents(kind) == DOCUMENTS
        digests.add(Store(Path(kind), "").key)
    assert len(digests) == 1


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_text_files_long_and_short(tmp_path: Path, packed: str):
    opener: Any = {"": open, ".gz": gzip.open, ".zst": import_module(ZSTD).open}[packed]
    # above LONG_TEXT_BYTES
    long = "".join(f"line {number} \N{GREEK SMALL LETTER OMEGA}\n" for number in range(100_000))
    for name, text in (("a.txt", DOCUMENTS[0]), ("b.txt", long)):
        with opener(f"{name}{packed}", "wb") as file:
            file.write(text.encode())
    # a.txt is read once, though two SOURCEs name it
    assert prepare(f"*.txt{packed}", tmp_path / f"a.txt{packed}", "--out", "out", "--held-out", 0) == 0
    found = documents("out")
    assert found[0] == DOCUMENTS[0] and "".join(found[1:]) == long and len(found) > 10


def test_the_held_out_are_those_of_every_other_source_kind(tmp_path: Path):
    """The content alone decides: the same documents are held out as with training.dataset = "files"."""
    from tests.unit.data_corpus import document, files_config, open_small
    from training.data.order import in_split

    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    assert prepare(source, "--out", "out", "--held-out", 0.1, "--shard-tokens", 5000) == 0
    corpus = open_small(files_config(source), tmp_path / "cache")
    wanted = [ByteTokenizer().decode(document(corpus, int(number))) for number in in_split(corpus, "validation", 0.1)]
    store, found, at = Store(Path("out"), ""), [], 0
    texts = documents("out")
    for shard in store.manifest.shards:
        found += texts[at + shard.train_documents : at + shard.documents]
        at += shard.documents
    assert len(store.manifest.shards) > 3 and len(wanted) > 10 and found == wanted


@pytest.mark.timeout(120)  # starts 20 processes
def test_processes_and_kills_leave_no_trace(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:170])
    with gzip.open("b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS[170:]))
    settings = ["a.jsonl", "b.jsonl.gz", "--shard-tokens=4000"]
    assert prepare(*settings, "--out=whole") == 0
    whole = Store(Path("whole"), "").manifest
    assert len(whole.shards) >= 5
    (tmp_path / "killed.py").write_text(KILLED)
    for processes, kills in ((1, [1, 3, 2, 5, 4]), (2, [4, 2, 1, 3, 2]), (4, [2, 3, 3])):
        out = f"out{processes}"
        command = [*settings, f"--out={out}", f"--processes={processes}"]
        for batch in kills:
            python("killed.py", str(batch), *command, code=-signal.SIGKILL)
        assert "goes on after" in python("killed.py", "0", *command)
        assert Store(Path(out), "").manifest == whole
        assert not Store(Path(out), "").damaged_shards()
        assert sorted(path.name for path in Path(out).iterdir()) == sorted(
            path.name for path in Path("whole").iterdir()
        )


def test_a_finished_store_stays_and_another_is_not_written_over_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    command = [f"{tmp_path}/**/*.json*", "--out", "my out"]  # a glob that finds manifest.json, too
    assert prepare(*command) == 0
    assert "documents, " in (said := capsys.readouterr().out)
    assert "next: --training.dataset=store --training.dataset_path='my out'\n" in said
    before = (tmp_path / "my out" / "manifest.json").stat().st_mtime_ns
    assert prepare(*command) == 0
    assert "finished already" in capsys.readouterr().out
    assert (tmp_path / "my out" / "manifest.json").stat().st_mtime_ns == before
    monkeypatch.setenv("HOME", str(tmp_path))
    said = refused(capsys, source, "--out=~/my out", "--held-out", 0.5)
    assert (
        said == f"--out {tmp_path}/my out: has a store of other settings or sources; name another folder, or remove it"
    )


def test_a_store_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert prepare(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "--out", "out", "--shard-tokens", 5000) == 0
    assert prepare_data.main(["--verify", "out"]) == 0
    path = tmp_path / "out" / "00001.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert prepare_data.main(["--verify", "out"]) == 1
    assert "shard 00001 differs from its digest" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("file", ["00000.bin", "00000.npy"])
def test_a_full_disk_is_called_so(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).symlink_to("/dev/full")
    assert prepare(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "--out", "out") == 1
    assert capsys.readouterr().err == "prepare_data: out: No space left on device\n"


def test_a_name_beyond_the_encoding_of_the_terminal(tmp_path: Path):
    assert prepare(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "--out", "é") == 0
    said = python(ROOT / "scripts" / "prepare_data.py", "--verify", "é", PYTHONIOENCODING="ascii")
    assert said.startswith("\\xe9: 1 shards are as they were written")


class TestBadInput:
    def test_missing_or_unknown_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        write_jsonl(tmp_path / "data.jsonl", DOCUMENTS)
        assert (
            refused(capsys, "date.jsonl", "--out", "out")
            == "SOURCE date.jsonl: no file matches date.jsonl; nearest: data.jsonl"
        )
        (tmp_path / "a.csv.gz").write_bytes(b"")
        assert refused(capsys, "a.csv.gz", "--out", "out") == (
            "SOURCE a.csv.gz: file a.csv.gz ends in '.gz'; legal: .txt, .jsonl, .json, .parquet (also with .gz or .zst)"
        )
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("out", [".", "corpus", "corpus/store"])
    def test_a_store_in_its_source(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str):
        """Refused, as the next call would read the store's manifest and journal as text."""
        (tmp_path / "corpus").mkdir()
        write_jsonl(tmp_path / "corpus" / "a.jsonl", DOCUMENTS)
        source = "." if out == "." else "corpus"
        legal = f"{(tmp_path / source).resolve()}-store"
        assert refused(capsys, source, "--out", out) == (
            f"--out {out}: lies in SOURCE {source}; legal: a folder outside it, such as {legal}"
        )
        assert not (tmp_path / "corpus" / "store").exists()

    @pytest.mark.parametrize(
        ("packed", "damage"),
        [(".gz", "torn"), (".gz", "garbage"), (".gz", "middle"), (".zst", "torn"), (".zst", "garbage")],
    )
    def test_damaged_compression(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: str, damage: str):
        opener: Any = {".gz": gzip.open, ".zst": import_module(ZSTD).open}[packed]
        name = f"a.jsonl{packed}"
        with opener(name, "wt", encoding="utf-8") as file:
            file.write("".join(json.dumps({"text": text, "n": hash_of(text)}) + "\n" for text in DOCUMENTS))
        content = Path(name).read_bytes()
        damaged = {
            "torn": content[:-9],
            "garbage": b"not it" * 9,
            "middle": content[:900] + b"\xff" * 64 + content[964:],
        }
        Path(name).write_bytes(damaged[damage])
        said = refused(capsys, name, "--out", "out")
        assert said.startswith(f"SOURCE: file {name} cannot be decompressed: ") and "\n" not in said

    def test_records(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
        said = refused(capsys, "a.jsonl", "--out", "out", "--text-key", "txt")
        assert said == 'SOURCE: file a.jsonl line 1 has no "txt", only \'text\'; nearest: --text-key = "text"'
        (tmp_path / "b.jsonl").write_text("[1]\n")
        assert refused(capsys, "b.jsonl", "--out", "out2").startswith("SOURCE: file b.jsonl line 1 is not an object")
        (tmp_path / "c.txt").write_text("")
        assert "no text" in refused(capsys, "c.txt", "--out", "out3")

    @pytest.mark.parametrize(
        ("option", "said"),
        [("--held-out=1", "--held-out 1.0: must be >= 0 and < 1"), ("--processes=0", "--processes 0: must be >= 1"),
         ("--shard-tokens=0", "--shard-tokens 0: must be >= 1")],
    )  # fmt: skip
    def test_options(self, capsys: pytest.CaptureFixture[str], option: str, said: str):
        with pytest.raises(SystemExit) as caught:
            prepare_data.main(["a.txt", "--out", "out", option])
        assert caught.value.code == 2 and said in capsys.readouterr().err


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that lists and serves the files of one data set. `listed`, `served`: the revisions asked for."""

    files: dict[str, bytes]
    listed: set[str]
    served: set[str]
    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        if path.startswith("/api/datasets/some/text/tree/"):
            revision, _, under = map(unquote, path.split("/tree/", 1)[1].partition("/"))
            self.listed.add(revision)
            entries = [
                {"type": "file", "oid": "1" * 40, "size": len(content), "path": name}
                for name, content in self.files.items()
                if Path(name).parent.as_posix() == (under or ".")
            ]
            folders = {Path(name).parent.as_posix() for name in self.files} - {"."} if not under else set()
            entries += [{"type": "directory", "oid": "2" * 40, "size": 0, "path": name} for name in folders]
            return self.answer(json.dumps(entries).encode(), "application/json")
        if path.startswith("/api/datasets/some/text"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {
                "id": "some/text",
                "sha": self.COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            return self.answer(json.dumps(info).encode(), "application/json")
        revision, _, name = map(unquote, path.split("/resolve/", 1)[-1].partition("/"))
        if name == "en/lost.txt":
            return None  # the connection ends without an answer
        if path.startswith("/datasets/some/text/resolve/") and name in self.files:
            self.served.add(revision)
            return self.answer(self.files[name], "application/octet-stream")
        self.send_error(404)
        return None

    def answer(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "ETag": '"abc"',
            "X-Repo-Commit": self.COMMIT,
        }
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def test_a_file_of_the_hub_that_a_killed_call_left_is_removed_and_a_local_one_is_never_downloaded(tmp_path: Path):
    names = ("left.txt", "local.txt")
    for name in names:
        (tmp_path / name).write_text("words")
    left, local = (
        SourceFile(tmp_path / name, name, stamp)
        for name, stamp in zip(names, ((5, 0, 0), stamp_of(tmp_path / "local.txt")), strict=True)
    )
    source = text_source((left, local), "SOURCE", "text", key_setting="--text-key")

    def read() -> list[bytes]:
        tasks = prepare_data.read(
            source, first_file=0 if left.path.exists() else 1, first_document=0, count=lambda size: None
        )
        return [document for task in tasks for document in task.documents]

    assert read() == [b"words", b"words"]
    assert (left.path.exists(), local.path.exists()) == (False, True)
    local.path.unlink()
    with pytest.raises(ValueError, match=r"local\.txt cannot be read"):
        read()


@pytest.fixture
def hub() -> Iterator[str]:
    lines = [json.dumps({"text": text}) + "\n" for text in DOCUMENTS]
    Hub.files = {
        "README.md": b"about",
        "en/c4-train.00000.json.gz": gzip.compress("".join(lines[:150]).encode()),
        "en/c4-train.00001.json.gz": gzip.compress("".join(lines[150:]).encode()),
        "en/c4-validation.00000.json.gz": gzip.compress(lines[0].encode()),
        "en/lost.txt": b"words",
    }
    Hub.listed, Hub.served = set(), set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_files_of_the_hub_are_downloaded_one_by_one(hub: str, tmp_path: Path):
    command = [
        sys.executable,
        str(ROOT / "scripts/prepare_data.py"),
        "hf://datasets/some/text/en/c4-train.*.json.gz",
        "--out",
        "out",
    ]
    environment = {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    finished([*command, "--held-out=0", "--processes=1"], **environment)
    assert documents("out") == DOCUMENTS
    assert not list(Path("out").rglob("*.gz")), "a file that was read is removed"
    for revision in ("~parquet", "refs/convert/parquet"):
        Hub.listed, Hub.served = set(), set()
        command[2:5] = [f"hf://datasets/some/text@{revision}/en/c4-train.*.json.gz", "--out", f"of/{revision}"]
        finished([*command, "--held-out=0", "--processes=1"], **environment)
        assert documents(f"of/{revision}") == DOCUMENTS
        assert (Hub.listed, Hub.served) == ({revision}, {revision})
    command[2:5] = ["hf://datasets/some/text/none/*.json.gz", "--out", "out"]
    assert "no file matches" in finished(command, code=2, **environment).stderr
    for pattern, problem in (
        ("*", "file datasets/some/text/README.md ends in '.md'; legal: .txt, .jsonl"),
        ("en", "no file matches; legal: globs of .txt, .jsonl"),
    ):
        command[2:5] = [f"hf://datasets/some/text/{pattern}", "--out", "mixed"]
        said = finished(command, code=2, **environment).stderr
        assert f"SOURCE hf://datasets/some/text/{pattern}: {problem}" in said
    command[2:5] = ["hf://datasets/some/text/en/lost.txt", "--out", "other"]
    lost = finished([*command, "--processes=1"], code=1, **environment).stderr
    assert "prepare_data: hf://datasets/some/text/en/lost.txt: the hub: " in lost and "Traceback" not in lost
    with socket.create_server(("127.0.0.1", 0)) as closed:
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{closed.getsockname()[1]}"
    assert "lost.txt: the hub: [Errno " in finished(command, code=1, **environment).stderr, "no bad input"
    assert (
        asdict(Store(Path("out"), "").manifest.settings)["files"][0][0]
        == "datasets/some/text/en/c4-train.00000.json.gz"
    )
    assert np.all(np.diff(Store(Path("out"), "").bounds(0)) > 2)

"""The cache: its content, one build for any number of concurrent starts, and detection of every kill and change."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_corpus import document, files_config, open_small, write_jsonl
from tests.unit.fakes import Lines, forbid_locks
from training.config import TrainingConfig
from training.data.cache import Corpus, bucket_of, open_corpus
from training.data.sources import TextSource, TokenSource, find_source
from training.progress import quantity
from training.tokenizer import ByteTokenizer

TEXTS = [f"document {number}" for number in range(20)]
ROOT = Path(__file__).resolve().parents[2]
TRUSTED = {"MIN_AGE_NS": -(10**18)}  # files are taken to be old


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", TEXTS)


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every read of an input file fail, also for its digest."""

    def refuse(self: object, file: object) -> None:
        raise AssertionError("an input file was read")

    for source, name in ((TextSource, "chunks"), (TokenSource, "chunks"), (TextSource, "documents")):
        monkeypatch.setattr(source, name, refuse)


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir() and path.name != "seen")


def test_holds_every_document_wrapped_in_order(tmp_path: Path, corpus_file: Path) -> None:
    corpus = open_small(files_config(corpus_file), tmp_path / "cache")
    assert [document(corpus, number) for number in range(20)] == [[256, *text.encode(), 257] for text in TEXTS]
    assert corpus.buckets.tolist() == [bucket_of(text.encode()) for text in TEXTS]
    meta = json.loads((tmp_path / "cache" / corpus.key / "meta.json").read_bytes())
    assert (meta["files"], meta["documents"], meta["tokens"], meta["dtype"]) == (1, 20, corpus.tokens, "uint16")
    assert folders(tmp_path / "cache") == [corpus.key]


def test_second_start_reads_no_input(tmp_path: Path, corpus_file: Path, request: pytest.FixtureRequest) -> None:
    first = open_small(files_config(corpus_file), tmp_path / "cache", limits=TRUSTED)
    request.getfixturevalue("no_reading")
    assert open_small(files_config(corpus_file), tmp_path / "cache").key == first.key


def test_a_file_just_written_is_not_trusted_by_its_time(tmp_path: Path, corpus_file: Path) -> None:
    open_small(files_config(corpus_file), tmp_path / "cache")
    assert not list((tmp_path / "cache" / "seen").iterdir())


def test_a_file_of_the_future_is_read_once(tmp_path: Path, corpus_file: Path, request: pytest.FixtureRequest) -> None:
    """Its writer's clock was wrong; else each rank would read the corpus at each launch, one after the other."""
    os.utime(corpus_file, (2**32, 2**32))
    first = open_small(files_config(corpus_file), tmp_path / "cache", limits={"MIN_AGE_NS": -1})
    request.getfixturevalue("no_reading")
    assert open_small(files_config(corpus_file), tmp_path / "cache").key == first.key


def test_a_changed_file_is_another_cache_even_with_its_size_and_time_kept(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_small(files_config(corpus_file), tmp_path / "cache", limits=TRUSTED)
    status = corpus_file.stat()
    corpus_file.write_bytes(corpus_file.read_bytes().replace(b"document 0", b"DOCUMENT 0"))
    os.utime(corpus_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = open_small(files_config(corpus_file), tmp_path / "cache")
    assert after.key != before.key
    assert bytes(document(after, 0)[1:-1]) == b"DOCUMENT 0"


def test_a_file_only_touched_or_moved_keeps_its_cache(tmp_path: Path, corpus_file: Path) -> None:
    before = open_small(files_config(corpus_file), tmp_path / "cache")
    os.utime(corpus_file)
    (tmp_path / "elsewhere").mkdir()
    moved = corpus_file.rename(tmp_path / "elsewhere" / corpus_file.name)
    after = open_small(files_config(moved), tmp_path / "cache")
    assert (after.key, folders(tmp_path / "cache")) == (before.key, [before.key])


def test_key_names_content_reading_and_tokenizer(tmp_path: Path, corpus_file: Path) -> None:
    class Other(ByteTokenizer):
        def fingerprint(self) -> str:
            return "other"

    def key(config: TrainingConfig, tokenizer: ByteTokenizer | None = None) -> str:
        return open_small(config, tmp_path / "cache", tokenizer=tokenizer).key

    corpus_file.write_text("".join(f'{{"text": "{text}", "body": "b"}}\n' for text in TEXTS))
    lines = tmp_path / "corpus.txt"  # the same bytes, read as one document
    lines.write_bytes(corpus_file.read_bytes())
    config = files_config(corpus_file)
    keys = {
        key(config),
        key(config, tokenizer=Other()),
        key(files_config(corpus_file, dataset_text_key="body")),
        key(files_config(lines)),
    }
    assert len(keys) == 4


def test_a_damaged_cache_is_made_again(tmp_path: Path, corpus_file: Path) -> None:
    config, cache = files_config(corpus_file), tmp_path / "cache"
    key = open_small(config, cache).key
    for damage in ("tokens.bin", "documents.npy", "meta.json"):
        path = cache / key / damage
        path.write_bytes(path.read_bytes()[:-8])
        assert document(open_small(config, cache), 19) == [256, *TEXTS[19].encode(), 257]


def test_text_that_turns_bad_while_it_is_read_is_refused(tmp_path: Path, corpus_file: Path) -> None:
    class Meddler(ByteTokenizer):
        def encode_documents(self, documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
            corpus_file.write_text("{}")
            return super().encode_documents(documents)

    with pytest.raises(ValueError, match=r"corpus.jsonl changed while it was read; start again$"):
        open_small(files_config(corpus_file), tmp_path / "cache", tokenizer=Meddler())
    assert folders(tmp_path / "cache") == []


def test_bad_text_beyond_what_the_check_reads_is_refused_at_tokenising(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.txt").write_bytes(b"b\xff")
    with pytest.raises(ValueError, match=r'^training.dataset_path = ".*": file .*b.txt is not UTF-8 at byte 1; '):
        open_small(files_config(tmp_path), tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


def test_the_standard_library_leaves_out_what_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.txt").write_bytes(b"b\xff")
    files = find_source(files_config(tmp_path)).files
    source = TextSource("stdlib", "training.dataset", files, "text", skips_bad_files=True)
    log = Lines()
    corpus = open_corpus(source, ByteTokenizer(), tmp_path / "cache", log=log)
    assert (corpus.meta.files, corpus.meta.bytes, len(corpus.buckets)) == (1, 4, 1)
    assert log.infos == ["stdlib: left out, not UTF-8: b.txt"]


def test_a_cache_that_cannot_be_written_is_refused_or_the_machines_fault(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file stands where the folder should be")
    with pytest.raises(
        ValueError, match=r"^job\.dump_folder: the data cache .*/cache cannot be written: .*; set it to"
    ):
        open_small(files_config(corpus_file), tmp_path / "cache")

    def full(path: Path, **given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match=r"^the data cache .*/other cannot be written: No space left on device$"):
        open_small(files_config(corpus_file), tmp_path / "other")


@pytest.mark.parametrize(("texts", "most"), [(["word " * 400], 1000), (["a"] * 300, 2000)], ids=["ids", "bounds"])
def test_a_disk_that_takes_no_more_is_called_so(texts: list[str], most: int, tmp_path: Path) -> None:
    """A limit on the size of a file, set in a separate process."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", texts)
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from tests.unit.data_corpus import files_config, open_small\n"
        "most = int(sys.argv[3])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))\n"
        "open_small(files_config(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", program, corpus, tmp_path / "cache", str(most)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.stderr.endswith(f"OSError: the data cache {tmp_path}/cache cannot be written: File too large\n")


class TestTokens:
    def config(self, path: Path, **keys: Any) -> TrainingConfig:
        return TrainingConfig(dataset="tokens", dataset_path=str(path), **keys)

    def test_documents_begin_at_bos_and_after_eos(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([7, 257, 256, 8, 9, 257, 257, 256, 5], dtype=np.uint16))
        np.array([1, 2, 257, 3], dtype=np.uint16).tofile(tmp_path / "b.bin")
        corpus = open_small(self.config(tmp_path), tmp_path / "cache")
        expected = [[7, 257], [256, 8, 9, 257], [257], [256, 5], [1, 2, 257], [3]]
        assert [document(corpus, number) for number in range(len(expected))] == expected
        assert len(corpus.buckets) == len(expected)
        assert (tmp_path / "cache" / corpus.key / "tokens.bin").stat().st_size == 0

    def test_a_file_without_marks_is_cut(self, tmp_path: Path) -> None:
        np.arange(10, dtype=np.uint32).tofile(tmp_path / "a.bin")
        config, limits = self.config(tmp_path / "a.bin", dataset_token_dtype="uint32"), {"SCAN_IDS": 3, "PIECE_IDS": 4}
        corpus = open_small(config, tmp_path / "cache", limits=limits)
        assert np.diff(corpus.bounds).tolist() == [4, 4, 2]

    @pytest.mark.parametrize(
        ("ids", "marked"),
        [
            ([1, 2, 3], False),
            ([1, 2, 3, 4, 5, 6], False),
            ([256, 1, 2, 3, 4, 5], True),
            ([1, 2, 3, 4, 5, 257], True),
            ([1, 257, 2], True),
            ([1, 256, 2], True),
        ],
    )
    def test_a_file_without_marks_is_named(self, tmp_path: Path, ids: list[int], marked: bool) -> None:
        np.array([256, 1, 257], dtype=np.uint16).tofile(tmp_path / "a.bin")
        np.array(ids, dtype=np.uint16).tofile(tmp_path / "b.bin")
        corpus = open_small(self.config(tmp_path), tmp_path / "cache", limits={"PIECE_IDS": 4})
        assert corpus.unmarked(ByteTokenizer()) == (None if marked else tmp_path / "b.bin")

    def test_marks_are_found_across_chunks(self, tmp_path: Path) -> None:
        np.array([1, 2, 257, 3, 256, 4, 4, 4, 257], dtype=np.uint16).tofile(tmp_path / "a.bin")
        corpus = open_small(self.config(tmp_path / "a.bin"), tmp_path / "cache", limits={"SCAN_IDS": 3})
        assert corpus.bounds.tolist() == [0, 3, 4, 9]

    def test_an_id_beyond_the_vocabulary_is_refused_by_place(self, tmp_path: Path) -> None:
        ids = np.zeros(1 << 17, dtype=np.uint16)
        ids[100_000] = 300
        ids.tofile(tmp_path / "a.bin")
        message = r"a.bin has id 300 at token 100000, but the vocabulary has 259 ids; set model.tokenizer_path"
        with pytest.raises(ValueError, match=message):
            open_small(self.config(tmp_path / "a.bin"), tmp_path / "cache")
        open_small(self.config(tmp_path / "a.bin"), tmp_path / "cache", vocab_size=301)
        with pytest.raises(ValueError, match=message):  # also from the cache that the larger vocabulary left
            open_small(self.config(tmp_path / "a.bin"), tmp_path / "cache")

    def test_pickles_as_names(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.zeros(1 << 20, dtype=np.uint16))
        corpus = open_small(self.config(tmp_path / "a.npy"), tmp_path / "cache")
        pickled = pickle.dumps(corpus)
        assert len(pickled) < 2000
        again: Corpus = pickle.loads(pickled)
        assert again.bounds.tolist() == corpus.bounds.tolist()
        assert again.tokens == corpus.tokens


# Builds the corpus argv[1] in the cache argv[2]; says "tokenising" when it is half-way and goes on when it is told to.
CHILD = """
import sys
from pathlib import Path
from typing import Any
from tests.unit.data_corpus import files_config, open_small
from training.tokenizer import ByteTokenizer
class Waiting(ByteTokenizer):
    def encode_documents(self, documents):
        print("tokenising", flush=True)
        sys.stdin.readline()
        return super().encode_documents(documents)
print(open_small(files_config(sys.argv[1]), Path(sys.argv[2]), tokenizer=Waiting()).key)
"""


class Idle(ByteTokenizer):
    def encode_documents(self, documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        raise AssertionError("the other process was to tokenise")


def start_child(corpus_file: Path, cache: Path) -> subprocess.Popen[str]:
    """Starts a process that is in the middle of a build."""
    command = [sys.executable, "-c", CHILD, str(corpus_file), str(cache)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "tokenising\n"
    return child


def test_two_starts_at_once_tokenise_once(tmp_path: Path, corpus_file: Path) -> None:
    cache, waits, keys = tmp_path / "cache", threading.Event(), list[str]()
    config, log = files_config(corpus_file), Lines(is_terminal=True)
    log.overwrite = lambda text: waits.set()  # it shows how far the other one is
    with start_child(corpus_file, cache) as child:
        second = threading.Thread(target=lambda: keys.append(open_small(config, cache, tokenizer=Idle(), log=log).key))
        second.start()
        assert waits.wait(30)
        key, _ = child.communicate("go on\n", timeout=30)
        second.join(30)
    assert keys == [key.strip()]
    assert folders(cache) == keys


def test_a_kill_half_way_leaves_nothing_that_is_used(tmp_path: Path, corpus_file: Path) -> None:
    cache, log = tmp_path / "cache", Lines()
    with start_child(corpus_file, cache) as child:
        (left,) = folders(cache)
        assert ".tmp-" in left
        child.send_signal(signal.SIGKILL)
    corpus = open_small(files_config(corpus_file), cache, log=log)
    assert document(corpus, 0) == [256, *TEXTS[0].encode(), 257]
    assert folders(cache) == [corpus.key]
    assert log.warnings == [f"data cache: removed {left}, which a killed launch had left half-written"]


@pytest.mark.parametrize("ahead_s", [0, 7200])
def test_another_hosts_fresh_folder_is_left_alone(
    tmp_path: Path, corpus_file: Path, ahead_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock of this host says: that host may be writing there, where locks hold on one host only."""
    now_s = time.time()
    monkeypatch.setattr("time.time", lambda: now_s + ahead_s)
    cache = tmp_path / "cache"
    for name in ("k.tmp-elsewhere-1", "k.tmp-else-where-2"):
        (cache / name).mkdir(parents=True)
    os.utime(cache / "k.tmp-else-where-2", (0, 0))
    corpus = open_small(files_config(corpus_file), cache)
    assert folders(cache) == sorted([corpus.key, "k.tmp-elsewhere-1"])


def test_without_locks_the_rename_decides(tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, config = tmp_path / "cache", files_config(corpus_file)

    class Overtaken(ByteTokenizer):
        """A tokenizer during whose call another process, simulated, completes the same build."""

        def encode_documents(self, documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
            self.faster = open_small(config, cache)
            return super().encode_documents(documents)

    forbid_locks(monkeypatch)
    tokenizer = Overtaken()
    corpus = open_small(config, cache, tokenizer=tokenizer)
    assert corpus.key == tokenizer.faster.key
    assert folders(cache) == [corpus.key]


def test_a_folder_that_another_process_has_just_finished_stays(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks, ranks of all nodes finish the same build at the same time: whoever is first may have mapped its folder."""
    cache, config, inodes = tmp_path / "cache", files_config(corpus_file), list[int]()
    key = open_small(config, tmp_path / "elsewhere").key

    class Overtaken(type(cache)):  # type: ignore[misc]
        """A path of the folder, at whose first use another process, simulated, has completed the same build."""

        def __fspath__(self) -> str:
            if self.name == key and not inodes:
                inodes.append(0)
                open_small(config, cache)
                inodes[0] = (cache / key).stat().st_ino
            return str(self)

    forbid_locks(monkeypatch)
    assert open_small(config, Overtaken(cache)).key == key
    assert (cache / key).stat().st_ino == inodes[0]
    assert folders(cache) == [key]


def test_a_damaged_folder_that_another_process_replaces_meanwhile_is_no_failure(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks: the other process, simulated, is done when this one has removed the damaged folder."""
    cache, config, rmtree, calls = tmp_path / "cache", files_config(corpus_file), shutil.rmtree, list[Path]()
    key = open_small(config, tmp_path / "elsewhere").key
    (cache / key / "damaged").mkdir(parents=True)

    def overtaken(path: Path, **options: Any) -> None:
        rmtree(path, **options)
        if path.name == key and not calls:
            calls.append(path)
            open_small(config, cache)

    forbid_locks(monkeypatch)
    monkeypatch.setattr("shutil.rmtree", overtaken)
    assert open_small(config, cache).key == key
    assert calls and folders(cache) == [key]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_progress_counts_the_bytes_of_the_files_as_they_are_on_disk(tmp_path: Path, name: str) -> None:
    content = b'{"text": "all work and no play"}\n' * 1000
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    open_small(files_config(tmp_path / name), tmp_path / "cache", limits={"PROGRESS_S": -1})
    size = quantity((tmp_path / name).stat().st_size)
    assert (tmp_path / "cache" / "lock").read_text().startswith(f"tokenising: [{'#' * 20}] 100%, {size} of {size} B")


def test_a_builder_that_stands_still_is_reported(tmp_path: Path, corpus_file: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with (cache / "lock").open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"^the process that holds .*/cache/lock has shown no progress for "):
            open_small(files_config(corpus_file), cache, limits={"STUCK_S": -1})

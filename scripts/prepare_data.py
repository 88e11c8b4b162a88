#!/usr/bin/env python3
"""Tokenises a corpus into a token store, which `training.dataset = "store"` trains on, with or without replica groups.

    python scripts/prepare_data.py SOURCE... --out DIR [--tokenizer TOKENIZER.json] [--text-key text] [--held-out 0.03] [--processes N]
    python scripts/prepare_data.py --verify DIR

SOURCE: a file, glob or folder of .txt, .jsonl, .json (a record per line) or .parquet, each also with .gz or .zst; or the files of a data
set on the Hugging Face hub, each downloaded when it is its turn: "hf://datasets/allenai/c4/en/c4-train.*.json.gz", or with NAME@REVISION
(a branch, a commit, ~parquet) in place of NAME. DIR is not in a folder SOURCE. The store is the same for any number of processes.
After a kill or Ctrl-C the same command goes on where it was.
Exit code: 0 written, finished before, or verified; 1 another error, damage found or interrupted; 2 bad input.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "scripts"))]

from scripts.launch import cores_here  # noqa: E402 (our packages first)
from training.config import need  # noqa: E402
from training.data.cache import BUCKETS, bucket_of  # noqa: E402
from training.data.sources import (  # noqa: E402
    TEXT_SUFFIXES,
    SourceFile,
    TextSource,
    find_files,
    named_suffixes,
    suffix_of,
    text_source,
)
from training.data.store import FORMAT, JOURNAL, MANIFEST, Store, StoreSettings, StoreWriter  # noqa: E402
from training.durable_files import cause_of  # noqa: E402
from training.log import Log  # noqa: E402
from training.progress import Bar, quantity  # noqa: E402
from training.tokenizer import Tokenizer, build_tokenizer  # noqa: E402

BATCH_BYTES = 1 << 20  # text of a task: the unit of work, and of the position from which a killed run goes on
AHEAD = 3  # tasks per process that wait or run, so that none waits for the reader
HUB = "hf://"


class TextBatch(NamedTuple):
    """Documents for one process. `file`, `document`: the first document after them."""

    documents: list[bytes]
    file: int
    document: int


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        return verify(options.verify) if options.verify else prepare(options)
    except ValueError as error:
        return fail(error, 2)
    except OSError as error:
        return fail(cause_of(error, options.verify or options.out), 1)
    except BrokenProcessPool:
        return fail("a process that tokenises was killed (is there enough memory?); the same command goes on", 1)
    except KeyboardInterrupt:
        return fail("interrupted; the same command goes on", 1)


def parse(argv: list[str]) -> argparse.Namespace:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="prepare_data.py", description=__doc__, formatter_class=how)
    parser.add_argument("sources", nargs="*", metavar="SOURCE")
    parser.add_argument("--out", type=expanded, help="folder of the store")
    parser.add_argument("--tokenizer", default="", metavar="PATH", help='tokenizer.json or its folder; "": bytes')
    parser.add_argument("--text-key", default="text", help='field with the text of a record, default "text"')
    parser.add_argument(
        "--held-out", type=float, default=0.03, help="share of the documents that is held out, default 0.03"
    )
    parser.add_argument(
        "--processes", type=int, default=max(1, cores_here()), help="processes that tokenise; default: the cores"
    )
    parser.add_argument("--shard-tokens", type=int, default=1 << 28, help="ids in a shard, at least; default 2^28")
    parser.add_argument(
        "--verify", type=expanded, metavar="DIR", help="compare the files of a store with their digests"
    )
    options = parser.parse_args(argv)
    if not options.verify and not (options.sources and options.out):
        parser.error("needs SOURCE... and --out DIR, or --verify DIR")
    if not 0 <= options.held_out < 1:
        parser.error(f"--held-out {options.held_out}: must be >= 0 and < 1")
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: must be >= 1")
    if options.shard_tokens < 1:
        parser.error(f"--shard-tokens {options.shard_tokens}: must be >= 1")
    return options


def expanded(name: str) -> Path:
    return Path(os.path.expanduser(name))  # noqa: PTH111 (Path's raises RuntimeError if there is no such user)


def prepare(options: argparse.Namespace) -> int:
    log, tokenizer = Log(), build_tokenizer(options.tokenizer)
    found = dict[Path, SourceFile]()
    for pattern in options.sources:
        for file in find(pattern, options.out):
            found.setdefault(file.path.resolve(), file)  # two SOURCEs may name the same file
    files = tuple(found.values())
    source = text_source(files, "SOURCE", options.text_key, key_setting="--text-key")
    settings = StoreSettings(
        FORMAT,
        tokenizer.fingerprint(),
        tokenizer.vocab_size,
        options.text_key,
        options.held_out,
        "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        options.shard_tokens,
        tuple((file.name, file.size) for file in files),
    )
    if (options.out / MANIFEST).is_file():
        if Store(options.out, f"--out {options.out}").manifest.settings != settings:
            raise ValueError(
                f"--out {options.out}: has a store of other settings or sources; name another folder, or remove it"
            )
        log.info("finished already: %s", options.out)
        return 0
    began = time.monotonic()
    with closing(StoreWriter(options.out, settings)) as writer:
        if writer.shards:
            log.info("goes on after %d shards: file %d of %d", len(writer.shards), writer.file + 1, len(files))
        bar = Bar(sum(file.size for file in files), "tokenising", log=log)
        bar.done = sum(file.size for file in files[: writer.file])
        tasks = read(source, first_file=writer.file, first_document=writer.document, count=bar.update)
        for task, (ids, lengths, held_out) in tokenise(tasks, options, tokenizer):
            if task.documents:
                writer.add(ids, lengths, held_out)
            writer.end_batch(task.file, task.document)
        bar.close()
        manifest = writer.finish()
    seconds, held = time.monotonic() - began, manifest.tokens - sum(shard.train_tokens for shard in manifest.shards)
    log.info(
        "%s: %s documents, %s tokens, of which %s are held out, in %d shards, digest %s; %s tokens/s",
        options.out,
        f"{manifest.documents:,}",
        f"{manifest.tokens:,}",
        f"{held:,}",
        len(manifest.shards),
        manifest.digest[:8],
        quantity(manifest.tokens / seconds),
    )
    log.info("next: --training.dataset=store --training.dataset_path=%s", shlex.quote(str(options.out)))
    return 0


def verify(folder: Path) -> int:
    store = Store(folder, f"--verify {folder}")
    damaged = store.damaged_shards()
    for index in damaged:
        print(f"{folder}: shard {index:05} differs from its digest", file=sys.stderr)
    if not damaged:
        print(f"{folder}: {len(store.shards)} shards are as they were written, digest {store.key[:8]}")
    return 1 if damaged else 0


def find(pattern: str, out: Path) -> tuple[SourceFile, ...]:
    """Returns the files of one SOURCE. Those of the hub have no times, and need not exist yet. Raises ValueError, and
    OSError if the hub is not reached."""
    if not pattern.startswith(HUB):
        folder = Path(pattern).expanduser().resolve()
        # The next call would take the store's files for text
        if folder.is_dir() and out.resolve().is_relative_to(folder):
            raise ValueError(
                f"--out {out}: lies in SOURCE {pattern}; legal: a folder outside it, such as {folder.parent / f'{folder.name}-store'}"
            )
        own = {(out / name).resolve() for name in (JOURNAL, MANIFEST)}  # a glob may find those of a killed call
        files = find_files([pattern], TEXT_SUFFIXES, f"SOURCE {pattern}", every=True)
        return tuple(file for file in files if file.path.resolve() not in own)
    need("huggingface_hub", extra="hf", setting=f"SOURCE {pattern}")
    hub = import_module("huggingface_hub")
    try:
        found = hub.HfFileSystem().glob(pattern.removeprefix(HUB), detail=True)
    except FileNotFoundError:
        found = {}
    except Exception as error:  # the hub library's own, or the network's
        answer = getattr(error, "response", None)
        refused = isinstance(error, ValueError) or (answer is not None and answer.status_code in (401, 403, 404))
        raise (ValueError if refused else OSError)(f"SOURCE {pattern}: the hub: {error}") from error
    found = {name: entry for name, entry in found.items() if entry["type"] == "file"}
    if not found:
        raise ValueError(f"SOURCE {pattern}: no file matches; legal: globs of {named_suffixes(TEXT_SUFFIXES)} files")
    for name in sorted(found):  # before hours of downloads
        if suffix_of(Path(name)) not in TEXT_SUFFIXES:
            suffix = Path(name).suffix or "nothing"
            raise ValueError(
                f"SOURCE {pattern}: file {name} ends in {suffix!r}; legal: {named_suffixes(TEXT_SUFFIXES)}"
            )
    return tuple(
        SourceFile(out / "download" / name, name, (int(entry["size"]), 0, 0)) for name, entry in sorted(found.items())
    )


def read(
    source: TextSource, *, first_file: int, first_document: int, count: Callable[[float], object]
) -> Iterator[TextBatch]:
    """Yields the documents of all files as tasks, whose bounds depend on the documents only. `count`: called with the bytes read."""
    for index, file in enumerate(source.files[first_file:], first_file):
        of_hub = file.stamp[1:] == (0, 0)  # see find(); its file may be there since a killed call downloaded it
        if of_hub and not file.path.exists():
            download(file)
        documents, size, number = list[bytes](), 0, 0
        for number, document in enumerate(source.documents(file, count), 1):
            if index == first_file and number <= first_document:
                continue
            documents.append(document)
            size += len(document)
            if size >= BATCH_BYTES:
                yield TextBatch(documents, index, number)
                documents, size = [], 0
        yield TextBatch(documents, index + 1, 0)
        if of_hub:
            file.path.unlink()


def download(file: SourceFile) -> None:
    """Downloads a file of the hub, "datasets/OWNER/NAME[@REVISION]/PATH", to its path. Raises OSError."""
    hub = import_module("huggingface_hub")
    try:
        of = hub.HfFileSystem().resolve_path(file.name)
        folder = file.path.parents[len(Path(of.path_in_repo).parts) - 1]
        hub.hf_hub_download(of.repo_id, of.path_in_repo, repo_type=of.repo_type, revision=of.revision, local_dir=folder)
    except Exception as error:  # the library's own, or the network's: not all are OSErrors
        raise OSError(f"{HUB}{file.name}: the hub: {error}") from error


_tokenizer: Tokenizer  # of a process that tokenises
_first_bucket: int  # documents in buckets below are held out
Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, lengths [D], held out [D] bool


def tokenise(
    tasks: Iterator[TextBatch], options: argparse.Namespace, tokenizer: Tokenizer
) -> Iterator[tuple[TextBatch, Encoded]]:
    """Yields every task with its result, in order."""
    if options.processes == 1:
        _begin(options.tokenizer, options.held_out)
        yield from ((task, _encode(task.documents)) for task in tasks)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has one core
    waiting = deque[tuple[TextBatch, Future[Any]]]()
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(options.processes, context, _begin, (options.tokenizer, options.held_out)) as pool:
        try:
            for task in tasks:
                waiting.append((task, pool.submit(_encode, task.documents)))
                if len(waiting) >= AHEAD * options.processes:
                    first, result = waiting.popleft()
                    yield first, result.result()
            for first, result in waiting:
                yield first, result.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(tokenizer_path: str, held_out: float) -> None:
    """Initialises a process that tokenises."""
    global _tokenizer, _first_bucket
    _tokenizer, _first_bucket = build_tokenizer(tokenizer_path), round(held_out * BUCKETS)
    if parent := multiprocessing.parent_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent process ends this one

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)

        # A killed parent would leave this process waiting for tasks
        threading.Thread(target=end_with_parent, daemon=True).start()


def _encode(documents: list[bytes]) -> Encoded:
    if not documents:
        return np.empty(0, np.uint32), np.empty(0, np.int64), np.empty(0, bool)
    ids, lengths = _tokenizer.encode_documents(documents)
    return ids, lengths, np.array([bucket_of(document) < _first_bucket for document in documents])


def fail(error: object, code: int) -> int:
    print(f"prepare_data: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path, with an ASCII locale
    sys.exit(main(sys.argv[1:]))

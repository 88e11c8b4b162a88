"""Measures scripts/prepare_data.py and the token store that it writes.

    python bench/corpus.py speed [--mb 100]        prepare_data beside Tokenizer.encode_batch on the same documents and cores, in turns
    python bench/corpus.py kills [--mb 2000]       killed five times at random and resumed, with 1, 2 and 4 processes: equal digests
    python bench/corpus.py open [--documents 400]  time and memory until the first batch of a store of so many million documents

The text is made from the standard library's words by a seed, as one .jsonl.zst, with a BPE tokenizer of 32,000 ids that is trained on them.
Exit code 1 if a bound is missed: at least 80 % of the speed; equal digests; 5 s and 1 GB besides the mapping.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.job import ROOT, memory_bytes
from bench.pairs import in_turns, machine, parser, ratio, spread, table
from training.config import TrainingConfig, ValidationConfig
from training.data.dataset import open_data
from training.data.loader import SlotPartition
from training.data.sources import ZSTD
from training.data.store import FORMAT, Store, StoreSettings, StoreWriter
from training.log import Log
from training.tokenizer import ByteTokenizer, build_tokenizer

KILLS, ROUNDS, SEED = 5, 5, 1
SHARE, OPEN_S, OPEN_BYTES = 0.8, 5.0, 1e9  # bounds
SHARD_TOKENS = 1 << 26  # documents of the opened store have two ids


def main() -> int:
    asked = parser(__doc__, mb=(0.0, "text in MB"), documents=(400.0, "million documents"))
    asked.add_argument("what", choices=("speed", "kills", "open"))
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if options.what == "open":
            return measure_opening(round(options.documents * 1e6))
        write_tokenizer()
        size = (options.mb or (100 if options.what == "speed" else 2000)) * 1e6
        write_text(size)
        return measure_speed() if options.what == "speed" else kill_and_resume(size)


def write_tokenizer() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(vocab_size=32_000, special_tokens=special, show_progress=False)
    tokenizer.train([str(path) for path in library()], trainer)
    tokenizer.save("tokenizer.json")


def library() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def write_text(size: float) -> None:
    """Writes documents of words in a random order, with a total of `size` bytes."""
    dice, written = random.Random(SEED), 0
    words = [word for path in library() for word in path.read_text(encoding="utf-8").split()]
    with import_module(ZSTD).open("text.jsonl.zst", "wt", encoding="utf-8") as file:
        while written < size:
            text = " ".join(dice.choices(words, k=dice.randint(20, 1200)))
            written += len(text.encode())
            file.write(json.dumps({"text": text}) + "\n")


def texts() -> Iterator[str]:
    with import_module(ZSTD).open("text.jsonl.zst", "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def command(out: str, processes: int) -> list[str]:
    script = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "text.jsonl.zst", "--tokenizer=tokenizer.json"]
    return [*script, f"--out={out}", f"--processes={processes}"]


def measure_speed() -> int:
    cores = len(os.sched_getaffinity(0))
    documents = list(texts())
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    backend = import_module("tokenizers").Tokenizer.from_file("tokenizer.json")

    def prepare() -> float:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            began = time.monotonic()
            subprocess.run(command(f"{folder}/out", cores), check=True, stdout=subprocess.DEVNULL)
            return time.monotonic() - began

    def encode() -> float:
        began = time.monotonic()
        for first in range(0, len(documents), 1000):
            backend.encode_batch(documents[first : first + 1000], add_special_tokens=False)
        return time.monotonic() - began

    sides: dict[str, Callable[[], float]] = {"prepare_data": prepare, "encode_batch": encode}
    seconds = in_turns(sides, ROUNDS, warm=1)
    speeds = {name: [megabytes / each for each in figures] for name, figures in seconds.items()}
    share = ratio(speeds["prepare_data"], speeds["encode_batch"])
    print(table(["MB/s", "median (range)"], [[name, spread(each, ".2f")] for name, each in speeds.items()]))
    reached = share.low >= SHARE
    print(f"{machine()}; {megabytes:.0f} MB: {share}, bound {SHARE}: {'reached' if reached else 'missed'}")
    return 0 if reached else 1


def kill_and_resume(size: float) -> int:
    dice, wrong = random.Random(SEED), 0
    # a kill is at a random share of the time that the whole takes, and some finished shards are resumed from
    shards = [f"--shard-tokens={max(1000, round(size / 4 / 20))}"]
    began = time.monotonic()
    subprocess.run([*command("whole", 2), *shards], check=True, stdout=subprocess.DEVNULL)
    whole_s, whole = time.monotonic() - began, Store(Path("whole"), "").manifest
    print(
        f"undisturbed: {whole_s:.0f} s, {whole.tokens:,} tokens in {len(whole.shards)} shards, digest {whole.digest[:8]}"
    )
    for processes in (1, 2, 4):
        out, kept = f"out{processes}", list[int]()
        while len(kept) < KILLS:
            process = subprocess.Popen([*command(out, processes), *shards], stdout=subprocess.DEVNULL)
            try:
                assert process.wait(dice.uniform(0.1, 0.4) * whole_s) == 0, "it failed by itself"
                break  # it has finished
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
            kept.append(len(list(Path(out).glob("*.npy"))))
        subprocess.run([*command(out, processes), *shards], check=True, stdout=subprocess.DEVNULL)
        equal = Store(Path(out), "").manifest == whole and not Store(Path(out), "").damaged_shards()
        wrong += not equal
        shown = ", ".join(map(str, kept))
        print(
            f"{processes} processes: killed after {shown} shards: {'equal digests' if equal else 'DIFFERENT'}",
            flush=True,
        )
    return 1 if wrong else 0


def measure_opening(documents: int) -> int:
    write_store(documents)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", "from bench.corpus import first_batch; first_batch()"]
    done = subprocess.run(program, env=env, check=True, capture_output=True, text=True)
    seconds, anonymous = map(float, done.stdout.split()[-2:])
    reached = seconds < OPEN_S and anonymous < OPEN_BYTES
    print(
        f"{machine()}; {documents:,} documents: first batch after {seconds:.2f} s (bound {OPEN_S:.0f}), {anonymous / 1e6:.0f} MB more than "
        f"before besides the mapping (bound {OPEN_BYTES / 1e6:.0f}): {'reached' if reached else 'missed'}"
    )
    return 0 if reached else 1


def write_store(documents: int) -> None:
    tokenizer = ByteTokenizer()
    settings = StoreSettings(
        FORMAT, tokenizer.fingerprint(), 259, "text", 0.03, "uint16", SHARD_TOKENS, (("made", documents),)
    )
    writer, at_once = StoreWriter(Path("store"), settings), 1 << 20
    ids = np.tile(np.array([tokenizer.bos_id, tokenizer.eos_id], np.uint16), at_once)
    held_out = np.arange(at_once) % 32 == 0
    for first in range(0, documents, at_once):
        count = min(at_once, documents - first)
        writer.add(ids[: 2 * count], np.full(count, 2), held_out[:count])
        writer.end_batch(0, first + count)
    writer.finish()
    writer.close()


def first_batch() -> None:
    """Prints seconds and bytes of memory that is not of a file, until the first batch of the store."""
    before, began = memory_bytes("RssAnon"), time.monotonic()
    config = TrainingConfig(dataset="store", dataset_path="store")
    data = open_data(
        config, ValidationConfig(enable=True), build_tokenizer(""), "unused", log=Log(stream=io.StringIO())
    )
    loader = data.loader(SlotPartition(8, 8, 0, 1))
    [batch] = islice(loader.load([0]), 1)
    assert batch.inputs.shape == (8, config.seq_len)
    print(time.monotonic() - began, memory_bytes("RssAnon") - before)
    loader.close()


if __name__ == "__main__":
    sys.exit(main())

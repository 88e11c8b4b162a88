#!/usr/bin/env python3
"""Prints what a run trains on at some positions: scripts/show_data.py outputs/llama 40-47

For each position: its source, and each document in it, with its number in the store (for [[training.skip]]), its number of tokens and the
beginning of its text. A position is the number of a sequence in the order of the data, as in messages and in samples.jsonl. RUN is a run's
folder, or a config file before the first launch. Reads the data and, for changes of settings, the newest checkpoint, before the first save
that of checkpoint.initial_load_path (if its data is continued; not a URL); one process, no GPU.
Exit code: 0 printed; 1 storage fails; 2 bad input, or a damaged checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

if __name__ == "__main__":  # run by path, from any folder: not scripts/, whose files could shadow a package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from configs.load import CONFIG_FILE, load
from scripts.generate import checkpoint_of
from training.checkpoint_dcp import read_values
from training.checkpoint_files import Damaged, read_verified
from training.checkpoint_load import checkpoint_to_continue, step_and_ledger
from training.data.dataset import StreamedData, open_data
from training.data.order import NO_TOKEN, SegmentedOrder, StoreOrder
from training.log import Log
from training.tokenizer import build_tokenizer

SHOWN = 100  # characters of a document


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="show_data.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run, such as outputs/llama, or a config file")
    parser.add_argument("positions", help="a position, 40, or an inclusive range, 40-47")
    args = parser.parse_args(argv)
    try:
        show(args.run, args.positions)
    except (ValueError, OSError, Damaged) as error:
        print(f"show_data: {error}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    return 0


def show(run: Path, positions: str) -> None:
    """Prints the positions. Raises ValueError, OSError, Damaged."""
    first, _, last = positions.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first)):
        raise ValueError(f"positions = {positions}: legal: one, such as 40, or a range with its last, such as 40-47")
    config = load([str(run / CONFIG_FILE if run.is_dir() else run)])
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    # beside RUN, as the checkpoints are in it: its job.dump_folder may be relative to another folder than this one; RUN may be ".."
    cache = Path(os.path.abspath(run) if run.is_dir() else config.run_folder).parent / "data_cache"  # noqa: PTH100
    log = Log(stream=sys.stderr)
    vocab_size = config.model.vocab_size
    data = open_data(config.training, config.validation, tokenizer, cache, log=log, vocab_size=vocab_size)
    if isinstance(data, StreamedData):
        raise ValueError('training.dataset = "huggingface": a stream has no positions')
    checkpoints = run / config.checkpoint.local_folder
    path = checkpoint_to_continue(replace(config.checkpoint, load_step=-1), run)
    if path is not None:
        if path.parent == checkpoints:
            path, _ = checkpoint_of(checkpoints, -1, who="show_data", full=True)  # an intact one
        else:  # initial_load_path
            read_verified(path)
        if path.parent == checkpoints or not config.checkpoint.excludes("data"):
            data.load_state_dict(read_values(path, "data"))
        data.continue_segments(step_and_ledger(path)[1]["position"], (), (), 0)  # settings may have changed since
    order = SegmentedOrder(data.orders())
    for position in range(int(first), int(last or first) + 1):
        segment = next(each for each in reversed(data.segments) if each.first <= position)
        training = config.training if segment is data.segments[-1] else segment.config(config.training)
        names = training.store_names or [training.dataset]
        of_source, source, index = order.find(position)
        print(f"position {position}: sequence {index} of {names[source]}")
        tokens, starts = order.sequence(position), order.document_starts(position)
        numbers = of_source.documents(index) if isinstance(of_source, StoreOrder) else ()
        for turn, begin in enumerate(np.unique(starts)):
            ids = tokens[(starts == begin) & (tokens != NO_TOKEN)]
            text = tokenizer.decode(np.maximum(ids, ~ids))
            named = f"document {numbers[turn]}" if turn < len(numbers) else "document"
            print(f"  {named}, {len(ids)} tokens: {text[:SHOWN]!r}{'...' * (len(text) > SHOWN)}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv[1:]))

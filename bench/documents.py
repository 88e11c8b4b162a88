"""Measures a training step with training.document_mask and without, for documents of several lengths.

    python bench/documents.py [--rounds 7] [--device cpu|cuda] [--threads 2]

Each side is one process for all rounds, with the step of bench/step.py; the sides alternate. On a machine with other load compare CPU
seconds, with --threads 1.
"""

from __future__ import annotations

import os
import statistics
import sys
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.pairs import asking, in_turns, machine, parser, ratio, table
from bench.step import OURS, SIZES, start

LENGTHS = (64, 256, 2048)  # tokens of a document; the last: one document, which is what a mask costs at most
SEQ_LEN, BATCH = 2048, 1


def main() -> None:
    flags = parser(
        __doc__,
        rounds=(7, "measurements of each side"),
        device="cpu",
        setting=("fp32", "precision and compilation, as in bench/step.py"),
        threads=(len(os.sched_getaffinity(0)), "number of CPUs and threads per side"),
    )
    options = flags.parse_args()
    sizes = {**SIZES, "seq": SEQ_LEN, "batch": BATCH}
    settings = [options.setting, *(f"{options.setting} documents={length}" for length in LENGTHS)]
    with ExitStack() as stack:
        workers = []
        for setting in settings:
            worker = start(OURS, setting, sizes, options.device, threads=options.threads)
            workers.append(stack.enter_context(closing(worker)))
            worker.answer()
        answers = in_turns(asking(workers, do="run", steps=1), options.rounds, warm=1)
    rows = []
    whole = answers[workers[0].name]
    for name, given in answers.items():
        row = [name.removeprefix(OURS).strip()]
        for clock in ("seconds", "cpu_seconds"):
            mine, its = ([answer[clock] for answer in side] for side in (given, whole))
            row += [f"{statistics.median(mine):.3f}", "" if given is whole else str(ratio(its, mine))]
        rows.append(row)
    print(f"{machine()}; {BATCH} x {SEQ_LEN} tokens, {options.rounds} rounds, {options.threads} threads")
    print(table(("side", "s/step", "faster", "CPU s/step", "faster"), rows))


if __name__ == "__main__":
    main()

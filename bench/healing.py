"""Healing a group's rank on this machine: both transports beside a bare socket that does nothing but recv_into.

    python bench/healing.py [--gb 2] [--pairs 5]

Two processes, a source and a joiner, hold states of the same size whose memory has been touched. They take turns: raw, HTTP, process
group, bare gloo (torch's own, messages as large: what a transport over gloo could reach), the same with our digests, and again; ratios
are taken inside a turn. Seconds are the joiner's, from its call to the verified state (the process group's
forming included). Peak memory is each side's, above what it held before that turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.pairs import Worker, ratio, table

WORKER = Path(__file__).with_name("healing_worker.py")
KINDS = ("raw", "http", "process group", "bare gloo", "bare gloo, digests")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="of tensors, in each of the two processes")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args(argv)
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    peaks: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        source, joiner = (
            Worker(role, [sys.executable, str(WORKER), role, str(options.gb)], {"OMP_NUM_THREADS": "1"})
            for role in ("source", "joiner")
        )
        stack.callback(source.close)
        stack.callback(joiner.close)
        source.answer(), joiner.answer()  # that they are ready
        for turn in range(options.pairs + 1):  # the first warms up and is dropped
            for kind in KINDS:
                address = source.ask(["offer", kind, turn])["address"]
                got = joiner.ask(["fetch", kind, turn, address])
                gave = source.ask(["end", kind, turn])
                assert got["right"], f"{kind}: the joiner's state is not the source's"
                if turn:
                    speeds[kind].append(got["gb"] / got["seconds"])
                    peaks[kind].append((gave["peak_mb"], got["peak_mb"]))
    rows = []
    for kind in KINDS:
        share = ratio(speeds[kind], speeds["raw"])
        rows.append(
            [
                kind,
                f"{statistics.median(speeds[kind]):.2f} ({min(speeds[kind]):.2f}-{max(speeds[kind]):.2f})",
                str(share),
                *(f"{max(peak[side] for peak in peaks[kind]):.0f}" for side in (0, 1)),
            ]
        )
    print(table(["over", "GB/s", "of raw", "source: MB above steady", "joiner: MB above steady"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Two checkouts of this repository beside each other: is the newer one slower?

    python bench/beside.py OLD_CHECKOUT [--pairs 11] [--only train,kill,reduce,healing,quorum]

Each pair runs one command in the old checkout and the same one in this one, in turns, every other pair backwards, with this Python. Ratios
are new / old of a time, taken inside a pair; the interval is the 95 % one of the median, by order statistics. To be run on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.pairs import table

HERE = Path(__file__).resolve().parents[1]
MEDIAN, UPPER = 1.02, 1.05  # bounds: of the median of ratios, and of its interval's upper end
TRAIN = "train.py configs/llama.toml --training.steps 40 --checkpoint.enable false --job.dump_folder {out} --job.name beside"


def _of_text(pattern: str, figure: Callable[[float], float] = float) -> Callable[[str, Path], float]:
    return lambda text, _: figure(float(re.findall(pattern, text, re.MULTILINE)[-1].replace(",", "")))


# By name: a command ({bench} is the folder of benchmarks, which once had another name), and its times
MEASURES: dict[str, tuple[str, dict[str, Callable[[str, Path], float]]]] = {
    "train": (TRAIN, {"ms/token": _of_text(r"([\d,]+) tokens per second of compute", lambda speed: 1e3 / speed)}),
    "kill": (
        "{bench}/recovery.py kill --mb 4 --kinds gloo --faults 2 --rounds 1",
        {
            "step ms": _of_text(r"^ours, gloo.*?MB +\d+ +(\d+)"),
            "gap s": _of_text(r"^ours, gloo.*?MB +\d+ +\d+ +([\d.]+)"),
        },
    ),
    "reduce": (
        "{bench}/reduce.py --rounds 3 --megabytes 100 --sides plain;kept",
        {"kept ms": _of_text(r"^kept +(\d+)")},
    ),
    "healing": (
        "{bench}/healing.py --gb 0.5 --pairs 2",
        {
            "http s/GB": _of_text(r"^http +([\d.]+)", lambda speed: 1 / speed),
            "process group s/GB": _of_text(r"^process group +([\d.]+)", lambda speed: 1 / speed),
        },
    ),
    "quorum": (
        "{bench}/quorum.py --groups 64 --pairs 5",
        {"round ms": _of_text(r"^64 groups, ours +([\d.]+)"), "known ms": _of_text(r"^64 groups, known +([\d.]+)")},
    ),
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--only", default=",".join(MEASURES))
    options = parser.parse_args(argv)
    rows, slower = list[list[str]](), False
    for name in options.only.split(","):
        ratios: dict[str, list[float]] = {}
        times: dict[str, list[float]] = {}
        for pair in range(options.pairs + 1):  # the first warms up
            trees = (options.old.resolve(), HERE)
            found = {tree: _times(tree, name) for tree in (trees if pair % 2 else reversed(trees))}
            for figure, value in found[HERE].items() if pair else ():
                ratios.setdefault(figure, []).append(value / found[trees[0]][figure])
                times.setdefault(figure, []).append(value)
            print(f"{name}: pair {pair} of {options.pairs}", file=sys.stderr, flush=True)
        for figure, found_ratios in ratios.items():
            low, high = interval(found_ratios)
            median = statistics.median(found_ratios)
            verdict = "no slower" if median <= MEDIAN and high < UPPER else "SLOWER, or not known"
            slower |= verdict != "no slower"
            new = statistics.median(times[figure])
            rows.append([f"{name}, {figure}", f"{new:.4g}", f"{median:.3f}", f"{low:.3f}-{high:.3f}", verdict])
    print(table(["", "now", "of before", "95 % of the median", ""], rows))
    return int(slower)


def _times(tree: Path, name: str) -> dict[str, float]:
    command, figures = MEASURES[name]
    with tempfile.TemporaryDirectory() as out:
        bench = "bench" if (tree / "bench").is_dir() else "benchmarks"
        words = command.format(bench=bench, out=out).split(" ")
        run = subprocess.run(
            [sys.executable, *words],
            cwd=tree,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            return {figure: read(run.stdout, Path(out)) for figure, read in figures.items()}
        except (IndexError, ValueError, KeyError):
            raise SystemExit(
                f"{' '.join(words)} in {tree}: no figure (exit code {run.returncode})\n{run.stdout}{run.stderr}"
            ) from None


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics around the median that hold it with at least 95 % (binomial). Fewer than six values: all of them."""
    ordered, n = sorted(values), len(values)
    k, outside = 0, 2 / 2**n
    while k + 1 < n // 2 and outside + 2 * math.comb(n, k + 1) / 2**n <= 0.05:
        k += 1
        outside += 2 * math.comb(n, k) / 2**n
    return ordered[k], ordered[n - 1 - k]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

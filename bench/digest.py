"""Measures the cost of comparing weights between replica groups: time of the digest relative to a step of the same model.

    python bench/digest.py

A round is some steps (forward, backward, clipping, AdamW; one process, no other groups) and as many digests as fit into a tenth of that
time. The share is per step with fault_tolerance.digest_interval = 100; the bound is one percent.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from timeit import timeit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.pairs import parser, ratio, table
from bench.step import pharos
from ft.digest import digest

INTERVAL, STEPS, ROUNDS = 100, 3, 7
DIMS = (192, 512)  # widths of the model; 192: that of configs/llama.toml


def main() -> None:
    parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = []
    for dim in DIMS:
        heads = {"heads": dim // 32, "kv_heads": dim // 64, "hidden": dim * 8 // 3 // 64 * 64}
        sizes = {"dim": dim, "layers": 4, **heads, "vocab": 257, "batch": 8, "seq": 256}
        with ExitStack() as cleanup:
            step, model = pharos(sizes, "bf16", torch.device("cpu"), cleanup)
            parameters = list(model.parameters())
            tokens = torch.randint(0, sizes["vocab"], (sizes["batch"], sizes["seq"] + 1))
            train, compute_digest = partial(step, tokens[:, :-1], tokens[:, 1:]), partial(digest, parameters)
            timeit(train, number=2), timeit(compute_digest, number=2)
            steps_s, digests_s = [], []
            for _ in range(ROUNDS):
                steps_s.append(timeit(train, number=STEPS) / STEPS)
                count = max(1, int(0.1 * STEPS * steps_s[-1] / timeit(compute_digest, number=1)))
                digests_s.append(timeit(compute_digest, number=count) / count)
        share = ratio(digests_s, [INTERVAL * seconds for seconds in steps_s])
        megabytes = sum(parameter.nbytes for parameter in parameters) / 1e6
        figures = [f"{1e3 * statistics.median(seconds):.2f}" for seconds in (steps_s, digests_s)]
        percent, low, high = (f"{100 * part:.4f}" for part in share)
        verdict = "reached" if share.high <= 0.01 else "missed"
        rows.append([f"{megabytes:.1f} MB", *figures, f"{percent} ({low}-{high})", verdict])
    print(table(["weights", "ms a step", "ms a digest", f"% of a step, every {INTERVAL}", "at most 1 %"], rows))


if __name__ == "__main__":
    main()

"""Measures a change of writer at a million rows: in the trainer's thread, and in the scribe's.

    python bench/figures.py

Writes metrics.jsonl, samples.jsonl and TensorBoard's files of so many steps into a temporary folder; then another group takes the role
over, with rows that the one before did not come to write.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.pairs import parser
from training.metrics_writer import LeaderMetricsWriter
from training.scribe import Scribe
from training.sinks import METRICS, SAMPLES, Sinks, TensorBoardSink

FIGURES = {
    "loss": 2.123456789, "grad_norm": 1.3, "lr": 3e-4, "tokens": 123456789, "tokens_per_s": 12345.6, "memory_gib": 12.3,
    "step_s": 0.51, "data_s": 0.01, "checkpoint_s": 0.0, "quorum_size": 2, "contributors": 2, "heals": 0, "time": 1795300000.1,
}  # fmt: skip
CHART = {"loss_metrics/global_avg_loss": 2.1, "grad_norm": 1.3, "lr": 3e-4, "throughput(tps)": 1000.0}
ROWS, CHART_EVERY = 1_000_000, 10


def sample(step: int) -> dict[str, object]:
    slots = {str(16 * step): "a:0123456789ab", str(16 * step + 8): "b:0123456789ab"}
    return {"slot_size": 8, "slots": slots, "holes": []}


def main() -> None:
    parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / METRICS).open("w") as metrics, (folder / SAMPLES).open("w") as samples:
            for step in range(1, ROWS + 1):
                metrics.write(json.dumps({"step": step, **FIGURES}) + "\n")
                samples.write(json.dumps({"step": step, **sample(step)}) + "\n")
        charts = TensorBoardSink(folder / "tb")
        for step in range(CHART_EVERY, ROWS + 1, CHART_EVERY):
            charts.write(step, CHART)
        charts.close()
        size_mb = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        said: list[str] = []
        scribe = Scribe(said.append)
        relay = LeaderMetricsWriter(
            folder,
            lambda: ("epoch", 2) if writes else None,
            lambda resumed: Sinks(folder, tensorboard_folder="tb", resumed_step=resumed),
            scribe,
        )
        writes, new, slowest_s, began_s = False, ROWS + 50, 0.0, 0.0
        for step in range(ROWS - 49, new + 1):  # the last 50 the one before has written, these it has not
            if step == new:
                writes, began_s = True, time.perf_counter()
            for kind, row in (("journals", FIGURES), ("charts", CHART), ("records", sample(step))):
                before_s = time.perf_counter()
                relay.write(kind, step, row)
                slowest_s = max(slowest_s, time.perf_counter() - before_s)
        assert scribe.flush(60) and not said, said
        taken_over_s = time.perf_counter() - began_s
        relay.close()
        scribe.close()
        with (folder / METRICS).open("rb") as file:
            assert sum(1 for _ in file) == new
        print(
            f"{ROWS:,} rows, {size_mb:.0f} MB: a change of writer takes {1e3 * taken_over_s:.1f} ms in the scribe's thread;"
        )
        print(f"the slowest of the trainer's writes {1e3 * slowest_s:.2f} ms")


if __name__ == "__main__":
    main()

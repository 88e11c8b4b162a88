"""The MetricsProcessor's console line, journal and charts, on a clock that the test moves."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import train
from ft.seam import Commit, Rewound
from parallelisms.device import DEVICE_TRAITS, DeviceTraits
from tests.unit.fakes import Clock
from training.components import Components
from training.data.loader import Batch
from training.log import Log
from training.loss import IGNORED
from training.metrics import MetricsConfig, MetricsProcessor, known_peak_tflops
from training.optimizer import Update
from training.progress import Progress
from training.tokenizer import ByteTokenizer


@dataclass
class Recorder:
    """The rows of one kind."""

    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)


class Sink:
    """A sink that records all rows."""

    def __init__(self) -> None:
        self.kinds = {kind: Recorder() for kind in ("metrics", "charts", "samples")}

    def write(self, kind: str, step: int, scalars: Mapping[str, float]) -> None:
        self.kinds[kind].rows.append((step, dict(scalars)))


@dataclass
class FakeDevice:
    type: str = "cpu"
    traits: DeviceTraits = DEVICE_TRAITS["cpu"]
    name: str = "a CPU"
    peak_gib: float = 1.5
    reads: int = 0

    def peak_rss_gib(self) -> float:
        self.reads += 1
        return self.peak_gib


class Run:
    """A loop of steps with values from the test."""

    def __init__(self, *, steps: int = 100, device: Any = None, **options: Any) -> None:
        config = MetricsConfig(**{key: options.pop(key) for key in ("log_freq", "peak_tflops") if key in options})
        self.clock, self.sink, self.out = Clock(50.0), Sink(), io.StringIO()
        self.journal, self.chart, self.record = self.sink.kinds.values()
        self.progress = Progress(self.clock)
        self.metrics_processor = MetricsProcessor(
            config,
            log=Log(stream=self.out),
            progress=self.progress,
            last_step=steps,
            device=device,
            wall_clock=lambda: 1.7e9,
            **options,
        )
        self.metrics_processor.writer = self.sink

    def spend(self, phase: str, seconds: float) -> None:
        with self.progress.phase(phase):
            self.clock.now += seconds

    def steps(self, first: int, last: int, *, tokens: int = 1000, compute_s: float = 0.5) -> None:
        for step in range(first, last + 1):
            self.spend("compute", compute_s)
            self.commit(step, loss=4.0 / step, tokens=tokens)

    def commit(
        self, step: int, *, loss: float = 2.5, tokens: int = 1000, quorum_size: int = 1, heals: int | None = None,
        slots: Sequence[tuple[int, str]] = (), holes: Sequence[int] = (), skipped: Sequence[tuple[int, int]] = (),
        spike: str = "", steps: int = 1, rewound: Rewound | None = None,
    ) -> None:  # fmt: skip
        commit = Commit(tokens, (0,), loss, quorum_size, tuple(slots), tuple(holes), tuple(skipped), rewound)
        self.metrics_processor.step(step, commit, Update(0.5, 3e-4, spike), slot_size=4, inner_steps=steps, heals=heals)

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


def test_the_journal_has_every_step_and_the_console_every_log_freq_with_the_first_and_the_last() -> None:
    run = Run(steps=25)
    run.steps(1, 25)
    assert [step for step, _ in run.journal.rows] == list(range(1, 26))
    assert [step for step, _ in run.chart.rows] == [1, 10, 20, 25]
    assert [line.split()[2] for line in run.lines] == ["1/25", "10/25", "20/25", "25/25"]


def test_the_first_step_after_a_resume_is_shown() -> None:
    run = Run(steps=25)
    run.clock.now += 30  # loading the checkpoint is no part of the first step
    run.metrics_processor.load_state_dict({"tokens": 12_000})
    run.steps(13, 14)
    assert [row["step_s"] for _, row in run.journal.rows] == [0.5, 0.5]
    assert [step for step, _ in run.chart.rows] == [13]
    assert [row["tokens"] for _, row in run.journal.rows] == [13_000, 14_000]
    assert run.metrics_processor.state_dict() == {"tokens": 14_000}


def test_the_first_step_after_a_return_to_step_0_does_not_count_the_spike() -> None:
    run = Run()
    run.steps(1, 1)
    run.spend("compute", 5.0)
    components = MagicMock(metrics_processor=run.metrics_processor, ema=None, spikes=None)
    Components.reset(components)
    run.steps(1, 1)
    assert [(row["step_s"], row["tokens"]) for _, row in run.journal.rows] == [(0.5, 1000)] * 2


def test_a_journal_row() -> None:
    run = Run(device=FakeDevice())
    run.spend("data", 0.25)
    run.spend("compute", 1.75)
    run.commit(1)
    assert run.journal.rows == [
        (
            1,
            {
                "loss": 2.5,
                "grad_norm": 0.5,
                "lr": 3e-4,
                "tokens": 1000,
                "tokens_per_s": 500.0,
                "memory_gib": 1.5,
                "step_s": 2.0,
                "data_s": 0.25,
                "checkpoint_s": 0.0,
                "time": 1.7e9,
            },
        )
    ]


def test_what_groups_do_is_charted_where_it_changes_and_what_they_cost_on_logging_steps() -> None:
    run = Run(log_freq=4)
    for step in range(1, 9):
        run.spend("compute", 3.0)
        run.spend("waiting", 1.0)
        run.progress.commit()
        run.commit(step, quorum_size=2 if step == 6 else 3, heals=0)
    assert [row["quorum_size"] for _, row in run.journal.rows] == [3, 3, 3, 3, 3, 2, 3, 3]
    charted = [(step, row["fault_tolerance/quorum_size"]) for step, row in run.chart.rows]
    assert charted == [(1, 3), (4, 3), (6, 2), (7, 3), (8, 3)], "one row a step: metrics_writer.py keeps no more"
    figures = next(row for step, row in run.chart.rows if step == 8)
    assert figures["time_metrics/waiting(s)"] == 1.0 and figures["time_metrics/heal(s)"] == 0.0
    assert figures["goodput(%)"] == 75.0


def test_checkpoints_and_validation_are_not_held_against_the_next_step() -> None:
    run = Run()
    run.steps(1, 1)
    run.spend("checkpoint", 30)
    with run.progress.phase("validation"):
        run.spend("data", 3)
        run.clock.now += 7
    run.steps(2, 2)
    row = run.journal.rows[-1][1]
    assert (row["step_s"], row["data_s"], row["checkpoint_s"], row["tokens_per_s"]) == (0.5, 0.0, 30.0, 2000.0)


def test_memory_is_read_on_logging_steps_only() -> None:
    device = FakeDevice()
    run = Run(device=device)
    run.steps(1, 1)
    device.peak_gib = 2.0
    run.steps(2, 10)
    assert device.reads == 2
    assert [row["memory_gib"] for _, row in run.journal.rows] == [1.5] * 9 + [2.0]


def test_the_console_line() -> None:
    run = Run(steps=1000, device=None)
    run.steps(1, 10)
    assert run.lines[-1] == (
        "[0] step 10/1000  loss 0.4000  grad norm 0.5000  lr 3.00e-04  2,000 tok/s  memory 0.00 GiB  ETA 8:15"
    )
    assert "ETA" not in run.lines[0]


def test_the_time_to_the_end_includes_checkpoints_but_not_the_first_step() -> None:
    run = Run(steps=110)
    run.steps(1, 1, compute_s=60)
    run.steps(2, 5)
    run.spend("checkpoint", 8)
    run.steps(6, 10)  # 9 steps in 12.5 s
    assert run.lines[-1].endswith("ETA 2:19")
    run.commit(6, rewound=Rewound(5, 11, "loss nan", ()))  # steps count from here again
    run.steps(7, 10)
    assert run.lines[-1].endswith("ETA 50 s")


def test_tags_are_torchtitans() -> None:
    run = Run(device=FakeDevice(), flops_per_token=6e9, peak_tflops=100, world_size=2)
    run.spend("data", 0.1)
    run.spend("compute", 0.9)
    run.commit(1, tokens=4000)
    ((_, scalars),) = run.chart.rows
    memory = {tag: value for tag, value in scalars.items() if tag.startswith("memory/")}
    assert set(memory) == {"memory/max_active(GiB)", "memory/max_active(%)"}
    assert {tag: value for tag, value in scalars.items() if tag not in memory} == {
        "loss_metrics/global_avg_loss": 2.5,
        "grad_norm": 0.5,
        "lr": 3e-4,
        "n_tokens_seen": 4000,
        "throughput(tps)": pytest.approx(2000),  # per device
        "tflops": pytest.approx(12),
        "mfu(%)": pytest.approx(12),
        "time_metrics/end_to_end(s)": pytest.approx(1.0),
        "time_metrics/data_loading(s)": pytest.approx(0.1),
        "time_metrics/data_loading(%)": pytest.approx(10),
    }
    assert "4,000 tok/s" in run.lines[0] and "mfu 12.0%" in run.lines[0]  # the line counts all devices' tokens


def test_throughput_is_per_device_of_all_groups() -> None:
    run = Run(device=FakeDevice(), flops_per_token=6e9, peak_tflops=100, world_size=2)
    run.spend("compute", 1)
    run.commit(1, tokens=12_000, quorum_size=3, heals=0)
    ((_, scalars),) = run.chart.rows
    assert scalars["throughput(tps)"] == pytest.approx(2000) and scalars["mfu(%)"] == pytest.approx(12)
    assert "12,000 tok/s" in run.lines[0]


def test_chart_points_are_means_since_the_last_one() -> None:
    run = Run()
    run.steps(1, 1)
    run.steps(2, 9, compute_s=1)
    run.spend("data", 0.9)
    run.steps(10, 10, compute_s=1)
    scalars = run.chart.rows[-1][1]
    assert scalars["throughput(tps)"] == pytest.approx(9000 / 9.9)
    assert scalars["time_metrics/end_to_end(s)"] == pytest.approx(1.1)
    assert scalars["time_metrics/data_loading(s)"] == pytest.approx(0.1)


def test_no_mfu_where_the_peak_is_not_known() -> None:
    run = Run(device=FakeDevice(name="NVIDIA GeForce RTX 9090"), flops_per_token=6e9)
    run.steps(1, 1)
    assert "mfu(%)" not in run.chart.rows[0][1] and "tflops" in run.chart.rows[0][1]
    assert "mfu" not in run.lines[0]


def test_validation() -> None:
    run = Run()
    tokens = 20_480
    run.metrics_processor.validation(0, {"": (5.5 * tokens, tokens, tokens)}, seconds=2.0)
    assert run.lines == ["[0] validation at step 0: loss 5.5000  7.9348 bits per byte  20,480 tokens in 2.0 s"]
    assert run.chart.rows == [
        (
            0,
            {
                "validation_metrics/loss": 5.5,
                "validation_metrics/bits_per_byte": pytest.approx(5.5 / math.log(2)),
                "validation_metrics/throughput(tps)": 10_240,
            },
        )
    ]
    (row,) = run.journal.rows
    assert row[0] == 0 and row[1]["validation_loss"] == 5.5 and "loss" not in row[1]


@pytest.mark.parametrize("other", [66, 300])
def test_bits_per_byte_are_told_only_if_the_tokenizer_has_all_ids(other: int) -> None:
    """Id 300 is from a token file of a different tokenizer, so bits per byte are not reported."""
    run, fakes = Run(), SimpleNamespace
    labels = torch.tensor([[65, other, IGNORED]])
    batch = Batch(labels, labels, 0, (0,), True)
    train.Run.validate(
        fakes(  # type: ignore[arg-type]
            progress=Progress(),
            tokenizer=ByteTokenizer(),
            vocab_size=512,
            device=torch.device("cpu"),
            held_out={"": fakes(load=lambda slots: iter([batch]))},
            config=fakes(validation=fakes(steps=1)),
            slot_size=1,
            coordinate=fakes(counts_tokens=True),
            model=fakes(evaluate=lambda *given: torch.tensor(4 * math.log(2)), parts=[]),
            world=fakes(world_size=1),
            metrics_processor=run.metrics_processor,
            manager=fakes(step=7),
        )
    )
    known = other == 66
    assert ("loss 1.3863  2.0000 bits per byte  2 tokens" if known else "loss 1.3863  2 tokens") in run.lines[0]
    ((_, scalars),), ((_, row),) = run.chart.rows, run.journal.rows
    assert ("validation_metrics/bits_per_byte" in scalars) == known
    assert math.isnan(row["validation_bits_per_byte"]) != known, "a file of metrics has null for NaN"


def test_several_sets_of_validation() -> None:
    run = Run()
    run.metrics_processor.validation(7, {"prose": (200.0, 100, 400), "code": (300.0, 300, 600)}, seconds=2.0)
    [line] = run.lines
    assert "loss 1.2500  0.7213 bits per byte  400 tokens" in line and line.endswith("  prose 2.0000  code 1.0000")
    ((_, scalars),) = run.chart.rows
    assert scalars["validation_metrics/loss"] == 1.25 and scalars["validation_metrics/loss/prose"] == 2.0
    assert scalars["validation_metrics/bits_per_byte/code"] == pytest.approx(0.5 / math.log(2))
    ((_, row),) = run.journal.rows
    assert (row["validation_loss"], row["validation_loss/prose"], row["validation_loss/code"]) == (1.25, 2.0, 1.0)


def test_the_held_out_text_beside_other_sets_has_a_name() -> None:
    run = Run()
    run.metrics_processor.validation(7, {"": (200.0, 100, 400), "code": (300.0, 300, 600)}, seconds=2.0)
    assert run.lines[0].endswith("  held_out 2.0000  code 1.0000")
    ((_, scalars),), ((_, row),) = run.chart.rows, run.journal.rows
    assert scalars["validation_metrics/loss/held_out"] == row["validation_loss/held_out"] == 2.0


def test_a_change_of_settings_is_in_the_next_rows_and_then_saved() -> None:
    run, saved = Run(), list[int]()

    def commit(step: int) -> object:
        run.steps(step, step)
        return next(row.get("changed") for number, row in run.journal.rows if number == step)

    changed = {"optimizer.lr": "1 -> 2"}
    run.metrics_processor.record_changes(changed, lambda: saved.append(1))
    run.metrics_processor.resume_step = 3
    assert commit(3) == changed and saved == [1]
    assert commit(4) is None and saved == [1]
    run.metrics_processor.record_changes(changed, lambda: saved.append(2))
    assert commit(5) is None and saved == [1, 2], "it has joined after the step"


def test_a_step_that_is_not_applied_leaves_its_data_out() -> None:
    run = Run()
    run.commit(1, loss=9.5, slots=[(0, "0:a"), (8, "1:b")], holes=[4], skipped=[(12, 20)], spike="loss 9.5")
    ((_, row),) = run.journal.rows
    assert row["spike"] == "loss 9.5" and row["tokens"] == 0
    assert (1, {"spike/skipped": 1, "spike/loss": 9.5}) in run.chart.rows
    ((_, record),) = run.record.rows
    assert record == {
        "slot_size": 4,
        "slots": {},
        "holes": [4],
        "skipped": [[12, 20], [0, 4], [8, 12]],
        "spike": "loss 9.5",
    }


SUMMARY = dict(verb="finished", saved="step-200", next_command="sample", groups="")


def test_summary_accounts_for_every_second() -> None:
    run = Run(steps=200)
    for phase, seconds in (
        ("start", 4),
        ("compute", 56),
        ("reduce", 15),
        ("data", 5),
        ("checkpoint", 9),
        ("sample", 2),
    ):
        run.spend(phase, seconds)
    run.clock.now += 9
    run.commit(200, loss=1.23456, tokens=204_800, steps=100)
    run.metrics_processor.validation(200, {"": (1.4, 1, 1)}, seconds=1.0)
    run.metrics_processor.print_summary(200, **SUMMARY)
    times = "start 4.0 s (4%), compute 71.0 s (71%), data 5.0 s (5%), checkpoint 9.0 s (9%), validation 0.0 s (0%)"
    assert run.lines[-5:] == [
        "[0] finished step 200 (resumed at 100): 204,800 tokens in 1:40, 2,885 tokens per second of compute",
        f"  time: {times}, other 11.0 s (11%)",
        "  loss: training 1.2346, validation 1.4000",
        "  checkpoint: step-200",
        "  next: sample",
    ]


def test_summary_counts_the_tokens_that_were_trained_on_and_then_undone() -> None:
    """A group that has joined at step 50 goes back with the job to step 40, and is stopped there."""
    run = Run()
    run.metrics_processor.load_state_dict({"tokens": 50_000})
    run.steps(51, 53)
    run.metrics_processor.load_state_dict({"tokens": 40_000})
    run.steps(41, 41)
    run.metrics_processor.print_summary(41, **SUMMARY | dict(verb="stopped at"))
    assert run.lines[-5] == (
        "[0] stopped at step 41 (resumed at 50): 4,000 tokens in 2 s, 2,000 tokens per second of compute"
    )


def test_summary_of_a_job_of_groups_names_what_they_cost() -> None:
    run = Run()
    for phase, seconds in (("compute", 60), ("quorum", 5), ("rebuild", 4), ("heal", 3), ("waiting", 8)):
        run.spend(phase, seconds)
    run.progress.commit()
    run.spend("compute", 10)
    run.progress.lose()
    run.clock.now += 10
    run.metrics_processor.print_summary(2, **SUMMARY | dict(groups="2 quorums"))
    assert run.lines[1:3] == [
        (
            "  time: start 0.0 s (0%), compute 60.0 s (60%), data 0.0 s (0%), checkpoint 0.0 s (0%), validation 0.0 s (0%), "
            "quorum 5.0 s (5%), rebuild 4.0 s (4%), heal 3.0 s (3%), waiting 8.0 s (8%), lost 10.0 s (10%), other 10.0 s (10%)"
        ),
        "  groups: 2 quorums; goodput 60%",
    ]


def test_summary_of_a_run_that_did_nothing() -> None:
    run = Run()
    run.metrics_processor.print_summary(0, **SUMMARY)
    assert run.lines[0] == "[0] finished step 0: 0 tokens in 0 s" and run.lines[2] == "  loss: training no step"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1300),
        ("AMD Instinct MI250X", 191.5),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", None),
    ],
)
def test_known_peaks(name: str, peak: float | None) -> None:
    assert known_peak_tflops(name) == peak


@pytest.mark.parametrize("folder", ["", ".", "/tmp/tb", "../tb", "tb/../.."])
def test_the_charts_stay_inside_the_run(folder: str) -> None:
    with pytest.raises(ValueError, match=r"^metrics\.save_tb_folder = "):
        MetricsConfig(save_tb_folder=folder).check()

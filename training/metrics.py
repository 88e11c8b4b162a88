"""Metrics of a run (log line, metrics.jsonl, charts) and the record of its training data, samples.jsonl.

train.py calls MetricsProcessor.step after each committed step, MetricsProcessor.validation after each validation. Nothing here waits for
the device: the loss is passed as a number, and memory is read from counters on the host, on logging steps only."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any

import torch

from ft.seam import Commit
from parallelisms.device import Device
from training.config import need
from training.log import Log
from training.metrics_writer import MetricsWriter
from training.optimizer import Update
from training.progress import GROUP_PHASES, LONG_PHASES, WORK, Progress, duration
from training.sinks import Kind

FIRST_ESTIMATE = 3  # commits of this launch before the estimate
# Phases in the closing summary; "other" is every other phase, and time outside of phases.
_SUMMARY_PHASES = ("start", "compute", "data", "checkpoint", "validation")


@dataclass(frozen=True)
class MetricsConfig:
    """[metrics]: frequency and destinations of the reports."""

    log_freq: Annotated[int, "steps between log lines and chart points; first and last step always", ">= 1"] = 10
    enable_tensorboard: Annotated[bool, "write TensorBoard charts; metrics.jsonl is written always"] = True
    save_tb_folder: Annotated[str, "TensorBoard's folder inside the run's folder"] = "tb"
    enable_wandb: Annotated[bool, "write Weights & Biases charts (needs the wandb package)"] = False
    disable_color_printing: Annotated[bool, "no colours on a terminal"] = False
    peak_tflops: Annotated[
        float, "peak of one device in TFLOP/s, for MFU; 0: from a table; a device that is not in it has no MFU", ">= 0"
    ] = 0.0

    def check(self) -> None:
        folder = PurePath(self.save_tb_folder)
        if not self.save_tb_folder or folder.is_absolute() or ".." in folder.parts or folder == PurePath():
            raise ValueError(
                f'metrics.save_tb_folder = "{self.save_tb_folder}": must name a folder inside the run\'s; nearest: "tb"'
            )
        if self.enable_wandb:
            need("wandb", extra="wandb", setting="metrics.enable_wandb = true")


class MetricsProcessor:
    """Turns committed steps into log lines, rows of metrics and chart points. Every rank has one, for the checkpoint; one has a `writer`.
    The first step is timed from construction or load_state_dict. A step's seconds exclude progress.LONG_PHASES."""

    def __init__(
        self,
        config: MetricsConfig,
        *,
        log: Log,
        progress: Progress,
        last_step: int,
        device: Device | None = None,
        world_size: int = 1,
        flops_per_token: float = 0.0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`last_step`: of the run. `world_size`: devices of this group. `flops_per_token`: of the model."""
        self.tokens = 0  # valid tokens since step 0, over all launches and ranks
        self._config, self._log, self._progress = config, log, progress
        self.writer: MetricsWriter | None = None  # training/components.py sets it on global rank 0
        self._last_step, self._world_size, self._flops_per_token = last_step, world_size, flops_per_token
        self._wall_clock = wall_clock
        self._memory = Memory(device)
        self._peak_tflops = config.peak_tflops or (known_peak_tflops(device.name) if device else None)
        self._first_step = 0  # first committed step since the launch or a rewind
        self._commits = 0  # of this launch
        self._resumed: int | None = None  # step before the first commit of this launch
        # of this launch's commits, also those that a rewind undid: compute seconds count them, too
        self._trained_tokens = 0
        self._loss = math.nan
        self._validation_loss: float | None = None  # of the newest validation
        self._after_first_s = 0.0  # Progress.total() after `_first_step`
        self._interval: dict[str, float] = {}  # sums over the steps since the last logging step
        self._spent = self._clocks()
        self._group_scalars: Mapping[str, float] = {}
        self._changes: dict[str, str] = {}  # changed settings, key -> "old -> new", until the next committed step
        self.resume_step = 0  # the step after the checkpoint from which the job resumes
        # position and holes of another run's checkpoint, from which this run continues: "begin" in the row of `resume_step`
        self.inherited_position: dict[str, Any] = {}
        self._save_config: Callable[[], None] = lambda: None
        self._group_s = dict.fromkeys(GROUP_PHASES, 0.0)  # at the last logging step

    def step(
        self, step: int, commit: Commit, update: Update, *, slot_size: int, inner_steps: int, heals: int | None = None
    ) -> None:
        """Reports a committed step; in semi-synchronous training one report stands for a round of `inner_steps`. An `update` with `spike`
        was not applied. `heals`: those that this group has seen, its own included, if there are groups; the groups' metrics are charted on
        logging steps and whenever they change."""
        loss, (grad_norm, lr, spike), rewound = commit.mean_loss, update, commit.rewound
        tokens = 0 if spike else round(commit.divisor)
        groups = dict[str, float]()
        if heals is not None:
            groups = {"quorum_size": commit.quorum_size, "contributors": len(commit.contributors), "heals": heals}
        before, self._spent = self._spent, self._clocks()
        total_s, data_s, checkpoint_s, long_s = (now - then for now, then in zip(self._spent, before, strict=True))
        step_s = total_s - long_s
        if first := not self._commits:
            self._resumed = step - inner_steps
        if first or rewound:
            self._first_step, self._after_first_s = step, self._progress.total()
        self._commits, self._loss, self.tokens = self._commits + 1, loss, self.tokens + tokens
        self._trained_tokens += tokens
        device_s = step_s * self._world_size * groups.get("quorum_size", 1)
        more = {"steps": inner_steps, "tokens": tokens, "step_s": step_s, "data_s": data_s, "device_s": device_s}
        self._interval = {name: self._interval.get(name, 0.0) + value for name, value in more.items()}
        passed = step // self._config.log_freq > (step - inner_steps) // self._config.log_freq
        logging_step = first or passed or step == self._last_step
        if logging_step:
            self._memory.read()
        changed = self._changes if step == self.resume_step else {}
        rewind = {"back_to": rewound.step, "from": rewound.spiked, "why": rewound.reason} if rewound else {}
        notes: dict[str, Any] = {"changed": changed, "spike": spike, "rewind": rewind}  # in the step's rows
        notes = {name: note for name, note in notes.items() if note}
        # no key may begin with "validation": see Row in metrics_writer.py
        self._write_metrics(
            step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=self.tokens,
            tokens_per_s=_per(tokens, step_s),
            memory_gib=self._memory.gib,
            step_s=step_s,
            data_s=data_s,
            checkpoint_s=checkpoint_s,
            **groups,
            **notes,
        )
        if rewound:
            self._write("charts", step, {"spike/went_back_from": rewound.spiked})
        if spike:
            self._write("charts", step, {"spike/skipped": 1, "spike/loss": loss})
        group_scalars = {f"fault_tolerance/{name}": value for name, value in groups.items()}
        if not logging_step and group_scalars != self._group_scalars:
            self._write("charts", step, group_scalars)
        self._group_scalars = group_scalars
        if logging_step:
            rates = self._rates()
            self._log.info(self._line(step, loss, grad_norm, lr, rates))
            scalars = {
                "loss_metrics/global_avg_loss": loss,
                "grad_norm": grad_norm,
                "lr": lr,
                "n_tokens_seen": self.tokens,
                **({"settings/changed": len(changed)} if changed else {}),
            }
            if groups:  # mean seconds per step in GROUP_PHASES since the last logging step; goodput: share of the time in committed steps
                earlier, self._group_s = self._group_s, {name: self._progress.spent(name) for name in GROUP_PHASES}
                for name, now in self._group_s.items():
                    scalars[f"time_metrics/{name}(s)"] = (now - earlier[name]) / self._interval["steps"]
                scalars["goodput(%)"] = 100 * _per(self._progress.goodput_s, self._progress.total())
            self._write("charts", step, {**scalars, **rates, **group_scalars, **self._memory.scalars})
            self._interval = {}
        self._record_data(step, commit, notes, slot_size=slot_size, inner_steps=inner_steps)
        if self._changes:
            self._changes = {}
            self._save_config()

    def record_changes(self, changes: Mapping[str, str], save_config: Callable[[], None]) -> None:
        """Calls `save_config`, which must not raise, after the next committed step. If that step is `resume_step`, the first with changed
        settings, its rows get `changes`, key -> "old -> new"; a group that joins after it writes none."""
        self._changes, self._save_config = dict(changes), save_config

    def validation(self, step: int, sets: Mapping[str, Sequence[float]], *, seconds: float) -> None:
        """Reports a validation after `step`: loss in nats per token and bits per byte, of all sets together and, if there are several, of
        each. `sets`: name -> (sum of nats, valid tokens, bytes). If the bytes are NaN (unknown), there are no bits per byte."""

        def per_token_and_byte(nats: float, tokens: float, byte_count: float) -> tuple[float, float]:
            return nats / max(tokens, 1), nats / max(byte_count, 1) / math.log(2)  # max(NaN, 1) is NaN

        totals = [sum(column) for column in zip(*sets.values(), strict=True)]
        (loss, bits_per_byte), tokens = per_token_and_byte(*totals), round(totals[1])
        self._validation_loss = loss
        each = {name or "held_out": per_token_and_byte(*sums) for name, sums in sets.items()} if len(sets) > 1 else {}
        bits = "" if math.isnan(bits_per_byte) else f"{bits_per_byte:.4f} bits per byte  "
        named = "".join(f"  {name} {set_loss:.4f}" for name, (set_loss, _) in each.items())
        self._log.info(
            f"validation at step {step}: {self._log.paint(f'loss {loss:.4f}', 'magenta')}  "
            f"{bits}{tokens:,} tokens in {seconds:.1f} s{named}"
        )
        self._write_metrics(
            step,
            validation_loss=loss,
            validation_bits_per_byte=bits_per_byte,
            validation_s=seconds,
            validation_tokens=tokens,
            **{f"validation_loss/{name}": set_loss for name, (set_loss, _) in each.items()},
        )
        scalars = {"validation_metrics/throughput(tps)": _per(tokens, seconds) / self._world_size}
        charted = {"": (loss, bits_per_byte), **{f"/{name}": values for name, values in each.items()}}
        for suffix, (set_loss, set_bits) in charted.items():
            scalars[f"validation_metrics/loss{suffix}"] = set_loss
            if not math.isnan(set_bits):
                scalars[f"validation_metrics/bits_per_byte{suffix}"] = set_bits
        self._write("charts", step, scalars)

    def print_estimate(self, step: int) -> None:
        """Logs the remaining time once, after FIRST_ESTIMATE commits."""
        if self._commits == FIRST_ESTIMATE and (left_s := self.eta_s(step)) is not None:
            self._log.info(
                "the remaining %d steps take about %s at this pace", self._last_step - step, duration(left_s)
            )

    def print_summary(self, step: int, *, verb: str, saved: str, next_command: str, groups: str) -> None:
        """Logs the closing summary of a launch at `step`. `saved`: folder of checkpoints. Goodput: share of time on committed steps."""
        progress, total = self._progress, self._progress.total()
        first_step, tokens = step if self._resumed is None else self._resumed, self._trained_tokens
        counted = {name: progress.spent(*(WORK if name == "compute" else [name])) for name in _SUMMARY_PHASES}
        if groups:
            counted |= {name: progress.spent(name) for name in GROUP_PHASES}
        counted["other"] = max(0.0, total - sum(counted.values()))
        shares = ", ".join(f"{name} {seconds:.1f} s ({_per(seconds, total):.0%})" for name, seconds in counted.items())
        since = f" (resumed at {first_step})" if first_step else ""
        rate = f", {tokens / counted['compute']:,.0f} tokens per second of compute" if counted["compute"] > 0 else ""
        lines = [f"{verb} step {step}{since}: {tokens:,} tokens in {duration(total)}{rate}", f"  time: {shares}"]
        if groups:
            lines.append(f"  groups: {groups}; goodput {_per(progress.goodput_s, total):.0%}")
        validation = "" if self._validation_loss is None else f", validation {self._validation_loss:.4f}"
        training = f"{self._loss:.4f}" if self._commits else "no step"
        lines += [f"  loss: training {training}{validation}", f"  checkpoint: {saved}", f"  next: {next_command}"]
        self._log.info("%s", "\n".join(lines))

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = int(state["tokens"])
        self._spent = self._clocks()

    def _record_data(
        self, step: int, commit: Commit, notes: Mapping[str, Any], *, slot_size: int, inner_steps: int
    ) -> None:
        """Records each slot of a step, named by the position of its first sequence, with the replica group whose gradients were used. After
        a spike all of them are left out; the first step of a branch has what was left out between the checkpoint and the spike. See
        scripts/samples.py."""
        rewound, slots, skipped = commit.rewound, commit.slots, commit.skipped
        skipped = (*(rewound.skipped if rewound else ()), *skipped)
        if "spike" in notes:
            skipped, slots = (*skipped, *((slot, slot + slot_size) for slot, _ in slots)), ()
        owners, holes = {str(slot): owner for slot, owner in slots}, list(commit.holes)
        row: dict[str, object] = {"slot_size": slot_size, "slots": owners, "holes": holes}
        more: dict[str, object] = {"steps": inner_steps} if inner_steps > 1 else {}
        more |= {"begin": self.inherited_position} if self.inherited_position and step == self.resume_step else {}
        more |= {"skipped": [list(span) for span in skipped]} if skipped else {}
        self._write("samples", step, {**row, **more, **notes})

    def _clocks(self) -> tuple[float, float, float, float]:
        spent = self._progress.spent
        return self._progress.total(), spent("data"), spent("checkpoint"), spent(*LONG_PHASES)

    def _rates(self) -> dict[str, float]:
        """Returns means over the steps since the last logging step. Throughput and MFU are per device of all groups in the quorum."""
        sums = self._interval
        tps = _per(sums["tokens"], sums["device_s"])
        rates = {
            "throughput(tps)": tps,
            "time_metrics/end_to_end(s)": sums["step_s"] / sums["steps"],
            "time_metrics/data_loading(s)": sums["data_s"] / sums["steps"],
            "time_metrics/data_loading(%)": 100 * _per(sums["data_s"], sums["step_s"]),
        }
        if self._flops_per_token:
            rates["tflops"] = self._flops_per_token * tps / 1e12
            if self._peak_tflops:
                rates["mfu(%)"] = 100 * rates["tflops"] / self._peak_tflops
        return rates

    def _line(self, step: int, loss: float, grad_norm: float, lr: float, rates: dict[str, float]) -> str:
        paint = self._log.paint
        fields = [
            paint(f"step {step}/{self._last_step}", "bold"),
            paint(f"loss {loss:.4f}", "green"),
            f"grad norm {grad_norm:.4f}",
            f"lr {lr:.2e}",
            paint(f"{_per(self._interval['tokens'], self._interval['step_s']):,.0f} tok/s", "blue"),
            f"memory {self._memory.text()}",
        ]
        if "mfu(%)" in rates:
            fields.append(paint(f"mfu {rates['mfu(%)']:.1f}%", "magenta"))
        if (eta_s := self.eta_s(step)) is not None:
            fields.append(f"ETA {duration(eta_s)}")
        return "  ".join(fields)

    def eta_s(self, step: int) -> float | None:
        """Returns the seconds to the last step at the pace since the launch or a rewind, without the first step after it; None: unknown."""
        done = step - self._first_step
        if done <= 0 or step >= self._last_step:
            return None
        return (self._progress.total() - self._after_first_s) / done * (self._last_step - step)

    def _write_metrics(self, step: int, **scalars: Any) -> None:
        self._write("metrics", step, {**scalars, "time": self._wall_clock()})

    def _write(self, kind: Kind, step: int, scalars: Mapping[str, Any]) -> None:
        if self.writer is not None:
            self.writer.write(kind, step, scalars)


class Memory:
    """Peak memory of this rank: of CUDA's allocator since the last `read`; on a CPU of the resident set since the process began."""

    def __init__(self, device: Device | None) -> None:
        self.gib, self._device = 0.0, device
        self.scalars: dict[str, float] = {}
        self._total_gib = 0.0  # memory of the device, or of the machine for a CPU; 0: unknown
        if device is not None and device.traits.has_allocator:
            self._total_gib = torch.cuda.get_device_properties(device.torch_device).total_memory / 2**30
        elif device is not None:
            with suppress(ValueError, OSError):
                self._total_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30

    def read(self) -> None:
        """Reads the counters, which are on the host, and resets the peak."""
        if self._device is None:
            return
        if self._device.traits.has_allocator:
            stats = torch.cuda.memory_stats(self._device.torch_device)
            torch.cuda.reset_peak_memory_stats(self._device.torch_device)
            peaks = {kind: stats.get(f"{kind}_bytes.all.peak", 0) / 2**30 for kind in ("active", "reserved")}
            self.gib = peaks["reserved"]
            self.scalars = {f"memory/{name}": stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms")}
        else:
            self.gib = self._device.peak_rss_gib()
            peaks = {"active": self.gib}
        for kind, gib in peaks.items():
            self.scalars[f"memory/max_{kind}(GiB)"] = gib
            if self._total_gib:
                self.scalars[f"memory/max_{kind}(%)"] = 100 * gib / self._total_gib

    def text(self) -> str:
        """Returns the peak as in `1.25 GiB (5%)`."""
        return f"{self.gib:.2f} GiB" + (f" ({self.gib / self._total_gib:.0%})" if self._total_gib else "")


_PEAKS = (  # dense bf16, TFLOP/s, from the vendors' data sheets; the first pattern that matches the device's name is used
    (r"\bMIG\b", None),  # the peak of a slice depends on its size
    (r"\bA100\b", 312.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100\b.*(HBM3|SXM)", 989.0),
    (r"\bH200 NVL\b", 835.0),
    (r"\bH200\b", 989.0),
    (r"\bH20\b", 148.0),
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bMI250X\b", 191.5),
    (r"\bMI300X\b", 1300.0),
    (r"\bMI355X\b", 2500.0),
    (r"\bL40S\b", 362.0),
)


def known_peak_tflops(device_name: str) -> float | None:
    """Returns the device's peak, or None if it is not in the table: a guess would make the MFU meaningless."""
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device_name)), None)


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0

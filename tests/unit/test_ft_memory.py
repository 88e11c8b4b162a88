"""Memory of fault tolerance equals the prediction of --explain, measured while gradients are reduced, held and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ft.config import FaultTolerance
from ft.memory import memory
from tests.unit.gradient_groups import Member, finish, open_all
from tools.explain.command import main
from tools.explain.rank import MemoryTracker

SLACK = 1.02  # figures of sizes, and a few bytes of the models' own


def large() -> nn.Module:
    """One gradient of 4 MiB, one of 1 MiB less a row, and small ones."""
    return nn.Sequential(nn.Linear(32, 32768, bias=False), nn.Linear(32768, 7, bias=False), nn.Linear(7, 5))


def said(model: nn.Module, *, keep: bool = True, shared: bool = False, slots: int = 0) -> list[int]:
    tensors = [torch.empty_like(parameter, device="meta") for parameter in model.parameters()]
    settings = FaultTolerance(keep_gradients=keep, heal_backlog=3, heal_copy_bytes=77)
    return [*memory(tensors, settings, in_child=shared, slots=slots).values()]


def taken(tracker: MemoryTracker, member: Member) -> int:
    """Returns the allocated bytes at the end, without those of the model."""
    [segment] = tracker.segments(gradients=set(), resident=tracker.serials(member.model.parameters()))
    return segment.change[0]


@pytest.mark.parametrize(("keep", "slots"), [(True, 0), (False, 0), (True, 3)])
def test_two_sets_are_always_there(keep: bool, slots: int):
    member = Member(0, large, keep=keep, slots=slots)
    with MemoryTracker() as tracker:
        member.gradients.prepare()
    always, one_set, *_ = said(member.model, keep=keep, slots=slots)
    assert always == 2 * one_set and always <= taken(tracker, member) <= SLACK * always


def test_plain_steps_take_no_more():
    member = Member(0, large)
    with MemoryTracker() as tracker:
        for seed in range(3):
            open_all([member])
            member.backward(seed)
            finish([member])
            member.model.zero_grad()
    always, *_ = said(member.model)
    assert always <= taken(tracker, member) <= SLACK * always


def test_each_step_that_is_held_takes_one_set():
    """Held steps need memory besides the sums in .grad and those of the current step."""
    member = Member(0, large)
    with MemoryTracker() as tracker:
        open_all([member])
        finish([member])
        for step in range(3):
            open_all([member])
            member.gradients.launch_remaining((1.0,), zeros=True)
            member.gradients.wait()
            member.gradients.hold(step)
        open_all([member])
    always, one_set, held, copies, kept = said(member.model)
    assert (held, copies, kept) == (3 * one_set, 77, 0)
    assert always + held <= taken(tracker, member) <= SLACK * (always + held)


def test_explain_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "4")
    (tmp_path / "run.toml").write_text("[model]\nvocab_size = 4096\nn_layers = 2\n[training]\nseq_len = 64\n")
    ask = [str(tmp_path / "run.toml"), "--explain", "--device=cpu", "--ranks=1"]
    assert main(ask) == 0 and "FAULT TOLERANCE" not in capsys.readouterr().out
    cuda = ["--device=cuda", "--fault_tolerance.enable=true", "--fault_tolerance.heal_backlog=100000"]
    assert main([*ask, "--device=cuda"]) == 0 and "fits on 24 GB" in capsys.readouterr().out
    assert main([*ask, *cuda]) == 0 and "fits on no GPU known here" in capsys.readouterr().out
    apart = ["--fault_tolerance.deterministic_reduce=true", "--fault_tolerance.keep_global_batch=true"]
    for more, words in (
        ([], "while this group heals: reduced gradients of 2 steps"),
        (apart, "if this group computes all 4 slots"),
    ):
        assert main([*ask, "--fault_tolerance.enable=true", *more]) == 0
        assert words in capsys.readouterr().out.partition("FAULT TOLERANCE, additional memory of a rank")[2]

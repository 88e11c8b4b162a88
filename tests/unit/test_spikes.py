"""The rule that decides if a step is a spike."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from training.config import TrainingConfig
from training.spikes import SpikeRule


def rule(window: int, factor: float = 6.0) -> SpikeRule:
    return SpikeRule(TrainingConfig(on_spike="skip", spike_window=window, spike_factor=factor))


def test_nothing_but_nan_and_inf_is_a_spike_until_the_window_is_full() -> None:
    for window in (0, 3):
        one = rule(window)
        for norm, loss in ((1.0, 2.0), (1e30, 1e30), (math.nan, 2.0), (1.0, math.inf), (math.inf, math.nan)):
            expected = [
                f"{name} {value}"
                for name, value in (("loss", loss), ("gradient norm", norm))
                if not math.isfinite(value)
            ]
            assert one.judge(norm, loss, 1.0) == " and ".join(expected)
        assert one.in_a_row == 3
        assert len(json.loads(one.state_dict()["window"])["values"]) == min(window, 2)


def test_a_spike_exceeds_the_mean_by_so_many_deviations() -> None:
    one = rule(4, factor=2.0)
    for loss in (1.0, 3.0, 1.0, 3.0):  # mean 2, deviation 1; of norms 10 and 0
        assert one.judge(30.0, loss, 3.0) == ""
    assert one.bounds(3.0) == (4.0, 30.0)
    assert (
        one.judge(30.0, math.nextafter(4.0, 5.0) + 1e-6, 3.0)
        == "loss 4 above 4, the mean of 4 steps and 2 standard deviations"
    )
    assert one.judge(33.0, 4.5, 3.0) == (
        "loss 4.5 above 4, the mean of 4 steps and 2 standard deviations and "
        "gradient norm 11 above 10, the mean of 4 steps and 2 standard deviations"
    )
    assert one.judge(30.0, 4.0, 3.0) == "" and one.in_a_row == 0  # enters the window in place of the first 1.0
    assert one.bounds(1.0)[0] == pytest.approx(2.75 + 2 * math.sqrt(4.75 / 4))


def test_device_and_host_decide_alike_at_every_bound() -> None:
    dice, one = random.Random(0), rule(8, factor=0.5)
    spikes = 0
    for _ in range(400):
        divisor = float(dice.randrange(1, 1 << 20))
        bounds = torch.tensor(one.bounds(divisor))
        near = dice.choice([bounds, torch.nextafter(bounds, bounds * 2), torch.nextafter(bounds, bounds / 2)])
        drawn = torch.tensor([dice.lognormvariate(0, 1), dice.lognormvariate(0, 1) * divisor])
        loss, norm = (near if dice.random() < 0.5 and bounds[0] < 1e30 else drawn).unbind()
        accepted = bool(one.accepts(norm, loss, divisor))
        spike = one.judge(norm.item(), loss.item(), divisor)
        assert accepted == (spike == "")
        spikes += not accepted
    assert 100 < spikes < 390


def test_a_loaded_window_decides_as_the_one_that_was_saved() -> None:
    dice, one = random.Random(1), rule(5, factor=1.0)
    for _ in range(9):
        one.judge(dice.random(), dice.random(), 7.0)
    one.judge(math.nan, 1.0, 7.0)
    other = rule(5, factor=1.0)
    other.judge(1.0, 1.0, 1.0)
    other.load_state_dict(one.state_dict())
    for _ in range(50):
        norm, loss = dice.random(), dice.random()
        assert one.judge(norm, loss, 7.0) == other.judge(norm, loss, 7.0)
        assert one.state_dict() == other.state_dict() and one.bounds(3.0) == other.bounds(3.0)
    shorter = rule(2, factor=1.0)
    shorter.load_state_dict(one.state_dict())
    assert json.loads(shorter.state_dict()["window"])["values"] == json.loads(one.state_dict()["window"])["values"][-2:]

"""The learning rate over a run."""

from __future__ import annotations

import pytest

from training.optimizer import LRSchedulerConfig, learning_rate_factor


def curve(steps: int, **keys) -> list[float]:
    config = LRSchedulerConfig(**keys)
    config.check()
    lengths = {"total_steps": config.total_steps or steps, "decay_steps": config.decay_length(steps)}
    return [learning_rate_factor(config, steps_before=step, **lengths) for step in range(steps)]


@pytest.mark.parametrize(
    ("keys", "factors"),
    [
        (dict(warmup_steps=3, decay_ratio=0.25), [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 2 / 3, 1 / 3]),
        (dict(warmup_steps=1), [1 / 2, 4 / 5, 3 / 5, 2 / 5, 1 / 5]),  # from the end of the warm-up by default
        (dict(warmup_steps=0, decay_ratio=0.0), [1.0] * 4),
        (dict(warmup_steps=0, total_steps=8), [8 / 9, 7 / 9, 6 / 9, 5 / 9]),  # longer than the run
    ],
)
def test_warms_up_stays_and_decays(keys, factors: list[float]):
    assert curve(len(factors), **keys) == pytest.approx(factors)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
def test_every_shape_falls_and_never_reaches_zero(decay_type: str):
    factors = curve(100, warmup_steps=0, decay_type=decay_type)
    assert all(a > b for a, b in zip(factors, factors[1:], strict=False))
    assert 0 < factors[-1] < 0.02 or decay_type == "sqrt" and 0 < factors[-1] < 0.01


def test_ends_at_the_least_factor():
    factors = curve(1000, warmup_steps=10, min_lr_factor=0.1)
    assert min(factors[10:]) == pytest.approx(0.1, abs=2e-3)


def test_after_the_schedule_the_least_factor_stays():
    assert curve(6, warmup_steps=0, total_steps=4, min_lr_factor=0.5)[4:] == [0.5, 0.5]
    assert curve(6, warmup_steps=0, total_steps=4, decay_ratio=0.0, min_lr_factor=0.5) == [1.0] * 6, "no decay"


def test_a_half_negative_ratio_is_refused():
    with pytest.raises(ValueError, match=r"lr_scheduler\.decay_ratio = -0\.5: must be between 0 and 1, or -1"):
        LRSchedulerConfig(decay_ratio=-0.5).check()

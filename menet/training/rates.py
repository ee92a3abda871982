"""The learning rate as a function of the step: nothing to store, nothing to restore."""

import math

from menet.training.config import TrainingConfig

WARM_UP = 0.3
"""The share of a one-cycle run in which the rate rises."""
START, END = 1 / 25, 1e-4
"""Its first and last rate, as shares of the highest."""


def rate_at(config: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of a step, counted from 0 over the whole run.

    `step` divides by ten at each milestone (the paper's); `one-cycle` rises to the configured rate and falls
    from there, both along a cosine (Smith 2018).
    """
    if config.schedule == "step":
        passed = sum(step // steps_per_epoch >= milestone for milestone in config.milestones)
        return config.rate * 0.1**passed
    done = step / max(1, config.epochs * steps_per_epoch - 1)
    if done < WARM_UP:
        return config.rate * _between(START, 1.0, done / WARM_UP)
    return config.rate * _between(1.0, END, (done - WARM_UP) / (1 - WARM_UP))


def _between(first: float, last: float, share: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2

"""The learning rate as a function of the step: nothing to store, nothing to restore."""

import math

from menet.training.config import TrainingConfig

WARM_UP = 0.3
"""Fraction of a one-cycle run in which the learning rate rises."""
START, END = 1 / 25, 1e-4
"""First and last learning rate of a one-cycle run, as fractions of the peak."""


def learning_rate_at(config: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, counted from 0 over the whole run.

    `step` divides by ten at each milestone (the paper's schedule); `one-cycle` rises to the configured learning
    rate and falls from there, both along a cosine (Smith 2018).
    """
    if config.schedule == "step":
        passed = sum(step // steps_per_epoch >= milestone for milestone in config.milestones)
        return config.learning_rate * 0.1**passed
    done = step / max(1, config.epochs * steps_per_epoch - 1)
    if done < WARM_UP:
        return config.learning_rate * _cosine(START, 1.0, done / WARM_UP)
    return config.learning_rate * _cosine(1.0, END, (done - WARM_UP) / (1 - WARM_UP))


def _cosine(first: float, last: float, fraction: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * fraction)) / 2

"""The checks of an audit, in the order in which they are run: the cheap ones that explain the others first."""

from menet.evaluation.checks.gradients import exact_and_bpda, gradients_arrive, loss_rises
from menet.evaluation.checks.order import black_box_is_weaker, noise_is_harmless, stays_in_the_ball
from menet.evaluation.checks.randomness import answers_repeat, own_generator
from menet.evaluation.checks.scores import fresh_scoring, own_masks
from menet.evaluation.checks.subject import Check
from menet.evaluation.checks.sweeps import draws_until_flat, epsilon_to_the_end, steps_until_flat

CHECKS: dict[str, Check] = {
    "answers repeat": answers_repeat,
    "own generator": own_generator,
    "gradients": gradients_arrive,
    "in the ball": stays_in_the_ball,
    "loss rises": loss_rises,
    "fresh scoring": fresh_scoring,
    "attack's own masks": own_masks,
    "noise": noise_is_harmless,
    "epsilon": epsilon_to_the_end,
    "steps": steps_until_flat,
    "draws (EOT)": draws_until_flat,
    "exact and BPDA": exact_and_bpda,
    "black box": black_box_is_weaker,
}

__all__ = ["CHECKS", "Check"]

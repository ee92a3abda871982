"""Attacks in the order of their knowledge: noise, scores, gradients; and none of them outside its ball."""

import torch
from torch import Tensor

from menet.attacks import Square
from menet.errors import AttackError
from menet.evaluation.checks.subject import Finding, Subject, clearly_above, mean

HARMFUL = 0.05
AVERAGED = 8
"""Draws that a score attack on a random model averages over: on single draws it takes luck for success."""


def stays_in_the_ball(subject: Subject) -> Finding:
    """What the attack returns, for every restart, is inside the threat model."""
    threat = subject.settings.threat
    try:
        candidates = subject.attempt.candidates
    except AttackError as error:
        return Finding("fail", f"The attack did not end well: {error}.")
    farthest = max(threat.distance(images, subject.images).max().item() for images in candidates)
    numbers = {
        "farthest": farthest,
        "epsilon": threat.epsilon,
        "lowest pixel": candidates.min().item(),
        "highest pixel": candidates.max().item(),
    }
    try:
        for images in candidates:
            threat.check(images, subject.images)
    except AttackError as error:
        return Finding("fail", f"The attack cheats, and its accuracy means nothing: {error}.", numbers)
    return Finding("pass", "Every image of the attack is inside the ball and the range of pixels.", numbers)


def noise_is_harmless(subject: Subject) -> Finding:
    """Random noise as large as the adversary's change does little, and less than the attack."""
    threat = subject.settings.threat
    random = torch.Generator().manual_seed(subject.seed())
    noise = torch.randn(subject.images.shape, generator=random).to(subject.images)
    noisy = threat.project(subject.images + 2 * threat.epsilon * threat.direction(noise), subject.images)
    survival = subject.survival(noisy)
    numbers = {"clean": mean(subject.clean), "noise": mean(survival), "attack": mean(subject.robust)}
    if clearly_above(subject.robust, survival, subject.settings.tolerance):
        return Finding("fail", "Noise does more than the attack, so the attack finds nothing.", numbers)
    if clearly_above(subject.clean, survival, HARMFUL):
        return Finding("warn", "Noise of this size harms the model: the threat model is large for it.", numbers)
    return Finding("pass", "Noise as large as the adversary's change does little.", numbers)


def black_box_is_weaker(subject: Subject) -> Finding:
    """An attack that sees scores alone does not beat the one that sees everything."""
    square = Square(threat=subject.settings.threat, calls=subject.settings.calls)
    draws = min(AVERAGED, subject.eot)

    def averaged(images: Tensor) -> Tensor:
        logits = subject.model(images.repeat(draws, 1, 1, 1))
        return logits.unflatten(0, (draws, len(images))).mean(0)

    found = subject.survival(subject.attacked(square, subject.model if draws == 1 else averaged))
    numbers = {"white box": mean(subject.robust), "black box": mean(found), "calls": subject.settings.calls}
    if clearly_above(subject.robust, found, subject.settings.tolerance):
        return Finding("fail", "A black-box attack beats the white-box one: gradients hide weakness.", numbers)
    return Finding("pass", "The white-box attack is at least as strong as the black-box one.", numbers)

"""Whether gradients lead anywhere."""

import torch

from menet.attacks import CrossEntropy, Margin
from menet.attacks.eot import ExpectedLoss
from menet.attacks.losses import Loss
from menet.attacks.query import Queries
from menet.errors import AttackError
from menet.evaluation.checks.subject import Finding, Subject, clearly_above, mean
from menet.seeding import reseed

VANISHED = 1e-12
FEW = 0.05


def gradients_arrive(subject: Subject) -> Finding:
    """The loss has a gradient at the images that is finite and not zero."""
    losses: dict[str, Loss] = {"cross-entropy": CrossEntropy(), "margin": Margin()}
    numbers: dict[str, float] = {}
    for name, loss in losses.items():
        reseed(subject.model, subject.seed())
        queries = Queries(subject.model, subject.labels)
        expected = ExpectedLoss(queries, loss, subject.labels, None, min(subject.eot, 10), subject.settings.rows)
        try:
            _, slope = expected.gradient(subject.images)
        except AttackError as error:
            return Finding("fail", f"No gradient attack can work: {error}.")
        norms = slope.flatten(1).norm(dim=1)
        numbers[f"{name}: median norm"] = norms.nanmedian().item()
        numbers[f"{name}: share zero"] = mean(norms < VANISHED)
        numbers[f"{name}: share not finite"] = mean(~norms.isfinite())
    if any(numbers[f"{name}: share not finite"] for name in losses):
        return Finding("fail", "Gradients are not numbers, so gradient attacks go astray.", numbers)
    if numbers["margin: share zero"] > FEW:
        return Finding(
            "fail",
            "Gradients are zero: gradient attacks stand still, and what looks robust may only be hidden.",
            numbers,
        )
    if numbers["cross-entropy: share zero"] > FEW:
        return Finding(
            "warn",
            "Cross-entropy has no gradient where the model is very sure; attack with the margin or DLR loss too.",
            numbers,
        )
    return Finding("pass", "Gradients reach the images.", numbers)


def loss_rises(subject: Subject) -> Finding:
    """The attack makes the loss higher than it was where the attack started."""
    trace = subject.attempt.trace
    if trace is None:
        reseed(subject.model, subject.seed())
        random = torch.Generator().manual_seed(subject.seed())
        trace = subject.pgd()(subject.model, subject.images, subject.labels, generator=random, trace=True).trace
    if trace is None or len(trace) < 2:
        return Finding("warn", "The attack keeps no losses, so nothing can be said of how they went.")
    # The mean of the last quarter: the highest loss of many would rise by chance alone on a random model.
    end = trace[-max(1, len(trace) // 4) :].mean(0)
    rose = mean(end > trace[0])
    places = sorted({0, len(trace) // 4, len(trace) // 2, 3 * len(trace) // 4, len(trace) - 1})
    numbers = {"steps": places, "mean loss": [mean(trace[place]) for place in places], "share that rose": rose}
    if not clearly_above(end, trace[0], 0.0):
        return Finding("fail", "The loss does not rise over the attack's steps: it is not optimising.", numbers)
    if rose < 0.5:
        return Finding("warn", "For most examples the loss does not end above where it started.", numbers)
    return Finding("pass", "The loss rises over the attack's steps.", numbers)


def exact_and_bpda(subject: Subject) -> Finding:
    """Gradients through a preprocessing and around it are both tried, and the stronger is the one reported."""
    model = subject.model
    if not hasattr(model, "with_gradient"):
        return Finding("pass", "The model offers one kind of gradient only, so there is nothing to compare.")
    survival = {
        gradient: subject.survival(subject.attacked(subject.pgd(), model.with_gradient(gradient)))
        for gradient in ("exact", "bpda")
    }
    numbers = {gradient: mean(found) for gradient, found in survival.items()}
    weaker = max(numbers, key=lambda gradient: numbers[gradient])
    stronger = min(numbers, key=lambda gradient: numbers[gradient])
    clear = clearly_above(survival[weaker], survival[stronger], subject.settings.tolerance)
    used = getattr(model, "gradient", None)
    if clear and used == weaker:
        return Finding(
            "fail", f"Attacked by {weaker} the model looks better than by {stronger}: report the latter.", numbers
        )
    if clear:
        return Finding("pass", f"The stronger of the two, {stronger}, is the one in use.", numbers)
    return Finding("pass", "Both kinds of gradient are equally strong.", numbers)

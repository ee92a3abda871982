"""Accuracy against the budget of the attack: it must fall, flatten, and end at zero."""

from itertools import pairwise

from torch import Tensor

from menet.attacks import ThreatModel
from menet.evaluation.checks.subject import Finding, Subject, clearly_above, mean


def epsilon_to_the_end(subject: Subject) -> Finding:
    """Accuracy falls as epsilon grows, and nothing is left when every image is allowed."""
    threat = subject.settings.threat
    reach = threat.high - threat.low
    everything = reach if threat.norm == "linf" else reach * subject.images[0].numel() ** 0.5
    sizes = [threat.epsilon * factor for factor in subject.settings.epsilon_sweep]
    sizes = [*(size for size in sorted(sizes) if size < everything), everything]
    found = [
        subject.survival(
            subject.attacked(subject.pgd(threat=ThreatModel(threat.norm, size, threat.low, threat.high)))
        )
        for size in sizes
    ]
    numbers = {"epsilon": [round(size, 5) for size in sizes], "accuracy": [mean(one) for one in found]}
    left, chance = mean(found[-1]), 1 / subject.classes
    if left > chance:
        return Finding(
            "fail",
            f"With any image allowed, {left:.0%} are still right: the attack does not find what must be there.",
            numbers,
        )
    if left > subject.settings.tolerance:
        return Finding("warn", f"With any image allowed, {left:.0%} are still right; it should be none.", numbers)
    if _rises(found, subject.settings.tolerance):
        return Finding(
            "warn", "Accuracy rises somewhere as epsilon grows; a good attack never shows that.", numbers
        )
    return Finding("pass", "Accuracy falls to nothing as epsilon grows.", numbers)


def steps_until_flat(subject: Subject) -> Finding:
    """More steps do not find more, or the last step count is not enough."""
    steps = subject.settings.step_sweep
    found = [subject.survival(subject.attacked(subject.pgd(steps=count))) for count in steps]
    numbers = {"steps": list(steps), "accuracy": [mean(one) for one in found]}
    tolerance = subject.settings.tolerance
    if clearly_above(found[-1], found[0], tolerance):
        return Finding("fail", "One step finds more than many: gradients mislead the attack.", numbers)
    if len(found) > 1 and clearly_above(found[-2], found[-1], tolerance):
        return Finding("warn", f"Accuracy still falls at {steps[-1]} steps: take more.", numbers)
    if _rises(found, tolerance):
        return Finding("warn", "Accuracy rises somewhere with more steps: the attack is not reliable.", numbers)
    return Finding("pass", f"Accuracy is flat at {steps[-1]} steps.", numbers)


def draws_until_flat(subject: Subject) -> Finding:
    """Gradients in expectation over more draws do not find more than the audited attack did."""
    if not subject.random:
        return Finding("pass", "The model is not random, so there is nothing to take an expectation over.")
    counts = subject.settings.eot_sweep
    found = [subject.survival(subject.attacked(subject.pgd(eot=count))) for count in counts]
    tolerance = subject.settings.tolerance
    numbers = {
        "draws": list(counts),
        "accuracy": [mean(one) for one in found],
        "audited attack": mean(subject.robust),
    }
    strongest = min(found, key=lambda one: one.mean().item())
    if clearly_above(subject.robust, strongest, tolerance):
        return Finding(
            "fail",
            "More draws per gradient find more than the audited attack: its number is too high.",
            numbers,
        )
    if len(found) > 1 and clearly_above(found[-2], found[-1], tolerance):
        return Finding("warn", f"Accuracy still falls at {counts[-1]} draws: take more.", numbers)
    return Finding("pass", f"Accuracy is flat at {counts[-1]} draws.", numbers)


def _rises(found: list[Tensor], tolerance: float) -> bool:
    return any(clearly_above(later, earlier, tolerance) for earlier, later in pairwise(found))

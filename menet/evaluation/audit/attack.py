"""Whether the attack is strong: useful gradients, within budget, above noise and black-box attacks, converged."""

from itertools import pairwise

import torch
from torch import Tensor

from menet.attacks import Attack, CrossEntropy, LowFrequency, Margin, Square, Standard, ThreatModel
from menet.attacks.base import Queries
from menet.attacks.losses import ExpectedLoss, Loss
from menet.errors import AttackError
from menet.evaluation.audit.randomness import AuditedModel, Finding, clearly_above, mean
from menet.seeding import reseed

VANISHED = 1e-12
FEW = 0.05
HARMFUL = 0.05
AVERAGED = 8
"""Draws that a score-based attack on a random model averages over: on single draws it takes luck for success."""


def gradients_arrive(audited: AuditedModel) -> Finding:
    """The gradient of the loss at the images is finite and not zero."""
    losses: dict[str, Loss] = {"cross-entropy": CrossEntropy(), "margin": Margin()}
    numbers: dict[str, float] = {}
    for name, loss in losses.items():
        reseed(audited.model, audited.seed())
        queries = Queries(audited.model, audited.labels)
        draws, max_batch = min(audited.eot, 10), audited.settings.max_batch
        expected = ExpectedLoss(queries, loss, audited.labels, None, draws, max_batch)
        try:
            _, gradient = expected.gradient(audited.images)
        except AttackError as error:
            return Finding("fail", f"No gradient attack can work: {error}.")
        norms = gradient.flatten(1).norm(dim=1)
        numbers[f"{name}: median norm"] = norms.nanmedian().item()
        numbers[f"{name}: fraction zero"] = mean(norms < VANISHED)
        numbers[f"{name}: fraction not finite"] = mean(queries.nonfinite_gradients)
    if any(numbers[f"{name}: fraction not finite"] for name in losses):
        return Finding("fail", "Gradients are NaN or infinite, so gradient attacks do not work.", numbers)
    if numbers["margin: fraction zero"] > FEW:
        return Finding(
            "fail",
            "Gradients are zero: gradient attacks make no progress, and robustness may only be apparent.",
            numbers,
        )
    if numbers["cross-entropy: fraction zero"] > FEW:
        return Finding(
            "warn",
            "Cross-entropy has no gradient where the model is very confident; use the margin or DLR loss too.",
            numbers,
        )
    return Finding("pass", "Gradients reach the images.", numbers)


def loss_rises(audited: AuditedModel) -> Finding:
    """The attack increases the loss above that at its start."""
    history = audited.attack.loss_history
    if history is None:
        reseed(audited.model, audited.seed())
        random = torch.Generator().manual_seed(audited.seed())
        pgd = audited.pgd()
        history = pgd(
            audited.model, audited.images, audited.labels, generator=random, loss_history=True
        ).loss_history
    if history is None or len(history) < 2:
        return Finding("warn", "The attack has no loss history, so this check does not apply.")
    # The mean of the last quarter: the highest of many losses would rise by chance alone on a random model.
    end = history[-max(1, len(history) // 4) :].mean(0)
    rose = mean(end > history[0])
    steps = sorted({0, len(history) // 4, len(history) // 2, 3 * len(history) // 4, len(history) - 1})
    numbers = {"steps": steps, "mean loss": [mean(history[step]) for step in steps], "fraction that rose": rose}
    if not clearly_above(end, history[0], 0.0):
        return Finding("fail", "The loss does not rise over the attack's steps: it is not optimizing.", numbers)
    if rose < 0.5:
        return Finding("warn", "For most examples the loss does not end above its start.", numbers)
    return Finding("pass", "The loss rises over the attack's steps.", numbers)


def exact_and_bpda(audited: AuditedModel) -> Finding:
    """Both kinds of gradient are tried, exact and BPDA, and the stronger attack is the one reported."""
    model = audited.model
    if not hasattr(model, "with_gradient"):
        return Finding("pass", "The model offers one kind of gradient only, so there is nothing to compare.")
    accuracy = {
        gradient: audited.accuracy(audited.adversarial(audited.pgd(), model.with_gradient(gradient)))
        for gradient in ("exact", "bpda")
    }
    numbers = {gradient: mean(found) for gradient, found in accuracy.items()}
    weaker = max(numbers, key=lambda gradient: numbers[gradient])
    stronger = min(numbers, key=lambda gradient: numbers[gradient])
    clear = clearly_above(accuracy[weaker], accuracy[stronger], audited.settings.tolerance)
    used = getattr(model, "gradient", None)
    if clear and used == weaker:
        return Finding(
            "fail",
            f"Robust accuracy is {numbers[weaker]:.1%} with {weaker} gradients but {numbers[stronger]:.1%} with "
            f"{stronger} ones. To pass, attack with the latter: `menet audit --gradient {stronger}`, in Python "
            f"`model.with_gradient({stronger!r})`; report `menet evaluate --attacks pgd:gradient={stronger}`.",
            numbers,
        )
    if clear:
        return Finding("pass", f"The stronger attack, with {stronger} gradients, is the one in use.", numbers)
    return Finding("pass", "Both kinds of gradient are equally strong.", numbers)


def within_threat_model(audited: AuditedModel) -> Finding:
    """The adversarial images of every restart are inside the threat model."""
    threat = audited.settings.threat
    try:
        candidates = audited.attack.candidates
    except AttackError as error:
        return Finding("fail", f"The attack raised an error: {error}.")
    numbers = {
        "largest perturbation": max(threat.distance(one, audited.images).max().item() for one in candidates),
        "epsilon": threat.epsilon,
        "lowest pixel": candidates.min().item(),
        "highest pixel": candidates.max().item(),
    }
    try:
        for images in candidates:
            threat.check(images, audited.images)
    except AttackError as error:
        return Finding(
            "fail", f"The attack violates the threat model, so its accuracy is void: {error}.", numbers
        )
    return Finding("pass", "All adversarial images are within epsilon and the pixel range.", numbers)


def noise_is_harmless(audited: AuditedModel) -> Finding:
    """Random noise as large as the budget does little harm, and less than the attack."""
    threat = audited.settings.threat
    random = torch.Generator().manual_seed(audited.seed())
    noise = torch.randn(audited.images.shape, generator=random).to(audited.images)
    noisy = threat.project(audited.images + 2 * threat.epsilon * threat.direction(noise), audited.images)
    accuracy = audited.accuracy(noisy)
    numbers = {"clean": mean(audited.clean), "noise": mean(accuracy), "attack": mean(audited.robust)}
    if clearly_above(audited.robust, accuracy, audited.settings.tolerance):
        return Finding(
            "fail", "Noise lowers accuracy more than the attack, so the attack does not work.", numbers
        )
    if clearly_above(audited.clean, accuracy, HARMFUL):
        return Finding("warn", "Noise of this size lowers accuracy: epsilon is large for this model.", numbers)
    return Finding("pass", "Noise as large as epsilon hardly lowers accuracy.", numbers)


def black_box_is_weaker(audited: AuditedModel) -> Finding:
    """A score-based attack does not beat the audited one."""
    square = Square(threat=audited.settings.threat, max_queries=audited.settings.max_queries)
    draws = min(AVERAGED, audited.eot)

    def averaged(images: Tensor) -> Tensor:
        logits = audited.model(images.repeat(draws, 1, 1, 1))
        return logits.unflatten(0, (draws, len(images))).mean(0)

    accuracy = audited.accuracy(audited.adversarial(square, audited.model if draws == 1 else averaged))
    numbers = {
        "white box": mean(audited.robust),
        "black box": mean(accuracy),
        "max queries": audited.settings.max_queries,
    }
    if clearly_above(audited.robust, accuracy, audited.settings.tolerance):
        return Finding("fail", "A black-box attack beats the white-box one: gradients are masked.", numbers)
    return Finding("pass", "The white-box attack is at least as strong as the black-box one.", numbers)


def epsilon_sweep(audited: AuditedModel) -> Finding:
    """Accuracy falls as epsilon grows, to zero where every image is allowed."""
    threat = audited.settings.threat
    reach = threat.high - threat.low
    everything = reach if threat.norm == "linf" else reach * audited.images[0].numel() ** 0.5
    sizes = [threat.epsilon * factor for factor in audited.settings.epsilon_sweep]
    sizes = [*(size for size in sorted(sizes) if size < everything), everything]
    found = [
        audited.accuracy(
            audited.adversarial(audited.pgd(threat=ThreatModel(threat.norm, size, threat.low, threat.high)))
        )
        for size in sizes
    ]
    numbers = {"epsilon": [round(size, 5) for size in sizes], "accuracy": [mean(one) for one in found]}
    final, chance = mean(found[-1]), 1 / audited.classes
    unbounded = f"With unbounded epsilon, robust accuracy is {final:.0%}"
    if final > chance:
        return Finding("fail", f"{unbounded}, above chance: the attack does not work.", numbers)
    if final > audited.settings.tolerance:
        return Finding("warn", f"{unbounded}; expected 0%.", numbers)
    if _rises(found, audited.settings.tolerance):
        return Finding(
            "warn", "Accuracy rises somewhere as epsilon grows, which a strong attack never shows.", numbers
        )
    return Finding("pass", "Accuracy falls to zero as epsilon grows.", numbers)


def step_sweep(audited: AuditedModel) -> Finding:
    """More steps do not lower accuracy further."""
    steps = audited.settings.step_sweep
    found = [audited.accuracy(audited.adversarial(audited.pgd(steps=count))) for count in steps]
    numbers = {"steps": list(steps), "accuracy": [mean(one) for one in found]}
    tolerance = audited.settings.tolerance
    if clearly_above(found[-1], found[0], tolerance):
        return Finding("fail", f"{steps[0]} steps beat {steps[-1]}: gradients mislead the attack.", numbers)
    if len(found) > 1 and clearly_above(found[-2], found[-1], tolerance):
        return Finding("warn", f"Accuracy still falls at {steps[-1]} steps: take more.", numbers)
    if _rises(found, tolerance):
        return Finding("warn", "Accuracy rises somewhere with more steps: the attack is not reliable.", numbers)
    return Finding("pass", f"Accuracy has converged at {steps[-1]} steps.", numbers)


def draw_sweep(audited: AuditedModel) -> Finding:
    """Gradients in expectation over more draws do not beat the audited attack."""
    if not audited.random:
        return Finding("pass", "The model is deterministic, so there is no expectation to take.")
    counts = audited.settings.eot_sweep
    found = [audited.accuracy(audited.adversarial(audited.pgd(eot=count))) for count in counts]
    tolerance = audited.settings.tolerance
    numbers = {
        "draws": list(counts),
        "accuracy": [mean(one) for one in found],
        "audited attack": mean(audited.robust),
    }
    worst = min(found, key=lambda one: one.mean().item())
    if clearly_above(audited.robust, worst, tolerance):
        return Finding(
            "fail",
            "More draws per gradient beat the audited attack: its robust accuracy is too high.",
            numbers,
        )
    if len(found) > 1 and clearly_above(found[-2], found[-1], tolerance):
        return Finding("warn", f"Accuracy still falls at {counts[-1]} draws: take more.", numbers)
    return Finding("pass", f"Accuracy has converged at {counts[-1]} draws.", numbers)


def better_optimizer(audited: AuditedModel) -> Finding:
    """The standard suite, with no more gradient passes, does not beat the audited attack."""
    settings = audited.settings
    passes = settings.steps * audited.eot
    # Attacks without gradients have a check of their own, and AutoAttack, for deterministic models, no budget.
    suite: Attack = Standard(
        threat=settings.threat, budget=passes, gradients_only=True, max_batch=settings.max_batch
    )
    if not audited.random:
        suite = audited.pgd(loss=Margin())
    accuracy = audited.accuracy(audited.adversarial(suite))
    numbers = {"audited attack": mean(audited.robust), "suite": mean(accuracy), "gradient passes": passes}
    if clearly_above(audited.robust, accuracy, settings.tolerance):
        return Finding(
            "fail",
            "The standard suite finds more with the same number of gradients: report `--attacks standard`.",
            numbers,
        )
    return Finding("pass", "The standard suite finds no more with the same number of gradients.", numbers)


def equal_budget(audited: AuditedModel) -> Finding:
    """No other split of the same number of gradients into steps and draws beats the audited attack."""
    if not audited.random:
        return Finding("pass", "The model is deterministic, so there is nothing to split.")
    steps, draws = audited.settings.steps, audited.eot
    passes = steps * draws
    splits = {(passes // many, many) for many in (max(1, draws // 4), min(4 * draws, max(1, passes // 5)))}
    splits -= {(steps, draws)}
    found = {
        split: audited.accuracy(audited.adversarial(audited.pgd(steps=split[0], eot=split[1])))
        for split in sorted(splits)
    }
    numbers: dict[str, object] = {"audited attack": mean(audited.robust)}
    numbers |= {f"{count} steps x {many} draws": mean(accuracy) for (count, many), accuracy in found.items()}
    for (count, many), accuracy in found.items():
        if clearly_above(audited.robust, accuracy, audited.settings.tolerance):
            return Finding(
                "fail",
                f"The same number of gradients as {count} steps of {many} draws finds more: report that split.",
                numbers,
            )
    return Finding("pass", "No other split of the gradients into steps and draws finds more.", numbers)


def smooth_perturbations(audited: AuditedModel) -> Finding:
    """An attack restricted to low frequencies does not beat the audited one."""
    settings = audited.settings
    smooth = LowFrequency(
        threat=settings.threat, steps=settings.steps, eot=audited.eot, max_batch=settings.max_batch
    )
    accuracy = audited.accuracy(audited.adversarial(smooth))
    numbers = {"audited attack": mean(audited.robust), "low frequencies": mean(accuracy)}
    if clearly_above(audited.robust, accuracy, settings.tolerance):
        return Finding(
            "fail",
            "Smooth perturbations alone beat the audited attack: the preprocessing hides the others from it.",
            numbers,
        )
    return Finding("pass", "Restricting the attack to smooth perturbations does not help it.", numbers)


def _rises(found: list[Tensor], tolerance: float) -> bool:
    return any(clearly_above(later, earlier, tolerance) for earlier, later in pairwise(found))

"""Whether gradients are useful to an attack."""

import torch

from menet.attacks import CrossEntropy, Margin
from menet.attacks.base import Queries
from menet.attacks.eot import ExpectedLoss
from menet.attacks.losses import Loss
from menet.errors import AttackError
from menet.evaluation.audit.audited_model import AuditedModel, Finding, clearly_above, mean
from menet.seeding import reseed

VANISHED = 1e-12
FEW = 0.05


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

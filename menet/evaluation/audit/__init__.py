"""The checks that a careful reviewer would ask for, on any classifier."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from menet.errors import ConfigurationError, MenetError
from menet.evaluation.audit.attack import (
    AVERAGED,
    better_optimizer,
    black_box_is_weaker,
    draw_sweep,
    epsilon_sweep,
    equal_budget,
    exact_and_bpda,
    gradients_arrive,
    loss_rises,
    noise_is_harmless,
    smooth_perturbations,
    step_sweep,
    within_threat_model,
)
from menet.evaluation.audit.randomness import (
    AuditedModel,
    AuditSettings,
    Check,
    Finding,
    attack_draws,
    fresh_scoring,
    frozen_draws,
    own_generator,
    repeats_when_reseeded,
)
from menet.preprocessed import evaluation_mode
from menet.progress import Reporter, reporting

__all__ = ["CHECKS", "AuditSettings", "AuditedModel", "Check", "Finding", "audit", "failed", "planned_passes"]

CHECKS: dict[str, Check] = {
    "reproducibility": repeats_when_reseeded,
    "own generator": own_generator,
    "gradients": gradients_arrive,
    "threat model": within_threat_model,
    "loss": loss_rises,
    "fresh scoring": fresh_scoring,
    "attack's own draws": attack_draws,
    "noise": noise_is_harmless,
    "epsilon": epsilon_sweep,
    "steps": step_sweep,
    "draws (EOT)": draw_sweep,
    "exact and BPDA": exact_and_bpda,
    "black box": black_box_is_weaker,
    "better optimizer": better_optimizer,
    "equal budget": equal_budget,
    "frozen draws": frozen_draws,
    "low frequencies": smooth_perturbations,
}
"""In the order they run: the cheap ones that explain the others first."""


def audit(
    model: Any,
    images: Tensor,
    labels: Tensor,
    settings: AuditSettings = AuditSettings(),  # noqa: B008 (frozen)
    generator: torch.Generator | None = None,
    checks: Mapping[str, Check] = CHECKS,
    *,
    finished: Sequence[Finding] = (),
    keep: Callable[[list[Finding]], None] | None = None,
) -> list[Finding]:
    """Run every check on `model`, a callable images → logits, in evaluation mode.

    A model with randomness of its own should have `reseed(seed)`. A check that raises an error because of the
    model or the attack counts as failed, with the error as its meaning. `keep` is called after each check with
    all findings so far; given back as `finished`, they are not computed again, and the others are the same.
    """
    if not len(images):
        raise ConfigurationError("expected images to audit on, some dozens of them; got an empty batch")
    generator = generator or torch.Generator().manual_seed(0)
    audited = AuditedModel(model, images, labels, settings, int(torch.randint(2**62, (), generator=generator)))
    findings = {finding.name: finding for finding in finished if finding.name in checks}
    left = [name for name in checks if name not in findings]
    with evaluation_mode(model), reporting("audit (forward passes)") as progress:
        # To know whether the model is random, it is called: not at the expense of the global generator.
        with torch.random.fork_rng(devices=[]):
            planned = planned_passes(audited)
        shown = {"check": ""}
        with _counted(audited, progress, shown) as counted:
            while left:
                progress.expect(progress.done + sum(planned.get(name, 0.0) for name in left))
                shown["check"] = name = left.pop(0)
                audited.begin(name)
                try:
                    finding = checks[name](audited)
                except MenetError as error:
                    finding = Finding("fail", f"The check could not run: {error}.")
                findings[name] = replace(finding, name=name)
                if not counted:
                    progress.advance(planned.get(name, 0.0), **shown)
                if keep is not None:
                    keep([findings[name] for name in checks if name in findings])
    return [findings[name] for name in checks]


def planned_passes(audited: AuditedModel) -> dict[str, float]:
    """What each check will cost, in forward passes of one image; the gradient of an image counts as one more.

    Checks differ in cost by a factor of a thousand, so the time left follows from these and not from their
    number. Attacks that stop early, and whatever else costs other than planned, is noticed after each check.
    """
    settings, random, eot = audited.settings, audited.random, audited.eot

    def pgd(steps: int = settings.steps, draws: int = eot) -> float:
        return 2.0 * steps * draws + audited.draws

    passes = {
        "reproducibility": 2.0 * random,
        "own generator": 3.0,
        "gradients": 4.0 * min(eot, 10),
        "threat model": pgd() - audited.draws,
        "fresh scoring": 2.0 * audited.draws * random,
        "attack's own draws": 3.0 * audited.draws * random,
        "noise": audited.draws + 2.0 * (not random),
        "epsilon": (1 + len(settings.epsilon_sweep)) * pgd(),
        "steps": sum(pgd(steps) for steps in settings.step_sweep),
        "draws (EOT)": sum(pgd(draws=draws) for draws in settings.eot_sweep) * random,
        "exact and BPDA": 2 * pgd() * hasattr(audited.model, "with_gradient"),
        "black box": settings.max_queries * min(AVERAGED, eot) + audited.draws,
        "better optimizer": pgd(),
        "equal budget": 2 * pgd() * random,
        "frozen draws": 2.0 * min(100, settings.steps * eot) * random,
        "low frequencies": pgd(),
    }
    return {name: count * len(audited.images) for name, count in passes.items()}


@contextmanager
def _counted(audited: AuditedModel, progress: Reporter, shown: Mapping[str, str]) -> Iterator[bool]:
    """Advance `progress` by the images that pass the model meanwhile, twice where they need a gradient.

    Yields whether it does so: calls are seen if the model is a module.
    """

    def count(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        images = arguments[0]
        progress.advance(len(images) * (2 if images.requires_grad and torch.is_grad_enabled() else 1), **shown)

    # A hook and not a wrapper: views of the model, such as one with another gradient, share it.
    hook = audited.model.register_forward_pre_hook(count) if isinstance(audited.model, nn.Module) else None
    try:
        yield hook is not None
    finally:
        if hook is not None:
            hook.remove()


def failed(findings: Sequence[Finding]) -> bool:
    """Whether any check failed."""
    return any(finding.status == "fail" for finding in findings)

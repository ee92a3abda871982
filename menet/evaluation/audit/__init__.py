"""The checks that a careful reviewer would ask for, on any classifier."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from menet.errors import ConfigurationError, MenetError
from menet.evaluation.audit.audited_model import AuditedModel, AuditSettings, Check, Finding
from menet.evaluation.audit.gradients import exact_and_bpda, gradients_arrive, loss_rises
from menet.evaluation.audit.randomness import (
    attack_draws,
    fresh_scoring,
    frozen_draws,
    own_generator,
    repeats_when_reseeded,
)
from menet.evaluation.audit.strength import (
    better_optimizer,
    black_box_is_weaker,
    draw_sweep,
    epsilon_sweep,
    equal_budget,
    noise_is_harmless,
    smooth_perturbations,
    step_sweep,
    within_threat_model,
)
from menet.evaluation.scoring import evaluation_mode
from menet.progress import reporting

__all__ = ["CHECKS", "AuditSettings", "AuditedModel", "Check", "Finding", "audit", "failed"]

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
) -> list[Finding]:
    """Run every check on `model`, a callable images → logits, in evaluation mode.

    A model with randomness of its own should have `reseed(seed)`. A check that raises an error because of the
    model or the attack counts as failed, with the error as its meaning.
    """
    if not len(images):
        raise ConfigurationError("expected images to audit on, some dozens of them; got an empty batch")
    audited = AuditedModel(model, images, labels, settings, generator or torch.Generator().manual_seed(0))
    findings = []
    with evaluation_mode(model), reporting("audit", len(checks)) as progress:
        for name, check in checks.items():
            try:
                finding = check(audited)
            except MenetError as error:
                finding = Finding("fail", f"The check could not run: {error}.")
            findings.append(replace(finding, name=name))
            progress.advance(check=name, result=finding.status)
    return findings


def failed(findings: Sequence[Finding]) -> bool:
    """Whether any check failed."""
    return any(finding.status == "fail" for finding in findings)

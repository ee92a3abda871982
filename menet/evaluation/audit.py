"""The checks that a careful reviewer would ask for, on any classifier."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from menet.errors import ConfigurationError, MenetError
from menet.evaluation.checks import CHECKS, Check
from menet.evaluation.checks.subject import AuditSettings, Finding, Subject
from menet.progress import reporting


def audit(
    model: Any,
    images: Tensor,
    labels: Tensor,
    settings: AuditSettings = AuditSettings(),  # noqa: B008 (frozen)
    generator: torch.Generator | None = None,
    checks: Mapping[str, Check] = CHECKS,
) -> list[Finding]:
    """Run every check on `model`, a callable images → logits, and say of each whether it passes.

    A model with randomness of its own should have `reseed(seed)`. A check that the model or the attack makes
    impossible has failed, with the reason as its meaning.
    """
    if not len(images):
        raise ConfigurationError("images is empty; an audit needs examples, some dozens of them")
    subject = Subject(model, images, labels, settings, generator or torch.Generator().manual_seed(0))
    findings = []
    with reporting("audit", len(checks)) as progress:
        for name, check in checks.items():
            try:
                finding = check(subject)
            except MenetError as error:
                finding = Finding("fail", f"The check could not be made: {error}.")
            findings.append(replace(finding, name=name))
            progress.advance(check=name, result=finding.status)
    return findings


def failed(findings: Sequence[Finding]) -> bool:
    """Whether any check failed."""
    return any(finding.status == "fail" for finding in findings)

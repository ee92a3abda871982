"""Evaluations one can trust: records, accuracies with intervals, an audit, and a certificate."""

from menet.distributed import Worker
from menet.evaluation.accuracy import (
    CRITERIA,
    Accuracy,
    Comparison,
    accuracies,
    accuracy,
    bounded_mean,
    clopper_pearson,
    compare,
    mcnemar,
    restart_accuracies,
)
from menet.evaluation.attack_spec import AttackRun, FixedDraws, parse_attack
from menet.evaluation.audit import AuditSettings, Finding, audit
from menet.evaluation.certify import (
    CertificateSettings,
    certificate_summary,
    certified_accuracies,
    certified_radius,
    certify,
)
from menet.evaluation.records import Records, read, read_folder
from menet.evaluation.results import publish, read_certificates, read_result, read_results
from menet.evaluation.runner import EvaluationSettings, Scores, evaluate, score

__all__ = [
    "CRITERIA",
    "Accuracy",
    "AttackRun",
    "AuditSettings",
    "CertificateSettings",
    "Comparison",
    "EvaluationSettings",
    "Finding",
    "FixedDraws",
    "Records",
    "Scores",
    "Worker",
    "accuracies",
    "accuracy",
    "audit",
    "bounded_mean",
    "certificate_summary",
    "certified_accuracies",
    "certified_radius",
    "certify",
    "clopper_pearson",
    "compare",
    "evaluate",
    "mcnemar",
    "parse_attack",
    "publish",
    "read",
    "read_certificates",
    "read_folder",
    "read_result",
    "read_results",
    "restart_accuracies",
    "score",
]

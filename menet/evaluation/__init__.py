"""Evaluations one can trust: records, accuracies with intervals, an audit, and a certificate."""

from menet.distributed import Worker
from menet.evaluation.accuracy import CRITERIA, Accuracy, accuracies, accuracy, restart_accuracies
from menet.evaluation.attack_words import Assignment, assign
from menet.evaluation.audit import audit
from menet.evaluation.certify import CertificateSettings, certified_accuracies, certified_radius, certify
from menet.evaluation.checks.subject import AuditSettings, Finding
from menet.evaluation.compare import Comparison, compare, mcnemar
from menet.evaluation.intervals import bounded_mean, clopper_pearson
from menet.evaluation.records import Records, read, read_folder
from menet.evaluation.runner import Settings, evaluate
from menet.evaluation.scoring import Outcome, score

__all__ = [
    "CRITERIA",
    "Accuracy",
    "Assignment",
    "AuditSettings",
    "CertificateSettings",
    "Comparison",
    "Finding",
    "Outcome",
    "Records",
    "Settings",
    "Worker",
    "accuracies",
    "accuracy",
    "assign",
    "audit",
    "bounded_mean",
    "certified_accuracies",
    "certified_radius",
    "certify",
    "clopper_pearson",
    "compare",
    "evaluate",
    "mcnemar",
    "read",
    "read_folder",
    "restart_accuracies",
    "score",
]

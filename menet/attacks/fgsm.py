"""The fast gradient sign method (Goodfellow et al. 2015)."""

from dataclasses import dataclass

from menet.attacks.base import Attack, Task
from menet.attacks.eot import ROWS
from menet.attacks.losses import CROSS_ENTROPY, Loss
from menet.attacks.pgd import PGD
from menet.attacks.result import AttackResult
from menet.attacks.threat import CIFAR10, ThreatModel


@dataclass(frozen=True, kw_only=True)
class FGSM(Attack):
    """One step of length epsilon from the image itself; draws nothing at random."""

    threat: ThreatModel = CIFAR10
    loss: Loss = CROSS_ENTROPY
    eot: int = 1
    rows: int = ROWS

    def run(self, task: Task) -> AttackResult:
        one_step = PGD(
            threat=self.threat,
            steps=1,
            step_size=self.threat.epsilon,
            loss=self.loss,
            random_start=False,
            keep="last",
            eot=self.eot,
            rows=self.rows,
        )
        return one_step.run(task)

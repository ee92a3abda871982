"""An attack as a user would write it, outside the package."""

from dataclasses import dataclass

from menet.attacks import Attack, AttackResult, Task, ThreatModel


@dataclass(frozen=True, kw_only=True)
class Brighter(Attack):
    """Make every pixel brighter by a fraction of the budget."""

    threat: ThreatModel
    amount: float = 1.0

    def run(self, task: Task) -> AttackResult:
        moved = task.images + self.amount * self.threat.epsilon
        return task.result(self.threat.project(moved, task.images))

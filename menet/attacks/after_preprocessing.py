"""The white-box attack of Appendix C that "does not attack the preprocessing layer"."""

from dataclasses import dataclass, field, replace

from menet.attacks.base import Task
from menet.attacks.displaced import DisplacedPGD
from menet.attacks.kinds import Model
from menet.attacks.query import Queries
from menet.attacks.result import AttackResult


@dataclass(frozen=True, kw_only=True)
class AfterPreprocessing(DisplacedPGD):
    """PGD on the classifier alone, at the estimate it would be handed; the change is added to the true image.

    The adversary knows the preprocessing, since it starts from its output, but takes no gradient through it,
    exact or approximated. It asks the defended model nothing: `queries` are zero.
    """

    classifier: Model = field(repr=False)

    def run(self, task: Task) -> AttackResult:
        bare = Queries(self.classifier, task.labels, task.targets)
        return replace(super().run(replace(task, model=bare)), queries=task.model.counts)

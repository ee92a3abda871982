"""Votes of masks, and how they decide.

Each mask casts a vote: the ranking of the classes by its logits. By `plurality` a vote counts for its first
class, and the class with the most wins. By `pairwise` votes A beats B if more than half of all votes rank A
strictly above B, and the class that beats every other one wins, the Condorcet winner; there is at most one.
Where there is none, the answer is the class whose narrowest majority is the widest, and nothing is certified.
Two rules are two classifiers: a certificate is about one of them, and so are its records.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.attacks.losses import MAX_BATCH
from menet.defense import MENet
from menet.errors import ConfigurationError
from menet.evaluation.scoring import require_positive

Decision = Literal["plurality", "pairwise"]

LABEL = "certificate"
FEWEST_DRAWS = 50
"""Of an early look: fewer settle nothing."""


@dataclass(frozen=True)
class CertificateSettings:
    """Settings of a certification."""

    start: int = 0
    stop: int | None = None
    """One past the last example; None for all."""
    batch_size: int | None = None
    """Examples certified together; None for 20, or fewer where fewer are asked for."""
    selection: int = 100
    """Draws that select the class and group its rivals."""
    estimation: int = 1000
    """Most draws that bound the probabilities of the class and its rivals."""
    looks: int = 4
    """How often an example may stop because more draws would not enlarge its radius: after all draws, a quarter
    of them, a sixteenth, … The error probability is divided among the looks. 1 never stops early."""
    alpha: float = 0.001
    """The probability with which a certificate may be wrong."""
    partitions: int | None = None
    """The deterministic certificate over this many partitions, in place of random draws."""
    decision: Decision = "pairwise"
    """How votes decide; records that do not say so are older than the choice, and by plurality."""
    seed: int = 0
    max_batch: int = MAX_BATCH
    """Largest number of images in one forward pass."""

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "selection", "estimation", "looks", "partitions", "max_batch")
        if not 0 < self.alpha < 0.5:
            raise ConfigurationError(f"expected 0 < alpha < 0.5, got {self.alpha}")
        if self.decision not in get_args(Decision):
            raise ConfigurationError(
                f"unknown decision {self.decision!r}; choose from {', '.join(get_args(Decision))}"
            )

    def schedule(self) -> list[tuple[int, float]]:
        """The draws after each look, and its part of alpha: half for the last, the rest shared by the others."""
        early = [self.estimation // 4**step for step in range(self.looks - 1, 0, -1)]
        early = [draws for draws in early if draws >= FEWEST_DRAWS]
        if not early:
            return [(self.estimation, self.alpha)]
        return [*((draws, self.alpha / 2 / len(early)) for draws in early), (self.estimation, self.alpha / 2)]


@dataclass(frozen=True)
class Certificates:
    """The certificates of a batch; radius -1 where it abstains."""

    prediction: Int[Tensor, " b"]
    counts: Int[Tensor, "b classes"]
    """Estimation draws, or cells, that rank each class first."""
    lower_bound: Float[Tensor, " b"]
    """Of the probability that a mask chooses the prediction, or (pairwise) ranks it above any one of the others;
    of partitions the fraction of the cells that do."""
    runner_up: Float[Tensor, " b"]
    """Upper bound of the probability of every other class, or (pairwise) that it is ranked at least as high; of
    partitions the fraction for the second."""
    radius: Int[Tensor, " b"]
    beaten: Int[Tensor, "b classes"] | None = None
    """Of pairwise decisions: draws, or cells, that rank the prediction above each class; for its own place 0."""
    patch: Int[Tensor, " b"] | None = None
    """Of partitions: the side of the largest square patch that cannot change the vote."""

    @property
    def votes(self) -> Int[Tensor, " b"]:
        """Votes for the prediction."""
        return self.counts.gather(1, self.prediction[:, None])[:, 0]

    @property
    def draws(self) -> Int[Tensor, " b"]:
        """All votes that were cast on each image."""
        return self.counts.sum(1)


def tally(logits: Float[Tensor, "b votes classes"], pairwise: bool = True) -> Int[Tensor, "b classes classes"]:
    """How many votes rank class i strictly above class j; on the diagonal, how many rank class i first.

    Without `pairwise` the diagonal alone.
    """
    classes = logits.shape[-1]
    firsts = torch.diag_embed(torch.nn.functional.one_hot(logits.argmax(-1), classes).sum(1))
    if not pairwise:
        return firsts
    # Class by class: all pairs of all votes at once would take much memory for many classes.
    return firsts + torch.stack([(logits[..., one, None] > logits).sum(1) for one in range(classes)], 1)


def first_choices(votes: Int[Tensor, "b classes classes"]) -> Int[Tensor, "b classes"]:
    """How many votes rank each class first."""
    return votes.diagonal(dim1=1, dim2=2)


def pairwise_winner(votes: Int[Tensor, "b classes classes"]) -> Int[Tensor, " b"]:
    """The class that beats every other one; without one, that with the widest narrowest majority.

    Of equals, that with the more first choices, and then the first.
    """
    narrowest = _without_own_place(votes, torch.iinfo(votes.dtype).max).amin(2)
    tied = narrowest == narrowest.amax(1, keepdim=True)
    return torch.where(tied, first_choices(votes), -1).argmax(1)


def beaten_by(prediction: Int[Tensor, " b"], votes: Int[Tensor, "b classes classes"]) -> Int[Tensor, "b classes"]:
    """How many votes rank the prediction above each class; for its own place 0."""
    beaten = votes[torch.arange(len(votes)), prediction]
    return beaten.scatter(1, prediction[:, None], 0)


def _without_own_place(votes: Int[Tensor, "b n n"], value: int) -> Int[Tensor, "b n n"]:
    return votes.masked_fill(torch.eye(votes.shape[1], dtype=torch.bool, device=votes.device), value)


def require_masks(model: nn.Module) -> MENet:
    """The model as one that is certified by its masks, or an error."""
    if not isinstance(model, MENet):
        raise ConfigurationError(
            f"expected a MENet that draws fresh masks, or a network of experts, got a {type(model).__name__} "
            "without; certify the defense itself"
        )
    return model

"""Votes over masks: how they decide, and certificates by random masks, which seldom show a few perturbed pixels.

Each mask casts a vote: the ranking of the classes by its logits. By `plurality` a vote counts for its first
class, and the class with the most wins. By `pairwise` votes A beats B if more than half of all votes rank A
strictly above B, and the class that beats every other one wins, the Condorcet winner; there is at most one.
Where there is none, the answer is the class whose narrowest majority is the widest, and nothing is certified.
Two rules are two classifiers: a certificate is about one of them, and so are its records.

A mask shows each entry with probability p, independently, so it shows a perturbed one with
probability Δ = 1 − (1−p)^(kρ), where k is the number of independently masked entries of a pixel: 1 where whole
pixels are masked, else the number of channels. An event that has probability q over the masks has at least q −
Δ and at most q + Δ after the perturbation, since all but a probability Δ of the masks show none of it.

By plurality: let p_C be the probability that a mask leads to class C, and A the class that most lead to. Then

    p'_A ≥ p_A − Δ,    and likewise    p'_B ≤ p_B + Δ    for every other class B.

So the vote remains A if p_A − p_B > 2Δ for every B: the runner-up bound. With p_B ≤ 1 − p_A alone, this is p_A
− Δ > 1/2, the bound of Levine & Feizi (2020). It is tight: nothing more follows from p_A and p_B, since A may
win precisely under the masks that show a perturbed entry, and all of these may turn to B.

By pairwise votes: let p(A≻B) be the probability that a mask ranks A above B. A remains the winner if

    p(A≻B) − Δ > 1/2    for every other class B.

Whoever ranks A first ranks A above B, so p(A≻B) ≥ p_A, and this is never worse than p_A − Δ > 1/2. Let t_A be
the probability that a mask leads to a third class and ranks A above B, and t_B that of the other masks that
lead to a third class. Then p(A≻B) = p_A + t_A and 1 − p(A≻B) = p_B + t_B, so the condition reads p_A − p_B +
t_A − t_B > 2Δ: better than the runner-up bound where votes for third classes prefer A, as they mostly do where
A is right.

The probabilities are unknown, but bounded by Clopper–Pearson. Selection draws choose A and, for plurality, a
grouping of the other classes; estimation draws, independent of these (Cohen et al. 2019), bound p_A from below
and each group from above, whose probability is at least that of each class in it; or p(A≻B) from below for each
B. Let there be M bounds, and J looks at the draws, in each of which an example may stop. The bounds of look j
are each wrong with probability at most α_j / M, where α_1 + … + α_J = α. Hence all bounds hold together, at all
looks, with probability at least 1 − α, whenever the draws stop and however that was decided; the best of each
is used. Where no class is ahead, the certificate abstains. It is about the vote over all masks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.attacks.losses import MAX_BATCH
from menet.defense import MENet
from menet.errors import ConfigurationError
from menet.evaluation.accuracy import lower_bound, upper_bound
from menet.evaluation.runner import require_positive
from menet.preprocessed import evaluation_mode, require_numbers
from menet.training.config import Precision

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
    precision: Precision = "float32"
    """In which the network computes its votes. bfloat16 makes another classifier, two to three times as fast
    where the processor has instructions for it; auto is bfloat16 there and float32 elsewhere."""

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "selection", "estimation", "looks", "partitions", "max_batch")
        if not 0 < self.alpha < 0.5:
            raise ConfigurationError(f"expected 0 < alpha < 0.5, got {self.alpha}")
        if self.decision not in get_args(Decision):
            raise ConfigurationError(
                f"unknown decision {self.decision!r}; choose from {', '.join(get_args(Decision))}"
            )
        if self.precision not in get_args(Precision):
            raise ConfigurationError(
                f"unknown precision {self.precision!r}; choose from {', '.join(get_args(Precision))}"
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


def certified_radius(
    probability: float, p: float, entries: int = 1, pixels: int | None = None, runner_up: float | None = None
) -> int | None:
    """The most pixels that can be perturbed without changing the vote; None (abstain) where no class is ahead.

    `probability` is a lower bound on that of the winning class, `runner_up` an upper bound on that of every other
    one (by default 1 − probability), `p` the probability that an entry is observed, `entries` the number of
    independently masked entries of a pixel. At most `pixels`, the size of the image.
    """
    rival = 1 - probability if runner_up is None else min(runner_up, 1 - probability)
    if not (0 <= probability <= 1 and 0 <= p <= 1 and rival >= 0):
        raise ConfigurationError(
            f"expected probabilities in [0, 1], got {probability} and p {p}, runner-up {runner_up}"
        )
    gap = probability - rival
    if not gap > 0:
        return None
    # Hidden with more than this probability, the perturbed entries leave the winner ahead: gap > 2Δ.
    needed = 1 - gap / 2
    if p == 0 or pixels == 0:
        if pixels is None:
            raise ConfigurationError("expected `pixels` with p = 0, since every radius is certified; got None")
        return pixels
    radius = 0 if p == 1 else math.floor(math.log(needed) / (entries * math.log1p(-p)))
    # The logarithm may be off by a rounding; the inequality itself decides, and it is strict.
    radius += 1
    while radius > 0 and not (1 - p) ** (entries * radius) > needed:
        radius -= 1
    return radius if pixels is None else min(radius, pixels)


def rivals(counts: Sequence[int], winner: int) -> list[list[int]]:
    """The other classes in few groups, none with more selection votes than the runner-up's alone where possible.

    Each group costs a part of alpha, and bounds each of its classes by their sum. Without a vote for another
    class there is no group: the winner's own bound then serves best.
    """
    others = sorted((one for one in range(len(counts)) if one != winner), key=lambda one: -counts[one])
    if not others or counts[others[0]] == 0:
        return []
    groups, sums = [[others[0]]], [counts[others[0]]]
    for one in others[1:]:
        # The runner-up stays alone: whatever joined it would raise the bound that matters.
        place = next((at for at in range(1, len(groups)) if sums[at] + counts[one] <= sums[0]), None)
        if place is None:
            groups.append([one])
            sums.append(counts[one])
        else:
            groups[place].append(one)
            sums[place] += counts[one]
    return groups


@dataclass
class Bounds:
    """What the draws so far say about one example: bounds that all hold together, and the radius they give."""

    groups: list[list[int]]
    lower: float = 0.0
    """Of the probability of the winner; of pairwise votes, that it is ranked above any other class."""
    upper: float = 1.0
    """Of the probability of every other class; of pairwise votes, that it is ranked at least as high."""

    def tightened(self, counts: Sequence[int], winner: int, alpha: float) -> "Bounds":
        """These bounds and those that the first choices in `counts` give at level `alpha`."""
        # As plain numbers: what comes from a device may be numbers of another kind.
        counts = [int(count) for count in counts]
        draws, each = sum(counts), alpha / (len(self.groups) + 1)
        lower = max(self.lower, lower_bound(counts[winner], draws, each))
        upper = max(
            (upper_bound(sum(counts[one] for one in group), draws, each) for group in self.groups), default=1.0
        )
        return Bounds(self.groups, lower, min(self.upper, upper, 1 - lower))

    def tightened_pairwise(self, beaten: Sequence[int], draws: int, alpha: float) -> "Bounds":
        """These bounds and those from how many of `draws` draws rank the winner above each of the others."""
        each = alpha / max(1, len(beaten))
        # All bounds of a look hold together, and the smallest grows with the count: one is enough.
        lower = max(self.lower, lower_bound(int(min(beaten)), draws, each) if beaten else 1.0)
        return Bounds(self.groups, lower, min(self.upper, 1 - lower))


def certificates(
    model: MENet,
    images: Float[Tensor, "b c h w"],
    settings: CertificateSettings = CertificateSettings(),  # noqa: B008 (frozen)
    selection_seed: int = 0,
    estimation_seed: int = 1,
) -> Certificates:
    """Certify a batch by random draws, in evaluation mode; seeds must differ, so that draws are independent."""
    if selection_seed == estimation_seed:
        raise ConfigurationError(f"expected two different seeds, got {selection_seed} twice")
    p, entries = observation(model, images.shape[1])
    if model.mask == "cells":
        raise ConfigurationError(
            "expected independently masked pixels for a certificate by random draws, got mask 'cells'; "
            "set `partitions` (menet certify --partitions), or mask 'pixels'"
        )
    pixels = images.shape[-2] * images.shape[-1]
    pairwise = settings.decision == "pairwise"
    looks = settings.schedule()
    with evaluation_mode(model):
        model.reseed(selection_seed)
        selected = count_votes(model, images, settings.selection, settings.max_batch, pairwise)
        winners = (pairwise_winner(selected) if pairwise else first_choices(selected).argmax(1)).tolist()
        firsts = first_choices(selected).tolist()
        bounds = [
            Bounds([] if pairwise else rivals(row, winner)) for row, winner in zip(firsts, winners, strict=True)
        ]

        def radius_of(number: int, votes: list[list[int]], draws: int, alpha: float) -> tuple[Bounds, int]:
            winner = winners[number]
            if pairwise:
                beaten = [count for one, count in enumerate(votes[winner]) if one != winner]
                found = bounds[number].tightened_pairwise(beaten, draws, alpha)
            else:
                found = bounds[number].tightened([row[one] for one, row in enumerate(votes)], winner, alpha)
            radius = certified_radius(found.lower, p, entries, pixels, found.upper)
            return found, -1 if radius is None else radius

        model.reseed(estimation_seed)
        counts = torch.zeros_like(selected)
        radii, active = [-1] * len(images), list(range(len(images)))
        done = 0
        for draws, alpha in looks:
            counts[active] += count_votes(model, images[active], draws - done, settings.max_batch, pairwise)
            done, unsettled = draws, []
            for number, votes in zip(active, counts[active].tolist(), strict=True):
                # If the remaining draws fell like those so far, would the radius be larger?
                scaled = [[count * settings.estimation // draws for count in row] for row in votes]
                _, expected = radius_of(number, scaled, settings.estimation, looks[-1][1])
                bounds[number], radii[number] = radius_of(number, votes, draws, alpha)
                if expected > radii[number]:
                    unsettled.append(number)
            active = unsettled
            if not active:
                break
    prediction, counts = torch.tensor(winners), counts.cpu()
    return Certificates(
        prediction,
        first_choices(counts),
        torch.tensor([one.lower for one in bounds], dtype=torch.float64),
        torch.tensor([one.upper for one in bounds], dtype=torch.float64),
        torch.tensor(radii),
        beaten_by(prediction, counts) if pairwise else None,
    )


def observation(model: nn.Module, channels: int) -> tuple[float, int]:
    """The probability that an entry is observed, and the number of independently masked entries of a pixel."""
    known = require_masks(model)
    return known.mean_p, channels if known.mask == "entries" else 1


@torch.no_grad()
def count_votes(
    model: Callable[[Tensor], Tensor],
    images: Float[Tensor, "b c h w"],
    draws: int,
    max_batch: int = MAX_BATCH,
    pairwise: bool = True,
) -> Int[Tensor, "b classes classes"]:
    """The votes of `draws` draws of the model, as `tally` counts them; passes hold at most `max_batch` images."""
    if draws < 1:
        raise ConfigurationError(f"expected draws >= 1, got {draws}")
    parts = []
    for part in images.split(max_batch):
        together = max(1, max_batch // len(part))
        total: Tensor | None = None
        for done in range(0, draws, together):
            count = min(together, draws - done)
            logits = model(part.repeat(count, 1, 1, 1)).unflatten(0, (count, len(part)))
            votes = tally(require_numbers(logits).transpose(0, 1), pairwise)
            total = votes if total is None else total + votes
        assert total is not None
        parts.append(total)
    return torch.cat(parts)

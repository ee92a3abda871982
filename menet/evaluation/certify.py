"""Certificates that come free with voting: no perturbation of a few pixels can change the vote.

A ME-Net's classifier sees an image only through the entries that a mask shows: all estimators fill the others
with zeros first, and an ablation shows nothing else. Let an adversary perturb ρ pixels, in any way. A mask that
shows none of them leads to the same prediction as before; what the others lead to is the adversary's choice.

**The decision.** Each mask casts a vote: the ranking of the classes by its logits. By `plurality` a vote counts
for its first class, and the class with the most wins. By `pairwise` votes A beats B if more than half of all
votes rank A strictly above B, and the class that beats every other one wins, the Condorcet winner; there is at
most one. Where there is none, the answer is the class whose narrowest majority is the widest, and nothing is
certified. Two rules are two classifiers: a certificate is about one of them, and so are its records.

**Random masks.** A mask shows each entry with probability p, independently, so it shows a perturbed one with
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

**Partitions.** The pixels are divided into T cells, in R public ways; the classifier votes once on each of the
R·T cells, so nothing is random and nothing is estimated. A perturbed pixel i lies in one cell of each
partition. Let N be the lead of A over another class B, u_B(cell) how much the cell can narrow it by a vote of
the adversary's choice, and w_B(i) the sum of u_B over the R cells in which i lies. Perturbing a set S narrows
the lead by at most the sum of w_B(i) over S (a cell that holds two pixels of S is counted twice), hence by at
most the sum of the ρ largest. The vote remains A if for every B

    N > the sum of the ρ largest w_B(i).

By plurality N = N_A − N_B, the difference of their votes. A cell that voted A can turn to B, so u_B = 2; one
that voted for a third class has u_B = 1; one that voted B has 0. By pairwise votes N is the number of cells
that rank A above B less that of the others, and u_B = 2 for the former and 0 for the latter: they can do no
further harm. Since w_B(i) ≤ 2R, either holds whenever N > 2ρR; with R = 1 and plurality this is the bound of
Hammoudeh & Lowd (2023). A tie after the perturbation counts as a changed vote. There is no probability of error
and no abstention.

**Patches.** An adversary who perturbs all pixels of a w×w square reaches, for each place of the square, the
cells that have a pixel in it, each once. The vote remains A if N exceeds the sum of u_B over these cells, for
every place and every B. There are few places, so the bound is computed for each of them.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet import masks as masking
from menet.attacks import PGD, RandomSearch, ThreatModel
from menet.attacks.eot import MAX_BATCH
from menet.attacks.losses import MARGIN
from menet.data.dataset import warn_of_missing_classes
from menet.defense import MENet
from menet.distributed import Worker
from menet.errors import ConfigurationError, RecordError
from menet.evaluation import provenance
from menet.evaluation.accuracy import CONFIDENCE, Accuracy, clopper_pearson, lower_bound, upper_bound
from menet.evaluation.records import Records, Row, Shard
from menet.evaluation.runner import range_of, records_of, remaining, worker_title
from menet.evaluation.scoring import require_positive
from menet.models import Network
from menet.preprocessed import evaluation_mode, require_numbers
from menet.progress import reporting
from menet.seeding import batch_seed

Decision = Literal["plurality", "pairwise"]

LABEL = "certificate"
BATCH_SIZE = 20
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
        _beaten_by(prediction, counts) if pairwise else None,
    )


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
    level = narrowest == narrowest.amax(1, keepdim=True)
    return torch.where(level, first_choices(votes), -1).argmax(1)


def _beaten_by(
    prediction: Int[Tensor, " b"], votes: Int[Tensor, "b classes classes"]
) -> Int[Tensor, "b classes"]:
    beaten = votes[torch.arange(len(votes)), prediction]
    return beaten.scatter(1, prediction[:, None], 0)


def _without_own_place(votes: Int[Tensor, "b n n"], value: int) -> Int[Tensor, "b n n"]:
    return votes.masked_fill(torch.eye(votes.shape[1], dtype=torch.bool, device=votes.device), value)


def partition_certificates(
    model: nn.Module,
    images: Float[Tensor, "b c h w"],
    partitions: Int[Tensor, "r h w"],
    max_batch: int = MAX_BATCH,
    decision: Decision = "pairwise",
) -> Certificates:
    """Certify a batch by the votes on each cell of each partition, in evaluation mode.

    Entry (r, i, j) of `partitions` is the cell of pixel (i, j) in partition r, counted from 0. The model is a
    ME-Net, or a network of experts, whose own partitions these must be.
    """
    cells = int(partitions.max()) + 1
    with evaluation_mode(model), torch.no_grad():
        logits = torch.cat(
            [cell_logits(model, part, partitions, max_batch).cpu() for part in images.split(max_batch)]
        )
    votes = tally(require_numbers(logits.transpose(0, 1)).transpose(0, 1))
    counts = first_choices(votes)
    prediction = pairwise_winner(votes) if decision == "pairwise" else counts.argmax(1)
    lead, harm = leads(logits, prediction, decision)
    harm = harm.unflatten(1, (len(partitions), cells))
    radius = partition_radius(lead, harm, partitions.cpu())
    # The lead of half the votes is the fraction that ranks the prediction above its closest rival.
    narrowest = lead.amin(1).double() / logits.shape[1] if lead.shape[1] else torch.ones(len(images)).double()
    winning = counts.gather(1, prediction[:, None])[:, 0].double() / logits.shape[1]
    first = (1 + narrowest) / 2 if decision == "pairwise" else winning
    return Certificates(
        prediction,
        counts,
        first,
        first - narrowest,
        radius,
        _beaten_by(prediction, votes) if decision == "pairwise" else None,
        patch_side(lead, harm, partitions.cpu()),
    )


def cell_logits(
    model: nn.Module,
    images: Float[Tensor, "b c h w"],
    partitions: Int[Tensor, "r h w"],
    max_batch: int = MAX_BATCH,
) -> Float[Tensor, "b cells classes"]:
    """The logits of a model that sees one cell at a time, partition by partition."""
    if isinstance(model, Network):
        return model.cell_logits(images)
    known = _require_masks(model)
    cells = int(partitions.max()) + 1
    shown = torch.stack([partitions == cell for cell in range(cells)], 1).flatten(0, 1).to(images.device)
    found = []
    for masks in shown.split(max(1, max_batch // len(images))):
        repeated = images.repeat(len(masks), 1, 1, 1)
        mask = masks.repeat_interleave(len(images), 0)[:, None].expand(repeated.shape)
        found.append(known(repeated, mask).unflatten(0, (len(masks), len(images))))
    return torch.cat(found).transpose(0, 1)


def leads(
    logits: Float[Tensor, "b cells classes"], prediction: Int[Tensor, " b"], decision: Decision
) -> tuple[Int[Tensor, "b rivals"], Int[Tensor, "b cells rivals"]]:
    """The lead of the prediction over each other class, and by how much each cell can narrow it."""
    classes = logits.shape[-1]
    # Each image's classes but the predicted one, in order.
    others = torch.arange(classes - 1).expand(len(logits), -1)
    others = others + (others >= prediction[:, None]).long()
    if decision == "pairwise":
        own = logits.gather(2, prediction[:, None, None].expand(-1, logits.shape[1], 1))
        above = (own > logits).gather(2, others[:, None].expand(-1, logits.shape[1], -1)).long()
        return 2 * above.sum(1) - logits.shape[1], 2 * above
    chosen = logits.argmax(-1)[..., None]
    winning, for_rival = (chosen == prediction[:, None, None]).long(), (chosen == others[:, None]).long()
    return (winning - for_rival).sum(1), 1 + winning - for_rival


def partition_radius(
    lead: Int[Tensor, "b rivals"], harm: Int[Tensor, "b r t rivals"], partitions: Int[Tensor, "r h w"]
) -> Int[Tensor, " b"]:
    """The most pixels that can be perturbed without changing the vote: N > the sum of the ρ largest w_B(i).

    `lead` is N for each rival, `harm` is u_B of each cell.
    """
    cell_of = partitions.flatten(1)
    radius = torch.full((len(lead),), cell_of.shape[1])
    for rival in range(lead.shape[1]):
        weights = torch.stack([harm[:, r, cells, rival] for r, cells in enumerate(cell_of)]).sum(0)
        lost = weights.sort(1, descending=True).values.cumsum(1)
        # The sums never fall, so counting those below is finding the last of them.
        radius = radius.minimum((lost < lead[:, rival, None]).sum(1))
    return radius


def patch_side(
    lead: Int[Tensor, "b rivals"], harm: Int[Tensor, "b r t rivals"], partitions: Int[Tensor, "r h w"]
) -> Int[Tensor, " b"]:
    """The side of the largest square patch, anywhere in the image, that cannot change the vote; 0 where none."""
    cells, least = int(partitions.max()) + 1, min(partitions.shape[1:])
    shown = torch.stack([partitions == cell for cell in range(cells)], 1).flatten(0, 1).float()
    flat = harm.flatten(1, 2).transpose(1, 2).float()
    found = torch.zeros(len(lead), dtype=torch.int64)
    holds = torch.ones(len(lead), dtype=torch.bool)
    for side in range(1, least + 1):
        # Which cells have a pixel in the patch, for each of its places.
        reached = torch.nn.functional.max_pool2d(shown, side, 1).flatten(1)
        holds = holds & ((flat @ reached).amax(2) < lead).all(1)
        if not bool(holds.any()):
            break
        found[holds] = side
    return found


class PartitionVote(nn.Module):
    """The pairwise decision over partitions as a deterministic classifier, for attacks on it.

    The score of a class is its narrowest majority: the smallest fraction of cells that rank it above another
    class, less a half; it is positive for the winner alone. Gradients are those of the same fractions with
    sigmoids of the differences of logits in place of steps: votes have none.
    """

    def __init__(self, model: nn.Module, partitions: Int[Tensor, "r h w"], max_batch: int = MAX_BATCH) -> None:
        super().__init__()
        self.model, self.partitions, self.max_batch = model, partitions, max_batch

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        logits = cell_logits(self.model, images, self.partitions, self.max_batch)
        scores = []
        for one in range(logits.shape[-1]):
            difference = logits[..., one, None] - torch.cat([logits[..., :one], logits[..., one + 1 :]], -1)
            soft = difference.sigmoid().mean(1)
            above = (difference > 0).to(soft).mean(1)
            scores.append((soft + (above - soft).detach()).amin(1) - 0.5)
        return torch.stack(scores, 1)


BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
"""Pixels that the attacks of a sandwich may perturb, one budget after the other."""


def fewest_pixels(
    model: nn.Module,
    images: Float[Tensor, "b c h w"],
    prediction: Int[Tensor, " b"],
    partitions: Int[Tensor, "r h w"],
    proposals: int = 300,
    seed: int = 0,
) -> Int[Tensor, " b"]:
    """The fewest pixels with which an l0 attack took the pairwise vote from the `prediction`; 0 where none did.

    Attacks are PGD with gradients of soft votes, and random search over the scores, at budgets from 1 to 64. The
    certified radius is below each of these numbers, or the certificate is wrong.
    """
    found = torch.zeros_like(prediction)
    vote = PartitionVote(model, partitions).eval()
    for budget in BUDGETS:
        left = (found == 0).nonzero()[:, 0]
        threat = ThreatModel("l0", budget)
        for attack in (
            PGD(threat=threat, steps=20, loss=MARGIN),
            RandomSearch(threat=threat, proposals=proposals),
        ):
            if not len(left):
                break
            generator = torch.Generator().manual_seed(batch_seed(seed, "attack", LABEL, budget))
            attacked = attack(vote, images[left], prediction[left], generator=generator).images
            now = partition_certificates(model, attacked, partitions).prediction
            pixels = (attacked != images[left]).any(1).flatten(1).sum(1)
            found[left] = torch.where(now != prediction[left], pixels, 0)
            left = left[now == prediction[left]]
    return found


def observation(model: nn.Module, channels: int) -> tuple[float, int]:
    """The probability that an entry is observed, and the number of independently masked entries of a pixel."""
    known = _require_masks(model)
    return known.mean_p, channels if known.mask == "entries" else 1


def certify(
    model: nn.Module,
    dataset: Any,
    folder: str | os.PathLike[str],
    settings: CertificateSettings = CertificateSettings(),  # noqa: B008 (frozen)
    *,
    source: str = "",
    device: torch.device | str = "cpu",
    worker: Worker | None = None,
) -> Records:
    """Certify a range of a dataset into rows that are resumed and shared like those of an evaluation.

    The model is a ME-Net, or a network of experts, which is certified by its own partitions. It is moved to
    `device`, used in evaluation mode, and left in the mode it was in.
    """
    worker = worker or Worker.from_environment()
    model.to(device)
    examples = range_of(settings.start, settings.stop, len(dataset))
    warn_of_missing_classes(dataset, examples.start, examples.stop)
    batch_size = settings.batch_size or min(BATCH_SIZE, len(examples))
    own = [index for index in examples if index // batch_size % worker.world == worker.rank]
    evaluation = {
        "label": LABEL,
        "model": provenance.of_model(model),
        "dataset": provenance.of_dataset(dataset),
        **asdict(settings),
        "start": examples.start,
        "stop": examples.stop,
        "batch_size": batch_size,
    }
    partitions = public_partitions(model, dataset.images.shape[2:], settings)
    if partitions is None:
        p, entries = observation(model, dataset.images.shape[1])
    else:
        evaluation["partitions"] = len(partitions)
        evaluation["cells"] = cells = int(partitions.max()) + 1
        p, entries = 1 / cells, 1
    evaluation |= {"p": p, "entries": entries}
    made = {"source": source, **provenance.of_machine(device)}
    with (
        Shard(folder, evaluation, made, worker.rank) as shard,
        reporting(worker_title(LABEL, worker), len(own)) as progress,
    ):
        progress.skip(len(shard.done.intersection(own)))
        for first, missing in remaining(own, batch_size, shard.done):
            images, labels = dataset.batch(slice(first, min(first + batch_size, len(dataset))))
            seeds = {
                "selection": batch_seed(settings.seed, "selection", LABEL, first),
                "estimation": batch_seed(settings.seed, "estimation", LABEL, first),
            }
            began, processor = time.perf_counter(), time.process_time()
            if partitions is None:
                assert isinstance(model, MENet)
                found = certificates(model, images.to(device), settings, *seeds.values())
            else:
                found = partition_certificates(
                    model, images.to(device), partitions, settings.max_batch, settings.decision
                )
            seconds = round((time.perf_counter() - began) / len(images), 6)
            processor_seconds = round((time.process_time() - processor) / len(images), 6)
            rows: list[Row] = [
                {
                    "index": index,
                    "label": int(labels[index - first]),
                    "prediction": int(found.prediction[index - first]),
                    "votes": int(found.votes[index - first]),
                    "counts": found.counts[index - first].tolist(),
                    **({} if found.beaten is None else {"beaten": found.beaten[index - first].tolist()}),
                    "lower_bound": float(found.lower_bound[index - first]),
                    "runner_up": float(found.runner_up[index - first]),
                    "radius": int(found.radius[index - first]),
                    **({} if found.patch is None else {"patch": int(found.patch[index - first])}),
                    "seconds": seconds,
                    "processor_seconds": processor_seconds,
                    **({"seeds": seeds} if partitions is None else {}),
                }
                for index in missing
            ]
            shard.append(rows)
            progress.advance(len(rows), radius=sum(max(0, row["radius"]) for row in rows) / len(rows))
        return records_of(shard, folder, LABEL, worker)


def public_partitions(
    model: nn.Module, shape: Sequence[int], settings: CertificateSettings
) -> Int[Tensor, "r h w"] | None:
    """The partitions that a model is certified by: a network of experts has its own; None for random draws."""
    own = model.partitions if isinstance(model, Network) else None
    if own is not None:
        if settings.partitions not in (None, len(own)):
            raise ConfigurationError(
                f"expected partitions {len(own)}, those of the experts, got {settings.partitions}; leave it out"
            )
        return own
    p, _ = observation(model, 1)
    if settings.partitions is None:
        return None
    generator = torch.Generator().manual_seed(batch_seed(settings.seed, "selection", LABEL, 0))
    return masking.partitions(settings.partitions, round(1 / p) if p else 0, (shape[0], shape[1]), generator)


def certified_accuracies(
    records: Records, radii: Sequence[int] | None = None, confidence: float = CONFIDENCE
) -> dict[int, Accuracy]:
    """At each radius, the fraction of examples whose vote is correct and certified for that many pixels.

    Without `radii`: every radius up to the first at which nothing is certified.
    """
    certified = _certified(records)
    found = {}
    for radius in range(max(certified) + 2) if radii is None else radii:
        found[radius] = _fraction(
            "certified", sum(one >= radius for one in certified), len(certified), confidence
        )
    return found


@dataclass(frozen=True)
class CertificateSummary:
    """What a certification found, in a few numbers."""

    vote: Accuracy
    """Clean accuracy of the vote, abstentions included where the class that was selected is right."""
    median_radius: int
    """The largest radius at which at least half of all examples are correct and certified; -1 where none is."""
    abstentions: int
    draws: float
    """Mean forward passes of an example."""
    seconds: float
    """Mean seconds of an example."""
    processor_seconds: float | None = None
    """The same in processor time, over all threads; None for records that are older than this number."""
    median_patch: int | None = None
    """Of partitions: like the median radius, for the side of a square patch; -1 where most votes are wrong."""


def certificate_summary(records: Records, confidence: float = CONFIDENCE) -> CertificateSummary:
    """Clean accuracy of the vote, median certified radius, abstentions and cost."""
    certified, rows = _certified(records), records.rows
    timed = all("processor_seconds" in row for row in rows)
    patches = [row["patch"] if row["prediction"] == row["label"] else -1 for row in rows if "patch" in row]
    right = sum(row["prediction"] == row["label"] for row in rows)
    # Rows older than early stopping have no counts: all draws were taken.
    fixed = records.evaluation.get("estimation", 0)
    selection = 0 if records.evaluation.get("partitions") else records.evaluation.get("selection", 0)
    return CertificateSummary(
        _fraction("vote", right, len(rows), confidence),
        statistics.median_high(certified),
        sum(row["radius"] < 0 for row in rows),
        statistics.fmean(selection + (sum(row["counts"]) if "counts" in row else fixed) for row in rows),
        statistics.fmean(row["seconds"] for row in rows),
        statistics.fmean(row["processor_seconds"] for row in rows) if timed else None,
        statistics.median_high(patches) if patches else None,
    )


def _certified(records: Records) -> list[int]:
    """Each example's radius, -1 where the vote is wrong or not certified."""
    if not records.rows:
        raise RecordError("expected at least one row to compute an accuracy from, got none")
    return [row["radius"] if row["prediction"] == row["label"] else -1 for row in records.rows]


def _fraction(criterion: str, count: int, examples: int, confidence: float) -> Accuracy:
    low, high = clopper_pearson(count, examples, confidence)
    return Accuracy("clean", criterion, 1, count / examples, low, high, examples, "clopper-pearson", confidence)


def _require_masks(model: nn.Module) -> MENet:
    if not isinstance(model, MENet):
        raise ConfigurationError(
            f"expected a MENet that draws fresh masks, or a network of experts, got a {type(model).__name__} "
            "without; certify the defense itself"
        )
    return model

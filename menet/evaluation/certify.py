"""Certificates that come free with voting: no perturbation of a few pixels can change the vote.

A ME-Net's classifier sees an image only through the entries that a mask shows: all estimators fill the others
with zeros first, and an ablation shows nothing else. Let an adversary perturb ρ pixels, in any way. A mask that
shows none of them leads to the same prediction as before; what the others lead to is the adversary's choice.

**Random masks.** A mask shows each entry with probability p, independently, so it shows a perturbed one with
probability Δ = 1 − (1−p)^(kρ), where k is the number of independently masked entries of a pixel: 1 where whole
pixels are masked, else the number of channels. Let p_C be the probability that a mask leads to class C, A the
class that most lead to, and p'_C the same after the perturbation. Masks that lead to A and show no perturbed
entry still lead to A, and all but a probability Δ show none:

    p'_A ≥ p_A − Δ,    and likewise    p'_B ≤ p_B + Δ    for every other class B.

So the vote remains A if p_A − p_B > 2Δ for every B: the runner-up bound. With p_B ≤ 1 − p_A alone, this is
p_A − Δ > 1/2, the bound of Levine & Feizi (2020). It is tight: nothing more follows from p_A and p_B, since A may
win precisely under the masks that show a perturbed entry, and all of these may turn to B.

The probabilities are unknown, but bounded by Clopper–Pearson: p_A from below, the others from above. Selection
draws choose A and a grouping of the other classes; estimation draws, independent of these (Cohen et al. 2019),
bound A and each group, whose probability is at least that of each class in it. With G groups and J looks at the
draws, in each of which an example may stop, the bounds of look j are each wrong with probability at most
α_j / (G + 1), where α_1 + … + α_J = α. Hence all bounds hold together, at all looks, with probability at least
1 − α, whenever the draws stop and however that was decided; the best of each is used. Where no class is ahead,
the certificate abstains. It is about the vote over all masks.

**Partitions.** The pixels are divided into T cells, in R public ways; the classifier votes once on each of the
R·T cells, so nothing is random and nothing is estimated. A perturbed pixel i lies in one cell of each partition.
Let N_C be the votes for C, and B another class. A cell that voted A can turn to B, which narrows N_A − N_B by 2;
one that voted for a third class narrows it by 1; one that voted B by 0. Let u_B(cell) be this number and w_B(i)
the sum of u_B over the R cells in which i lies. Perturbing a set S narrows N_A − N_B by at most the sum of w_B(i)
over S (a cell that holds two pixels of S is counted twice), hence by at most the sum of the ρ largest. The vote
remains A if for every B

    N_A − N_B > the sum of the ρ largest w_B(i).

Since w_B(i) ≤ 2R, this holds whenever N_A − N_B > 2ρR, the bound of Hammoudeh & Lowd (2023) for R = 1. A tie
after the perturbation counts as a changed vote. There is no probability of error and no abstention.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet import masks as masking
from menet.attacks.eot import MAX_BATCH
from menet.data.dataset import warn_of_missing_classes
from menet.defense import MENet
from menet.distributed import Worker
from menet.errors import ConfigurationError, RecordError
from menet.evaluation import provenance
from menet.evaluation.accuracy import CONFIDENCE, Accuracy, clopper_pearson, lower_bound, upper_bound
from menet.evaluation.records import Records, Row, Shard
from menet.evaluation.runner import range_of, records_of, remaining, worker_title
from menet.evaluation.scoring import require_positive
from menet.preprocessed import evaluation_mode, require_numbers
from menet.progress import reporting
from menet.seeding import batch_seed

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
    seed: int = 0
    max_batch: int = MAX_BATCH
    """Largest number of images in one forward pass."""

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "selection", "estimation", "looks", "partitions", "max_batch")
        if not 0 < self.alpha < 0.5:
            raise ConfigurationError(f"expected 0 < alpha < 0.5, got {self.alpha}")

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
    """Of the probability of the winner."""
    upper: float = 1.0
    """Of the probability of every other class."""

    def tightened(self, counts: Sequence[int], winner: int, alpha: float) -> "Bounds":
        """These bounds and those that `counts` give at level `alpha`."""
        # As plain numbers: what comes from a device may be numbers of another kind.
        counts = [int(count) for count in counts]
        draws, each = sum(counts), alpha / (len(self.groups) + 1)
        lower = max(self.lower, lower_bound(counts[winner], draws, each))
        upper = max(
            (upper_bound(sum(counts[one] for one in group), draws, each) for group in self.groups), default=1.0
        )
        return Bounds(self.groups, lower, min(self.upper, upper, 1 - lower))


@dataclass(frozen=True)
class Certificates:
    """The certificates of a batch; radius -1 where it abstains."""

    prediction: Int[Tensor, " b"]
    counts: Int[Tensor, "b classes"]
    """Estimation draws, or cells, that voted for each class."""
    lower_bound: Float[Tensor, " b"]
    """Of the probability that a mask chooses the prediction; of partitions its fraction of the votes."""
    runner_up: Float[Tensor, " b"]
    """Upper bound of the probability of every other class; of partitions the second's fraction."""
    radius: Int[Tensor, " b"]

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
    looks = settings.schedule()
    with evaluation_mode(model):
        model.reseed(selection_seed)
        selected = count_votes(model, images, settings.selection, settings.max_batch)
        winners = selected.argmax(1).tolist()
        bounds = [Bounds(rivals(row, winner)) for row, winner in zip(selected.tolist(), winners, strict=True)]

        def radius_of(number: int, row: Sequence[int], alpha: float) -> tuple[Bounds, int]:
            found = bounds[number].tightened(row, winners[number], alpha)
            radius = certified_radius(found.lower, p, entries, pixels, found.upper)
            return found, -1 if radius is None else radius

        model.reseed(estimation_seed)
        counts = torch.zeros_like(selected)
        radii, active = [-1] * len(images), list(range(len(images)))
        done = 0
        for draws, alpha in looks:
            counts[active] += count_votes(model, images[active], draws - done, settings.max_batch)
            done, unsettled = draws, []
            for number, row in zip(active, counts[active].tolist(), strict=True):
                # If the remaining draws fell like those so far, would the radius be larger?
                scaled = [count * settings.estimation // draws for count in row]
                _, expected = radius_of(number, scaled, looks[-1][1])
                bounds[number], radii[number] = radius_of(number, row, alpha)
                if expected > radii[number]:
                    unsettled.append(number)
            active = unsettled
            if not active:
                break
    return Certificates(
        torch.tensor(winners),
        counts.cpu(),
        torch.tensor([one.lower for one in bounds], dtype=torch.float64),
        torch.tensor([one.upper for one in bounds], dtype=torch.float64),
        torch.tensor(radii),
    )


@torch.no_grad()
def count_votes(
    model: Callable[[Tensor], Tensor], images: Float[Tensor, "b c h w"], draws: int, max_batch: int = MAX_BATCH
) -> Int[Tensor, "b classes"]:
    """How many of `draws` draws of the model predict each class; passes hold at most `max_batch` images."""
    if draws < 1:
        raise ConfigurationError(f"expected draws >= 1, got {draws}")
    parts = []
    for part in images.split(max_batch):
        together = max(1, max_batch // len(part))
        total: Tensor | None = None
        for done in range(0, draws, together):
            count = min(together, draws - done)
            logits = model(part.repeat(count, 1, 1, 1)).unflatten(0, (count, len(part)))
            votes = torch.nn.functional.one_hot(require_numbers(logits).argmax(-1), logits.shape[-1]).sum(0)
            total = votes if total is None else total + votes
        assert total is not None
        parts.append(total)
    return torch.cat(parts)


def partition_certificates(
    model: MENet,
    images: Float[Tensor, "b c h w"],
    partitions: Int[Tensor, "r h w"],
    max_batch: int = MAX_BATCH,
) -> Certificates:
    """Certify a batch by the votes on each cell of each partition, in evaluation mode.

    Entry (r, i, j) of `partitions` is the cell of pixel (i, j) in partition r, counted from 0.
    """
    _require_masks(model)
    cells = int(partitions.max()) + 1
    shown = torch.stack([partitions == cell for cell in range(cells)], 1).flatten(0, 1).to(images.device)
    choices = []
    classes = 0
    with evaluation_mode(model), torch.no_grad():
        for part in images.split(max_batch):
            votes = []
            for masks in shown.split(max(1, max_batch // len(part))):
                repeated = part.repeat(len(masks), 1, 1, 1)
                mask = masks.repeat_interleave(len(part), 0)[:, None].expand(repeated.shape)
                logits = require_numbers(model(repeated, mask).unflatten(0, (len(masks), len(part))))
                votes.append(logits.argmax(-1))
                classes = logits.shape[-1]
            choices.append(torch.cat(votes).T.unflatten(1, (len(partitions), cells)))
    chosen = torch.cat(choices).cpu()
    counts = torch.stack([(chosen == one).sum((1, 2)) for one in range(classes)], 1)
    prediction = counts.argmax(1)
    radius = partition_radius(chosen, prediction, classes, partitions.cpu())
    fractions = (counts / chosen[0].numel()).double()
    second = fractions.scatter(1, prediction[:, None], 0).amax(1)
    return Certificates(prediction, counts, fractions.amax(1), second, radius)


def partition_radius(
    chosen: Int[Tensor, "b r t"], prediction: Int[Tensor, " b"], classes: int, partitions: Int[Tensor, "r h w"]
) -> Int[Tensor, " b"]:
    """The most pixels that can be perturbed without changing the vote, from the class `chosen` by each cell."""
    radius = torch.full_like(prediction, partitions[0].numel())
    cell_of = partitions.flatten(1)[None].expand(len(chosen), -1, -1)
    winning = chosen == prediction[:, None, None]
    for rival in range(classes):
        for_rival = chosen == rival
        turned = 1 + winning.int() - for_rival.int()
        weights = turned.gather(2, cell_of).sum(1)
        lost = weights.sort(1, descending=True).values.cumsum(1)
        ahead = winning.sum((1, 2)) - for_rival.sum((1, 2))
        # The sums never fall, so counting those below is finding the last of them.
        kept = (lost < ahead[:, None]).sum(1)
        radius = torch.where(prediction == rival, radius, radius.minimum(kept))
    return radius


def observation(model: nn.Module, channels: int) -> tuple[float, int]:
    """The probability that an entry is observed, and the number of independently masked entries of a pixel."""
    known = _require_masks(model)
    return known.mean_p, channels if known.mask == "entries" else 1


def certify(
    model: MENet,
    dataset: Any,
    folder: str | os.PathLike[str],
    settings: CertificateSettings = CertificateSettings(),  # noqa: B008 (frozen)
    *,
    source: str = "",
    device: torch.device | str = "cpu",
    worker: Worker | None = None,
) -> Records:
    """Certify a range of a dataset into rows that are resumed and shared like those of an evaluation.

    The model is moved to `device`, used in evaluation mode, and left in the mode it was in.
    """
    worker = worker or Worker.from_environment()
    model.to(device)
    examples = range_of(settings.start, settings.stop, len(dataset))
    warn_of_missing_classes(dataset, examples.start, examples.stop)
    batch_size = settings.batch_size or min(BATCH_SIZE, len(examples))
    own = [index for index in examples if index // batch_size % worker.world == worker.rank]
    p, entries = observation(model, dataset.images.shape[1])
    evaluation = {
        "label": LABEL,
        "model": provenance.of_model(model),
        "dataset": provenance.of_dataset(dataset),
        **asdict(settings),
        "start": examples.start,
        "stop": examples.stop,
        "batch_size": batch_size,
        "p": p,
        "entries": entries,
    }
    partitions = None
    if settings.partitions is not None:
        evaluation["cells"] = cells = round(1 / p) if p else 0
        height, width = dataset.images.shape[2:]
        generator = torch.Generator().manual_seed(batch_seed(settings.seed, "selection", LABEL, 0))
        partitions = masking.partitions(settings.partitions, cells, (height, width), generator)
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
            began = time.perf_counter()
            if partitions is None:
                found = certificates(model, images.to(device), settings, *seeds.values())
            else:
                found = partition_certificates(model, images.to(device), partitions, settings.max_batch)
            seconds = round((time.perf_counter() - began) / len(images), 6)
            rows: list[Row] = [
                {
                    "index": index,
                    "label": int(labels[index - first]),
                    "prediction": int(found.prediction[index - first]),
                    "votes": int(found.votes[index - first]),
                    "counts": found.counts[index - first].tolist(),
                    "lower_bound": float(found.lower_bound[index - first]),
                    "runner_up": float(found.runner_up[index - first]),
                    "radius": int(found.radius[index - first]),
                    "seconds": seconds,
                    **({"seeds": seeds} if partitions is None else {}),
                }
                for index in missing
            ]
            shard.append(rows)
            progress.advance(len(rows), radius=sum(max(0, row["radius"]) for row in rows) / len(rows))
        return records_of(shard, folder, LABEL, worker)


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


def certificate_summary(records: Records, confidence: float = CONFIDENCE) -> CertificateSummary:
    """Clean accuracy of the vote, median certified radius, abstentions and cost."""
    certified, rows = _certified(records), records.rows
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
            f"expected a MENet that draws fresh masks, got a {type(model).__name__} without; "
            "certify the defense itself"
        )
    return model

"""A certificate that comes free with voting: no perturbation of a few pixels can change the vote.

The vote of a ME-Net is the class that most masks choose. A mask shows each entry of the image's matrix with
probability p, independently. The estimator and the network see the image only through the entries shown: all
estimators fill the others with zeros first, and Soft-Impute's shrinkage is computed from the filled matrix.

Let an adversary perturb ρ pixels, k entries in all. A mask that shows none of the k leads to the same prediction
as before; such a mask has probability (1−p)^k. If a mask chose class A with probability p_A before, then masks
that choose A and show no perturbed entry have probability at least p_A − (1 − (1−p)^k), since masks that do show
one have 1 − (1−p)^k together; and they still choose A. So A keeps more than half of the vote, under
every such perturbation, if

    p_A − (1 − (1−p)^k) > 1/2.

With joint channels a pixel is C entries, masked independently: k = C·ρ. With separate channels the mask is over
pixels: k = ρ. The probability p_A is unknown, but bounded from below by Clopper–Pearson from independent masks,
not those that selected A (Cohen et al. 2019); where the bound is not above 1/2 the certificate abstains. Each
certificate is wrong with probability at most alpha, and is about the vote over all masks.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.attacks.eot import MAX_BATCH
from menet.defense import MENet
from menet.distributed import Worker
from menet.errors import ConfigurationError, RecordError
from menet.evaluation import provenance
from menet.evaluation.accuracy import CONFIDENCE, Accuracy, clopper_pearson, lower_bound
from menet.evaluation.records import Records, Row, Shard
from menet.evaluation.runner import range_of, records_of, remaining, worker_title
from menet.evaluation.scoring import evaluation_mode, require_positive, score
from menet.progress import reporting
from menet.seeding import batch_seed

LABEL = "certificate"
BATCH_SIZE = 20


@dataclass(frozen=True)
class CertificateSettings:
    """Settings of a certification."""

    start: int = 0
    stop: int | None = None
    """One past the last example; None for all."""
    batch_size: int | None = None
    """Examples certified together; None for 20, or fewer where fewer are asked for."""
    selection: int = 100
    """Masks that select the class."""
    estimation: int = 1000
    """Masks that bound its probability of winning."""
    alpha: float = 0.001
    """The probability with which a certificate may be wrong."""
    seed: int = 0
    max_batch: int = MAX_BATCH
    """Largest number of images in one forward pass."""

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "selection", "estimation", "max_batch")
        if not 0 < self.alpha < 0.5:
            raise ConfigurationError(f"expected 0 < alpha < 0.5, got {self.alpha}")


def certified_radius(probability: float, p: float, entries: int = 1, pixels: int | None = None) -> int | None:
    """The most pixels that can be perturbed without changing the vote; None (abstain) unless probability > 1/2.

    `probability` is a lower bound on that of the winning class, `p` the probability that an entry is observed,
    `entries` the number of independently masked entries of a pixel. At most `pixels`, the size of the image.
    """
    if not (0 <= probability <= 1 and 0 <= p <= 1):
        raise ConfigurationError(f"expected probabilities in [0, 1], got {probability} and p {p}")
    if not probability > 0.5:
        return None
    # Hidden with more than this probability, the changed entries leave the winner more than half of the vote.
    needed = 1.5 - probability
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


@dataclass(frozen=True)
class Certificates:
    """The certificates of a batch; radius -1 where it abstains."""

    prediction: Int[Tensor, " b"]
    votes: Int[Tensor, " b"]
    """Estimation draws that chose the prediction."""
    lower_bound: Float[Tensor, " b"]
    """Of the probability that a mask chooses the prediction."""
    radius: Int[Tensor, " b"]


def certificates(
    model: MENet,
    images: Float[Tensor, "b c h w"],
    settings: CertificateSettings = CertificateSettings(),  # noqa: B008 (frozen)
    selection_seed: int = 0,
    estimation_seed: int = 1,
) -> Certificates:
    """Certify a batch, in evaluation mode; the two seeds must differ, so that the masks are independent."""
    if selection_seed == estimation_seed:
        raise ConfigurationError(f"expected two different seeds, got {selection_seed} twice")
    p, entries = observation(model, images.shape[1])
    unknown = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    with evaluation_mode(model):
        model.reseed(selection_seed)
        chosen = score(model, images, unknown, settings.selection, settings.max_batch).predictions.mode(0).values
        model.reseed(estimation_seed)
        draws = score(model, images, unknown, settings.estimation, settings.max_batch).predictions
    votes = (draws == chosen).sum(0)
    bounds = [lower_bound(count, settings.estimation, settings.alpha) for count in votes.tolist()]
    pixels = images.shape[-2] * images.shape[-1]
    radii = [certified_radius(bound, p, entries, pixels) for bound in bounds]
    return Certificates(
        chosen,
        votes,
        torch.tensor(bounds, dtype=torch.float64),
        torch.tensor([-1 if radius is None else radius for radius in radii]),
    )


def observation(model: nn.Module, channels: int) -> tuple[float, int]:
    """The probability that an entry is observed, and the number of independently masked entries of a pixel."""
    if not isinstance(model, MENet):
        raise ConfigurationError(
            f"expected a MENet that draws fresh masks, got a {type(model).__name__} without; "
            "certify the defense itself"
        )
    return model.mean_p, 1 if model.channels == "separate" else channels


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
    made = {"source": source, **provenance.of_machine(device)}
    with (
        Shard(folder, evaluation, made, worker.rank) as shard,
        reporting(worker_title(LABEL, worker), len(own)) as progress,
    ):
        progress.advance(len(shard.done.intersection(own)))
        for first, missing in remaining(own, batch_size, shard.done):
            images, labels = dataset.batch(slice(first, min(first + batch_size, len(dataset))))
            seeds = {
                "selection": batch_seed(settings.seed, "selection", LABEL, first),
                "estimation": batch_seed(settings.seed, "estimation", LABEL, first),
            }
            began = time.perf_counter()
            found = certificates(model, images.to(device), settings, *seeds.values())
            seconds = round((time.perf_counter() - began) / len(images), 6)
            rows: list[Row] = [
                {
                    "index": index,
                    "label": int(labels[index - first]),
                    "prediction": int(found.prediction[index - first]),
                    "votes": int(found.votes[index - first]),
                    "lower_bound": float(found.lower_bound[index - first]),
                    "radius": int(found.radius[index - first]),
                    "seconds": seconds,
                    "seeds": seeds,
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
    if not records.rows:
        raise RecordError("expected at least one row to compute an accuracy from, got none")
    certified = [row["radius"] if row["prediction"] == row["label"] else -1 for row in records.rows]
    found = {}
    for radius in range(max(certified) + 2) if radii is None else radii:
        count = sum(one >= radius for one in certified)
        low, high = clopper_pearson(count, len(certified), confidence)
        found[radius] = Accuracy(
            "clean",
            "certified",
            1,
            count / len(certified),
            low,
            high,
            len(certified),
            "clopper-pearson",
            confidence,
        )
    return found

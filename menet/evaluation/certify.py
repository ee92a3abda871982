"""A certificate that comes free with voting: no change of a few pixels can turn the vote.

The vote of a ME-Net is the class that most masks choose. A mask shows each entry of the image's matrix with
probability p, independently. The estimator and the network see the image only through the entries shown: all
estimators fill the others with zeros first, and Soft-Impute's shrinkage is computed from the filled matrix.

Let an adversary change ρ pixels, k entries in all. Of a mask that shows none of the k, the prediction is what it
was; such a mask has probability (1−p)^k. If class A had the share p_A of all masks before, then the masks that
choose A and show no changed entry have at least p_A − (1 − (1−p)^k), since masks that do show one have
1 − (1−p)^k together, and they still choose A. So A keeps more than half of the vote, whatever was changed, if

    p_A − (1 − (1−p)^k) > 1/2.

With joint channels a pixel is C entries, masked independently: k = C·ρ. With separate channels the mask is of
pixels: k = ρ. The share p_A is not known, but bounded from below by Clopper–Pearson from independent masks, not
those by which A was chosen (Cohen et al. 2019); where the bound is not above 1/2 the certificate abstains. Each
example's certificate is wrong with probability at most alpha, and speaks of the vote over all masks.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet import seeding
from menet.attacks.eot import ROWS
from menet.defense import MENet
from menet.distributed import Worker
from menet.errors import ConfigurationError, RecordError
from menet.evaluation import description
from menet.evaluation.accuracy import Accuracy
from menet.evaluation.batches import range_of, work_through
from menet.evaluation.intervals import CONFIDENCE, clopper_pearson, lower_bound
from menet.evaluation.records import Records, Row, Shard, read, shard_path, shards
from menet.evaluation.scoring import score

PURPOSES: tuple[seeding.Purpose, seeding.Purpose] = ("selection", "estimation")

LABEL = "certificate"


@dataclass(frozen=True)
class CertificateSettings:
    """How certificates are made."""

    start: int = 0
    stop: int | None = None
    """One past the last example; None for all."""
    batch: int = 20
    selection: int = 100
    """Masks by which the class is chosen."""
    estimation: int = 1000
    """Masks by which its share of the vote is bounded."""
    alpha: float = 0.001
    """How likely a certificate may be wrong."""
    seed: int = 0
    rows: int = ROWS
    """Most images in one forward pass."""

    def __post_init__(self) -> None:
        for name in ("batch", "selection", "estimation", "rows"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 < self.alpha < 0.5:
            raise ConfigurationError(f"alpha is {self.alpha}; accepted are numbers between 0 and 0.5")


def certified_radius(share: float, p: float, entries: int = 1, pixels: int | None = None) -> int | None:
    """The most pixels whose change cannot turn the vote; None (abstain) where `share` is not above 1/2.

    `share` is a lower bound of the winner's share of the vote, `p` the probability that an entry is observed,
    `entries` the independently masked entries of a pixel. At most `pixels`, the size of the image.
    """
    if not (0 <= share <= 1 and 0 <= p <= 1):
        raise ConfigurationError(f"share is {share} and p is {p}; accepted are numbers from 0 to 1")
    if not share > 0.5:
        return None
    # Unseen with more than this probability, the changed entries leave the winner more than half of the vote.
    needed = 1.5 - share
    if p == 0 or pixels == 0:
        if pixels is None:
            raise ConfigurationError("p is 0, so that every radius holds: give the number of pixels")
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
    """Estimation masks that chose the prediction."""
    share: Float[Tensor, " b"]
    radius: Int[Tensor, " b"]


def certificates(
    model: MENet,
    images: Float[Tensor, "b c h w"],
    settings: CertificateSettings = CertificateSettings(),  # noqa: B008 (frozen)
    selection_seed: int = 0,
    estimation_seed: int = 1,
) -> Certificates:
    """Certify a batch; the two seeds must differ, or the bound would be of masks that chose the class."""
    if selection_seed == estimation_seed:
        raise ConfigurationError(f"both seeds are {selection_seed}; accepted are two that differ")
    p, entries = observation(model, images.shape[1])
    unknown = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    model.reseed(selection_seed)
    chosen = score(model, images, unknown, settings.selection, settings.rows).predictions.mode(0).values
    model.reseed(estimation_seed)
    draws = score(model, images, unknown, settings.estimation, settings.rows).predictions
    votes = (draws == chosen).sum(0)
    shares = [lower_bound(count, settings.estimation, settings.alpha) for count in votes.tolist()]
    pixels = images.shape[-2] * images.shape[-1]
    radii = [certified_radius(share, p, entries, pixels) for share in shares]
    return Certificates(
        chosen,
        votes,
        torch.tensor(shares, dtype=torch.float64),
        torch.tensor([-1 if radius is None else radius for radius in radii]),
    )


def observation(model: nn.Module, channels: int) -> tuple[float, int]:
    """The probability that an entry is observed, and how many entries a pixel has that are masked alone."""
    # A view under one mask (`MENet.under`) has another `preprocess` of its own.
    if not isinstance(model, MENet) or "preprocess" in vars(model):
        raise ConfigurationError(
            f"model is a {type(model).__name__} without fresh masks; certificates need a MENet that draws its own"
        )
    if model.training:
        raise ConfigurationError("model is in training mode, where each image has another p; call model.eval()")
    return model.mean_p, 1 if model.channels == "separate" else channels


def certify(
    model: MENet,
    dataset: Any,
    folder: str | os.PathLike[str],
    settings: CertificateSettings = CertificateSettings(),  # noqa: B008 (frozen)
    *,
    source: str = "",
    device: torch.device | str = "cpu",
    place: Worker | None = None,
) -> Records:
    """Certify a range of a dataset into rows that can be killed, continued and shared like an evaluation's."""
    place = place or Worker.from_environment()
    model.eval().to(device)
    examples = range_of(settings.start, settings.stop, len(dataset))
    p, entries = observation(model, dataset.images.shape[1])
    evaluation = {
        "label": LABEL,
        "model": description.of_model(model),
        "dataset": description.of_dataset(dataset),
        **asdict(settings),
        "start": examples.start,
        "stop": examples.stop,
        "p": p,
        "entries": entries,
    }

    def make(start: int, stop: int) -> list[Row]:
        first = start - start % settings.batch
        images, labels = dataset.batch(slice(first, min(first + settings.batch, len(dataset))))
        used = {name: seeding.batch_seed(settings.seed, name, LABEL, first) for name in PURPOSES}
        began = time.perf_counter()
        found = certificates(model, images.to(device), settings, *used.values())
        seconds = round((time.perf_counter() - began) / len(images), 6)
        return [
            {
                "index": first + place_in,
                "label": int(labels[place_in]),
                "prediction": int(found.prediction[place_in]),
                "votes": int(found.votes[place_in]),
                "share": float(found.share[place_in]),
                "radius": int(found.radius[place_in]),
                "seconds": seconds,
                "seeds": used,
            }
            for place_in in range(start - first, stop - first)
        ]

    made = {"source": source, **description.of_machine(device)}
    with Shard(shard_path(folder, LABEL, place.rank), evaluation, made) as shard:
        work_through(examples, settings.batch, make, shard, Path(folder), LABEL, place, _certified)
    return read(*shards(folder, LABEL), damaged=place.world > 1)


def certified_accuracies(
    records: Records, radii: Sequence[int] | None = None, confidence: float = CONFIDENCE
) -> dict[int, Accuracy]:
    """At each radius, the share of examples whose vote is right and cannot be turned by so many pixels.

    Without `radii`: every radius up to the first at which nothing is certified.
    """
    if not records.rows:
        raise RecordError("there are no rows to take an accuracy from")
    right = [row["radius"] if row["prediction"] == row["label"] else -1 for row in records.rows]
    found = {}
    for radius in range(max(right) + 2) if radii is None else radii:
        count = sum(one >= radius for one in right)
        low, high = clopper_pearson(count, len(right), confidence)
        found[radius] = Accuracy(
            "clean", "certified", 1, count / len(right), low, high, len(right), "clopper-pearson", confidence
        )
    return found


def _certified(rows: list[Row]) -> dict[str, float | str]:
    return {"radius": sum(max(0, row["radius"]) for row in rows) / len(rows)}

"""Certificates that come free with voting: no perturbation of a few pixels can change the vote.

A ME-Net's classifier sees an image only through the entries that a mask shows: all estimators fill the others
with zeros first, and an ablation shows nothing else. Let an adversary perturb ρ pixels, in any way. A mask that
shows none of them leads to the same prediction as before; what the others lead to is the adversary's choice.

How votes decide is in `votes`, with the proof and the radii for random masks; those for partitions are in
`partitions`, attacks on both in `sandwich`. Here a dataset is certified into records, and records become
certified accuracies.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from menet import masks as masking
from menet.data.dataset import warn_of_missing_classes
from menet.defense import MENet
from menet.distributed import Worker
from menet.errors import ConfigurationError, RecordError
from menet.evaluation import provenance
from menet.evaluation.accuracy import CONFIDENCE, Accuracy, clopper_pearson
from menet.evaluation.certify.partitions import partition_certificates
from menet.evaluation.certify.sandwich import PartitionVote, fewest_pixels
from menet.evaluation.certify.votes import (
    LABEL,
    Certificates,
    CertificateSettings,
    Decision,
    certificates,
    certified_radius,
    observation,
)
from menet.evaluation.records import Records, Row, Shard
from menet.evaluation.runner import range_of, records_of, remaining, worker_title
from menet.models import Network
from menet.progress import reporting
from menet.seeding import batch_seed
from menet.training.config import autocast, number_type

__all__ = [
    "LABEL",
    "CertificateSettings",
    "CertificateSummary",
    "Certificates",
    "Decision",
    "PartitionVote",
    "certificate_summary",
    "certificates",
    "certified_accuracies",
    "certified_radius",
    "certify",
    "fewest_pixels",
    "observation",
    "partition_certificates",
    "public_partitions",
]

BATCH_SIZE = 20


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
    precision = number_type(settings.precision, torch.device(device))
    # Records that do not say so are of float32, as all older ones are.
    del evaluation["precision"]
    if precision != torch.float32:
        evaluation["precision"] = str(precision).removeprefix("torch.")
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
            with autocast(precision, torch.device(device)):
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

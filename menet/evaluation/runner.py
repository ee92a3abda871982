"""Attack, score on fresh masks, and write rows: an evaluation that can be killed at any time and continued."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from menet import seeding
from menet.attacks import AttackedBatch, AttackResult, attack_range
from menet.attacks.eot import ROWS
from menet.distributed import Worker
from menet.errors import ConfigurationError
from menet.evaluation import description
from menet.evaluation.attack_words import Assignment
from menet.evaluation.batches import range_of, work_through
from menet.evaluation.pictures import portray
from menet.evaluation.records import Records, Row, Shard, read, shard_path, shards
from menet.evaluation.scoring import answers_alike, score
from menet.seeding import reseed


@dataclass(frozen=True)
class Settings:
    """How an evaluation is made; together with model, data and attack it decides every row but its seconds."""

    start: int = 0
    stop: int | None = None
    """One past the last example; None for all."""
    batch: int = 100
    masks: int = 100
    """Fresh masks that every image is scored on; 1 is enough, and taken, for a model that answers alike."""
    restart_masks: int = 1
    """Fresh masks for the outcome of each restart; the paper judges each on one."""
    seed: int = 0
    rows: int = ROWS
    """Most images in one forward pass."""
    pictures: int = 0
    """Keep the images of the first so many examples in their rows."""
    trace: bool = False
    """Keep each example's loss at every step of the attack."""

    def __post_init__(self) -> None:
        for name in ("batch", "masks", "restart_masks", "rows"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be 1 or more")


def evaluate(
    model: nn.Module,
    dataset: Any,
    assignments: Sequence[Assignment],
    folder: str | os.PathLike[str],
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    *,
    source: str = "",
    device: torch.device | str = "cpu",
    place: Worker | None = None,
) -> dict[str, Records]:
    """Make all rows that are not in `folder` yet, and return the records of each attack, by label.

    Rows are appended batch by batch. What a batch holds depends on its place and the seed alone, so a killed
    evaluation that is started again ends with the rows of one that was never killed. A process of several
    returns what is there, without waiting for the others.
    """
    place = place or Worker.from_environment()
    if len({assignment.label for assignment in assignments}) < len(assignments):
        raise ConfigurationError("attacks has the same words twice; each makes rows of its own")
    model.eval().to(device)
    range_of(settings.start, settings.stop, len(dataset))
    masks = 1 if answers_alike(model, dataset.batch(slice(0, 8))[0].to(device)) else settings.masks
    made = {"source": source, **description.of_machine(device)}
    clean: dict[int, list[dict[str, Any]]] = {}
    records = {}
    for assignment in assignments:
        evaluation = _evaluation(model, dataset, assignment, settings, masks)
        with Shard(shard_path(folder, assignment.label, place.rank), evaluation, made) as shard:
            work = _Work(model, dataset, assignment, settings, masks, torch.device(device), clean)
            work.run(shard, Path(folder), place)
        # Other processes may be writing: what of theirs is whole counts, the rest is missing for now.
        records[assignment.label] = read(*shards(folder, assignment.label), damaged=place.world > 1)
    return records


def _evaluation(
    model: nn.Module, dataset: Any, assignment: Assignment, settings: Settings, masks: int
) -> dict[str, Any]:
    examples = range_of(settings.start, settings.stop, len(dataset))
    threat = getattr(assignment.attack, "threat", None)
    return {
        "label": assignment.label,
        "model": description.of_model(model),
        "dataset": description.of_dataset(dataset),
        "start": examples.start,
        "stop": examples.stop,
        "batch": settings.batch,
        "attack": description.of_attack(assignment.attack),
        "gradient": assignment.gradient,
        "threat": description.plain(asdict(threat)) if threat is not None else None,
        "scoring": {"masks": masks, "restart_masks": settings.restart_masks, "rows": settings.rows},
        "seed": settings.seed,
        "pictures": settings.pictures,
        "trace": settings.trace,
    }


@dataclass(frozen=True)
class _Work:
    """One attack on one range of examples."""

    model: nn.Module
    dataset: Any
    assignment: Assignment
    settings: Settings
    masks: int
    device: torch.device
    clean: dict[int, list[dict[str, Any]]]
    """Answers for clean images by batch, the same for every attack."""

    def run(self, shard: Shard, folder: Path, place: Worker) -> None:
        settings = self.settings
        examples = range_of(settings.start, settings.stop, len(self.dataset))
        work_through(
            examples, settings.batch, self._rows, shard, folder, self.assignment.label, place, _survivors
        )

    def _rows(self, start: int, stop: int) -> list[Row]:
        """The rows of the examples `start` to `stop`, which lie in one batch."""
        settings, label = self.settings, self.assignment.label
        first = start - start % settings.batch
        end = min(first + settings.batch, len(self.dataset))
        began = time.perf_counter()
        (outcome,) = self._attacked(first, end)
        seconds = (time.perf_counter() - began) / (end - first)
        images, labels = (part.to(self.device) for part in self.dataset.batch(slice(first, end)))
        used = {
            purpose: seeding.batch_seed(settings.seed, purpose, label, first) for purpose in ("attack", "scoring")
        }
        used["clean"] = seeding.batch_seed(settings.seed, "clean", "", first)
        if first not in self.clean:
            self.clean[first] = self._scored(images, labels, used["clean"])
        adversarial = self._scored(outcome.result.images, labels, used["scoring"])
        extras = self._extras(outcome.result, images, labels, first)
        change = _norms(outcome.result.images, images)
        rows: list[Row] = []
        for place in range(start - first, stop - first):
            rows.append(
                {
                    "index": first + place,
                    "label": int(labels[place]),
                    "clean": self.clean[first][place],
                    "adversarial": adversarial[place],
                    "change": change[place],
                    "queries": int(outcome.result.queries[place]),
                    "failed": bool(outcome.result.failed[place]) if outcome.result.failed is not None else False,
                    "seconds": round(seconds, 6),
                    "seeds": used,
                    **extras[place],
                }
            )
        return rows

    def _attacked(self, first: int, end: int) -> Iterator[AttackedBatch]:
        if self.assignment.source is not None:
            reseed(
                self.assignment.source,
                seeding.batch_seed(self.settings.seed, "source", self.assignment.label, first),
            )
        return attack_range(
            self.assignment.attack,
            self.assignment.model,
            self.dataset,
            first,
            end,
            batch=self.settings.batch,
            seed=seeding.evaluation_seed(self.settings.seed, "attack", self.assignment.label),
            trace=self.settings.trace,
            device=self.device,
        )

    def _scored(self, images: Tensor, labels: Tensor, seed: int) -> list[dict[str, Any]]:
        reseed(self.model, seed)
        return score(self.model, images, labels, self.masks, self.settings.rows).rows()

    def _extras(self, result: AttackResult, images: Tensor, labels: Tensor, first: int) -> list[Row]:
        """What only some rows have: restarts, trace, pictures."""
        settings, label = self.settings, self.assignment.label
        extras: list[Row] = [{} for _ in images]
        if result.restarts is not None:
            reseed(self.model, seeding.batch_seed(settings.seed, "restarts", label, first))
            fooled = torch.stack(
                [
                    (score(self.model, one, labels, settings.restart_masks, settings.rows).ranks > 0).sum(0)
                    for one in result.restarts
                ]
            )
            for extra, counts in zip(extras, fooled.T.tolist(), strict=True):
                extra["restarts"] = counts
        if result.trace is not None:
            for extra, losses in zip(extras, result.trace.T.tolist(), strict=True):
                extra["trace"] = [float(f"{loss:.6g}") for loss in losses]
        kept = max(0, min(settings.start + settings.pictures - first, len(images)))
        if kept:
            seed = seeding.batch_seed(settings.seed, "pictures", label, first)
            portraits = portray(self.model, images[:kept], result.images[:kept], seed)
            for extra, portrait in zip(extras, portraits, strict=False):
                extra["pictures"] = portrait
        return extras


def _survivors(rows: list[Row]) -> dict[str, float | str]:
    return {"accuracy": sum(row["adversarial"]["ranks"][0] == 0 for row in rows) / len(rows)}


def _norms(images: Tensor, origin: Tensor) -> list[dict[str, float]]:
    """How far each image was changed: linf and l2 in pixels of [0,1], l0 as the number of changed pixels."""
    change = images - origin
    flat = change.flatten(1)
    pixels = (change != 0).any(1).flatten(1).sum(1)
    return [
        {"linf": linf, "l2": l2, "l0": l0}
        for linf, l2, l0 in zip(
            flat.abs().amax(1).tolist(), flat.norm(dim=1).tolist(), pixels.tolist(), strict=True
        )
    ]

"""Attack a model, score it on fresh draws, and write one row per example; safe to interrupt and resume."""

import os
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.attacks import AttackResult
from menet.attacks.base import Model, is_deterministic
from menet.attacks.losses import MAX_BATCH
from menet.data.dataset import warn_of_missing_classes
from menet.distributed import Worker
from menet.errors import ConfigurationError
from menet.evaluation import provenance
from menet.evaluation.attack_spec import AttackRun
from menet.evaluation.records import Records, Row, Shard, batch_size_of, read, shards
from menet.evaluation.snapshots import snapshot
from menet.preprocessed import evaluation_mode, in_bfloat16, require_numbers
from menet.progress import reporting
from menet.seeding import batch_seed, derive, reseed

BATCH_SIZE = 100


def require_positive(settings: Any, *names: str) -> None:
    """Refuse settings that are less than 1; None, for a default that is computed later, is fine."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"expected {name} >= 1, got {value}")


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation; with model, data and attack they determine every row but its seconds."""

    start: int = 0
    stop: int | None = None
    """One past the last example; None for all."""
    batch_size: int | None = None
    """Examples attacked together, in batches at multiples of it. None for that of the rows that are there, else
    about 100, or fewer where fewer are asked for, such that batches are of one size. A batch that the range cuts
    is attacked whole, so that its rows do not depend on the range."""
    draws: int = 100
    """Fresh random draws that score each image; a deterministic model is scored on 1."""
    restart_draws: int = 1
    """Fresh random draws that score each restart; the paper uses one."""
    seed: int = 0
    max_batch: int = MAX_BATCH
    """Largest number of images in one forward pass."""
    snapshots: int = 0
    """Keep the images of the first examples, this many, in their rows."""
    loss_history: bool = False
    """Keep each example's loss at every step of the attack."""
    bfloat16: bool = False
    """Attack a random model with its network in bfloat16, whose rounding is far below the noise of its draws.
    Scores are never rounded."""

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "draws", "restart_draws", "max_batch")
        if self.snapshots < 0:
            raise ConfigurationError(f"expected snapshots >= 0, got {self.snapshots}")


def evaluate(
    model: nn.Module,
    dataset: Any,
    attacks: Sequence[AttackRun],
    folder: str | os.PathLike[str],
    settings: EvaluationSettings = EvaluationSettings(),  # noqa: B008 (frozen)
    *,
    source: str = "",
    device: torch.device | str = "cpu",
    worker: Worker | None = None,
    views: Mapping[str, tuple[nn.Module, int]] | None = None,
) -> dict[str, Records]:
    """Write all rows that are not in `folder` yet, and return the records of each attack, by label.

    Rows are appended batch by batch. They depend only on the batch and the seed, so an evaluation that was
    interrupted and resumed ends with the same rows as one that was not. Models are moved to `device`, used in
    evaluation mode, and left in the mode they were in. Records of the same examples up to an earlier `stop` are
    extended. One process of several returns the rows that are there, without waiting for the others. Each of
    `views`, a module and a number of draws, scores the adversarial examples too, in the field `views` of rows.
    """
    worker = worker or Worker.from_environment()
    for run in attacks:
        if not isinstance(run, AttackRun):
            raise ConfigurationError(
                f"expected attacks as parse_attack('pgd', model, epsilon=8/255) returns them, got {run!r:.80}"
            )
    if len({run.label for run in attacks}) < len(attacks):
        raise ConfigurationError("expected attacks with different labels, got one twice")
    device = torch.device(device)
    examples = range_of(settings.start, settings.stop, len(dataset))
    warn_of_missing_classes(dataset, examples.start, examples.stop)
    kept = (batch_size_of(folder, run.label) for run in attacks)
    batch_size = settings.batch_size or next(filter(None, kept), None) or even(len(examples), BATCH_SIZE)
    own = [index for index in examples if index // batch_size % worker.world == worker.rank]
    models = [model, *(one for run in attacks for one in (run.model, run.source))]
    made = {"source": source, **provenance.of_machine(device)}
    records = {}
    with evaluation_mode(*models):
        for one in models:
            if isinstance(one, nn.Module):
                one.to(device)
        sample = dataset.batch(slice(0, 8))[0].to(device)
        deterministic = is_deterministic(model, sample)
        if deterministic and settings.bfloat16:
            raise ConfigurationError("expected a random model with bfloat16, got a deterministic one")
        draws = 1 if deterministic else settings.draws
        for view, _ in (views or {}).values():
            view.to(device).eval()
        work = _Evaluation(model, dataset, settings, examples, batch_size, draws, device, {}, views or {})
        for run in attacks:
            attacked = run.model if run.source is None else run.source
            run = replace(run, attack=run.attack.resolved(random=not is_deterministic(attacked, sample)))
            header = work.header(run)
            with (
                Shard(folder, header, made, worker.rank) as shard,
                reporting(worker_title(run.label, worker), len(own)) as progress,
            ):
                progress.skip(len(shard.done.intersection(own)))
                for first, missing in remaining(own, batch_size, shard.done):
                    rows = work.rows(run, first, missing)
                    shard.append(rows)
                    correct = sum(row["adversarial"]["ranks"][0] == 0 for row in rows)
                    progress.advance(len(rows), accuracy=correct / len(rows))
                records[run.label] = records_of(shard, folder, run.label, worker)
    return records


@dataclass(frozen=True)
class _Evaluation:
    """One model on one range of examples, under any attack."""

    model: nn.Module
    dataset: Any
    settings: EvaluationSettings
    examples: range
    batch_size: int
    draws: int
    device: torch.device
    clean: dict[int, list[dict[str, Any]]]
    """Scores of clean images by batch, which all attacks share."""
    views: Mapping[str, tuple[nn.Module, int]]

    def header(self, run: AttackRun) -> dict[str, Any]:
        """All that determines the rows of an attack."""
        settings, threat = self.settings, getattr(run.attack, "threat", None)
        return {
            "label": run.label,
            "model": provenance.of_model(self.model),
            "dataset": provenance.of_dataset(self.dataset),
            "start": self.examples.start,
            "stop": self.examples.stop,
            "batch_size": self.batch_size,
            "attack": provenance.of_attack(run.attack),
            "gradient": run.gradient,
            "fixed_draws": run.fixed_draws and run.fixed_draws.described(),
            "threat": provenance.plain(asdict(threat)) if threat is not None else None,
            "scoring": {
                "draws": self.draws,
                "restart_draws": settings.restart_draws,
                "max_batch": settings.max_batch,
                **({"views": {name: draws for name, (_, draws) in self.views.items()}} if self.views else {}),
            },
            "seed": settings.seed,
            "snapshots": settings.snapshots,
            "loss_history": settings.loss_history,
            **({"bfloat16": True} if settings.bfloat16 else {}),
        }

    def rows(self, run: AttackRun, first: int, wanted: Sequence[int]) -> list[Row]:
        """The rows of the examples `wanted`, which lie in the batch that begins at `first`."""
        batch = slice(first, min(first + self.batch_size, len(self.dataset)))
        images, labels = (part.to(self.device) for part in self.dataset.batch(batch))
        seeds = {
            "attack": batch_seed(self.settings.seed, "attack", run.label, first),
            "scoring": batch_seed(self.settings.seed, "scoring", run.label, first),
            "clean": batch_seed(self.settings.seed, "clean", "", first),
        }
        began = time.perf_counter()
        result = self._attack(run, images, labels, first, seeds["attack"])
        seconds = (time.perf_counter() - began) / len(images)
        if first not in self.clean:
            self.clean[first] = self._score(self.model, images, labels, seeds["clean"])
        frozen = run.fixed_draws is not None and run.fixed_draws.scored
        scored = run.model if frozen else self.model
        adversarial = self._score(scored, result.images, labels, seeds["scoring"])
        optional = self._optional(run, result, images, labels, first)
        perturbation = _norms(result.images, images)
        failed, unusable = _flags(result.failed, images), _flags(result.unusable_gradients, images)
        return [
            {
                "index": index,
                "label": int(labels[index - first]),
                "image": provenance.of_image(images[index - first]),
                "clean": self.clean[first][index - first],
                "adversarial": adversarial[index - first],
                "perturbation": perturbation[index - first],
                "queries": int(result.queries[index - first]),
                "failed": failed[index - first],
                "unusable_gradients": unusable[index - first],
                "seconds": round(seconds, 6),
                "seeds": seeds,
                **optional[index - first],
            }
            for index in wanted
        ]

    def _attack(self, run: AttackRun, images: Tensor, labels: Tensor, first: int, seed: int) -> AttackResult:
        if run.source is not None:
            reseed(run.source, batch_seed(self.settings.seed, "source", run.label, first))
        # Two streams: with one, a random start would follow the masks that the model is about to draw.
        reseed(run.model, derive(seed, 0))
        generator = torch.Generator().manual_seed(derive(seed, 1))
        precision = in_bfloat16(run.model, run.source) if self.settings.bfloat16 else nullcontext()
        with precision:
            return run.attack(
                run.model, images, labels, generator=generator, loss_history=self.settings.loss_history
            )

    def _score(self, model: Any, images: Tensor, labels: Tensor, seed: int) -> list[dict[str, Any]]:
        reseed(model, seed)
        return score(model, images, labels, self.draws, self.settings.max_batch).rows()

    def _optional(
        self, run: AttackRun, result: AttackResult, images: Tensor, labels: Tensor, first: int
    ) -> list[Row]:
        """The fields that only some rows have: cost in gradients, member, restarts, loss history, snapshots."""
        settings = self.settings
        found: list[Row] = [{} for _ in images]
        if result.gradients is not None:
            for row, count in zip(found, result.gradients.tolist(), strict=True):
                row["gradients"] = count
        if result.members is not None:
            for row, member in zip(found, result.members, strict=True):
                row["member"] = member
        if result.restarts is not None:
            reseed(self.model, batch_seed(settings.seed, "restarts", run.label, first))
            fooled = torch.stack(
                [
                    (score(self.model, one, labels, settings.restart_draws, settings.max_batch).ranks > 0).sum(0)
                    for one in result.restarts
                ]
            )
            for row, counts in zip(found, fooled.T.tolist(), strict=True):
                row["restarts"] = counts
        if result.loss_history is not None:
            for row, losses in zip(found, result.loss_history.T.tolist(), strict=True):
                row["loss_history"] = [float(f"{loss:.6g}") for loss in losses]
        for name, (view, draws) in self.views.items():
            reseed(view, batch_seed(settings.seed, "scoring", f"{run.label}|{name}", first))
            scores = score(view, result.images, labels, draws, settings.max_batch).rows()
            for row, one in zip(found, scores, strict=True):
                row.setdefault("views", {})[name] = one
        kept = max(0, min(settings.start + settings.snapshots - first, len(images)))
        if kept:
            seed = batch_seed(settings.seed, "pictures", run.label, first)
            taken = snapshot(self.model, images[:kept], result.images[:kept], seed)
            for row, one in zip(found, taken, strict=False):
                row["snapshots"] = one
        return found


def range_of(start: int, stop: int | None, length: int) -> range:
    """The examples `start` to `stop` (to the end if None) of `length`, at least one."""
    end = length if stop is None else stop
    if not 0 <= start < end <= length:
        raise ConfigurationError(f"expected 0 <= start < stop <= {length}, got start {start} and stop {end}")
    return range(start, end)


def even(count: int, most: int) -> int:
    """The size of batches, at most `most`, that divide `count` examples evenly: 150 are two batches of 75."""
    return -(-count // -(-count // most))


def remaining(examples: Sequence[int], batch_size: int, done: Container[int]) -> Iterator[tuple[int, list[int]]]:
    """The batches in which examples are not done: where each begins, and those examples.

    Batches lie at multiples of `batch_size` for every range.
    """
    missing = (index for index in examples if index not in done)
    for number, indices in groupby(missing, lambda index: index // batch_size):
        yield number * batch_size, list(indices)


def records_of(shard: Shard, folder: str | os.PathLike[str], label: str, worker: Worker) -> Records:
    """All rows that are there: those of `shard`, and what other processes have written meanwhile."""
    if worker.world == 1:
        return shard.records()
    # Others may be writing: their whole lines count, the rest is missing for now.
    return read(*shards(folder, label), damaged=True)


def worker_title(label: str, worker: Worker) -> str:
    """How progress is titled, with the rank where there are several processes."""
    return label + (f" [{worker.rank}]" if worker.world > 1 else "")


def _flags(found: Tensor | None, images: Tensor) -> list[bool]:
    """One flag per image; all False where an attack has none."""
    return [False] * len(images) if found is None else [bool(flag) for flag in found.tolist()]


def _norms(images: Tensor, origin: Tensor) -> list[dict[str, float]]:
    """The norms of each perturbation: linf and l2 in pixels of [0,1], l0 as the number of perturbed pixels."""
    perturbation = images - origin
    flat = perturbation.flatten(1)
    pixels = (perturbation != 0).any(1).flatten(1).sum(1)
    return [
        {"linf": linf, "l2": l2, "l0": l0}
        for linf, l2, l0 in zip(
            flat.abs().amax(1).tolist(), flat.norm(dim=1).tolist(), pixels.tolist(), strict=True
        )
    ]


@dataclass(frozen=True)
class Scores:
    """The predictions of several draws for each image; ranks count from 0, the rank of a predicted label."""

    predictions: Int[Tensor, "draws b"]
    ranks: Int[Tensor, "draws b"]
    """The position of the label when classes are sorted by their logits."""
    mean_prediction: Int[Tensor, " b"]
    mean_rank: Int[Tensor, " b"]
    mean_probability: Float[Tensor, " b"]
    """The label's probability by the softmax of the mean logits."""

    @property
    def accuracy(self) -> float:
        """The fraction of draws and images that are classified correctly."""
        return (self.ranks == 0).double().mean().item()

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary of plain values per image, as records hold it."""
        return [
            {
                "predictions": predictions,
                "ranks": ranks,
                "mean": {"prediction": prediction, "rank": rank, "probability": probability},
            }
            for predictions, ranks, prediction, rank, probability in zip(
                self.predictions.T.tolist(),
                self.ranks.T.tolist(),
                self.mean_prediction.tolist(),
                self.mean_rank.tolist(),
                self.mean_probability.tolist(),
                strict=True,
            )
        ]


@torch.no_grad()
def score(
    model: Model,
    images: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    draws: int,
    max_batch: int = MAX_BATCH,
) -> Scores:
    """Classify each image `draws` times; draws share forward passes of at most `max_batch` images.

    The model draws from its own generator; the caller seeds it.
    """
    if draws < 1 or max_batch < 1:
        raise ConfigurationError(f"expected draws >= 1 and max_batch >= 1, got {draws} and {max_batch}")
    parts = [
        _score(model, images[start : start + max_batch], labels[start : start + max_batch], draws, max_batch)
        for start in range(0, len(images), max_batch)
    ]
    if len(parts) == 1:
        return parts[0]
    return Scores(
        predictions=torch.cat([part.predictions for part in parts], 1),
        ranks=torch.cat([part.ranks for part in parts], 1),
        mean_prediction=torch.cat([part.mean_prediction for part in parts]),
        mean_rank=torch.cat([part.mean_rank for part in parts]),
        mean_probability=torch.cat([part.mean_probability for part in parts]),
    )


def _score(model: Model, images: Tensor, labels: Tensor, draws: int, max_batch: int) -> Scores:
    together = max(1, max_batch // max(1, len(images)))
    predictions, ranks = [], []
    total: Tensor | None = None
    for done in range(0, draws, together):
        count = min(together, draws - done)
        logits = model(images.repeat(count, 1, 1, 1)).unflatten(0, (count, len(images))).double()
        require_numbers(logits)
        predictions.append(logits.argmax(-1))
        ranks.append(_ranks(logits, labels))
        total = logits.sum(0) if total is None else total + logits.sum(0)
    assert total is not None
    mean = total / draws
    return Scores(
        predictions=torch.cat(predictions),
        ranks=torch.cat(ranks),
        mean_prediction=mean.argmax(-1),
        mean_rank=_ranks(mean, labels),
        mean_probability=mean.softmax(-1).gather(-1, labels[:, None])[:, 0],
    )


def _ranks(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.expand(logits.shape[:-1])[..., None]
    above = (logits > logits.gather(-1, chosen)).sum(-1)
    # A tie for the first place goes to the class that is predicted.
    return above + ((above == 0) & (logits.argmax(-1) != labels))

"""The training loop, from top to bottom: where a run starts or goes on, its steps, its epochs, its end."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from menet import data
from menet.distributed import Worker, joined
from menet.errors import AttackError, ConfigurationError, TrainingError
from menet.files import write_atomically
from menet.progress import Reporter, reporting
from menet.seeding import Stream, stream
from menet.training.adversarial import attack_of
from menet.training.batches import Batches
from menet.training.building import Objective, build_model, build_objective, build_optimizer
from menet.training.checkpoint import (
    BEST,
    LAST,
    Moving,
    Progress,
    fitted_defense,
    resume,
    save_checkpoint,
    save_weights,
)
from menet.training.config import TrainingConfig
from menet.training.log import Log, read_log
from menet.training.precision import autocast, number_type
from menet.training.rates import rate_at
from menet.training.score import accuracy


@dataclass(frozen=True)
class Saving:
    """How often a run writes a checkpoint within an epoch, beside the one at its end; and a row in its log."""

    seconds: float = 60.0
    steps: int | None = None
    log_steps: int = 50

    def __post_init__(self) -> None:
        for name in ("seconds", "steps", "log_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name} is {value}; accepted are numbers above 0")


class Step(nn.Module):
    """One forward pass of training, attack included: images and labels → loss and logits.

    It is a module so that `DistributedDataParallel` sees one forward pass per step, whatever the objective does.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, generator: torch.Generator, kind: torch.dtype
    ) -> None:
        super().__init__()
        self.model, self.objective, self.generator, self.kind = model, objective, generator, kind

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.kind, images.device):
            return self.objective(self.model, images, labels, self.generator)


def train(
    config: TrainingConfig,
    folder: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    saving: Saving | None = None,
) -> Path:
    """Train by `config` in the run folder, or go on with the run that is there; return the folder.

    The folder gets `config.json`, `log.jsonl`, `last.safetensors` (all that is needed to go on) and
    `best.safetensors` (the model of the best epoch). A run that was killed goes on from its last checkpoint, and
    on a CPU with the same number of threads ends in the same bits. Under `torchrun` all processes train one model
    together; the folder must then be one that all of them see. `root` holds the datasets.
    """
    folder, saving = Path(folder), saving or Saving()
    with joined() as place:
        batches = Batches.of(config, None if root is None else Path(root), place.world)
        testing = data.load(config.dataset, "test", root)
        resumed = (folder / LAST).exists()
        fitted = fitted_defense(folder / LAST, config) if resumed and config.defense else None
        model = build_model(config, batches.dataset, place, chosen=batches.chosen, fitted=fitted)
        kind = number_type(config.precision, place.device)
        moving = Moving(
            model,
            build_optimizer(config, model),
            {
                "augmentation": stream(config.seed, Stream.AUGMENTATION),
                "attack": stream(config.seed, Stream.ATTACK),
            },
        )
        progress = resume(folder / LAST, config, moving) if resumed else Progress()
        with _log(folder, config, place, progress.epoch * batches.steps + progress.step, resumed) as log:
            # No process may write the next checkpoint before all have read this one.
            place.wait()
            objective = build_objective(config, place)
            step = place.parallel(Step(model, objective, moving.generators["attack"], kind))
            while progress.epoch < config.epochs:
                _epoch(config, batches, step, moving, progress, place, log, saving, folder)
                scores = _scores(config, batches, model, place, kind, progress)
                _finish_epoch(config, batches, moving, progress, scores, place, log, folder)
            _test(config, model, testing, place, kind, log, config.epochs * batches.steps, folder)
    return folder


def _epoch(
    config: TrainingConfig,
    batches: Batches,
    step: nn.Module,
    moving: Moving,
    progress: Progress,
    place: Worker,
    log: Log | None,
    saving: Saving,
    folder: Path,
) -> None:
    """The steps of an epoch from where it stands to its end, with checkpoints on the way."""
    order = batches.order(progress.epoch)
    moving.model.train()
    saved = time.monotonic()
    with _reporting(f"epoch {progress.epoch + 1} of {config.epochs}", batches.steps, place) as reporter:
        reporter.advance(progress.step)
        while progress.step < batches.steps:
            done = progress.epoch * batches.steps + progress.step
            rate = rate_at(config, done, batches.steps)
            for group in moving.optimizer.param_groups:
                group["lr"] = rate

            images, labels = batches.batch(order, progress.step, moving.generators["augmentation"], place)
            try:
                loss, logits = step(images, labels)
            except AttackError as error:
                raise TrainingError(f"{_where(progress)}: {error}; the last good checkpoint is kept") from error
            right = (logits.argmax(1) == labels).sum()
            mean_loss, correct = _over_processes(place, loss, right)
            if not math.isfinite(mean_loss):
                raise TrainingError(
                    f"the loss is {mean_loss} at {_where(progress)} (rate {rate:.3g}); the last good checkpoint "
                    "is kept (a lower rate may help)"
                )
            moving.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            moving.optimizer.step()

            progress.step += 1
            progress.loss += mean_loss * config.batch
            progress.correct += correct
            progress.seen += config.batch
            share = progress.correct / progress.seen
            reporter.advance(loss=progress.loss / progress.seen, accuracy=f"{share:.2%}")
            if log is None:
                continue
            done += 1
            if done % saving.log_steps == 0:
                log.write("step", done, loss=mean_loss, accuracy=correct / config.batch, rate=rate)
            # The end of an epoch is saved with its scores, never between steps and scores.
            due = time.monotonic() - saved >= saving.seconds or (saving.steps and done % saving.steps == 0)
            if due and progress.step < batches.steps:
                save_checkpoint(folder / LAST, config, moving, progress)
                saved = time.monotonic()


def _scores(
    config: TrainingConfig,
    batches: Batches,
    model: nn.Module,
    place: Worker,
    kind: torch.dtype,
    progress: Progress,
) -> dict[str, float]:
    """How good the epoch's model is on held-out images; under attack too where it was trained so."""
    if not len(batches.held_out):
        return {}
    common: dict[str, Any] = {"seed": config.seed, "place": place, "precision": kind}
    scores = {"validation": accuracy(model, batches.dataset, batches.held_out, **common)}
    if config.objective != "standard":
        attack = attack_of(config)
        scores["validation_attacked"] = accuracy(
            model, batches.dataset, batches.held_out, attack=attack, **common
        )
    return scores


def _finish_epoch(
    config: TrainingConfig,
    batches: Batches,
    moving: Moving,
    progress: Progress,
    scores: dict[str, float],
    place: Worker,
    log: Log | None,
    folder: Path,
) -> None:
    """Write the epoch down: the best model if this is it, the log, the checkpoint, in this order.

    A run killed in between repeats the end of the epoch and writes the same again.
    """
    loss, share = progress.loss / progress.seen, progress.correct / progress.seen
    epoch = progress.epoch + 1
    score = scores.get("validation_attacked", scores.get("validation"))
    best = score is None or progress.best is None or score > progress.best
    progress.best = score if best else progress.best
    progress.next_epoch()
    if log is None:
        return
    if best:
        save_weights(folder / BEST, config, moving.model, {"epoch": epoch, **scores})
    log.write("epoch", epoch * batches.steps, epoch=epoch, loss=loss, accuracy=share, best=best, **scores)
    save_checkpoint(folder / LAST, config, moving, progress)
    told = ", ".join(f"{name.replace('_', ' ')} {value:.2%}" for name, value in scores.items())
    print(
        f"epoch {epoch} of {config.epochs}: loss {loss:.4f}, accuracy {share:.2%}{told and ', '}{told}",
        file=sys.stderr,
    )


def _test(
    config: TrainingConfig,
    model: nn.Module,
    testing: data.Dataset,
    place: Worker,
    kind: torch.dtype,
    log: Log | None,
    step: int,
    folder: Path,
) -> None:
    """Score the last model on the test images once, at the end of the run."""
    done = torch.tensor(int(any(row["kind"] == "test" for row in read_log(folder))) if place.first else 0)
    if int(place.total(done.to(place.device))):
        return
    share = accuracy(model, testing, seed=config.seed, place=place, precision=kind)
    if log is not None:
        log.write("test", step, accuracy=share, images=len(testing))


@contextmanager
def _log(folder: Path, config: TrainingConfig, place: Worker, step: int, resumed: bool) -> Iterator[Log | None]:
    """The run's log on the first process, None on the others."""
    if not place.first:
        yield None
        return
    try:
        write_atomically(folder / "config.json", json.dumps(config.as_dict(), indent=1) + "\n")
    except OSError as error:
        raise TrainingError(f"out is {folder}, which cannot be written: {error.strerror}") from error
    log = Log(folder, step, resumed=resumed)
    try:
        yield log
    finally:
        log.close()


@contextmanager
def _reporting(description: str, total: int, place: Worker) -> Iterator[Reporter]:
    if place.first:
        with reporting(description, total) as reporter:
            yield reporter
        return
    with open(os.devnull, "w") as nowhere, reporting(description, total, nowhere) as reporter:
        yield reporter


def _over_processes(place: Worker, loss: Tensor, right: Tensor) -> tuple[float, int]:
    numbers = place.total(torch.stack([loss.detach().double(), right.double()]))
    mean_loss, correct = numbers.tolist()
    return mean_loss / place.world, int(correct) if math.isfinite(correct) else 0


def _where(progress: Progress) -> str:
    return f"epoch {progress.epoch + 1}, step {progress.step + 1}"

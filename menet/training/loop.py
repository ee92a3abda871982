"""The training loop, from top to bottom: how a run starts or resumes, its steps, its epochs, its end."""

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from menet import data
from menet.defense import MENet
from menet.distributed import Worker, joined
from menet.errors import AttackError, ConfigurationError, TrainingError
from menet.files import locked, write_atomically
from menet.preprocessed import Preprocessed
from menet.progress import Reporter, format_duration, reporting
from menet.seeding import Stream, stream
from menet.training.batches import Batches, estimated_ahead
from menet.training.checkpoint import (
    BEST,
    FIT,
    LAST,
    Progress,
    TrainState,
    load_weights,
    read_checkpoint,
    save_checkpoint,
    save_weights,
)
from menet.training.config import (
    TrainingConfig,
    attack_strength_at,
    autocast,
    averaged_copy,
    build_model,
    build_optimizer,
    learning_rate_at,
    number_type,
    update_average,
)
from menet.training.monitoring import CURVES, Log, accuracy, check, draw_curves, read_log
from menet.training.objectives import BatchLoss, LossAndLogits, build_objective, training_attack, weakened


@dataclass(frozen=True)
class Saving:
    """How often a run writes a checkpoint within an epoch, besides the one at its end; and a row of its log."""

    seconds: float = 60.0
    steps: int | None = None
    log_steps: int = 50

    def __post_init__(self) -> None:
        for name in ("seconds", "steps", "log_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"expected {name} > 0, got {value}")


@dataclass(frozen=True)
class TrainingResult:
    """What a run ended with; usable as a path to its folder."""

    folder: Path
    epoch: int
    """The best epoch, counted from 1."""
    test_accuracy: float
    """Of the weights of that epoch, with one draw of the defense per test image."""

    @property
    def weights(self) -> Path:
        """The weights file of the best epoch."""
        return self.folder / BEST

    def __fspath__(self) -> str:
        return str(self.folder)


SECONDS_BETWEEN_PICTURES = 30.0


@dataclass
class Clock:
    """What a run's speed is computed from, since it was started or resumed."""

    first_step: int
    started: float = field(default_factory=time.monotonic)
    drawn: float = -math.inf
    """When the curves were drawn last."""

    def speed(self, step: int) -> float:
        """Steps per second, validation and checks included."""
        return (step - self.first_step) / max(time.monotonic() - self.started, 1e-9)


@dataclass(frozen=True)
class Run:
    """A run in progress, as one of its processes sees it."""

    config: TrainingConfig
    folder: Path
    worker: Worker
    batches: Batches
    state: TrainState
    forward: nn.Module
    """The training step's forward pass, over all processes."""
    precision: torch.dtype
    saving: Saving
    log: Log | None
    """On the first process only, which is the one that writes."""
    clock: Clock

    @property
    def step(self) -> int:
        """Steps done since the beginning of the run."""
        return self.state.progress.epoch * self.batches.steps + self.state.progress.step

    @property
    def pace(self) -> dict[str, str]:
        """Images per second and the time left, for people."""
        speed = self.clock.speed(self.step)
        if not speed:
            return {}
        left = format_duration((self.config.epochs * self.batches.steps - self.step) / speed)
        return {"images/s": f"{speed * self.config.batch_size:.3g}", "run": f"{left} left"}


class Step(nn.Module):
    """The forward pass of one training step, attack included: images and labels → loss and logits.

    `strength` is the fraction of the attack's budget, below 1 while the budget warms up.

    It is a module so that `DistributedDataParallel` sees one forward pass per step for every objective.
    """

    def __init__(
        self, model: nn.Module, objective: BatchLoss, generator: torch.Generator, precision: torch.dtype
    ) -> None:
        super().__init__()
        self.model, self.objective, self.generator, self.precision = model, objective, generator, precision

    def forward(self, images: Tensor, labels: Tensor, strength: float = 1.0) -> LossAndLogits:
        with autocast(self.precision, images.device):
            return weakened(self.objective, strength)(self.model, images, labels, self.generator)


def train(
    config: TrainingConfig,
    folder: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    saving: Saving | None = None,
    device: str = "auto",
) -> TrainingResult:
    """Train by `config` in a run folder, or resume the run that is there; return the test accuracy.

    The folder gets `config.json`, `log.jsonl`, `last.safetensors` (the checkpoint), `best.safetensors` (the
    weights of the best epoch) and `curves.png`, and is locked while the run lasts. A run that was killed resumes
    from its last checkpoint, and on a CPU with the same number of threads ends in the same bits. Under `torchrun`
    all processes train one model together, in a folder that all of them see. `root` holds the datasets; `device`
    `auto` is CUDA where there is a GPU, else the CPU.
    """
    with joined(device) as worker:
        batches = Batches.of(config, None if root is None else Path(root), worker.world)
        test_set = data.load(config.dataset, "test", root)
        if worker.first:
            print(batches.describe(test_set), file=sys.stderr)
        with _started(config, Path(folder), worker, batches, saving or Saving()) as run:
            while run.state.progress.epoch < config.epochs:
                _epoch(run)
                _finish_epoch(run, _validate(run))
            result = _test(run, test_set)
            _draw(run, last=True)
            (run.folder / FIT).unlink(missing_ok=True)
            return result


@contextmanager
def _started(
    config: TrainingConfig, folder: Path, worker: Worker, batches: Batches, saving: Saving
) -> Iterator[Run]:
    """The run of a folder, from its last checkpoint or from the beginning; the folder is locked meanwhile."""
    with ExitStack() as stack:
        _lock(folder, worker, stack)
        # The others read the folder only after the first process has locked it.
        worker.wait()
        checkpoint = read_checkpoint(folder / LAST, config) if (folder / LAST).exists() else None
        fitted = None if checkpoint is None else checkpoint.defense
        fit = folder / FIT if worker.first else None
        model = build_model(config, batches.dataset, worker, chosen=batches.chosen, fitted=fitted, checkpoint=fit)
        generators = {
            "augmentation": stream(config.seed, Stream.AUGMENTATION),
            "attack": stream(config.seed, Stream.ATTACK),
        }
        if isinstance(model, Preprocessed):
            generators["model"] = model.generator
        optimizer = build_optimizer(config, model)
        state = TrainState(model, optimizer, generators, averaged=averaged_copy(config, model))
        if checkpoint is not None:
            checkpoint.restore(state)
        log = None
        step = state.progress.epoch * batches.steps + state.progress.step
        if worker.first:
            log = _open_log(folder, config, step, resumed=checkpoint is not None)
            stack.callback(log.close)
        # No process may write the next checkpoint before all have read this one.
        worker.wait()
        precision = number_type(config.precision, worker.device)
        objective = build_objective(config, worker, estimated=estimated_ahead(config, model) is not None)
        forward = worker.parallel(Step(model, objective, generators["attack"], precision))
        yield Run(config, folder, worker, batches, state, forward, precision, saving, log, Clock(step))


def _epoch(run: Run) -> None:
    """Train from where the epoch stands to its end, with checkpoints on the way."""
    config, batches, state, progress = run.config, run.batches, run.state, run.state.progress
    defense = estimated_ahead(config, state.model)
    names = ("augmentation",) if defense is None else ("augmentation", "model")
    drawn_from = {name: state.generators[name] for name in names}
    bank = state.model if isinstance(state.model, MENet) and state.model.bank is not None else None
    order = batches.order(progress.epoch)
    state.model.train()
    saved = time.monotonic()
    with (
        _reporting(f"epoch {progress.epoch + 1} of {config.epochs}", batches.steps, run.worker) as reporter,
        _interrupts_wait() as interrupts,
        batches.ahead(progress.epoch, progress.step, drawn_from, run.worker, defense) as ready,
    ):
        reporter.skip(progress.step)
        for images, labels in ready:
            learning_rate = learning_rate_at(config, run.step, batches.steps)
            for group in state.optimizer.param_groups:
                group["lr"] = learning_rate

            if bank is not None:
                first = progress.step * config.batch_size
                bank.examples = run.worker.part(order[first : first + config.batch_size])
            strength = attack_strength_at(config, run.step, batches.steps)
            try:
                loss, logits = run.forward(images, labels, strength)
            except AttackError as error:
                raise TrainingError(f"{_where(progress)}: {error}; the last good checkpoint is kept") from error
            mean_loss, correct = _over_workers(run.worker, loss, (logits.argmax(1) == labels).sum())
            if not math.isfinite(mean_loss):
                raise TrainingError(
                    f"the loss is {mean_loss} at {_where(progress)} (learning rate {learning_rate:.3g}); "
                    "the last good checkpoint is kept (try a lower learning rate)"
                )
            state.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if config.clip_gradient is not None:
                nn.utils.clip_grad_norm_(state.model.parameters(), config.clip_gradient)
            state.optimizer.step()
            progress.step += 1
            if state.averaged is not None:
                update_average(state.averaged, state.model, config.ema, run.step)

            progress.loss += mean_loss * config.batch_size
            progress.correct += correct
            progress.seen += config.batch_size
            if _guarded(run) and run.step % config.guard == 0:
                _guard(run)
            shown: dict[str, Any] = {"accuracy": f"{progress.correct / progress.seen:.2%}", **run.pace}
            reporter.advance(loss=progress.loss / progress.seen, **shown)
            if interrupts:
                if run.log is not None:
                    save_checkpoint(run.folder / LAST, config, state)
                raise KeyboardInterrupt
            if run.log is None:
                continue
            if run.step % run.saving.log_steps == 0:
                batch_accuracy = correct / config.batch_size
                run.log.write(
                    "step", run.step, loss=mean_loss, accuracy=batch_accuracy, learning_rate=learning_rate
                )
            # The end of an epoch is saved with its scores, never between steps and scores.
            due = time.monotonic() - saved >= run.saving.seconds
            due = due or (run.saving.steps is not None and run.step % run.saving.steps == 0)
            if due and progress.step < batches.steps:
                save_checkpoint(run.folder / LAST, config, state)
                saved = time.monotonic()


def _guarded(run: Run) -> bool:
    """Whether the run is checked for catastrophic overfitting."""
    return run.config.guard > 0 and run.config.objective != "standard" and len(run.batches.held_out) > 0


def _guard(run: Run) -> None:
    """Check the model in training; where it overfits catastrophically, fall back to the last good weights.

    They are averaged if the run averages. The optimizer begins anew: its momentum led to the collapse. The
    schedule goes on, so that the learning rate at which it happened passes.
    """
    config, state, progress = run.config, run.state, run.state.progress
    common: dict[str, Any] = {"seed": config.seed, "worker": run.worker, "precision": run.precision}
    now = check(state.model, run.batches.dataset, run.batches.held_out, training_attack(config), **common)
    overfitted = now.overfitted(progress)
    falls_back = overfitted and bool(state.good)
    if falls_back:
        for model in {state.model, state.judged}:
            model.load_state_dict(state.good)
        state.optimizer.state.clear()
        progress.fallbacks += 1
    elif not overfitted and now.good(progress):
        state.good.update({name: value.clone() for name, value in state.judged.state_dict().items()})
        progress.robust = max(now.pgd, progress.robust or 0.0)
    if run.log is None:
        return
    run.log.write("guard", run.step, pgd=now.pgd, fgsm=now.fgsm, fell_back=falls_back)
    if overfitted:
        done = "fell back to the last good weights" if falls_back else "no good weights to fall back to yet"
        print(
            f"catastrophic overfitting at {_where(progress)}: robust accuracy {now.pgd:.1%} (highest "
            f"{progress.robust or 0.0:.1%}), under FGSM {now.fgsm:.1%}; {done} (if this repeats, use more noise, "
            "a lower learning rate, or objective 'adversarial')",
            file=sys.stderr,
        )


def _draw(run: Run, *, last: bool = False) -> None:
    """Draw the curves, where they can be drawn and have not been a moment ago."""
    clock = run.clock
    if run.log is None or not (last or time.monotonic() - clock.drawn > SECONDS_BETWEEN_PICTURES):
        return
    if not draw_curves(run.folder) and clock.drawn < 0:
        print(f"no {CURVES} without matplotlib; install it with: pip install 'menet[report]'", file=sys.stderr)
    clock.drawn = time.monotonic()


def _validate(run: Run) -> dict[str, float]:
    """The epoch's accuracy on the validation images; the robust accuracy too where training is adversarial."""
    batches = run.batches
    if not len(batches.held_out):
        return {}
    common: dict[str, Any] = {"seed": run.config.seed, "worker": run.worker, "precision": run.precision}
    model = run.state.judged
    scores = {"validation": accuracy(model, batches.dataset, batches.held_out, **common)}
    if run.config.objective != "standard":
        attack = training_attack(run.config)
        scores["validation_attacked"] = accuracy(
            model, batches.dataset, batches.held_out, attack=attack, **common
        )
    return scores


def _finish_epoch(run: Run, scores: dict[str, float]) -> None:
    """Write the epoch: the weights if it is the best, the log, the checkpoint, in this order.

    A run killed in between repeats the end of the epoch and writes the same again.
    """
    progress = run.state.progress
    epoch, loss, train_accuracy = (
        progress.epoch + 1,
        progress.loss / progress.seen,
        progress.correct / progress.seen,
    )
    score = scores.get("validation_attacked", scores.get("validation"))
    best = score is None or progress.best is None or score > progress.best
    progress.best = score if best else progress.best
    progress.next_epoch()
    if run.log is None:
        return
    if best:
        save_weights(run.folder / BEST, run.config, run.state.judged, {"epoch": epoch, **scores})
    run.log.write("epoch", run.step, epoch=epoch, loss=loss, accuracy=train_accuracy, best=best, **scores)
    save_checkpoint(run.folder / LAST, run.config, run.state)
    _draw(run)
    told = "".join(f", {name.replace('_', ' ')} {value:.2%}" for name, value in scores.items())
    told += "".join(f", {name} {value}" for name, value in run.pace.items())
    print(
        f"epoch {epoch} of {run.config.epochs}: loss {loss:.4f}, accuracy {train_accuracy:.2%}{told}",
        file=sys.stderr,
    )


def _test(run: Run, test_set: data.Dataset) -> TrainingResult:
    """Test the weights of the best epoch, as they are in their file; once, at the end of the run."""
    # From the first process to all: the best epoch (0 where the test is still to be made) and its accuracy.
    known = torch.zeros(2, dtype=torch.float64, device=run.worker.device)
    if run.log is not None:
        for row in read_log(run.folder):
            epoch, found = row.get("epoch"), row.get("accuracy")
            if row["kind"] == "test" and type(epoch) is int and type(found) is float and 0 <= found <= 1:
                known[0], known[1] = epoch, found
    epoch, test_accuracy = run.worker.total(known).tolist()
    if not epoch:
        epoch = load_weights(run.folder / BEST, run.state.judged)["epoch"]
        test_accuracy = accuracy(
            run.state.judged, test_set, seed=run.config.seed, worker=run.worker, precision=run.precision
        )
        if run.log is not None:
            run.log.write("test", run.step, epoch=epoch, accuracy=test_accuracy, images=len(test_set))
    return TrainingResult(run.folder, int(epoch), test_accuracy)


@contextmanager
def _interrupts_wait() -> Iterator[list[int]]:
    """Ctrl-C inside the block is noted in the list that is yielded; a second one does not wait.

    Between two steps, and only there, a checkpoint is one that a run resumes from to the same bits.
    """
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            before(number, frame)
        noted.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _lock(folder: Path, worker: Worker, stack: ExitStack) -> None:
    """Lock the folder for this run: two at once would overwrite each other's log and checkpoints."""
    if not worker.first:
        return
    try:
        stack.enter_context(locked(folder))
    except OSError as error:
        raise TrainingError(f"cannot write the run folder {folder}: {error.strerror}") from error


def _open_log(folder: Path, config: TrainingConfig, step: int, *, resumed: bool) -> Log:
    try:
        write_atomically(folder / "config.json", json.dumps(config.as_dict(), indent=1) + "\n")
    except OSError as error:
        raise TrainingError(f"cannot write the run folder {folder}: {error.strerror}") from error
    return Log(folder, step, resumed=resumed)


@contextmanager
def _reporting(description: str, total: int, worker: Worker) -> Iterator[Reporter]:
    if worker.first:
        with reporting(description, total) as reporter:
            yield reporter
        return
    with open(os.devnull, "w") as nowhere, reporting(description, total, nowhere) as reporter:
        yield reporter


def _over_workers(worker: Worker, loss: Tensor, correct: Tensor) -> tuple[float, int]:
    """The mean loss and the number of correct predictions over all workers."""
    total_loss, total_correct = worker.total(torch.stack([loss.detach().double(), correct.double()])).tolist()
    return total_loss / worker.world, int(total_correct) if math.isfinite(total_correct) else 0


def _where(progress: Progress) -> str:
    return f"epoch {progress.epoch + 1}, step {progress.step + 1}"

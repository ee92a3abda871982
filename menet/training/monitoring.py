"""What is known of a run while it trains: its accuracy, and its log.

By accuracy epochs are selected, a run is guarded against catastrophic overfitting, and its end is reported. The
log is JSON Lines always, a picture of its curves and TensorBoard where those are installed.
"""

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from menet.attacks import FGSM, PGD
from menet.attacks.base import Attack
from menet.data import Dataset
from menet.distributed import Worker
from menet.errors import TrainingError
from menet.files import replacing, write_atomically
from menet.preprocessed import Preprocessed
from menet.seeding import Stream, stream, stream_seed
from menet.training.checkpoint import Progress
from menet.training.config import autocast

NAME, CURVES = "log.jsonl", "curves.png"
BATCH_SIZE = 500
GUARD_IMAGES = 250
"""Validation images of a check for catastrophic overfitting: few, since a run makes many checks."""
COLLAPSED, GOOD = 0.5, 0.75
"""Fractions of the highest robust accuracy so far: below the first it has collapsed, from the second on good."""
HIGH, LOW = 0.5, 0.1
"""From the first accuracy under FGSM on, robust accuracy below the fraction LOW of it is a collapse by itself."""


def accuracy(
    model: nn.Module,
    dataset: Dataset,
    index: Int[Tensor, " n"] | None = None,
    *,
    seed: int = 0,
    attack: Attack | None = None,
    worker: Worker | None = None,
    precision: torch.dtype = torch.float32,
) -> float:
    """The accuracy on the images at `index` (all if None), with one draw of the defense each.

    With an attack it is the accuracy on adversarial examples. Each batch has its own seed, so the result does
    not depend on the number of workers that share the batches. The model's mode and generator are restored. It
    is a quick estimate to train by; for an evaluation use `menet.evaluation`.
    """
    worker = Worker() if worker is None else worker
    index = torch.arange(len(dataset)) if index is None else index
    was_training = model.training
    state = model.generator.get_state() if isinstance(model, Preprocessed) else None
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=worker.device)
    for number, block in enumerate(index.split(BATCH_SIZE)):
        if number % worker.world != worker.rank:
            continue
        if isinstance(model, Preprocessed):
            model.reseed(stream_seed(seed, Stream.SCORE, number))
        images, labels = (tensor.to(worker.device) for tensor in dataset.batch(block))
        with autocast(precision, worker.device):
            if attack is not None:
                generator = stream(seed, Stream.ATTACK, number)
                images = attack(model, images, labels, generator=generator).images
            with torch.no_grad():
                correct += (model(images).argmax(1) == labels).sum()
    if isinstance(model, Preprocessed) and state is not None:
        model.generator.set_state(state)
    model.train(was_training)
    return int(worker.total(correct)) / len(index)


@dataclass(frozen=True)
class Check:
    """Accuracies of the model in training on a few validation images: under PGD, and under FGSM without noise."""

    pgd: float
    fgsm: float
    chance: float = 0.0
    """The accuracy of guessing."""

    def overfitted(self, progress: Progress) -> bool:
        """Whether robust accuracy has collapsed, or never rose, while the accuracy under FGSM is far above it.

        That is catastrophic overfitting (Wong et al. 2020): the network has learned to defeat the single step
        it is trained on, and nothing else. An unlucky moment of training lowers both.
        """
        if self.fgsm <= 2 * self.chance or self.pgd >= self.fgsm / 2:
            return False
        never_rose = self.fgsm >= HIGH and self.pgd < LOW * self.fgsm
        return never_rose or self.pgd < COLLAPSED * (progress.robust or 0.0)

    def good(self, progress: Progress) -> bool:
        """Whether the weights are worth falling back to: about as robust as any before, and not by guessing.

        However far the accuracy under FGSM is above: a run may overfit from early on, and the best that it had is
        better than what it collapses to.
        """
        return self.pgd > 2 * self.chance and self.pgd >= GOOD * (progress.robust or 0.0)


def check(
    model: nn.Module,
    dataset: Dataset,
    held_out: Int[Tensor, " n"],
    attack: PGD,
    *,
    seed: int,
    worker: Worker,
    precision: torch.dtype,
) -> Check:
    """The check of a model in training, under `attack` and under FGSM of the same budget."""
    few = held_out[:GUARD_IMAGES]
    single = FGSM(threat=attack.threat, eot=attack.eot, max_batch=attack.max_batch)
    pgd, fgsm = (
        accuracy(model, dataset, few, attack=one, seed=seed, worker=worker, precision=precision)
        for one in (attack, single)
    )
    return Check(pgd, fgsm, 1 / len(dataset.classes))


class Log:
    """Rows appended to `log.jsonl`, each with `kind` and `step` (counted over the whole run).

    A resumed run drops the rows after its checkpoint, and a half-written last one, so that the log reads as if
    the run had never stopped.
    """

    def __init__(self, folder: Path, step: int, *, resumed: bool) -> None:
        self.path = folder / NAME
        kept = [row for row in read_log(folder) if row["step"] <= step] if resumed else []
        try:
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = self.path.open("a")
        except OSError as error:
            raise TrainingError(f"cannot write {self.path}: {error.strerror}") from error
        self._board = _tensorboard(folder)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one row."""
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(f"cannot write {self.path}: {error.strerror}") from error
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's log; lines that are damaged or truncated are left out."""
    path = folder / NAME
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("kind"), str) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def draw_curves(folder: Path) -> bool:
    """Draw a run's log to `curves.png`; False where matplotlib is missing.

    Above, the accuracies by epoch, and in between those of the checks for catastrophic overfitting; below, loss
    and learning rate.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    rows = read_log(folder)
    figure = Figure(figsize=(7, 6), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True)
    for kind, name, label, style in (
        ("epoch", "accuracy", "training", "C7-"),
        ("epoch", "validation", "validation, clean", "C0o-"),
        ("epoch", "validation_attacked", "validation, robust", "C3o-"),
        ("guard", "pgd", "check, PGD", "C3:"),
        ("guard", "fgsm", "check, FGSM", "C1:"),
    ):
        steps, values = _curve(rows, kind, name)
        if steps:
            above.plot(steps, values, style, label=label, markersize=4)
    for row in rows:
        if row["kind"] == "guard" and row.get("fell_back"):
            above.axvline(row["step"], color="C3", linewidth=1)
    below.plot(*_curve(rows, "step", "loss"), "C7-", linewidth=0.7, label="loss of a batch")
    below.plot(*_curve(rows, "epoch", "loss"), "C0o-", markersize=4, label="loss, mean of an epoch")
    rates = below.twinx()
    rates.plot(*_curve(rows, "step", "learning_rate"), "C2--", linewidth=1)
    rates.set_ylabel("learning rate", color="C2")
    above.set_ylabel("accuracy")
    below.set(xlabel="step", ylabel="loss")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    try:
        with replacing(folder / CURVES) as temporary:
            figure.savefig(temporary, format="png", dpi=110)
    except OSError as error:
        raise TrainingError(f"cannot write {folder / CURVES}: {error.strerror}") from error
    return True


def _curve(rows: list[dict[str, Any]], kind: str, name: str) -> tuple[list[int], list[float]]:
    points = [
        (row["step"], row[name])
        for row in rows
        if row["kind"] == kind and isinstance(row.get(name), int | float) and math.isfinite(row[name])
    ]
    return [step for step, _ in points], [value for _, value in points]


def _tensorboard(folder: Path) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))

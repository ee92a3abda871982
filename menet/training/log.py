"""The log of a run: JSON Lines always, a picture of its curves and TensorBoard where those are installed."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

from menet.errors import TrainingError
from menet.files import replacing, write_atomically

NAME = "log.jsonl"
CURVES = "curves.png"


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

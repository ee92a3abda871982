"""The log of a run: JSON Lines always, TensorBoard where it is installed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from menet.errors import TrainingError
from menet.files import write_atomically

NAME = "log.jsonl"


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


def _tensorboard(folder: Path) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))

"""A run that is killed again and again: `killed_run.py FOLDER` trains once undisturbed and once under fire.

Each attempt is a process of its own (a fork, so that torch is loaded once), ended by SIGKILL: at a random moment,
or at a planned place inside the writing of a checkpoint. Prints, as JSON, how each attempt ended.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from training_helpers import full

from menet.models import weights
from menet.training import loop, train
from menet.training.loop import Saving
from menet.training.monitoring import Log

SAVING = Saving(steps=2, log_steps=1)


def attempt(folder: Path, prepare: Callable[[], None] | None = None) -> int:
    """Train in a child process; return its exit status (9 for one that was killed)."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        if prepare is not None:
            # A picture takes longer than the steps it shows.
            loop.draw_curves = lambda folder: True
            prepare()
        train(full(), folder, saving=SAVING)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def with_half_a_file(number: int) -> Callable[[], None]:
    """Die in the `number`-th writing of a weights file, with half of the bytes on disk."""
    original, written = weights.save_file, []

    def save_half(tensors, path, metadata):
        original(tensors, path, metadata=metadata)
        written.append(path)
        if len(written) == number:
            os.truncate(path, Path(path).stat().st_size // 2)
            die()

    def prepare() -> None:
        weights.save_file = save_half

    return prepare


def before_the_rename(number: int) -> Callable[[], None]:
    """Die when the `number`-th file is whole but not yet in its place."""
    original, renamed = Path.replace, []

    def replace(self, target):
        renamed.append(target)
        if len(renamed) == number:
            die()
        return original(self, target)

    def prepare() -> None:
        Path.replace = replace

    return prepare


def at_a_random_moment(after: float) -> Callable[[], None]:
    """Die `after` seconds from the first new step, at the latest when two more steps are done.

    The limit makes sure that the run is not over before, however fast the machine is.
    """
    original, steps = Log.write, []

    def write(self, kind, step, **values):
        original(self, kind, step, **values)
        if kind == "step":
            steps.append(step)
            if len(steps) == 1:
                threading.Timer(after, die).start()
            if len(steps) == 3:
                time.sleep(60)

    def prepare() -> None:
        Log.write = write

    return prepare


def main(folder: Path) -> None:
    peace = attempt(folder / "peace")
    chance = random.Random(20190509)
    ends = []
    fire = folder / "fire"
    ends.append(["half a file", attempt(fire, with_half_a_file(2))])
    ends.append(["before the rename", attempt(fire, before_the_rename(2))])
    for _ in range(3):
        after = chance.uniform(0, 0.15)
        ends.append([f"after {after:.2f} s", attempt(fire, at_a_random_moment(after))])
    ends.append(["half a file", attempt(fire, with_half_a_file(1))])
    ends.append(["in peace", attempt(fire)])
    print(json.dumps({"peace": peace, "ends": ends}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

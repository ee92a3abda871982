"""A small trained network and its ME-Net, and a dataset to evaluate them on; also run by tests as a program."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from menet.attacks import PGD, ThreatModel
from menet.data import Dataset, load
from menet.defense import MENet
from menet.estimators import USVT
from menet.evaluation import AttackRun, EvaluationSettings, evaluate
from menet.evaluation.records import shard_path
from menet.models import Normalize

THREAT = ThreatModel("linf", 0.2)
KILLED = EvaluationSettings(
    start=3, stop=63, batch_size=4, draws=5, seed=7, restart_draws=2, snapshots=1, loss_history=True
)
RESTARTED = PGD(threat=THREAT, steps=3, restarts=2, eot=2)


def network(width: int = 8) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            Normalize((0.1307,), (0.3081,)),
            nn.Conv2d(1, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 49, 10),
        )


def trained(p: float | tuple[float, float] = (0.4, 0.6), epochs: int = 4, examples: int = 3000) -> MENet:
    """A small network, trained on masked and estimated digits."""
    images, labels = load("digits").batch(slice(0, examples))
    model = MENet(network(), USVT(), p=p).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for index in torch.randperm(len(images), generator=order).split(100):
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(images[index]), labels[index]).backward()
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model.eval()


def attack_runs(model: nn.Module) -> list[AttackRun]:
    return [AttackRun("pgd:restarts=2", RESTARTED, model, "bpda")]


def held_out() -> Dataset:
    return load("digits", "test")


def evaluate_in(folder: Path, weights: Path) -> None:
    """The evaluation that a test kills."""
    model = MENet(network(), USVT())
    model.load_state_dict(torch.load(weights, weights_only=True))
    evaluate(model, held_out(), attack_runs(model), folder, KILLED)


def start(folder: Path, weights: Path) -> int:
    """Begin or continue the evaluation in a process of its own, forked to spare it the imports."""
    child = os.fork()
    if not child:
        evaluate_in(folder, weights)
        os._exit(0)
    return child


def kill_and_resume(folder: Path, weights: Path, times: int) -> list[int]:
    """Kill the evaluation `times` times, each while it computes the batch after one that it wrote.

    What comes back is the size of the rows after each kill; in the end the evaluation is let through.
    """
    file, sizes = shard_path(folder, "pgd:restarts=2"), []
    for _ in range(times):
        before = file.stat().st_size if file.exists() else 0
        child = start(folder, weights)
        while not file.exists() or file.stat().st_size <= before:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                raise RuntimeError("the evaluation ended by itself before it could be killed")
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        sizes.append(file.stat().st_size)
    assert os.waitstatus_to_exitcode(os.waitpid(start(folder, weights), 0)[1]) == 0
    return sizes


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(kill_and_resume(Path(sys.argv[1]), Path(sys.argv[2]), times=10))

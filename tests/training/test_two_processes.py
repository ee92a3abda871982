"""Two processes equal one, and one of them may die."""

import subprocess
from pathlib import Path

import pytest
import torch
from training_helpers import ENVIRONMENT, python

from menet.attacks import ThreatModel
from menet.cli import main
from menet.distributed import Worker
from menet.models import weights
from menet.training.checkpoint import LAST
from menet.training.monitoring import read_log
from menet.training.objectives import SharedThreat

# Without batch normalization, whose statistics are each process's own on a CPU.
OPTIONS = [
    "train", "digits", "--model", "lenet", "--defense", "me-net", "--estimator", "usvt",
    "--objective", "adversarial", "--steps", "2", "--step-size", "0.1", "--epochs", "2", "--batch-size", "16",
    "--limit", "80", "--validation", "20", "--augmentation", "True", "--log-steps", "1", "--save-steps", "2",
    "--precision", "float32",
]  # fmt: skip


def torchrun(*program: str) -> None:
    command = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", *program
    )  # fmt: skip
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("processes")
    assert main([*OPTIONS, "--out", str(folder / "one")]) == 0
    torchrun("-m", "menet.cli", *OPTIONS, "--out", str(folder / "two"))
    script = Path(__file__).with_name("worker_dies.py")
    torchrun(str(script), *OPTIONS, "--out", str(folder / "killed"))
    return {name: folder / name for name in ("one", "two", "killed")}


@pytest.mark.slow
def test_losses_and_scores_are_those_of_one_process(runs):
    one, two = (read_log(runs[name]) for name in ("one", "two"))
    assert [row["kind"] for row in one] == [row["kind"] for row in two]
    losses = [[row["loss"] for row in rows if row["kind"] == "step"] for rows in (one, two)]
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    scores = [
        [row.get("validation", row["accuracy"]) for row in rows if row["kind"] != "step"] for rows in (one, two)
    ]
    # One image of 20 may fall to the other side of a decision by rounding.
    assert scores[1] == pytest.approx(scores[0], abs=0.051)


@pytest.mark.slow
def test_weights_are_those_of_one_process(runs):
    one, two = (weights.load(runs[name] / LAST)[0] for name in ("one", "two"))
    for name, value in one.items():
        if name.startswith("model.classifier"):
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)
        elif name.startswith("generator"):
            assert torch.equal(two[name], value), f"{name} depends on the number of processes"


@pytest.mark.slow
def test_killed_worker_comes_back_from_the_checkpoint(runs):
    two, killed = (weights.load(runs[name] / LAST)[0] for name in ("two", "killed"))
    assert all(torch.equal(two[name], killed[name]) for name in two)
    assert [row["step"] for row in read_log(runs["killed"]) if row["kind"] == "step"] == list(range(1, 11))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_random_starts_are_parts_of_the_whole(norm):
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = ThreatModel(norm, 0.3).random_start(images, torch.Generator().manual_seed(1))
    for rank in range(3):
        part = images[2 * rank : 2 * rank + 2]
        threat = SharedThreat(norm, 0.3, rank=rank, world=3)
        torch.testing.assert_close(
            threat.random_start(part, torch.Generator().manual_seed(1)), whole[2 * rank : 2 * rank + 2]
        )


def test_parts_cover_a_batch():
    batch = torch.arange(12)
    assert torch.equal(torch.cat([Worker(rank, 4).part(batch) for rank in range(4)]), batch)

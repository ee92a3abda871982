"""What a machine with GPUs relies on: one device for all, one job per GPU, parts, filters, and what they cost.

There is no GPU here: `simulated_device.py` runs jobs on a device that refuses what a GPU refuses.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from menet import cli, data, masks
from menet.data.dataset import stratified
from menet.defense import MENet
from menet.experiments import EXPERIMENTS, cost_model, experiment, tables
from menet.experiments.jobs import Evaluate, Job, Train, Workspace, transformed
from menet.experiments.plan import graph
from menet.experiments.runner import Local
from menet.experiments.scale import GPU_DAY, SMOKE
from menet.training.batches import Batches
from menet.training.prepared import prepare
from menet.training.recipes import me_net

SPECK = replace(
    SMOKE,
    images=40,
    examples=4,
    draws=2,
    batch_size=2,
    certificate_draws=12,
    training=lambda config: replace(SMOKE.training(config), epochs=1, limit=40),
)
VICTIM = tables.model("mnist", "me-net", "adversarial", tables.LOW, estimator="usvt")
PURE = tables.model("mnist", p=tables.LOW, estimator="usvt")
VANILLA = tables.model("mnist", "vanilla")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_kind_of_job_of_the_smoke_scale_runs_on_another_device(tmp_path: Path) -> None:
    """Preparation, training, every attack, baseline and estimator, certificates, what figures are drawn from."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("needs a torch that takes a device written in Python")
    here = Path(__file__)
    environment = {**os.environ, "PYTHONPATH": str(here.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here.with_name("simulated_device.py")), str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["refused"] == [
        "two devices",
        "index on the device, values not",
        "generator of the CPU",
        "to an array",
    ]
    jobs = found["jobs"]
    assert [job for job in jobs if job["status"] != "done"] == []
    # A job that computed nothing there ran on the CPU.
    assert [job["title"] for job in jobs if job["device"] and not job["operations"]] == []
    kinds = {type(job).kind for name in EXPERIMENTS for job in graph(experiment(name).jobs)}
    assert {job["kind"] for job in jobs} == kinds
    attacks = {trait[1] for job in jobs for trait in job["traits"] if job["kind"] == "evaluate"}
    assert attacks >= {
        "boundary",
        "hop-skip-jump",
        "spsa",
        "pgd",
        "cw",
        "fgsm",
        "projected-bpda",
        "classifier-only",
    }
    methods = {trait[1] for job in jobs for trait in job["traits"] if job["kind"] == "train"}
    assert methods >= {None, "me-net", "thermometer", "pixel-defend", "total-variation"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Occupying(Job):
    """Writes when it began and ended and on which device."""

    number: int
    kind: ClassVar[str] = "train"

    def run(self, folder: Path, workspace: Workspace) -> None:
        began = time.monotonic()
        time.sleep(0.2)
        (folder / "span").write_text(json.dumps([workspace.device, began, time.monotonic()]))

    def title(self) -> str:
        return f"occupy {self.number}"


def spans(jobs: list[Job], workspace: Workspace) -> list[tuple[str, float, float]]:
    return sorted(tuple(json.loads((workspace.folder(job) / "span").read_text())) for job in jobs)


@pytest.mark.slow
def test_a_gpu_has_one_job_at_a_time(tmp_path: Path) -> None:
    jobs: list[Job] = [Occupying(number=number) for number in range(4)]
    workspace = Workspace(tmp_path, device="cuda")
    outcomes = Local(workers=3, gpus=("cuda:0", "cuda:1"))(jobs, workspace, lambda _: None)
    assert {one.status for one in outcomes.values()} == {"done"}
    found = spans(jobs, workspace)
    assert {device for device, _, _ in found} == {"cuda:0", "cuda:1"}
    for (device, _, ended), (after, began, _) in pairwise(found):
        assert device != after or began >= ended


def test_a_plan_needs_no_gpu_and_names_hours_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(cost_model, "speed_of_a_core", lambda: 3e10)
    command = [
        "reproduce",
        "table4",
        "--scale",
        "gpu-day",
        "--device",
        "cuda",
        "--dry-run",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "1 GPU, one job at a time on each; GPU memory about" in shown
    assert "hours)" in shown
    # Readable in a terminal of 80 columns: nothing is cut off.
    assert "…" not in shown.partition("the longest:")[0]
    assert all(word in shown for word in ("│ table4 ", "GPU-hours", "unfiltered", "GPU memory", "disk"))
    assert "Wide" not in shown
    rows = json.loads((tmp_path / "plans" / "gpu-day.json").read_text("utf-8"))
    assert all(row["gpu_memory"] > 1e9 for row in rows if row["kind"] == "train")


def test_the_main_tables_take_a_day() -> None:
    plans = [experiment(f"table{number}") for number in (1, 2, 3, 4, 5, 6)]
    chosen = [plan.select(lambda words, job, ours: not ours).at(GPU_DAY) for plan in plans]
    hours = sum(cost_model.hours_of(job, gpu=True) for job in graph(job for plan in chosen for job in plan.jobs))
    assert hours < 30


def test_filters_leave_what_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "speed_of_a_core", lambda: 3e10)

    def planned(*options: str) -> list[str]:
        command = ["reproduce", "table7", "table16", "--dry-run", "--out", str(tmp_path), *options]
        assert cli.main(command) == 0
        rows = json.loads((tmp_path / "plans" / "smoke.json").read_text("utf-8"))
        return [row["title"] for row in rows if row["kind"] == "evaluate"]

    everything = planned()
    assert len(planned("--without-extensions")) < len(everything)
    assert not any("exact" in title for title in planned("--without-extensions"))
    assert set(planned("--match", "p 0.8→1 · Prep. + Adv")) < set(everything)
    assert set(planned("--datasets", "mnist")) < set(everything)
    assert cli.main(["reproduce", "table7", "--datasets", "cats", "--dry-run", "--out", str(tmp_path)]) == 2
    assert cli.main(["reproduce", "table7", "--match", "cats", "--dry-run", "--out", str(tmp_path)]) == 2


def test_examples_and_max_batch_size_a_scale() -> None:
    sized = GPU_DAY.sized(examples=60, max_batch=7)
    job = transformed(tables.black_box(VANILLA, "SPSA"), sized)
    assert (job.examples, job.max_batch) == (60, 7)
    assert "here 60 examples" in sized.summary


@pytest.mark.slow
def test_parts_of_an_evaluation_have_the_rows_of_the_whole(tmp_path: Path) -> None:
    job = transformed(tables.white_box(PURE, 7), SPECK)
    whole, split = Workspace(tmp_path / "whole"), Workspace(tmp_path / "split")
    assert job.split(2).key == job.key
    Local()(graph([job]), whole, lambda _: None)
    outcomes = Local()(graph([job.split(2)]), split, lambda _: None)
    assert sum("part" in one.title for one in outcomes.values()) == 2
    rows = [[{**row, "seconds": 0} for row in job.records(place).rows] for place in (whole, split)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 4


def test_long_evaluations_split_into_hours_and_never_below_a_batch() -> None:
    job = tables.extension(tables.model("cifar10", "me-net", "adversarial"), "exact+EOT")
    parts = cost_model.parts_of(job, 4.0, gpu=True)
    assert cost_model.hours_of(job.split(parts).parts[0], gpu=True) <= 4.0
    assert cost_model.parts_of(job, 1e-9, gpu=True) == 100


def test_subsets_are_stratified_and_the_same_for_every_method(tmp_path: Path) -> None:
    labels = torch.arange(100_000) // 500
    assert labels[stratified(labels, 10_000)].bincount().tolist() == [50] * 200
    defense = {**me_net("usvt"), "masks": 2}
    prepare("digits", defense, tmp_path / "set", limit=100)
    config = replace(SMOKE.training(VANILLA.config), dataset="digits", validation=0)
    plain = Batches.of(replace(config, limit=100))
    prepared = Batches.of(replace(config, limit=None, defense=defense, prepared=str(tmp_path / "set")))
    assert data.load("digits", "train").labels[plain.chosen].bincount().unique().tolist() == [10]
    mine, theirs = plain.dataset.batch(plain.chosen)[0], prepared.dataset.batch(slice(0, 100))[0]
    assert torch.equal(mine, theirs)


def test_every_copy_is_shown_once_an_epoch(tmp_path: Path) -> None:
    defense = {**me_net("usvt"), "masks": 3}
    prepare("digits", defense, tmp_path / "set", limit=40)
    config = replace(
        SMOKE.training(VANILLA.config), dataset="digits", defense=defense, prepared=str(tmp_path / "set"),
        limit=None, every_copy=True,
    )  # fmt: skip
    every = Batches.of(config)
    assert every.steps == 3 * 40 // config.batch_size
    assert every.order(0).sort().values.tolist() == list(range(120))
    assert not torch.equal(every.order(0), every.order(1))
    one = Batches.of(replace(config, every_copy=False))
    assert one.steps == 40 // config.batch_size


def test_a_bank_has_n_masks_of_each_image() -> None:
    model = MENet(torch.nn.Identity(), "usvt", p=(0.4, 0.6), masks=3, bank=0).train()
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    seen: list[set[bytes]] = [set(), set(), set(), set()]
    for _ in range(60):
        order = torch.randperm(4, generator=model.generator)
        model.examples = order
        for example, mask in zip(order.tolist(), model.sample_mask(images, model.generator), strict=True):
            seen[example].add(mask.numpy().tobytes())
    assert [len(one) for one in seen] == [3] * 4
    assert len(set.union(*seen)) == 12
    assert "bank" not in MENet(torch.nn.Identity()).settings()
    drawn = masks.of_examples(torch.arange(500), torch.zeros(500).long(), torch.full((500,), 0.3), (16, 16))
    assert abs(drawn.float().mean().item() - 0.3) < 0.01


def test_jobs_of_one_key_are_one_job_however_they_are_split() -> None:
    job = transformed(tables.white_box(PURE, 7), SPECK)
    assert isinstance(job, Evaluate)
    assert job == job.split(3)
    assert len({part.key for part in job.split(3).parts}) == 3
    assert all(isinstance(need, Train) for need in job.needs)

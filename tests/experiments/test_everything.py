"""Every table and figure from nothing: the whole of `menet reproduce --all`, with few and small jobs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from menet.experiments import EXPERIMENTS, experiment, plan
from menet.experiments.jobs import Evaluate, Job, Prepare, Train, Workspace
from menet.experiments.plan import Table, graph
from menet.experiments.runner import Local
from menet.experiments.scale import SMOKE, Scale
from menet.report.reproduction import publish


class Collapsed(Scale):
    """The smoke scale, with jobs that differ in numbers alone made equal, so that they run once.

    What remains different runs different code: the kind of job, method, estimator, objective, attack, access,
    gradient, whether there are restarts and EOT, whether p is a schedule.
    """

    def __call__(self, job: Job) -> Job:
        job = super().__call__(job)
        if isinstance(job, Prepare):
            return replace(job, defense=_defense(job.defense))
        if isinstance(job, Train):
            config = replace(job.config, epsilon=0.1, step_size=0.1, defense=_defense(job.config.defense))
            return replace(job, config=config)
        if isinstance(job, Evaluate):
            numbers = {"epsilon": 0.1, "step_size": 0.1, "kappa": 20}
            settings = {name: numbers.get(name, value) for name, value in job.settings.items()}
            return replace(job, settings=settings)
        return job


def _defense(defense: dict[str, Any]) -> dict[str, Any]:
    if defense.get("name") != "me-net":
        return defense
    scheduled = isinstance(defense["p"], list | tuple)
    return {**defense, "p": [0.4, 0.6] if scheduled else 0.05, "masks": 2 if scheduled else 1}


SPECK = Collapsed(
    **{
        **vars(SMOKE),
        "training": lambda config: replace(SMOKE.training(config), epochs=1, limit=40, steps=1),
        "images": 40,
        "examples": 4,
        "draws": 2,
        "batch_size": 4,
        "steps": lambda steps: 2,
        "restarts": lambda restarts: 2,
        "spsa_samples": 4,
        "boundary_steps": 3,
        "certificate_draws": 12,
    }
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_table_and_figure_is_made_and_kept(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    experiments = [experiment(name).at(SPECK) for name in EXPERIMENTS]
    jobs = graph(job for one in experiments for job in one.jobs)
    outcomes = Local()(jobs, workspace, lambda outcome: None)
    assert Counter(one.status for one in outcomes.values()) == {"done": len(jobs)}, [
        one for one in outcomes.values() if one.status != "done"
    ]
    for one in experiments:
        summary = plan.summarize(one, SPECK, workspace, outcomes)
        if isinstance(one, Table):
            assert all(cell["value"] is not None for cell in summary["cells"]), one.name
        plan.save_summary(summary, workspace)
    markdown, site = publish(tmp_path, tuple(EXPERIMENTS))
    text = markdown.read_text("utf-8")
    assert all(one.title in text for one in experiments)
    assert "failed" not in text
    assert site.stat().st_size > 100_000
    again = Local()(jobs, workspace, lambda outcome: None)
    assert {one.status for one in again.values()} == {"kept"}

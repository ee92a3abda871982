"""Every table and figure from nothing: the whole of `menet reproduce --all`, its jobs as small as they can be."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from menet.experiments import results
from menet.experiments.catalog import EXPERIMENTS, plan_of
from menet.experiments.jobs import Places
from menet.experiments.plan import Table, graph
from menet.experiments.runner import Local
from menet.experiments.scale import SMOKE
from menet.report.reproduction import publish

SPECK = replace(
    SMOKE,
    images=40,
    examples=4,
    masks=2,
    batch=4,
    steps=lambda steps: 2 if steps <= 20 else 3,
    eot=2,
    restarts=lambda restarts: 2,
    samples=4,
    walk=3,
    certificate=12,
    training=lambda config: replace(SMOKE.training(config), epochs=1, limit=40, steps=1),
)


@pytest.mark.timeout(900)
def test_every_table_and_figure_is_made_and_kept(tmp_path: Path) -> None:
    places = Places(tmp_path)
    plans = [plan_of(name).at(SPECK) for name in EXPERIMENTS]
    jobs = graph(job for plan in plans for job in plan.jobs)
    outcomes = Local(2)(jobs, places, lambda outcome: None)
    assert Counter(one.status for one in outcomes.values()) == {"done": len(jobs)}
    for plan in plans:
        summary = results.summarise(plan, SPECK, places, outcomes)
        if isinstance(plan, Table):
            assert all(cell["value"] is not None for cell in summary["cells"]), plan.name
        results.keep(summary, places)
    markdown, site = publish(tmp_path, tuple(EXPERIMENTS))
    text = markdown.read_text("utf-8")
    assert all(plan.title in text for plan in plans)
    assert "failed" not in text
    assert site.stat().st_size > 100_000
    again = Local(2)(jobs, places, lambda outcome: None)
    assert {one.status for one in again.values()} == {"kept"}

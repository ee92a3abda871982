"""Each claim is measured by exactly one cell, in the claim's own setting, and scales keep the plans whole."""

from collections import Counter
from dataclasses import replace

import pytest

from menet.errors import ConfigurationError
from menet.experiments import claims, paper
from menet.experiments.catalog import EXPERIMENTS, plan_of
from menet.experiments.jobs import Evaluate, Train, transformed
from menet.experiments.plan import Figure, Table, graph
from menet.experiments.scale import LAPTOP, PAPER, SCALES, SMOKE


@pytest.fixture(scope="module")
def plans() -> dict[str, Table | Figure]:
    return {name: plan_of(name) for name in EXPERIMENTS}


@pytest.fixture(scope="module")
def tables(plans: dict[str, Table | Figure]) -> list[Table]:
    return [plan for plan in plans.values() if isinstance(plan, Table)]


def test_each_claim_is_reached_from_one_cell_and_each_cell_of_the_paper_reaches_one(tables: list[Table]) -> None:
    cells = Counter(
        (table.label, cell.row, cell.column) for table in tables for cell in table.cells if not cell.ours
    )
    assert cells == Counter(claim.place for claim in claims.load())


def test_what_a_cell_would_run_is_what_its_claim_was_measured_on(tables: list[Table]) -> None:
    for table in tables:
        for cell in table.cells:
            claim = table.claim(cell)
            if claim is not None:
                assert cell.setting().difference(claim.setting) is None, (table.name, cell.row, cell.column)


def test_every_white_box_table_has_columns_of_exact_gradients_and_expectation(tables: list[Table]) -> None:
    white = {
        claim.table for claim in claims.load() if claim.setting.access in ("white-box", "after-preprocessing")
    }
    assert len(white) == 14
    for table in tables:
        if table.label in white:
            ours = [cell for cell in table.cells if cell.ours]
            assert ours, table.name
            jobs = [cell.job for cell in ours if isinstance(cell.job, Evaluate)]
            assert {"exact", "bpda"} == {job.gradient for job in jobs}
            assert any(job.settings.get("eot", 1) > 1 for job in jobs)


def test_names_agree_and_labels_are_the_papers(plans: dict[str, Table | Figure]) -> None:
    assert all(plan.name == name for name, plan in plans.items())
    labels = [plan.label for plan in plans.values() if isinstance(plan, Table) and plan.label]
    assert sorted(labels) == sorted(claims.tables())


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_plans_keep_their_shape_at_every_scale(plans: dict[str, Table | Figure], scale: object) -> None:
    for plan in plans.values():
        scaled = plan.at(scale)  # type: ignore[arg-type]
        assert len(scaled.jobs) == len(plan.jobs)
        assert [type(job) for job in scaled.jobs] == [type(job) for job in plan.jobs]


def test_the_scale_of_the_paper_changes_no_model_and_no_attack(plans: dict[str, Table | Figure]) -> None:
    for plan in plans.values():
        for before, after in zip(plan.jobs, plan.at(PAPER).jobs, strict=True):
            if isinstance(before, Evaluate) and isinstance(after, Evaluate):
                assert before.model == after.model
                assert before.settings == after.settings
                assert (before.examples, before.pictures) == (after.examples, after.pictures)


def test_a_graph_holds_each_job_once_and_after_what_it_needs(plans: dict[str, Table | Figure]) -> None:
    jobs = graph(job for plan in plans.values() for job in plan.at(SMOKE).jobs)
    keys = [job.key for job in jobs]
    assert len(set(keys)) == len(keys)
    place = {key: number for number, key in enumerate(keys)}
    assert all(place[need.key] < place[job.key] for job in jobs for need in job.needs)


def test_models_are_shared_between_tables() -> None:
    first = {job.key for job in graph(plan_of("table4").jobs) if isinstance(job, Train)}
    second = {job.key for job in graph(plan_of("table13").jobs) if isinstance(job, Train)}
    assert first < second


def test_a_changed_setting_changes_the_keys_of_what_depends_on_it_alone() -> None:
    job = paper.black_box(paper.model("mnist", p=paper.LOW), "PGD 40")

    def longer(one: object) -> object:
        if isinstance(one, Train) and one.config.defense:
            return replace(one, config=replace(one.config, epochs=one.config.epochs + 1))
        return one

    changed = transformed(job, longer)  # type: ignore[arg-type]
    assert changed.key != job.key
    assert changed.model.key != job.model.key
    assert changed.source == job.source
    assert changed.model.prepared == job.model.prepared
    renamed = replace(job.model, config=replace(job.model.config, recipe="another name"))
    assert renamed.key == job.model.key


def test_smaller_scales_keep_attacks_in_order_and_able_to_cross_the_ball() -> None:
    victim = paper.model("mnist", p=paper.LOW)
    for scale in (SMOKE, LAPTOP):
        sizes = []
        for steps in (7, 20, 40, 100, 1000):
            settings = transformed(paper.white_box(victim, steps), scale).settings
            sizes.append(settings["steps"])
            if settings["steps"] < steps:
                assert settings["steps"] * settings["step_size"] >= 2 * settings["epsilon"]
        assert sizes == sorted(set(sizes))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="table27"):
        plan_of("table99")
    with pytest.raises(ConfigurationError, match="accepted are"):
        paper.gradient_attack(paper.model("mnist"), "Fireworks")

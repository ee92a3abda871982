"""Each claim is measured by exactly one cell, in the claim's own setting, and scales keep experiments whole."""

from collections import Counter
from dataclasses import replace

import pytest

from menet.errors import ConfigurationError
from menet.experiments import EXPERIMENTS, claims, experiment
from menet.experiments.jobs import Evaluate, Train, transformed
from menet.experiments.plan import Experiment, Table, graph
from menet.experiments.scale import LAPTOP, PAPER, SCALES, SMOKE, Scale
from menet.experiments.tables import LOW, black_box, gradient_attack, model, white_box


@pytest.fixture(scope="module")
def experiments() -> dict[str, Experiment]:
    return {name: experiment(name) for name in EXPERIMENTS}


@pytest.fixture(scope="module")
def tables(experiments: dict[str, Experiment]) -> list[Table]:
    return [plan for plan in experiments.values() if isinstance(plan, Table)]


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
    white = {claim.table for claim in claims.load() if claim.setting.access in ("white-box", "classifier-only")}
    assert len(white) == 14
    for table in tables:
        if table.label in white:
            ours = [cell for cell in table.cells if cell.ours]
            assert ours, table.name
            jobs = [cell.job for cell in ours if isinstance(cell.job, Evaluate)]
            assert {"exact", "bpda"} == {job.gradient for job in jobs}
            assert any(job.settings.get("eot", 1) > 1 for job in jobs)


def test_names_agree_and_labels_are_the_papers(experiments: dict[str, Experiment]) -> None:
    assert all(plan.name == name for name, plan in experiments.items())
    labels = [plan.label for plan in experiments.values() if isinstance(plan, Table) and plan.label]
    assert sorted(labels) == sorted(claims.tables())


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_experiments_keep_their_shape_at_every_scale(experiments: dict[str, Experiment], scale: Scale) -> None:
    for plan in experiments.values():
        scaled = plan.at(scale)
        assert len(scaled.jobs) == len(plan.jobs)
        assert [type(job) for job in scaled.jobs] == [type(job) for job in plan.jobs]


def test_the_scale_of_the_paper_changes_no_model_and_no_attack(experiments: dict[str, Experiment]) -> None:
    for plan in experiments.values():
        for before, after in zip(plan.jobs, plan.at(PAPER).jobs, strict=True):
            if isinstance(before, Evaluate) and isinstance(after, Evaluate):
                assert before.model == after.model
                assert before.settings == after.settings
                assert (before.examples, before.snapshots) == (after.examples, after.snapshots)


def test_a_graph_holds_each_job_once_and_after_what_it_needs(experiments: dict[str, Experiment]) -> None:
    jobs = graph(job for plan in experiments.values() for job in plan.at(SMOKE).jobs)
    keys = [job.key for job in jobs]
    assert len(set(keys)) == len(keys)
    place = {key: number for number, key in enumerate(keys)}
    assert all(place[need.key] < place[job.key] for job in jobs for need in job.needs)


def test_models_are_shared_between_tables() -> None:
    first = {job.key for job in graph(experiment("table4").jobs) if isinstance(job, Train)}
    second = {job.key for job in graph(experiment("table13").jobs) if isinstance(job, Train)}
    assert first < second


def test_a_changed_setting_changes_the_keys_of_what_depends_on_it_alone() -> None:
    job = black_box(model("mnist", p=LOW), "PGD 40")

    def longer(one: object) -> object:
        if isinstance(one, Train) and one.config.defense:
            return replace(one, config=replace(one.config, epochs=one.config.epochs + 1))
        return one

    changed = transformed(job, longer)  # type: ignore[arg-type]
    assert changed.key != job.key
    assert changed.model.key != job.model.key
    assert changed.surrogate == job.surrogate
    assert changed.model.prepared == job.model.prepared
    renamed = replace(job.model, config=replace(job.model.config, recipe="another name"))
    assert renamed.key == job.model.key


def test_smaller_scales_keep_attacks_in_order_and_able_to_cross_the_epsilon_ball() -> None:
    victim = model("mnist", p=LOW)
    for scale in (SMOKE, LAPTOP):
        sizes = []
        for steps in (7, 20, 40, 100, 1000):
            settings = transformed(white_box(victim, steps), scale).settings
            sizes.append(settings["steps"])
            if settings["steps"] < steps:
                assert settings["steps"] * settings["step_size"] >= 2 * settings["epsilon"]
        assert sizes == sorted(set(sizes))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown experiment 'table99'; choose from figure1,"):
        experiment("table99")
    with pytest.raises(ConfigurationError, match="unknown column 'Fireworks'; choose from FGSM"):
        gradient_attack(model("mnist"), "Fireworks")

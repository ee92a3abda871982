"""Each claim is measured by exactly one cell, in the claim's own setting, and scales keep experiments whole."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from menet import data, models
from menet.attacks import ThreatModel
from menet.attacks.adaptive import ProjectedBPDA
from menet.baselines import TotalVariation
from menet.errors import ConfigurationError
from menet.evaluation.snapshots import Features
from menet.experiments import EXPERIMENTS, claims, cost_model, experiment, jobs
from menet.experiments.jobs import Evaluate, Train, Workspace, transformed
from menet.experiments.measures import EstimationError, Ranks, Redistributed
from menet.experiments.plan import Cell, Experiment, Table, graph
from menet.experiments.scale import CORES, GPU_DAY, LAPTOP, PAPER, SCALES, SMOKE, Scale
from menet.experiments.tables import (
    BOUNDED,
    DEFENDED,
    HIGH,
    LOW,
    black_box,
    gradient_attack,
    model,
    standard_suite,
    white_box,
)
from menet.report.figures import distances
from menet.training.recipes import me_net


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
                ours = cell.setting()
                if claim.quoted:
                    # Trained by the authors of another paper.
                    ours = replace(ours, training_steps=None)
                assert ours.difference(claim.setting) is None, (table.name, cell.row, cell.column)


def test_a_claim_holds_the_budget_the_samples_and_the_steps_of_training() -> None:
    """Each of them, changed in a job, is found by the comparison above."""
    victim = model("cifar10", p=HIGH)
    claim = claims.by_place()["cifar black ours", "ME-Net", "SPSA"].setting
    assert (claim.epsilon, claim.samples) == ("8/255", 2048)
    assert claim.training_steps == 200 * (10 * 50_000 // 256)
    cell = Cell("ME-Net", "SPSA", black_box(victim, "SPSA"))
    assert cell.setting() == claim
    assert isinstance(cell.job, Evaluate)
    for name, value in (("epsilon", 4 / 255), ("samples", 128)):
        weaker = replace(cell.job, settings={**cell.job.settings, name: value})
        assert str(replace(cell, job=weaker).setting().difference(claim)).startswith(name)
    short = replace(victim, config=replace(victim.config, every_copy=False))
    found = replace(cell, job=replace(cell.job, model=short)).setting().difference(claim)
    assert found == "training_steps: 39000 here, 390600 there"


def test_every_white_box_table_has_columns_of_exact_gradients_and_expectation(tables: list[Table]) -> None:
    white = {claim.table for claim in claims.load() if claim.setting.access in ("white-box", "classifier-only")}
    assert len(white) == 14
    for table in tables:
        if table.label in white:
            ours = [cell for cell in table.cells if cell.ours]
            assert ours, table.name
            jobs = [cell.job for cell in ours if isinstance(cell.job, Evaluate)]
            suites = [job for job in jobs if job.attack == "standard"]
            assert suites
            assert {"exact", "bpda"} == {job.gradient for job in jobs if job not in suites}
            assert any(job.settings.get("eot", 1) > 1 for job in jobs)


def test_names_agree_and_labels_are_the_papers(experiments: dict[str, Experiment]) -> None:
    assert all(plan.name == name for name, plan in experiments.items())
    labels = [plan.label for plan in experiments.values() if isinstance(plan, Table) and plan.label]
    assert sorted(labels) == sorted(claims.tables())


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_experiments_keep_their_shape_at_every_scale(experiments: dict[str, Experiment], scale: Scale) -> None:
    for plan in experiments.values():
        scaled = plan.at(scale)
        measured = [job for job in plan.jobs if scale.measures(job)]
        assert [type(job) for job in scaled.jobs] == [type(job) for job in measured]
        assert len(measured) == len(plan.jobs) or "ide" in scaled.note, plan.name


@pytest.mark.parametrize("scale", [LAPTOP, CORES, GPU_DAY, PAPER], ids=lambda scale: scale.name)
def test_no_two_rows_of_a_scale_print_one_measurement_under_two_names(
    experiments: dict[str, Experiment], scale: Scale
) -> None:
    """Jobs that differ at the paper's scale differ at every other (the smoke scale has one dataset)."""
    before: dict[str, str] = {}
    for plan in experiments.values():
        for job in plan.jobs:
            if scale.measures(job):
                scaled = transformed(job, scale).key
                assert before.setdefault(scaled, job.key) == job.key, (plan.name, job.title())


def test_rows_of_networks_that_a_scale_lacks_are_left_out_and_named() -> None:
    at_paper, at_day = (experiment("table4").at(scale) for scale in (PAPER, GPU_DAY))
    assert isinstance(at_paper, Table)
    assert isinstance(at_day, Table)
    assert any(cell.row.startswith("WideResNet") for cell in at_paper.cells)
    assert not any(cell.row.startswith("WideResNet") for cell in at_day.cells)
    assert "Not measured at scale gpu-day: WideResNet · Madry" in at_day.note


def test_an_epoch_of_the_paper_is_all_estimates_and_other_scales_say_what_theirs_is() -> None:
    victim = model("cifar10", p=LOW)
    assert transformed(victim, PAPER).steps(50_000) == 200 * (500_000 // 256)
    assert (
        transformed(victim, PAPER).described() == "standard, 200 epochs, all 10 estimates of an image per epoch"
    )
    at_day, at_cores = transformed(victim, GPU_DAY), transformed(victim, CORES)
    assert at_day.described() == "standard, 200 epochs, one of 10 estimates of an image per epoch"
    assert at_cores.described().endswith("fresh masks")
    assert at_cores.prepared is None
    single = transformed(model("cifar10", p=0.9, masks=1), CORES)
    assert single.described().endswith("one fixed mask per image")


def test_the_number_of_masks_is_that_of_fixed_masks_under_adversarial_training() -> None:
    table = experiment("table27")
    trained = [job for job in graph(table.jobs) if isinstance(job, Train) and job.config.objective != "standard"]
    assert len({job.key for job in trained}) == 6
    for job in trained:
        assert job.config.defense["bank"] == 0
        assert "fixed mask" in job.described()


def test_boundary_has_no_budget_and_its_bounded_form_is_an_extension(tables: list[Table]) -> None:
    for table in tables:
        for cell in table.cells:
            if isinstance(cell.job, Evaluate) and cell.job.attack == "boundary":
                assert (cell.job.settings["epsilon"] is None) != cell.ours
    bounded = [cell for table in tables for cell in table.cells if cell.column == BOUNDED]
    assert len(bounded) == sum(claim.column == "Boundary" for claim in claims.load())


def test_the_source_is_a_copy_of_the_network_and_a_defended_one_an_extension(tables: list[Table]) -> None:
    sources = {False: 0, True: 0}
    for table in tables:
        for cell in table.cells:
            if isinstance(cell.job, Evaluate) and cell.job.surrogate is not None:
                victim, source = cell.job.model.config, cell.job.surrogate.config
                assert (source.model, source.objective, source.seed) == (victim.model, victim.objective, 1)
                assert bool(source.defense) == cell.column.endswith(DEFENDED) == (cell.job.gradient is not None)
                assert cell.ours or not source.defense or table.label is None
                sources[bool(source.defense)] += 1
    assert sources[True] >= 15


def test_total_variation_has_the_p_of_me_net_and_the_papers_three_models_agree() -> None:
    job = next(cell.job for cell in experiment("table3").cells if cell.row.startswith("TV"))  # type: ignore[union-attr]
    assert isinstance(job, Evaluate)
    assert job.model.config.defense["p"] == [0.4, 0.6]
    (claim,) = claims.query("cifar black compare", method="madry", attack="cw")
    assert (claim.value, claim.setting.kappa) == (78.7, 20)


def test_fifty_restarts_answer_for_ten_and_twenty() -> None:
    table = experiment("table25")
    assert isinstance(table, Table)
    hard = [cell for cell in table.cells if cell.criterion == "hard"]
    assert len(hard) == 18
    assert len({cell.job.key for cell in hard}) == 6
    for scale in SCALES.values():
        counted = [cell.restarts or 0 for cell in table.at(scale).cells[:3]]
        assert counted == sorted(set(counted))
        job = table.at(scale).cells[0].job
        assert isinstance(job, Evaluate)
        assert job.settings["restarts"] == counted[-1]


def test_a_smaller_scale_says_what_it_leaves_of_an_attack() -> None:
    table = experiment("table25")
    assert isinstance(table, Table)
    assert table.at(LAPTOP).cells[2].reduced == "60 of 100 steps, 8 of 50 restarts"
    assert table.at(PAPER).cells[2].reduced == ""


def test_votes_take_p_from_the_schedule_and_the_mean_is_an_extension() -> None:
    table = experiment("table26")
    assert isinstance(table, Table)
    assert {cell.criterion for cell in table.cells if not cell.ours} == {"expected", "vote"}
    assert {cell.criterion for cell in table.cells if "vote at the mean p" in cell.column} == {"vote-mean"}


def test_figures_show_what_the_papers_show() -> None:
    ten = next(iter(experiment("figure10").jobs))
    assert isinstance(ten, Redistributed)
    assert not ten.attacked.model.config.defense
    assert ten.defended.config.defense["name"] == "me-net"
    assert experiment("figure3").form == "diagram"  # type: ignore[union-attr]


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


def test_distances_of_figure5_are_in_no_unit_of_the_network() -> None:
    vectors = np.array([[0.0], [1.0], [3.0], [7.0]])
    features = Features("attack", np.array([0, 0, 1, 1]), vectors, 2 * vectors)
    clean, adversarial = distances([("network", features)]).axes
    assert [line.get_xdata()[-1] for line in clean.lines] == [4.0, 7.0]
    assert [line.get_xdata()[-1] for line in adversarial.lines] == [8.0, 14.0]


def test_ranks_are_of_both_splits(tmp_path: Path) -> None:
    whole = sum(len(data.load("digits", split)) for split in ("train", "test"))
    assert Ranks(dataset="digits").measure(Workspace(tmp_path))["images"] == whole
    assert Ranks(dataset="digits", limit=100).measure(Workspace(tmp_path))["images"] == 100


def test_the_error_of_masks_alone_is_that_of_gray_pixels(tmp_path: Path) -> None:
    """A hidden pixel is gray to the network, halfway between black and white, and an observed one is itself."""
    images, _ = data.load("digits", "test").batch(slice(0, 200))
    expected = (images - 0.5).square().mean((1, 2, 3)).mul(0.5).sqrt().mean()
    found = {
        p: EstimationError(dataset="digits", defense=me_net("mask-only", p, masks=1), examples=200).measure(
            Workspace(tmp_path)
        )
        for p in (0.5, 1.0)
    }
    assert found[0.5]["mean"] == pytest.approx(float(expected), rel=0.02)
    assert found[0.5]["examples"] == 200
    assert 0 < found[0.5]["deviation"] < 0.1
    assert found[1.0]["mean"] == pytest.approx(0, abs=1e-6)


def test_total_variation_draws_p_from_its_schedule_in_training_and_uses_the_mean_after() -> None:
    defense = TotalVariation(nn.Identity(), p=(0.0, 1.0))
    images = torch.ones(400, 1, 4, 4)
    assert defense.settings()["p"] == [0.0, 1.0]
    assert len(defense.schedule) == 10
    blank = [(defense.train(mode).preprocess(images, generator()).amax((1, 2, 3)) == 0) for mode in (True, False)]
    # One probability of ten is zero, where nothing is seen; at the mean 0.45 of 16 entries some are.
    assert 15 < int(blank[0].sum()) < 80
    assert int(blank[1].sum()) <= 2


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_pixel_defend_has_its_published_network_at_the_papers_scale_and_others_say_what_they_have() -> None:
    victim = model("cifar10", "pixel-defend")
    defense = transformed(victim, PAPER).config.defense
    assert (defense["likelihood"], defense["width"], defense["layers"]) == ("pixel-cnn++", 160, 5)
    assert transformed(victim, PAPER).described().endswith("PixelCNN++ of its publication")
    for scale in (SMOKE, LAPTOP, CORES, GPU_DAY):
        small = transformed(victim, scale)
        assert "likelihood" not in small.config.defense
        assert small.described().endswith("a small PixelCNN in place of PixelCNN++")
    at_paper, at_day = (transformed(victim, scale) for scale in (PAPER, GPU_DAY))
    # Days of eight GPUs, as its authors say, against minutes; and memory for its passes.
    assert cost_model.hours_of(at_paper, gpu=True) > 100 * cost_model.hours_of(at_day, gpu=True)
    assert cost_model.memory_of(at_paper) > 2 * cost_model.memory_of(at_day)


def test_estimation_compares_trainings_that_differ_in_what_their_rows_say() -> None:
    table = experiment("estimation")
    assert isinstance(table, Table)
    assert all(cell.ours for cell in table.cells)
    suites = {cell.row: cell.job for cell in table.at(LAPTOP).cells if cell.column == "standard"}
    trained = {row: job.model.config for row, job in suites.items() if isinstance(job, Evaluate)}
    assert len({job.needs for job in suites.values()}) == len(suites) == 2 * (11 + 13)
    for scale, budget in ((LAPTOP, "quick"), (PAPER, "standard")):
        jobs = [cell.job for cell in table.at(scale).cells if cell.column == "standard"]
        assert {job.settings["budget"] for job in jobs if isinstance(job, Evaluate)} == {budget}
    pixels = {cell.row: cell.job for cell in table.at(LAPTOP).cells if cell.column == "8 pixels"}
    assert {row: job.needs for row, job in pixels.items()} == {row: job.needs for row, job in suites.items()}
    threats = {
        (job.settings["norm"], job.settings["epsilon"]) for job in pixels.values() if isinstance(job, Evaluate)
    }
    assert threats == {("l0", 8)}
    first = "MNIST · ME-Net, p 0.4→0.6"
    assert trained[f"{first} · seed 0"].defense["gradient"] == "bpda"
    assert trained[f"{first}, exact · seed 0"].defense["gradient"] == "exact"
    assert trained[f"{first}, exact, 4 draws · seed 1"].eot == 4
    assert trained[f"{first}, TRADES · seed 1"].objective == "trades"
    assert trained["CIFAR-10 · ME-Net, p 0.4→0.6, masks of pixels · seed 0"].defense["mask"] == "pixels"
    assert trained["MNIST · mask only, p 0.8→1 · seed 0"].defense["estimator"] == {"name": "mask-only"}
    # At scale cores all have the same time, so that more draws are fewer epochs.
    at_cores = {cell.row: cell.job for cell in table.at(CORES).cells if cell.column == "standard"}
    one, four = (at_cores[f"{first}, exact{draws} · seed 0"] for draws in ("", ", 4 draws"))
    assert isinstance(one, Evaluate)
    assert isinstance(four, Evaluate)
    assert one.model.config.epochs > 2 * four.model.config.epochs
    assert "exact 4 draws" in four.model.title()


def test_another_version_of_the_suite_is_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    victim = model("mnist", "me-net", "adversarial")
    keys = []
    for version in (4, 5):
        monkeypatch.setattr(jobs, "Standard", lambda version=version: SimpleNamespace(version=version))
        keys.append((standard_suite(victim).key, white_box(victim, 40).key))
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] == keys[1][1]


def test_the_smallest_budget_is_searched_by_the_attacks_that_stand_beside_it() -> None:
    table = experiment("published-code")
    assert isinstance(table, Table)
    jobs_of = {(cell.row, cell.column): cell.job for cell in table.cells}
    searched = [place for place in jobs_of if place[1].endswith(", smallest")]
    assert len(searched) == 3 * 3 * (4 + 3) + 2 * 2
    for row, column in searched:
        within, smallest = jobs_of[row, column.removesuffix(", smallest")], jobs_of[row, column]
        assert (within.attack, smallest.attack) == ("pgd", "pgd-smallest")
        assert replace(smallest, attack="pgd") == within
    # Every network is trained on estimates by its own defense.
    for job in graph(table.jobs):
        if isinstance(job, Train) and job.prepared:
            assert job.prepared.defense == job.config.defense
    # What stands beside it are the paper's own cells.
    assert jobs_of["MNIST · Nuclear norm, p 0.4→0.6", "Gray-box"] in experiment("table15").jobs


def test_related_defenses_have_their_attacks_and_published_sizes_at_the_papers_scale_alone() -> None:
    table = experiment("related-defenses")
    assert isinstance(table, Table)
    assert all(cell.ours for cell in table.cells)
    columns = {
        row: [cell.column for cell in table.cells if cell.row == row] for row in {c.row for c in table.cells}
    }
    for dataset in ("MNIST", "CIFAR-10"):
        plain = ["Clean", "FGSM", "PGD 100"]
        assert columns[f"{dataset} · Vanilla"] == plain
        assert columns[f"{dataset} · Image quilting"] == [*plain, "BPDA+EOT"]
        assert columns[f"{dataset} · Defense-GAN"] == [*plain, "exact", "BPDA+EOT", "on-manifold"]
    for method, name, published in (
        ("image-quilting", "patches", 1_000_000),
        ("defense-gan", "gan_steps", 200_000),
    ):
        victim = model("cifar10", method)
        assert transformed(victim, PAPER).config.defense[name] == published
        assert transformed(victim, PAPER).described().endswith("of its publication")
        for scale in (SMOKE, LAPTOP, CORES, GPU_DAY):
            small = transformed(victim, scale)
            assert small.config.defense.get(name, 0) < published
            assert " a small " in small.described()
        at_paper, at_cores = (transformed(victim, scale) for scale in (PAPER, CORES))
        assert cost_model.hours_of(at_paper, gpu=False) > 10 * cost_model.hours_of(at_cores, gpu=False)
    attack = next(cell.job for cell in table.at(SMOKE).cells if cell.column == "on-manifold")
    assert isinstance(attack, Evaluate)
    assert cost_model.cost_of(attack).operations > 0


def test_the_page_tells_the_choices_that_the_code_makes() -> None:
    """What the paper leaves open: the page's words beside the defaults that the words are about."""
    page = " ".join(Path(__file__).parents[2].joinpath("docs/reproduce.md").read_text("utf-8").split())
    victim = model("cifar10")
    attack, settings = gradient_attack(victim, "CW")
    assert (attack, settings["steps"], settings["kappa"]) == ("cw", 40, 50)
    assert "**CW** is 40 steps of PGD on the margin loss with confidence κ within ε" in page
    assert ProjectedBPDA(threat=ThreatModel("linf", 0.1)).rank == 5
    assert "Projected BPDA projects onto rank 5" in page
    network = models.build("densenet121", channels=3, side=64, classes=200, generator=generator())
    stem = next(one for one in network.modules() if isinstance(one, nn.Conv2d))
    assert stem.kernel_size == (3, 3)
    assert "DenseNet-121 has a 3×3 stem" in page
    for words in (
        "finds δ at the estimate and adds it to the true image",
        "keeps its statistics while training examples are attacked",
        "**Soft-Impute** iterates to convergence",
    ):
        assert words in page

"""From plans to RESULTS.md with real jobs, as small as they can be."""

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from menet import cli, data
from menet.errors import ConfigurationError
from menet.evaluation import CertificateSettings, accuracy
from menet.evaluation.accuracy import vote_rank
from menet.evaluation.results import read_result
from menet.evaluation.snapshots import pack
from menet.experiments import claims, experiment, tables
from menet.experiments.jobs import Certify, Evaluate, Train, Workspace, transformed
from menet.experiments.measures import FeatureVectors, Ranks, Reconstructions, Redistributed
from menet.experiments.plan import (
    Cell,
    Experiment,
    Figure,
    Panel,
    Point,
    Table,
    cells_of,
    graph,
    load_summary,
    number_of,
    save_summary,
    summarize,
    summary_path,
)
from menet.experiments.runner import JobOutcome, Local
from menet.experiments.scale import SMOKE, Scale, by_name
from menet.experiments.tables import paper
from menet.files import locked
from menet.report.documents import fill_results
from menet.report.paper_figures import diagram, lines, ranks
from menet.report.reproduction import overview, parts_of, places_of, publish, record_of, report_of, table_of
from menet.report.reproduction import pack as pack_tables
from menet.training import load_model, pretrained
from menet.training.recipes import me_net

TINY: Scale = replace(
    SMOKE,
    name="smoke",
    images=40,
    examples=10,
    draws=3,
    batch_size=5,
    certificate_draws=12,
    training=lambda config: replace(SMOKE.training(config), epochs=1, limit=40),
)
VICTIM = tables.model("cifar10", "me-net", "adversarial", tables.LOW, estimator="usvt")
RESTARTED = tables.white_box(VICTIM, 100, restarts=20)
RESTARTED_AT = transformed(RESTARTED, TINY)
Made = tuple[Workspace, list[Experiment], dict[str, JobOutcome]]
PURE = tables.model("cifar10", p=tables.HIGH, estimator="usvt")


def small_table() -> Table:
    """Cells of every kind, some of them where the paper has a number."""
    row = "ME-Net - USVT · Prep. + Adv. train"
    attacked = tables.white_box(VICTIM, 7)
    cells = (
        Cell(row, "Clean", tables.clean(VICTIM), clean=True),
        Cell(row, "7", attacked),
        Cell(row, "vote", attacked, criterion="vote", ours=True),
        Cell(row, "vote at the mean p", attacked, criterion="vote-mean", ours=True),
        Cell(row, "Boundary", tables.black_box(VICTIM, "Boundary"), ours=True),
        Cell(row, "one restart", RESTARTED, criterion="hard", restarts=10, ours=True),
        Cell(row, "top-5", attacked, top=5, ours=True),
        Cell(row, "restarts", RESTARTED, criterion="hard", ours=True),
        Cell(row, "certified", Certify(model=PURE, settings=CertificateSettings()), radius=0, ours=True),
    )
    return Table("table24", "Estimators", cells, "appendix me methods white", "A note.")


def small_figures() -> list[Figure]:
    kept = replace(tables.black_box(PURE, "PGD 40"), snapshots=10)
    points = tuple(Point(steps, Cell("a", str(steps), tables.white_box(VICTIM, steps))) for steps in (7, 20))
    vectors = (Panel("ME-Net", sources=(("ME-Net", FeatureVectors(attacked=kept)),)),)
    images = Reconstructions(dataset="mnist", defense={**me_net("usvt"), "masks": 1}, probabilities=(0.3, 0.9))
    return [
        Figure("figure1", "Ranks", "ranks", (Panel("MNIST", sources=(("MNIST", Ranks(dataset="mnist")),)),)),
        Figure("figure2", "Images", "reconstructions", (Panel("", sources=(("images", images),)),)),
        Figure("figure4", "Plane", "plane", vectors),
        Figure("figure5", "Distances", "distances", vectors),
        Figure("figure6", "Steps", "lines", (Panel("MNIST", (("ME-Net", points),)),), "steps"),
        Figure("figure3", "Diagram", "diagram", (Panel("", sources=(("images", images),)),)),
        Figure(
            "figure10",
            "Pictures",
            "pictures",
            (Panel("", sources=(("images", Redistributed(attacked=kept, defended=VICTIM)),)),),
        ),
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    workspace = Workspace(tmp_path_factory.mktemp("reproduce"))
    plans: list[Experiment] = [plan.at(TINY) for plan in (small_table(), *small_figures())]
    outcomes = Local()(graph(job for plan in plans for job in plan.jobs), workspace, lambda outcome: None)
    for plan in plans:
        save_summary(summarize(plan, TINY, workspace, outcomes), workspace)
    return workspace, plans, outcomes


def test_every_kind_of_job_runs(made: Made) -> None:
    assert {one.status for one in made[2].values()} == {"done"}, made[2]


def test_a_summary_holds_the_claim_beside_what_the_rows_say(
    made: Made,
) -> None:
    workspace, plans, _ = made
    summary = load_summary(workspace, "smoke", "table24")
    assert summary is not None
    cells = {cell["column"]: cell for cell in summary["cells"]}
    claim = claims.by_place()["appendix me methods white", "ME-Net - USVT · Prep. + Adv. train", "7"]
    assert cells["7"]["claimed"] == claim.value == 67.3
    table = plans[0]
    assert isinstance(table, Table)
    job = table.cells[1].job
    assert isinstance(job, Evaluate)
    rows = job.records(workspace).rows
    assert cells["7"]["value"] == pytest.approx(100 * accuracy(job.records(workspace), "adversarial").value)
    assert cells["7"]["examples"] == 10
    assert cells["7"]["low"] <= cells["7"]["value"] <= cells["7"]["high"]
    restarted = RESTARTED_AT.records(workspace).rows
    assert {len(row["restarts"]) for row in restarted} == {3}
    for column, first in (("restarts", 3), ("one restart", 2)):
        right = sum(all(one == 0 for one in row["restarts"][:first]) for row in restarted)
        assert cells[column]["value"] == 100 * right / 10
    # Votes have p from the schedule, in draws of their own.
    votes = [row["views"]["schedule"]["predictions"] for row in rows]
    assert {len(one) for one in votes} == {10}
    right = sum(vote_rank(one, row["label"]) == 0 for one, row in zip(votes, rows, strict=True))
    assert cells["vote"]["value"] == 100 * right / 10
    attack = job.records(workspace).evaluation["attack"]
    assert (attack["eot"], attack["keep"]) == (1, "last"), "one draw per step, as in the paper"
    assert cells["Boundary"]["median_distance"]["l2"] >= 0
    assert "median ℓ2" in str(table_of(summary).rows[0])
    assert cells["7"]["training"] == "adversarial, 1 epoch, fresh masks"
    assert "fresh masks" in str(table_of(summary).rows[0][0])
    assert cells["vote"]["claimed"] is None
    assert cells["top-5"]["value"] >= cells["7"]["value"]
    assert len(rows) == 10


def test_results_name_the_scale_the_claim_and_the_difference(
    made: Made,
) -> None:
    workspace, _, _ = made
    order = ("figure1", "figure2", "figure3", "figure4", "figure5", "figure6", "figure10", "table24")
    markdown, site, tables = publish(workspace.root, order, ("csv", "latex"))
    assert {path.name for path in tables.iterdir()} == {
        f"{name}.{ending}" for name in ("overview", "table24-smoke") for ending in ("csv", "tex")
    }
    text = markdown.read_text("utf-8")
    assert "scale smoke" in text
    assert "paper 67.3, " in text
    assert text.count("![") == 7
    assert all(
        (markdown.parent / "RESULTS-figures" / f"{name}-smoke.png").stat().st_size > 1000 for name in order[:-1]
    )
    page = site.read_text("utf-8")
    assert "paper 67.3" in page
    assert 'src="http' not in page


def test_a_second_run_repeats_nothing(made: Made) -> None:
    workspace, plans, _ = made
    outcomes = Local()(graph(job for plan in plans for job in plan.jobs), workspace, lambda outcome: None)
    assert {one.status for one in outcomes.values()} == {"kept"}
    before = summary_path(workspace, "smoke", "table24").read_bytes()
    save_summary(summarize(plans[0], TINY, workspace, outcomes), workspace)
    assert summary_path(workspace, "smoke", "table24").read_bytes() == before


def test_a_document_gets_the_measured_rows_of_a_published_table(made: Made, tmp_path: Path) -> None:
    pack_tables(made[0].root, tmp_path / "paper", ["table24"])
    document = tmp_path / "page.md"
    document.write_text("Before.\n<!-- reproduced table24 smoke -->\nold\n<!-- /reproduced -->\nAfter.\n")
    once = fill_results(document, tmp_path).read_text()
    assert once.startswith("Before.\n<!-- reproduced table24 smoke -->\n\n|  | Clean | 7 |")
    assert once.endswith("|\n\n<!-- /reproduced -->\nAfter.\n")
    assert "old" not in once
    assert once.count("\n| ME-Net - USVT") == 1
    assert fill_results(document, tmp_path).read_text() == once
    document.write_text("<!-- reproduced table25 smoke -->\n<!-- /reproduced -->\n")
    with pytest.raises(ConfigurationError, match=r"expected table25 at scale smoke in .*`menet publish`"):
        fill_results(document, tmp_path)


def test_a_document_compares_rows_of_a_published_table_on_the_same_images(made: Made, tmp_path: Path) -> None:
    pack_tables(made[0].root, tmp_path / "paper", ["table24"])
    cell = small_table().cells[1]
    document, row = tmp_path / "page.md", cell.row
    document.write_text(f"<!-- compared table24 smoke\n7: {row} | {row}\n-->\nold\n<!-- /compared -->\nAfter.\n")
    once = fill_results(document, tmp_path).read_text()
    summary = load_summary(Workspace(tmp_path / "paper"), "smoke", "table24")
    assert summary is not None
    value = f"{summary['cells'][1]['value']:.1f}"
    assert f"| 7 | {row} | {row} | {value} | {value} | +0.0 ± 0.0 |" in once
    assert once.endswith("<!-- /compared -->\nAfter.\n")
    assert "old" not in once
    assert fill_results(document, tmp_path).read_text() == once
    for wrong in (f"7: {row}", f"7: {row} | another", f"9: {row} | {row}"):
        document.write_text(f"<!-- compared table24 smoke\n{wrong}\n-->\n<!-- /compared -->\n")
        with pytest.raises(ConfigurationError, match=r"ROW \| ROW"):
            fill_results(document, tmp_path)


def test_a_sentence_has_numbers_of_a_published_table(made: Made, tmp_path: Path) -> None:
    pack_tables(made[0].root, tmp_path / "paper", ["table24"])
    summary = load_summary(Workspace(tmp_path / "paper"), "smoke", "table24")
    assert summary is not None
    cell, document = summary["cells"][1], tmp_path / "page.md"
    assert cell["column"] == "7"
    place = f"table24 smoke 7: {cell['row']}"
    document.write_text(
        f"<!-- number {place} --><!-- /number --> <!-- paper {place} --><!-- /paper --> "
        f"<!-- gap {place} | {cell['row']} --><!-- /gap -->\n"
    )
    once = fill_results(document, tmp_path).read_text()
    assert f"-->{cell['value']:.1f} % ({cell['low']:.1f}–{cell['high']:.1f})<!--" in once
    assert "-->67.3 %<!--" in once
    assert "-->+0.0 ± 0.0<!--" in once
    document.write_text(f"<!-- number table24 smoke 8: {cell['row']} --><!-- /number -->")
    with pytest.raises(ConfigurationError, match="of a measured cell"):
        fill_results(document, tmp_path)


def test_me_nets_are_attacked_in_bfloat16_where_the_run_asks_and_the_table_says_so(
    made: Made, tmp_path: Path
) -> None:
    """The same jobs, trained before: how they are attacked is the run's, like its device."""
    workspace = Workspace(tmp_path, bfloat16=True)
    job = transformed(tables.white_box(VICTIM, 7), TINY)
    shutil.copytree(made[0].folder(job.model), workspace.folder(job.model))
    plan = Table("table24", "Estimators", (Cell("ME-Net", "7", job), Cell("ME-Net", "Clean", job, clean=True)))
    outcomes = Local(1)(graph([job]), workspace, lambda outcome: None)
    assert {one.status for one in outcomes.values()} == {"kept", "done"}
    assert job.records(workspace).evaluation["bfloat16"] is True
    assert job.records(workspace).evaluation == {**job.records(made[0]).evaluation, "bfloat16": True}
    (section,) = report_of([summarize(plan, TINY, workspace, outcomes)], tmp_path).sections[1:]
    assert "2 of 2 numbers are of rows that were attacked in bfloat16." in section.paragraphs[0]
    (section,) = report_of([summarize(plan, TINY, made[0], {})], tmp_path).sections[1:]
    assert "bfloat16" not in section.paragraphs[0]


@pytest.mark.slow
def test_ray_makes_the_same_table_although_a_worker_is_killed(made: Made, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'menet[ray]'")
    from menet.experiments.runner import Ray

    workspace, plans, _ = made
    killed: list[int] = []

    def kill_one_at_work(outcome: JobOutcome) -> None:
        # The title of a worker at work is that of its task.
        if not killed:
            titles = tuple(f"ray::{kind}" for kind in ("prepare", "train", "evaluate", "certify"))
            workers = [pid for pid, title in _processes() if title.startswith(titles)]
            for pid in workers[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    spread = Workspace(tmp_path)
    outcomes = Ray(cpus=2)(graph(plans[0].jobs), spread, kill_one_at_work)
    assert killed
    assert {one.status for one in outcomes.values()} == {"done"}, outcomes
    alone, together = (
        summarize(plans[0], TINY, where, {key: replace(one, seconds=0) for key, one in outcomes.items()})
        for where in (workspace, spread)
    )
    # How long its jobs took is all that may differ.
    cells = [[{**cell, "seconds": sorted(cell["seconds"])} for cell in one["cells"]] for one in (together, alone)]
    assert cells[0] == cells[1]


def _processes() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(folder.name), (folder / "cmdline").read_bytes().decode("utf-8", "replace")


def test_what_is_missing_is_shown_as_missing(tmp_path: Path) -> None:
    table = small_table().at(TINY)
    summary = summarize(table, TINY, Workspace(tmp_path), {})
    shown = table_of(summary)
    assert shown.columns == ("", "Clean", "7")  # and no column of ours in which nothing was tried
    assert [cell.text for cell in shown.rows[0][1:]] == ["–", "–"]
    failed = JobOutcome(table.cells[1].job.key, "it", "failed", message="out of memory")
    summary = summarize(table, TINY, Workspace(tmp_path), {failed.key: failed})
    assert "out of memory" in json.dumps(summary)
    assert table_of(summary).rows[0][2].text == "failed"


def test_the_measured_panels_of_a_figure_are_drawn_and_the_others_named(tmp_path: Path) -> None:
    figure = experiment("figure8")
    summary = summarize(figure.at(TINY), TINY, Workspace(tmp_path), {})
    assert not summary["panels"][1]["sources"]
    for curve in summary["panels"][1]["curves"]:
        for point in curve["points"]:
            del point["missing"]
            point |= {"value": 50.0, "low": 40.0, "high": 60.0}
    save_summary(summary, Workspace(tmp_path))
    publish(tmp_path, ("figure8",))
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "Not measured: MNIST, SVHN, Tiny-ImageNet" in text
    assert "![" in text


def test_the_command_draws_a_figure_lists_and_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = ["--out", str(tmp_path)]
    assert cli.main(["reproduce", "figure1", "--workers", "1", *out]) == 0
    assert (tmp_path / "RESULTS.md").is_file()
    assert cli.main(["reproduce", "--list", *out]) == 0
    assert "table27" in capsys.readouterr().out
    assert cli.main(["reproduce", "table16", "--dry-run", "--scale", "paper", *out]) == 0
    shown = capsys.readouterr().out
    assert "GPU-hours" in shown
    assert "disk" in shown
    graph_file = json.loads((tmp_path / "plans" / "paper.json").read_text("utf-8"))
    keys = {row["key"] for row in graph_file}
    assert all(need in keys for row in graph_file for need in row["needs"])


@pytest.mark.parametrize(
    ("dataset", "title"), [("cifar10", "CIFAR-10, 3"), ("digits", "CIFAR-10 (here digits), 3")]
)
def test_a_figure_of_ranks_names_another_dataset_only(tmp_path: Path, dataset: str, title: str) -> None:
    source = {"dataset": dataset, "images": 3, "histogram": [0, 1, 2]}
    figure = ranks({"panels": [{"title": "CIFAR-10", "sources": {"it": source}}]}, tmp_path)
    assert figure.axes[0].get_title(loc="left").startswith(title)


def test_a_figure_of_three_panels_has_no_empty_fourth(tmp_path: Path) -> None:
    curve = {"name": "ME-Net", "points": [{"x": 7, "value": 40.0, "low": 30.0, "high": 50.0}]}
    panels = [{"title": title, "curves": [curve]} for title in "abc"]
    figure = lines({"panels": panels, "across": "steps"}, tmp_path)
    assert [place.get_visible() for place in figure.axes] == [True, True, True, False]


def test_the_list_counts_what_is_measured_here_and_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    here, published = Workspace(tmp_path / "here"), Workspace(tmp_path / "published")
    there = (
        (here, "cores", 0, 3),
        (published, "cores", 0, 5),
        (published, "laptop", 4, 7),
        (here, "smoke", 0, 20),
    )
    for places, scale, start, stop in there:
        summary = summarize(paper.table15().at(by_name(scale)), by_name(scale), places, {})
        for cell in summary["cells"][start:stop]:
            del cell["missing"]
            cell |= {"value": 90.0, "low": 80.0, "high": 95.0}
        save_summary(summary, places)
    command = ["reproduce", "--list", "--out", str(here.root), "--results", str(published.root)]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "cores: 5 of 20; laptop: 3 of 20; smoke: 20 of 20" in shown
    assert "\n7 of the paper's 673 numbers are measured" in shown, "each once, at whatever scale"
    assert cli.main([*command[:4], "--results", str(tmp_path / "none")]) == 0
    assert "3 of the paper's 673 numbers are measured" in capsys.readouterr().out


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "table99", "--out", str(tmp_path)]) == 2
    assert "unknown experiment 'table99'" in capsys.readouterr().err
    assert cli.main(["reproduce", "--out", str(tmp_path)]) == 2
    assert "--list" in capsys.readouterr().err


def test_two_runs_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(tmp_path):
        assert cli.main(["reproduce", "figure1", "--out", str(tmp_path)]) == 2
    assert "is locked by another process" in capsys.readouterr().err
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("count", [1, 3])
def test_the_diagram_leads_from_images_through_the_network_to_the_label(count: int, tmp_path: Path) -> None:
    image = pack(torch.rand(1, 8, 8))
    columns = [{"p": 0.1 * n, "masked": [image], "estimate": [image]} for n in range(1, count + 1)]
    summary = {"panels": [{"sources": {"digits": {"originals": [image], "columns": columns}}}]}
    figure = diagram(summary, tmp_path)
    figure.draw_without_rendering()
    (place,) = figure.axes
    boxes = [shown.get_window_extent() for shown in place.images]
    assert len(boxes) == 2 * (1 + count) + 2
    assert all(abs(box.width - box.height) <= 2 for box in boxes)
    words = [(text.get_text(), text.get_window_extent()) for text in place.texts if text.get_text()]
    network, label = (
        next(box for word, box in reversed(words) if word == name) for name in ("network N", "label")
    )
    assert max(box.x1 for box in boxes) < network.x0 < network.x1 < label.x0
    # Nothing is written over an image or over other words.
    for number, (word, box) in enumerate(words):
        assert not any(box.overlaps(other) for other in boxes), word
        assert not any(box.overlaps(other) for _, other in words[number + 1 :]), word


def test_without_tables_there_is_no_empty_overview(tmp_path: Path) -> None:
    assert report_of([], tmp_path).sections == ()
    empty = {"kind": "table", "name": "table4", "title": "t", "scale": "smoke", "cells": []}
    assert len(overview([empty], tmp_path).rows) == 1
    assert overview([{"kind": "figure"}], tmp_path).rows == ()


def without_numbers(summary: dict[str, Any]) -> dict[str, Any]:
    """The same table as another folder has it, in which nothing was run."""
    names = ("row", "column", "ours", "claimed", "quoted", "job", "does")
    cells = [{name: cell[name] for name in names} | {"missing": "not run yet"} for cell in summary["cells"]]
    return {**summary, "cells": cells}


def test_parts_of_a_table_are_published_from_several_folders(made: Made, tmp_path: Path) -> None:
    whole = load_summary(made[0], "smoke", "table24")
    assert whole is not None
    target, second, third = (Workspace(tmp_path / name) for name in ("paper", "second", "third"))
    pack_tables(made[0].root, target.root, ["table24"])
    one, *others = whole["cells"]
    save_summary({**whole, "cells": [{**one, "value": 12.5}, *without_numbers(whole)["cells"][1:]]}, second)
    pack_tables(second.root, target.root, ["table24"])
    merged = load_summary(target, "smoke", "table24")
    assert merged is not None
    assert [cell["value"] for cell in merged["cells"]] == [12.5, *(cell["value"] for cell in others)]
    changed = without_numbers(whole)
    changed["cells"][0] |= {"value": 50.0, "low": 40.0, "high": 60.0, "unit": "%"}
    changed["cells"][1]["job"] = "evaluate/another"
    save_summary(changed, third)
    markdown, *_ = pack_tables(third.root, target.root, ["table24"])
    again = load_summary(target, "smoke", "table24")
    assert again is not None
    assert [cell.get("earlier", False) for cell in again["cells"]] == [False, True, *[False] * (len(others) - 1)]
    assert markdown.read_text("utf-8").count("; by an earlier version of its attack or training") == 1


def test_published_numbers_come_with_records_that_give_them(made: Made, tmp_path: Path) -> None:
    pack_tables(made[0].root, tmp_path / "paper", ["table24", "figure6"])
    table = small_table().at(TINY)
    summary = load_summary(Workspace(tmp_path / "paper"), "smoke", "table24")
    assert summary is not None
    for cell, published in zip(table.cells, summary["cells"], strict=True):
        records = read_result(record_of(published, tmp_path / "paper"))
        if cell.criterion != "vote-mean":  # the first ten draws, which compact records do not tell apart
            assert isinstance(cell.job, Evaluate | Certify)
            assert 100 * number_of(cell, cell.job, records).value == pytest.approx(published["value"], abs=1e-9)
    figure = load_summary(Workspace(tmp_path / "paper"), "smoke", "figure6")
    assert figure is not None
    assert all(record_of(part, tmp_path / "paper").is_file() for part in parts_of(figure))
    first = record_of(summary["cells"][0], tmp_path / "paper")
    recorded = first.read_bytes()
    stray = tmp_path / "paper" / "records" / "stray.npz"
    for file in (first, stray):
        file.write_bytes(b"")
    pack_tables(made[0].root, tmp_path / "paper", ["table24", "figure6"])
    assert not stray.exists()
    assert first.read_bytes() == recorded, "the records of a job that was measured again"


def test_features_are_published_and_images_are_not(made: Made, tmp_path: Path) -> None:
    names = ["table24", "figure2", "figure3", "figure5", "figure10"]
    markdown, *_ = pack_tables(made[0].root, tmp_path / "paper", names)
    text = markdown.read_text("utf-8")
    assert [name for name in names if f"## {name}, " in text] == ["table24", "figure5"]
    stray = tmp_path / "paper" / "vectors" / "stray" / "pgd.features.safetensors"
    stray.parent.mkdir()
    stray.write_bytes(b"")
    publish(tmp_path / "paper", names)
    pack_tables(made[0].root, tmp_path / "paper", names)
    assert markdown.read_text("utf-8") == text
    assert not stray.exists()
    (kept,) = (tmp_path / "paper" / "vectors").glob("*/*.features.safetensors")
    assert kept.is_file()


def test_what_is_published_is_not_measured_again_where_the_run_asks_for_the_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    published = Workspace(tmp_path / "published")
    summary = summarize(paper.table15().at(SMOKE), SMOKE, published, {})
    for cell in summary["cells"][:-1]:
        del cell["missing"]
        cell["value"] = 90.0
    save_summary(summary, published)
    command = ["reproduce", "table15", "--missing", "--dry-run", "--out", str(tmp_path / "here")]
    command += ["--results", str(published.root)]
    assert cli.main(command) == 0
    assert re.search(r"evaluate +│ +1 │", capsys.readouterr().out)
    # A job that two cells read is missing until both have a number.
    summary["cells"].append({**summary["cells"][0], "column": "vote", "missing": "not run yet"})
    del summary["cells"][-1]["value"]
    save_summary(summary, published)
    assert cli.main(command) == 0
    assert re.search(r"evaluate +│ +2 │", capsys.readouterr().out)
    del summary["cells"][-1]
    del summary["cells"][-1]["missing"]
    summary["cells"][-1]["value"] = 90.0
    save_summary(summary, published)
    assert cli.main(command) == 2
    assert "--missing leave; got none" in capsys.readouterr().err


def test_a_network_that_ships_stands_for_one_that_is_trained_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job,) = {
        need
        for cell in paper.table16().at(by_name("cores")).cells
        for need in cell.job.needs
        if cell.row.startswith("Madry") and isinstance(need, Train)
    }
    assert job.shipped() == pretrained.FOLDER / "mnist-adversarial.safetensors"
    assert replace(job, config=replace(job.config, seed=7)).shipped() is None
    workspace = Workspace(tmp_path, shipped=True)
    assert Local()([job], workspace, lambda outcome: None)[job.key].status == "done"
    loaded, shipped = load_model(workspace.folder(job) / "run"), load_model(job.shipped() or "")
    for one, other in zip(loaded.parameters(), shipped.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    options = ["--scale", "cores", "--match", "Madry", "--dry-run", "--out", str(tmp_path / "plan")]
    assert cli.main(["reproduce", "table16", "--shipped", *options]) == 0
    assert "train adversarial" not in capsys.readouterr().out
    assert cli.main(["reproduce", "table16", *options]) == 0
    assert "train adversarial" in capsys.readouterr().out


def test_the_number_of_a_network_that_ships_says_so(made: Made, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    job = transformed(tables.white_box(VICTIM, 7), TINY)
    shutil.copytree(made[0].folder(job), workspace.folder(job))
    workspace.folder(job.model).mkdir(parents=True)
    (workspace.folder(job.model) / "run").write_bytes(b"a file, not the folder of a training")
    plan = Table("table24", "Estimators", (Cell("ME-Net", "7", job),))
    (section,) = report_of([summarize(plan, TINY, workspace, {})], tmp_path).sections[1:]
    assert section.tables[0].rows[0][1].note.endswith("; the network that ships")


def test_a_part_of_a_dataset_is_named_beside_the_numbers(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    larger = replace(data.source("digits"), images=(100_000, 10_000), classes=200)
    monkeypatch.setitem(data.SOURCES, "digits", larger)
    (section,) = report_of([summarize(small_table().at(TINY), TINY, made[0], {})], made[0].root).sections[1:]
    named = "(from files with 1,000 of its 10,000 test images, 10 of its 200 classes)"
    assert any(named in one for one in section.paragraphs)


def test_a_number_stands_in_every_table_that_asks_for_it(tmp_path: Path) -> None:
    """Table 3 is of rows of table 11; a table of a larger scale is not begun at a smaller one."""
    laptop, run, target = by_name("laptop"), Workspace(tmp_path / "run"), Workspace(tmp_path / "paper")
    cells = dict(cells_of(paper.table11().at(laptop)))
    summary = summarize(paper.table11().at(laptop), laptop, run, {})
    for cell in summary["cells"]:
        del cell["missing"]
        cell |= {"unit": "%", "value": 40.0, "low": 30.0, "high": 50.0, "examples": 200, "dataset": "cifar10"}
    save_summary(summary, run)
    pack_tables(run.root, target.root, ["table3", "table11", "figure8"])
    shared = load_summary(target, "laptop", "table3")
    assert shared is not None
    measured = {cell.reading for cell in cells.values()}
    wanted = dict(cells_of(paper.table3().at(laptop)))
    for place, part in places_of(shared):
        assert ("value" in part) == (wanted[place].reading in measured)
        assert part.get("reduced", "") == (wanted[place].reduced if "value" in part else "")
    assert 0 < sum("value" in part for part in parts_of(shared)) < len(wanted)
    for cell in summary["cells"]:
        cell["value"] = 45.0
    save_summary(summary, run)
    pack_tables(run.root, target.root, ["table3", "table11", "figure8"])
    again = load_summary(target, "laptop", "table3")
    assert again is not None
    assert {part["value"] for part in parts_of(again) if "value" in part} == {45.0}, "a job was measured again"
    save_summary({**shared, "scale": "cores"}, run)
    summary_path(target, "laptop", "table3").unlink()
    pack_tables(run.root, target.root, ["table3", "table11"])
    assert load_summary(target, "laptop", "table3") is None


def test_rows_of_ours_in_which_nothing_was_tried_are_not_shown(tmp_path: Path) -> None:
    laptop = by_name("laptop")
    summary = summarize(experiment("estimation").at(laptop), laptop, Workspace(tmp_path), {})
    assert len(table_of(summary).rows) > 10, "a plan of which nothing was tried is shown whole"
    measured = {"unit": "%", "value": 40.0, "low": 30.0, "high": 50.0}
    summary["cells"][0] = {**summary["cells"][0], **measured}
    del summary["cells"][0]["missing"]
    assert [row[0].text for row in table_of(summary).rows] == ["MNIST · no defense · seed 0"]


def test_columns_of_ours_keep_their_order_whichever_was_measured_first(tmp_path: Path) -> None:
    laptop = by_name("laptop")
    summary = summarize(experiment("estimation").at(laptop), laptop, Workspace(tmp_path), {})
    measured = {"unit": "%", "value": 40.0, "low": 30.0, "high": 50.0}
    first, second = (
        next(cell for cell in summary["cells"] if cell["column"] == one) for one in ("8 pixels", "Clean")
    )
    other = next(cell for cell in summary["cells"] if cell["column"] == "Clean" and cell["row"] != first["row"])
    for cell in (first, other):
        del cell["missing"]
        cell |= measured
    assert second["row"] == first["row"]
    assert table_of(summary).columns == ("", "Clean", "8 pixels")

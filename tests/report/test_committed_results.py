"""What the repository publishes: rendered from its records, small, and the same when it is measured again."""

from pathlib import Path

import pytest
import torch

import menet
from benchmarks.strength import filled, read
from menet import data
from menet.errors import DataError
from menet.evaluation import EvaluationSettings, evaluate, parse_attack, read_result, read_results
from menet.experiments import experiment
from menet.experiments.jobs import Workspace
from menet.experiments.plan import cells_of, load_summary, number_of
from menet.experiments.scale import by_name
from menet.report.board import problems
from menet.report.documents import fill_results
from menet.report.reproduction import places_of, record_of
from menet.training import pretrained

RESULTS = Path(__file__).parents[2] / "results"

pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="needs the results of the repository")


def dataset(name: str) -> data.Dataset:
    try:
        return data.load(name, "test")
    except DataError as error:
        pytest.skip(f"needs the dataset: {error}")


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_reviewer_has_nothing_to_object_to():
    """Among it that rendering again changes nothing."""
    assert problems(RESULTS) == []


@pytest.mark.parametrize(
    "name", ["README.md", "docs/limits.md", "docs/findings.md", "docs/differences.md", "docs/estimators.md"]
)
def test_documents_have_the_table_of_the_results(name, tmp_path):
    before = (RESULTS.parent / name).read_text(encoding="utf-8")
    copy = tmp_path / "copy.md"
    copy.write_text(before, encoding="utf-8")
    assert fill_results(copy, RESULTS).read_text(encoding="utf-8") == before


@pytest.mark.parametrize("name", ["docs/standard.md", "docs/attacks.md"])
def test_documents_have_the_tables_of_the_benchmarks(name):
    rows = read(RESULTS / "strength.jsonl")
    text = (RESULTS.parent / name).read_text(encoding="utf-8")
    assert filled(text, rows) == text
    assert filled(text, rows[:1]) != text


def test_the_papers_tables_have_the_numbers_of_their_records():
    """Numbers that were published before their records were have none."""
    checked, places = 0, Workspace(RESULTS / "paper")
    for folder in (RESULTS / "paper" / "results").iterdir():
        for file in folder.glob("*.json"):
            summary, cells = load_summary(places, folder.name, file.stem), {}
            for place, part in places_of(summary or {}):
                if "value" not in part or not record_of(part, places.root).is_file():
                    continue
                cells = cells or dict(cells_of(experiment(file.stem).at(by_name(folder.name))))
                cell = cells[place]
                assert places.name(cell.job) == part["job"] or part.get("earlier")
                # The vote of the first ten draws is lost: compact records do not tell draws apart.
                if cell.criterion != "vote-mean":
                    records = read_result(record_of(part, places.root))
                    assert 100 * number_of(cell, cell.job, records).value == pytest.approx(
                        part["value"], abs=1e-6
                    )
                    checked += 1
    assert checked > 20


def test_results_and_networks_are_small():
    assert size(RESULTS) <= 25 * 2**20
    assert size(pretrained.FOLDER) <= 12 * 2**20


@pytest.mark.parametrize("name", pretrained.names())
def test_a_sample_of_every_network_is_as_accurate_as_its_card_says(name):
    card = pretrained.card(name)
    line = card.measured[0]
    count, clean = min(line["examples"], 300), line["clean"]["value"]
    images, labels = dataset(card.dataset).batch(slice(0, count))
    with torch.no_grad():
        correct = (menet.load(name)(images).argmax(1) == labels).double().mean()
    # Four standard errors of one draw, of an error of a hundredth at least.
    assert abs(float(correct) - clean) <= 4 * (max(clean * (1 - clean), 0.01) / count) ** 0.5


def test_recorded_rows_come_out_again(tmp_path):
    """The first batch of a recorded attack, from its seeds. On another processor an image or two may differ."""
    (label, recorded) = next(
        (label, one)
        for label, one in read_results(RESULTS)["mnist/menet-pure"].items()
        if "on=classifier" in label
    )
    model, settings = menet.load("mnist-menet-pure"), recorded.evaluation
    attack = parse_attack(label, model, menet.load, epsilon=settings["threat"]["epsilon"])
    again = evaluate(
        model,
        dataset("mnist"),
        [attack],
        tmp_path,
        EvaluationSettings(stop=50, batch_size=settings["batch_size"], draws=settings["scoring"]["draws"]),
    )[label]
    rows = dict(zip((row["index"] for row in recorded.rows), recorded.rows, strict=True))
    counts = [
        (sorted(row["adversarial"]["predictions"]), sorted(rows[row["index"]]["adversarial"]["predictions"]))
        for row in again.rows
    ]
    assert sum(now == then for now, then in counts) >= 45
    assert all(row["seeds"] == rows[row["index"]]["seeds"] for row in again.rows)
    assert all(row["image"] == rows[row["index"]]["image"] for row in again.rows)

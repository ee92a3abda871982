"""Compact results: nothing that a number is computed from is lost, and a damaged file is refused."""

import io
import json
import zipfile
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from results_samples import certificate, records

from menet.errors import ConfigurationError, RecordError
from menet.evaluation import (
    accuracies,
    accuracy,
    certificate_summary,
    compare,
    publish,
    read_certificates,
    read_result,
    read_results,
    results,
)
from menet.evaluation.records import Records
from menet.evaluation.results import write_results
from menet.experiments.jobs import Workspace
from menet.experiments.plan import FORMAT, save_summary
from menet.report.board import entries, problems, results_markdown, write_board
from menet.report.documents import fill_results
from menet.report.results import Entry


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 12))
def test_every_accuracy_comes_out_the_same(tmp_path_factory, seed, count):
    original = records(seed, count=count)
    path = tmp_path_factory.mktemp("results") / "pgd.npz"
    write_results(path, original)
    found = read_result(path)
    assert found.header == original.header
    assert accuracies(found) == accuracies(original)
    for mine, theirs in zip(found.rows, original.rows, strict=True):
        assert sorted(mine["adversarial"]["predictions"]) == sorted(theirs["adversarial"]["predictions"])
        assert {**mine, "clean": 0, "adversarial": 0} == {**theirs, "clean": 0, "adversarial": 0}


def test_results_of_several_models_compare_as_their_records_do(tmp_path):
    one, other = records(0), records(1)
    shared = ("label", "image", "clean", "adversarial")
    rows = tuple(
        {**row, **{name: mine[name] for name in shared}} for row, mine in zip(other.rows, one.rows, strict=True)
    )
    publish("mnist/a", {"pgd": one}, {}, tmp_path)
    publish("mnist/b", {"pgd": Records(other.header, rows)}, {"config": {"seed": 1}}, tmp_path)
    found = read_results(tmp_path)
    assert set(found) == {"mnist/a", "mnist/b"}
    assert compare(found["mnist/a"]["pgd"], found["mnist/b"]["pgd"]).p_value == 1


@pytest.mark.parametrize("partitions", [None, 3])
def test_certificates_come_out_the_same(tmp_path, partitions):
    original = certificate(4, partitions=partitions)
    publish("mnist/a", {"pgd": records(0), "certificate-all": original}, {}, tmp_path)
    found = read_certificates(tmp_path)["mnist/a"]["certificate-all"]
    assert found.evaluation == original.evaluation
    assert found.rows == original.rows
    assert set(read_results(tmp_path)["mnist/a"]) == {"pgd"}


def test_a_certificate_is_on_the_board_with_or_without_an_attack(tmp_path):
    large, small = certificate(1, count=40), certificate(2, partitions=3)
    publish("mnist/both", {"pgd": records(0), "certificate": small, "certificate-all": large}, {}, tmp_path)
    publish("mnist/proven", {"certificate": small}, {"config": {"epochs": 3}}, tmp_path)
    write_board(tmp_path)
    lines = {line["name"]: line for line in json.loads((tmp_path / "board.json").read_text(encoding="utf-8"))}
    both, proven = lines["mnist/both"], lines["mnist/proven"]
    assert both["certificate"]["examples"] == 40
    assert both["certificate"]["median_radius"] == certificate_summary(large).median_radius
    assert both["robust"] is not None
    assert proven["robust"] is None
    assert proven["clean"]["value"] == pytest.approx(certificate_summary(small).vote.value, abs=1e-4)
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "3 partitions of 25 cells" in text
    assert "random masks, p 0.04, α 0.001" in text


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.update(radius=-2),
        lambda row: row.update(seconds=float("inf")),
        lambda row: row.update(radius=2**30),
        lambda row: row.update(label=-1),
    ],
)
def test_wrong_certificates_are_refused(tmp_path, change):
    wrong = certificate()
    change(wrong.rows[3])
    write_results(tmp_path / "certificate.npz", wrong)
    with pytest.raises(RecordError):
        read_result(tmp_path / "certificate.npz")


def test_two_models_stand_beside_each_other_on_the_same_images(tmp_path):
    first, second = records(0, count=9), records(1, count=7)
    publish("mnist/a", {"pgd": first}, {}, tmp_path)
    publish("mnist/b", {"pgd": second}, {}, tmp_path)
    document = tmp_path / "page.md"
    document.write_text("<!-- paired mnist/a mnist/b -->\n<!-- /paired -->\n", encoding="utf-8")
    filled = fill_results(document, tmp_path).read_text(encoding="utf-8")
    (row,) = (line for line in filled.splitlines() if line.startswith("| mnist/a"))
    right = [np.array([np.mean(np.array(row["adversarial"]["ranks"]) == 0) for row in one.rows[:7]])
             for one in (first, second)]  # fmt: skip
    gap = 100 * (right[1] - right[0])
    assert f"| {100 * right[0].mean():.1f} | {100 * right[1].mean():.1f} | " in row
    assert f"| {gap.mean():+.1f} ± {1.96 * gap.std(ddof=1) / np.sqrt(7):.1f} | 7 |" in row
    for pairs, words in (("mnist/a mnist/none", "got 'mnist/none'; there is"), ("mnist/a", "two names")):
        document.write_text(f"<!-- paired {pairs} -->\n<!-- /paired -->\n", encoding="utf-8")
        with pytest.raises(ConfigurationError, match=words):
            fill_results(document, tmp_path)


def test_numbers_in_sentences_come_from_the_records(tmp_path):
    first, second = records(0, count=9), records(1, "cw", count=7)
    publish("mnist/a", {"pgd": first, "cw": second}, {}, tmp_path)
    publish("mnist/b", {"cw": second}, {}, tmp_path)
    document = tmp_path / "page.md"

    def filled(words: str) -> str:
        document.write_text(words, encoding="utf-8")
        return fill_results(document, tmp_path).read_text(encoding="utf-8")

    weak = accuracy(first)
    for form, words in (
        ("number", f"{100 * weak.value:.1f} % ({100 * weak.low:.1f}–{100 * weak.high:.1f})"),
        ("value", f"{100 * weak.value:.1f} %"),
    ):
        marker = f"<!-- {form} mnist/a robust pgd -->"
        text = f"It has {marker}9.9 %<!-- /{form} -->, and {marker}<!-- /{form} --> again."
        expected = f"It has {marker}{words}<!-- /{form} -->, and {marker}{words}<!-- /{form} --> again."
        assert filled(text) == expected
        assert filled(expected) == expected
    lowest = min(accuracy(one).value for one in (first, second))
    assert f"-->{100 * lowest:.1f} %<!--" in filled("<!-- value mnist/a robust --><!-- /value -->")
    vote = accuracy(second, "adversarial", "vote").value
    assert f"-->{100 * vote:.1f} %<!--" in filled("<!-- value mnist/b vote --><!-- /value -->")
    gaps = [
        filled(f"<!-- gap {pair} robust --><!-- /gap -->").split("-->")[1].split("<")[0]
        for pair in ("mnist/a mnist/b", "mnist/b mnist/a")
    ]
    (there, margin), (back, same) = (gap.split(" ± ") for gap in gaps)
    assert (float(there), margin) == (-float(back), same)
    # By a named attack on the second: on mnist/a the first nine rows, of which seven are there for both.
    named = filled("<!-- gap mnist/b mnist/a robust pgd --><!-- /gap -->").split("-->")[1].split(" ±")[0]
    shared = accuracy(replace(first, rows=first.rows[:7])).value - accuracy(second).value
    assert named == f"{100 * shared:+.1f}"
    for wrong, reason in (
        ("number mnist/c robust", "got 'mnist/c'; there is mnist/a"),
        ("number mnist/a right", "one of clean, robust"),
        ("number mnist/a robust spsa", "got 'spsa'; there is"),
        ("gap mnist/a mnist/b", "`gap A B clean`"),
        ("value table4 smoke 7: Madry", "table4 at scale smoke"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            filled(f"<!-- {wrong} --><!-- /{wrong.split()[0]} -->")


def test_where_a_model_lay_is_not_published(tmp_path):
    one = records(0)
    one.header["made"]["source"] = "/home/somebody/runs/me-net"
    (path, _) = publish("mnist/a", {"pgd": one}, {}, tmp_path)
    assert read_result(path).header["made"]["source"] == "me-net"


def test_where_its_estimates_lay_is_not_published(tmp_path):
    made = {"config": {"epochs": 2, "prepared": "/home/someone/shards"}}
    publish("mnist/a", {"pgd": records(0)}, made, tmp_path)
    assert json.loads((tmp_path / "mnist/a/model.json").read_text())["config"]["prepared"] == "shards"


def test_rendering_again_changes_nothing(tmp_path):
    publish("mnist/me-net", {"pgd": records(0), "cw": records(1, "cw")}, {"config": {"epochs": 2}}, tmp_path)
    first = {path.name: path.read_bytes() for path in write_board(tmp_path)}
    again = {path.name: path.read_bytes() for path in write_board(tmp_path)}
    assert first == again
    assert set(first) == {"RESULTS.md", "board.json", "board.html", "attacks.svg"}
    line = json.loads(first["board.json"])[0]
    (entry,) = entries(tmp_path)
    assert line["robust"]["low"] < line["robust"]["value"] < line["robust"]["high"]
    assert line["attacks"] == 2
    assert f"{100 * line['robust']['value']:.1f}%" in results_markdown([entry])


def test_models_under_several_threat_models_get_a_table_of_their_own(tmp_path):
    publish("mnist/one", {"pgd": records(0), "weak": records(1, "weak", epsilon=0.05)}, {}, tmp_path)
    publish("mnist/other", {"pgd": records(2)}, {}, tmp_path)
    found = entries(tmp_path)
    assert [(one.name, one.threat) for one in found] == [
        ("mnist/one", "ℓ∞ ≤ 0.1"), ("mnist/one", "ℓ∞ ≤ 0.05"), ("mnist/other", "ℓ∞ ≤ 0.1")
    ]  # fmt: skip
    text = results_markdown(found)
    table = text[text.index("### By budget and norm") : text.index("### ℓ∞ ≤ 0.1")]
    assert "| ℓ∞ ≤ 0.05 | ℓ∞ ≤ 0.1 |" in table
    assert "mnist/one" in table
    assert "mnist/other" not in table
    for entry in found[:2]:
        assert f"{100 * accuracy(entry.decisive).value:.1f}%" in table

    document = tmp_path / "document.md"
    document.write_text("<!-- results -->\n<!-- /results -->\n<!-- budgets mnist -->\n<!-- /budgets -->\n")
    fill_results(document, tmp_path)
    main, budgets = document.read_text(encoding="utf-8").split("<!-- /results -->")
    assert "ℓ∞ ≤ 0.05" not in main, "the main table is of one threat model"
    assert "ℓ∞ ≤ 0.05" in budgets


def test_the_picture_shows_the_model_whose_attacks_differ_most(tmp_path):
    weak, strong = records(0), records(1, "cw")
    for row in strong.rows:
        row["adversarial"] = {
            **row["adversarial"],
            "predictions": [(row["label"] + 1) % 3] * len(row["adversarial"]["predictions"]),
        }
    publish("mnist/one", {"pgd": records(2)}, {}, tmp_path)
    smaller = records(3, "smaller", epsilon=0.05)
    evaluations = {"pgd": weak, "cw": strong, "smaller": smaller}
    publish("mnist/me-net", evaluations, {"config": {"objective": "<b>"}}, tmp_path)
    write_board(tmp_path)
    text = (tmp_path / "attacks.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert "mnist/me-net" in text
    assert text.index("mnist/me-net") < text.index("mnist/one")
    assert "<b>" not in text
    circles = [one for one in root.iter() if one.tag.endswith("circle")]
    assert [one.get("class") for one in circles] == ["other", "worst", "worst"]
    places = [float(one.get("cx")) for one in circles]
    assert places[1] < places[0], "the decisive attack is to the left"


def test_the_finished_part_of_an_evaluation_can_be_published(tmp_path):
    whole = records(count=9)
    begun = Records(whole.header, whole.rows[:6])
    publish("mnist/a", {"pgd": begun.until(5)}, {}, tmp_path)
    found = read_results(tmp_path)["mnist/a"]["pgd"]
    assert found.evaluation == {**whole.evaluation, "stop": 5}
    assert accuracies(found) == accuracies(Records({**whole.header}, whole.rows[:5]))
    with pytest.raises(RecordError, match="got 1 missing"):
        publish("mnist/b", {"pgd": begun.until(7)}, {}, tmp_path)


def test_a_name_cannot_leave_the_page_or_the_folder(tmp_path):
    for name in ("../a", "/etc/a", "a//b", "A", "<b>", ""):
        with pytest.raises(RecordError, match="expected a name"):
            publish(name, {"pgd": records()}, {}, tmp_path)
    hostile = records(label="</script><script>alert(1)</script>")
    hostile.header["evaluation"]["attack"]["kind"] = "</script><b>"
    publish("mnist/a", {"x": hostile}, {}, tmp_path)
    page = write_board(tmp_path)[2].read_text()
    assert "</script><b>" not in page
    assert page.count("</script>") == 2


def test_incomplete_records_are_not_published(tmp_path):
    short = records()
    with pytest.raises(RecordError, match="expected all rows of 'pgd', got 1 missing"):
        write_results(tmp_path / "a.npz", Records(short.header, short.rows[:-1]))


@pytest.mark.parametrize("seed", range(30))
def test_damage_is_refused_or_harmless(tmp_path, seed):
    path = tmp_path / "a.npz"
    write_results(path, records())
    content = bytearray(path.read_bytes())
    random = np.random.default_rng(seed)
    if seed % 3 == 0:
        content = content[: int(random.integers(0, len(content)))]
    else:
        for place in random.integers(0, len(content), 3):
            content[place] ^= 1 << int(random.integers(8))
    path.write_bytes(content)
    try:
        found = read_result(path)
    except RecordError:
        return
    # What is not covered by a checksum, such as a name's date, changes no number.
    assert accuracies(found) == accuracies(records())


def test_a_bomb_is_refused_before_it_unpacks(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "LARGEST", 2**20)
    path = tmp_path / "bomb.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(2**21, np.uint8))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("index.npy", buffer.getvalue())
    with pytest.raises(RecordError, match="unpacks to"):
        read_result(path)
    with pytest.raises(RecordError, match="found none"):
        read_results(tmp_path / "empty")


def forged(path, header=lambda header: None, **columns):
    """A file of results with valid checksums and wrong values."""
    found = results._columns(records())
    content = json.loads(found["header"].tobytes())
    header(content["header"])
    found |= {"header": np.frombuffer(json.dumps(content).encode(), np.uint8), **columns}
    with path.open("wb") as file:
        np.savez_compressed(file, **{name: column for name, column in found.items() if column is not None})
    return path


class Pickled:
    def __reduce__(self):
        return print, ("code of a stranger",)


def without(name, inner=None):
    def change(header):
        del (header["evaluation"] if inner is None else header["evaluation"][name])[inner or name]

    return change


def with_value(value, *names):
    def change(header):
        for name in names[:-1]:
            header = header[name]
        header[names[-1]] = value

    return change


@pytest.mark.parametrize(
    "wrong",
    [
        {"index": np.array([Pickled()] * 9, object)},
        {"clean.counts": np.full((9, 12), 2**32 - 1, np.uint32)},
        {"adversarial.counts": np.full((9, 12), np.nan)},
        {"clean.first": np.full(9, 50, np.int32)},
        {"clean.first_rank": np.full(9, -3, np.int32)},
        {"index": np.full(9, 4, np.int32)},
        {"index": np.arange(9, dtype=np.int32) + 10**6},
        {"label": np.array(["0"] * 9)},
        {"label": np.zeros(9)},
        {"label": np.full(9, 2**31)},
        {"label": np.full(9, -1)},
        {"queries": np.full(9, 0.5)},
        {"perturbation.linf": None},
        {"member": np.full(9, 200, np.uint8)},
        {"restarts": np.zeros((9, 2), "S0")},
        {"header": with_value(10**12, "evaluation", "stop")},
        {"header": with_value("linf", "evaluation", "threat")},
        {"header": with_value("l7", "evaluation", "threat", "norm")},
        {"header": with_value(float("nan"), "evaluation", "threat", "epsilon")},
        {"header": with_value({}, "evaluation")},
        {"header": with_value([], "made")},
        {"header": without("attack")},
        {"header": without("attack", "kind")},
        {"header": without("scoring", "draws")},
        {"header": without("dataset", "split")},
        {"header": without("model")},
        {"header": without("seed")},
    ],
)
def test_wrong_values_with_valid_checksums_are_refused(tmp_path, wrong, capsys):
    with pytest.raises(RecordError, match=r"a\.npz"):
        read_result(forged(tmp_path / "a.npz", **wrong))
    assert capsys.readouterr().out == ""


def test_nothing_of_many_is_not_listed(tmp_path):
    """Text of no characters: 10¹² of them take no bytes in the file."""
    path = tmp_path / "a.npz"
    npy = io.BytesIO()
    np.lib.format.write_array_header_1_0(npy, {"descr": "|S0", "fortran_order": False, "shape": (10**12,)})
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "<i8", "fortran_order": False, "shape": (10**14,)})
    torn = npy.getvalue().replace(b"}", b" ")
    for content in (npy.getvalue(), huge.getvalue(), torn):
        with zipfile.ZipFile(path, "w") as archive:
            for name, column in results._columns(records()).items():
                plain = io.BytesIO()
                np.save(plain, column)
                archive.writestr(f"{name}.npy", plain.getvalue() if name == "header" else content)
        with pytest.raises(RecordError, match=r"a\.npz is not a file of results"):
            read_result(path)


@pytest.mark.parametrize(
    ("name", "split", "there", "words"),
    [
        ("svhn", "test", 10_240, ", part of the dataset (10,240 of its 26,032 test images)"),
        ("svhn", "test", 26_032, ""),
        ("svhn", "train", 10_240, ""),
        ("my images", "test", 10, ""),
    ],
)
def test_a_part_of_a_dataset_is_told_beside_the_training(name, split, there, words):
    found = Records({"evaluation": {"dataset": {"name": name, "split": split, "examples": there}}}, ())
    assert Entry("a", {}, (found,)).training == "not recorded" + words


@pytest.mark.parametrize(
    "made", [b"[" * 10**5, b"\xff", b'{"seconds": "long"}', b'{"config": 3}', b'{"config": {"limit": [3]}}']
)
def test_a_training_that_cannot_be_read_is_one_line(tmp_path, made):
    publish("mnist/a", {"pgd": records()}, {"config": {"epochs": 1}}, tmp_path)
    (tmp_path / "mnist/a/model.json").write_bytes(made)
    with pytest.raises(RecordError, match=r"model\.json"):
        write_board(tmp_path)


def reviewed(tmp_path, change=lambda one: None, made=None):
    """The objections to a line of the board in which something was changed."""
    good = records(label="standard", count=200)
    good.header["evaluation"]["attack"]["kind"] = "Standard"
    good.header["evaluation"]["threat"]["epsilon"] = 0.125
    good.header["evaluation"]["dataset"]["name"] = "unheard-of"
    good.header["evaluation"]["scoring"]["draws"] = 20
    change(good)
    publish("mnist/a", {"standard": good}, {"config": {"epochs": 1}} if made is None else made, tmp_path)
    write_board(tmp_path)
    return problems(tmp_path)


def test_a_good_line_passes_review(tmp_path):
    assert reviewed(tmp_path) == []


@pytest.mark.parametrize(
    "objection, change",
    [
        ("within the budget, got 1 beyond", lambda one: one.rows[7]["perturbation"].update(linf=0.2)),
        ("at least 20 draws, got 7", lambda one: one.header["evaluation"]["scoring"].update(draws=7)),
        ("expected the attack standard", lambda one: one.header["evaluation"]["attack"].update(kind="PGD")),
    ],
)
def test_a_reviewer_notices(tmp_path, objection, change):
    (found,) = reviewed(tmp_path, change)
    assert objection in found


def test_a_reviewer_notices_a_missing_training_and_a_board_by_hand(tmp_path):
    (found,) = reviewed(tmp_path, made={})
    assert "model.json" in found
    page = tmp_path / "RESULTS.md"
    page.write_text(page.read_text().replace("%", "9%", 1))
    assert any("RESULTS.md: expected what `menet report" in one for one in problems(tmp_path))


def test_a_reviewer_notices_examples_of_another_dataset(tmp_path):
    """The digests of the planted rows are random, so none is that of a digit."""

    def digits(one):
        one.header["evaluation"]["dataset"].update(name="digits", split="test")

    (found,) = reviewed(tmp_path, digits)
    assert "not that of the dataset digits" in found


def test_a_reviewer_looks_at_certificates_too(tmp_path):
    proven = certificate()
    proven.header["evaluation"]["dataset"].update(name="digits", split="test")
    publish("digits/proven", {"certificate": proven}, {}, tmp_path)
    write_board(tmp_path)
    found = problems(tmp_path)
    assert any("digits/proven: expected model.json" in one for one in found)
    assert any("digits/proven, certificate: example" in one for one in found)


def test_the_tables_of_a_reproduction_are_packed_if_something_is_measured(tmp_path, capsys):
    from menet.cli import main

    cell = {"row": "ME-Net", "column": "PGD", "ours": False, "claimed": 73.5, "quoted": False, "job": "e/1",
            "does": "pgd on me-net"}  # fmt: skip
    found = {"unit": "%", "value": 12.5, "low": 10.0, "high": 15.0, "examples": 1000, "interval": "exact",
             "dataset": "mnist", "training": "standard, 6 epochs"}  # fmt: skip
    common = {"format": FORMAT, "title": "MNIST", "label": "tab", "note": "", "scale": "cores",
              "scale_summary": "of cores", "kind": "table"}  # fmt: skip
    work = Workspace(tmp_path / "work")
    save_summary({**common, "name": "table16", "cells": [{**cell, **found}]}, work)
    save_summary({**common, "name": "table15", "cells": [{**cell, "missing": "not run yet"}]}, work)
    assert main(["publish", str(work.root), "--out", str(tmp_path / "results")]) == 0
    paper = tmp_path / "results" / "paper"
    assert [path.name for path in paper.rglob("*.json")] == ["table16.json"]
    assert "12.5%" in (paper / "RESULTS.md").read_text()
    assert main(["publish", str(tmp_path / "nothing"), "--out", str(tmp_path)]) == 2
    assert "expected --name" in capsys.readouterr().err

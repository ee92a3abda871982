"""Tables, curves, words and pages show the numbers that stand in the records, and nothing else."""

import csv
import dataclasses
import io
import json
import re

import numpy as np
import pytest
import torch
from report_samples import EXAMPLES, HOSTILE, evaluation, write
from scipy.stats import binomtest

from menet.cli import main
from menet.errors import ConfigurationError, RecordError
from menet.evaluation.snapshots import load_features
from menet.report import Cell, Table, curves
from menet.report.accuracy_tables import comparisons, every_accuracy, overview
from menet.report.collect import collect
from menet.report.figures import legend, sheet, styled
from menet.report.narrative import attack_words, findings, tenth
from menet.report.page import Report, Section, render_html, report_of, write_markdown
from menet.report.pictures import reconstruction_grid


def test_planted_accuracies_stand_in_the_table_with_intervals_by_scipy(collection):
    rows = {(row[0].text, row[1].text, row[1].note): row for row in overview(collection).rows}
    row = rows[HOSTILE, "PGD, BPDA, 20 steps", "ℓ∞ ≤ 0.2"]
    assert row[3].text == f"{100 * 23 / EXAMPLES:.1f}%" == "57.5%"
    exact = binomtest(23, EXAMPLES).proportion_ci(0.95, method="exact")
    assert row[3].note == f"{100 * exact.low:.1f}–{100 * exact.high:.1f}"
    assert (row[6].text, row[6].note) == ("52.8%", "table 3")
    alone = rows["vanilla", "PGD, 20 steps", "ℓ∞ ≤ 0.2"]
    assert [cell.text for cell in alone[2:5]] == ["2.5%", "same", "same"]
    assert rows[HOSTILE, "PGD, BPDA, 20 steps, EOT over 20 draws", "ℓ∞ ≤ 0.2"][2].text == "35.0%"
    assert rows["vanilla", "none (clean)", ""][2].text == "95.0%"


def test_transferred_attacks_come_first_and_then_by_size(collection):
    labels = list(collection.subjects[1].evaluations)
    assert labels == ["pgd:on=copy", "pgd:epsilon=0.1", "pgd", "pgd:eot=5", "pgd:eot=20", "pgd:epsilon=0.3"]


def test_models_are_compared_by_mcnemar(collection):
    row = next(row for row in comparisons(collection).rows if "transferred" not in row[1].text)
    assert [cell.text for cell in row[2:]] == ["40", "−55.0 points", "0 : 22", "< 0.001"]


def test_curves_are_of_evaluations_that_differ_in_one_number(collection):
    found = {axis.name: curves for axis, curves in curves.sweeps(collection.subjects).items()}
    assert set(found) == {"epsilon", "eot"}
    (curve,) = found["epsilon"]
    assert [(point.at, point.value) for point in curve.points] == [
        (0.0, 0.95),
        (0.1, 33 / 40),
        (0.2, 23 / 40),
        (0.3, 9 / 40),
    ]
    (curve,) = found["eot"]
    assert [(point.at, point.value) for point in curve.points] == [(1, 23 / 40), (5, 17 / 40), (20, 14 / 40)]


def test_evaluations_with_other_settings_are_not_joined(tmp_path):
    for masks in (1, 5, 20):
        write(tmp_path, evaluation(f"a{masks}", defense=True, eot=masks, steps=10 + masks), right=10)
    assert curves.sweeps(collect(tmp_path).subjects) == {}


def test_votes_of_more_masks_are_counted_from_the_rows(collection):
    records = collection.subjects[1].evaluations["pgd"]
    rows = [json.loads(json.dumps(row)) for row in records.rows]
    wrong = (rows[0]["label"] + 1) % 10
    rows[0]["adversarial"]["predictions"] = [wrong, wrong] + [rows[0]["label"]] * 6
    changed = dataclasses.replace(records, rows=tuple(rows))
    points = {point.at: point.value for point in curves.voting(changed).points}
    assert points[1] == 22 / 40
    assert points[8] == 23 / 40


def test_findings_say_that_eot_lowers_robust_accuracy_and_who_is_more_robust(collection):
    words = "\n".join(findings(collection))
    assert "57.5%" in words
    assert re.search(r"57\.5% \(\d.*\) with one draw per gradient and 35\.0% \(\d.*\) with 20 draws", words)
    assert "−22.5 points. An attack without EOT overestimates this defense" in words
    assert re.search(rf"At ℓ∞ ε = 0\.2, .* {re.escape(HOSTILE)} \(35\.0%\) is more robust than vanilla \(", words)
    assert "upper bound" in words


def test_findings_do_not_claim_a_difference_that_may_be_chance(tmp_path):
    write(tmp_path, evaluation("one", defense=True), right=20)
    write(tmp_path, evaluation("many", defense=True, eot=20), right=19)
    words = "\n".join(findings(collect(tmp_path)))
    assert "may be chance" in words
    assert "overestimates" not in words


def test_eot_is_compared_within_one_kind_of_gradient(tmp_path):
    write(tmp_path, evaluation("one", defense=True), right=30)
    write(tmp_path, evaluation("many", defense=True, eot=20), right=20)
    write(tmp_path, {**evaluation("exact", defense=True, eot=20), "gradient": "exact"}, right=5)
    words = "\n".join(findings(collect(tmp_path)))
    assert re.search(
        r"worst case over attacks: 12\.5% \(\d.*\) \(PGD, exact gradient, 20 steps, EOT over 20 draws\)", words
    )
    assert re.search(r"75\.0% \(\d.*\) with one draw per gradient and 50\.0% \(\d.*\) with 20 draws", words)


def test_findings_name_a_defense_that_is_less_robust(tmp_path):
    write(tmp_path / "b", evaluation("pgd", defense=True), right=2)
    write(tmp_path / "a", evaluation("pgd", defense=False), right=35)
    assert re.search(r"b \(\d.*%\) is less robust than a \(\d.*%\)\.", "\n".join(findings(collect(tmp_path))))


def test_findings_name_attacks_that_fail_at_a_larger_budget(tmp_path):
    for epsilon, right in ((0.1, 20), (0.2, 10), (0.3, 18)):
        label = f"pgd:epsilon={epsilon}"
        write(tmp_path / "a", evaluation(label, defense=False, epsilon=epsilon), right=right)
    words = "\n".join(findings(collect(tmp_path)))
    assert "rises from 25.0% at ε = 0.2 to 45.0% at ε = 0.3. A larger budget can only help" in words
    assert "at ε = 0.1" not in words


def test_many_models_are_compared_with_those_without_a_defense(tmp_path):
    for number in range(6):
        write(tmp_path / f"model-{number}", evaluation("pgd", defense=number > 1), right=20)
    table = comparisons(collect(tmp_path))
    pairs = {row[0].text for row in table.rows}
    assert pairs == {f"model-{a} – model-{b}" for a in (0, 1) for b in range(a + 1, 6)}
    assert "Of 6 models" in table.explanation


def test_page_escapes_names_and_asks_for_nothing_outside(whole):
    assert "<script" not in whole
    assert "&lt;script&gt;alert" in whole
    addresses = re.findall(r"""(?:src|href|action|data|poster)\s*=\s*["']([^"']*)""", whole)
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert "@import" not in whole
    assert not re.search(r"""url\(|https?://""", re.sub(r"base64,[A-Za-z0-9+/=]+", "", whole))


def test_page_has_every_part(whole):
    for part in (
        "meaning",
        "accuracy",
        "curves",
        "pictures",
        "features",
        "certificate",
        "audit",
        "numbers",
        "made",
    ):
        assert f'id="{part}"' in whole, part
    for words in (
        "Imaginary Processor 3000",
        "torch 9.9.9",
        "2 min 5 s",
        "Noise of size epsilon",
        "0.8125, 0.75",
    ):
        assert words in whole, words


def test_same_records_give_the_same_page(tmp_path):
    write(tmp_path, evaluation("pgd", defense=True), right=20)
    first, second = (render_html(report_of(collect(tmp_path))) for _ in range(2))
    assert "image/svg" in first
    assert first == second


def test_certified_numbers(collection):
    points = curves.certified(collection.subjects[1]).points
    assert [(point.at, point.value) for point in points] == [
        (0, 0.9), (1, 0.7), (2, 0.5), (3, 0.4), (4, 0.2), (5, 0.2), (6, 0.0),
    ]  # fmt: skip


def test_markdown_holds_the_tables_and_writes_figures(report, tmp_path):
    file, *figures = write_markdown(report, tmp_path / "report.md")
    text = file.read_text()
    assert "57.5%" in text
    assert "\\<script>" in text
    for figure in figures:
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert f"(report-figures/{figure.name})" in text
    assert len(figures) >= 8


def test_markdown_escapes_what_would_break_a_table():
    table = Table("t", ("a|b",), ((Cell("x|y\nz"),),))
    assert table.markdown().splitlines() == ["| a\\|b |", "|---|", "| x\\|y z |"]


def test_tables_as_csv_json_and_latex(tmp_path):
    row = (Cell("50% of A_B", "ℓ∞ ≤ 8/255"), Cell("91.0%", "85–95", number=True))
    table = Table("T", ("model & p", "accuracy"), (row,), "Why.")
    header, values = csv.reader(io.StringIO(table.csv()))
    assert dict(zip(header, values, strict=True)) == {
        "model & p": "50% of A_B",
        "model & p (note)": "ℓ∞ ≤ 8/255",
        "accuracy": "91.0%",
        "accuracy (note)": "85–95",
    }
    assert json.loads(table.json())["rows"] == [
        {"model & p": {"text": row[0].text, "note": row[0].note}, "accuracy": {"text": "91.0%", "note": "85–95"}}
    ]
    assert table.latex().splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"model \& p & accuracy \\",
        r"\midrule",
        r"50\% of A\_B {\scriptsize ($\ell_\infty$ $\le$ 8/255)} & 91.0\% {\scriptsize (85--95)} \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    for name in ("t.csv", "t.json", "t.tex", "t.md"):
        assert "91.0" in table.written(tmp_path / name).read_text()
    with pytest.raises(ConfigurationError, match=r"expected a file name with \.csv"):
        table.written(tmp_path / "t.xlsx")


def test_command_writes_every_table(tmp_path, capsys):
    folder = tmp_path / "records"
    write(folder, evaluation("pgd", defense=True), right=20)
    assert main(["report", str(folder), "--tables", "csv", "latex", "json"]) == 0
    assert "latex: " in capsys.readouterr().out
    written = {path.name for path in (folder / "report-tables").iterdir()}
    assert {
        f"{name}.{ending}" for name in ("accuracy", "numbers") for ending in ("csv", "tex", "json")
    } <= written


def test_command_writes_page_and_markdown(tmp_path, capsys):
    folder = tmp_path / "records"
    write(folder, evaluation("pgd", defense=True), right=20)
    out = tmp_path / "here" / "page.html"
    assert main(["report", str(folder), "--out", str(out), "--markdown", "--title", "T<i>tle"]) == 0
    assert "<title>T&lt;i&gt;tle</title>" in out.read_text()
    assert out.with_suffix(".md").is_file()
    assert str(out) in capsys.readouterr().out


def test_folders_without_records_are_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "expected records (*.rank*.jsonl) or audit.json" in capsys.readouterr().err


def test_damaged_rows_are_left_out_only_if_asked_and_then_named(tmp_path):
    write(tmp_path, evaluation("pgd", defense=False), right=20)
    (file,) = tmp_path.glob("*.jsonl")
    text = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*text[:3], text[3].replace('"index":2', '"index":3', 1), *text[4:]]))
    with pytest.raises(RecordError, match=":4 is damaged"):
        collect(tmp_path)
    shown = render_html(report_of(collect(tmp_path, damaged=True)))
    assert ":4 is damaged" in shown
    assert ">39<" in shown


@pytest.mark.parametrize("content", ["[", "[1]", '{"paper": [{"model": "a"}]}', '{"names": 3}'])
def test_bad_notes_are_named(tmp_path, content):
    write(tmp_path, evaluation("pgd", defense=False), right=20)
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(RecordError, match=r"expected the notes of a report in .*report\.json"):
        collect(tmp_path)


def test_bad_audit_and_features_are_named(tmp_path):
    write(tmp_path, evaluation("pgd", defense=False), right=20)
    (tmp_path / "audit.json").write_text('{"findings": [{"name": "x"}]}')
    with pytest.raises(RecordError, match=r"expected an audit in .*audit\.json"):
        collect(tmp_path)
    file = tmp_path / "pgd.features.safetensors"
    file.write_bytes(b"nonsense")
    with pytest.raises(RecordError, match=r"expected features in .*features\.safetensors"):
        load_features(file)


def test_features_round_trip(collection):
    (features,) = collection.subjects[0].features
    assert features.label == "pgd:on=copy"
    np.testing.assert_allclose(features.adversarial, features.clean + 1)


def test_grid_puts_the_psnr_under_estimates_and_refuses_other_shapes(without_annotation_checks):
    images = torch.zeros(2, 3, 8, 8)
    figure = reconstruction_grid(images, images, {"usvt": images + 0.1, "exact": images})
    assert [place.get_xlabel() for place in figure.axes] == ["", "", "PSNR 20.0 dB", "exact"] * 2
    assert [place.get_title() for place in figure.axes[:4]] == ["original", "masked", "usvt", "exact"]
    with pytest.raises(ConfigurationError, match=r"expected usvt of shape \(2, 3, 8, 8\), got \(1, 3, 8, 8\)"):
        reconstruction_grid(images, images, {"usvt": images[:1]})


def test_the_two_attacks_named_cw_are_told_apart(tmp_path):
    write(tmp_path, evaluation("cw", defense=False, kind="CW"), right=20)
    write(tmp_path, evaluation("cw-l2", defense=False, kind="CWL2"), right=10)
    shown = [row[0].text for row in every_accuracy(collect(tmp_path).subjects[0]).rows]
    assert set(shown) == {"CW (margin), 20 steps", "CW-L2, 20 steps"}


def test_a_multi_targeted_attack_is_named_with_its_inner_one(tmp_path):
    about = evaluation("pgd-targeted", defense=False)
    about["attack"] = {"kind": "MultiTargeted", "attack": about["attack"]}
    write(tmp_path, about, right=20)
    (records,) = collect(tmp_path).subjects[0].evaluations.values()
    assert attack_words(records) == "multi-targeted PGD, 20 steps"


def test_words_between_backticks_are_code_and_everything_is_escaped():
    shown = render_html(Report("T", ("run `menet <b> reproduce`",), (Section("a", "A", ("`x` & y",)),)))
    assert "<p>run <code>menet &lt;b&gt; reproduce</code></p>" in shown
    assert "<p><code>x</code> &amp; y</p>" in shown


def test_long_names_do_not_leave_the_figure():
    with styled():
        figure = sheet()
        place = figure.add_subplot()
        place.plot(
            [0, 1], [0, 1], label="a network with a long name, PGD, exact gradient, 1,000 steps, 20 draws, $5 $6"
        )
        legend(figure, place)
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_a_number_and_its_rounded_decimals_have_the_same_digit():
    """The board's JSON has six decimals of a fraction, RESULTS.md the fraction itself."""
    for count in range(4001):
        assert tenth(count / 4000) == tenth(round(count / 4000, 6))
    # In binary 100 × 0.3545 is just below 35.45, and 0.35450000000000004 is what 1,418 draws of 4,000 add up to.
    assert tenth(0.3545) == tenth(0.35450000000000004) == "35.5"
    assert (tenth(0.0), tenth(1.0), tenth(0.0085), tenth(0.00849)) == ("0.0", "100.0", "0.9", "0.8")

"""One rule for all commands: common options, output for people and for programs, tables that fit, exit codes."""

import csv
import importlib
import inspect
import io
import json
import re
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from rich.console import Console
from torch import nn

from menet.cli import COMMANDS, EXIT_CODES, main
from menet.commands import FORMATS, Output, options, printing
from menet.data.dataset import Dataset
from menet.errors import ConfigurationError
from menet.evaluation import EvaluationSettings, evaluate, parse_attack, publish
from menet.evaluation.accuracy import accuracy
from menet.evaluation.records import Records
from menet.report import Cell, Table, accuracy_tables
from menet.report.collect import Collection, Notes, Subject

ROOT = Path(__file__).parents[2]

# What a command lacks, and why. A new command has all of them, or gets a reason here.
NO_RANDOMNESS, NO_FILES, NO_NETWORK = "uses no randomness", "writes no files", "runs no network"
WITHOUT = {
    "json": {"serve": "runs until it is stopped", "completion": "prints a script"},
    "out": {
        "serve": NO_FILES,
        "explore": "the page is --export",
        "doctor": NO_FILES,
        "completion": NO_FILES,
        "data list": NO_FILES,
        "data verify": NO_FILES,
        "models list": NO_FILES,
        "models show": NO_FILES,
        "models measured": "writes the cards of the package",
        "data fetch": "writes to the folder of the datasets, --root",
        "data import": "writes to the folder of the datasets, --root",
    },
    "seed": {
        "report": NO_RANDOMNESS,
        "publish": NO_RANDOMNESS,
        "compare": NO_RANDOMNESS,
        "reproduce": "the seeds are part of the experiments",
        "serve": "the page asks for each seed",
        "explore": "the page is the same for everybody",
        "doctor": "its self-test is the same for everybody",
        "completion": NO_RANDOMNESS,
        "data list": NO_RANDOMNESS,
        "data fetch": NO_RANDOMNESS,
        "data import": NO_RANDOMNESS,
        "data verify": NO_RANDOMNESS,
        "data rank": NO_RANDOMNESS,
        "models list": NO_RANDOMNESS,
        "models show": NO_RANDOMNESS,
        "models pack": NO_RANDOMNESS,
        "models measured": NO_RANDOMNESS,
    },
    "device": {
        "demo": "small networks, for which a CPU is enough",
        "report": NO_NETWORK,
        "publish": NO_NETWORK,
        "compare": NO_NETWORK,
        "serve": "small networks, for which a CPU is enough",
        "explore": "small networks, for which a CPU is enough",
        "doctor": "tests what is there",
        "completion": NO_NETWORK,
        "data list": NO_NETWORK,
        "data fetch": NO_NETWORK,
        "data import": NO_NETWORK,
        "data verify": NO_NETWORK,
        "data rank": NO_NETWORK,
        "models list": NO_NETWORK,
        "models show": NO_NETWORK,
        "models pack": NO_NETWORK,
        "models measured": NO_NETWORK,
    },
}
KINDS = {"json": bool, "csv": bool, "latex": bool, "seed": int, "device": str, "out": Path, "root": Path}


def command_type(name: str) -> type:
    module, attribute = COMMANDS[name].target.split(":")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options(name: str) -> None:
    there = {one.name for one in fields(command_type(name))}
    for option, reasons in WITHOUT.items():
        assert (option in there) != (name in reasons), f"--{option}"


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_means_the_same_everywhere(name: str) -> None:
    hints = get_type_hints(command_type(name))
    for option, kind in KINDS.items():
        if option in hints:
            assert kind in (hints[option], *get_args(hints[option])), option


@pytest.mark.parametrize("name", COMMANDS)
def test_every_table_can_be_had_as_csv_and_latex(name: str) -> None:
    kind = command_type(name)
    source = inspect.getsource(sys.modules[kind.__module__])
    shows = "out.table(" in inspect.getsource(kind)
    there = {one.name for one in fields(kind)}
    assert ({"json", "csv", "latex"} <= there) == shows
    # A table that is printed by itself would be missing from the formats for programs.
    assert not re.search(r"\btable\.print\(|Table\([^\n]*\)\.print\(", source)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_eighty_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    # Examples are lines to copy: they are not broken.
    lines = [line for line in shown.splitlines() if not line.startswith(("   ", "usage:"))]
    assert [line for line in lines if len(line) > (80 if name else 84)] == []


def test_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    page = (ROOT / "docs" / "commands.md").read_text()
    for code, meaning in EXIT_CODES.items():
        assert re.search(rf"^  {code} +{meaning}$", shown, re.MULTILINE)
        assert f"| {code} | {meaning}" in page


def test_the_page_of_the_command_line_lists_every_command() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    for name in COMMANDS:
        assert f"`menet {name}" in page, name


TABLE = Table("title", ("name", "long heading"), ((Cell("a_b", "x"), Cell("1", "±2", number=True)),), "why")


@pytest.mark.parametrize("format", FORMATS)
def test_standard_output_holds_the_document_alone(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    class DataShown(SimpleNamespace):
        @printing
        def __call__(self, out: Output) -> int:
            print("words")
            out.table(TABLE)
            out.value(folder=Path("runs"))
            return 1

    assert DataShown(**{format: True})() == 1
    shown = capsys.readouterr()
    assert shown.err == "words\n"
    if format == "json":
        found = json.loads(shown.out)
        assert found["command"] == "data shown"
        assert found["folder"] == "runs"
        assert found["tables"][0]["rows"][0]["long heading"] == {"text": "1", "note": "±2"}
    elif format == "csv":
        rows = list(csv.reader(io.StringIO(shown.out)))
        assert rows == [["name", "name (note)", "long heading", "long heading (note)"], ["a_b", "x", "1", "±2"]]
    else:
        assert shown.out.startswith(r"\begin{tabular}")
        assert r"a\_b" in shown.out
    assert DataShown()() == 1
    plain = capsys.readouterr()
    assert "words" in plain.out
    assert "a_b" in plain.out


def test_a_failure_prints_no_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "nowhere", "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "expected" in shown.err
    assert main(["data", "list", "--json", "--csv"]) == 2
    assert "expected one output format, got --json and --csv" in capsys.readouterr().err


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Records]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    images = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8)
    dataset = Dataset("squares", "test", images, torch.arange(6) % 3, ("a", "b", "c"), (0.5,), (0.5,))
    attacks = [parse_attack(spec, model, epsilon=0.1) for spec in ("fgsm", "pgd:steps=2,restarts=2,loss=margin")]
    return evaluate(model, dataset, attacks, tmp_path_factory.mktemp("records"), EvaluationSettings(stop=6))


def test_tables_fit_eighty_columns(records: dict[str, Records]) -> None:
    long = Subject("runs/cifar10-me-net-adversarial", records)
    other = Subject("runs/cifar10-none-adversarial", records)
    collection = Collection(Path(), (long, other), Notes())
    for table in (
        accuracy_tables.summary(collection),
        accuracy_tables.overview(collection),
        accuracy_tables.every_accuracy(long),
        accuracy_tables.comparison(long, other, list(records)),
    ):
        shown = io.StringIO()
        table.print(Console(file=shown, width=80))
        lines = shown.getvalue().splitlines()
        assert max(map(len, lines)) <= 80
        # Rich ends with an ellipsis what it had to cut off.
        assert "…" not in shown.getvalue(), shown.getvalue()
        assert "\x1b" not in shown.getvalue()


@pytest.mark.parametrize("arguments", [["reproduce", "table4", "--dry-run", "--match", "PGD"], ["data", "list"]])
def test_printed_tables_fit_eighty_columns(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    drawn = [line for line in shown.splitlines() if line and line[0] in "┏┃┡│├└"]
    assert all(len(line) <= 80 for line in drawn)
    assert "…" not in shown
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(table["rows"] for table in found["tables"])


def test_unknown_devices_are_refused_by_every_command_that_has_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="unknown device 'gpu'"):
        options.device_of("gpu")
    for arguments in (["train", "digits"], ["prepare", "digits", "--out", "set"], ["reproduce", "figure1"]):
        assert main([*arguments, "--device", "gpu"]) == 2


def test_results_fill_the_place_of_a_document(records: dict[str, Records], tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "README.md"
    publish("squares/linear", records, {"config": {"objective": "standard", "epochs": 3, "seed": 7}}, results)
    page.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    assert main(["report", str(results), "--fill", str(page)]) == 0
    filled = page.read_text()
    assert filled.startswith("before\n<!-- results -->\n\n| dataset, threat model |")
    assert filled.endswith("<!-- /results -->\nafter\n")
    assert "old" not in filled
    number = min((accuracy(one) for one in records.values()), key=lambda one: one.value)
    assert f"{100 * number.value:.1f} ({100 * number.low:.1f}–{100 * number.high:.1f})" in filled
    assert "standard, 3 epochs, seed 7" in filled
    assert main(["report", str(results), "--fill", str(page)]) == 0
    assert page.read_text() == filled
    page.write_text("<!-- results linear -->\n<!-- /results -->\n<!-- results other -->\n<!-- /results -->")
    assert main(["report", str(results), "--fill", str(page)]) == 0
    chosen, others = page.read_text().split("<!-- /results -->\n")
    assert "standard training" in chosen
    assert "| dataset | threat model |" in others
    assert "standard training" not in others
    page.write_text("no place")
    assert main(["report", str(results), "--fill", str(page)]) == 2
    assert page.read_text() == "no place"

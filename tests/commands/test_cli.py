"""The command line itself: quick help, choices that match the registries, interrupts and helpful errors."""

import contextlib
import dataclasses
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from menet import cli
from menet.cli import COMMANDS, main
from menet.commands import options
from menet.errors import ConfigurationError
from menet.evaluation.certify import fewest_pixels

HEAVY = ("torch", "numpy", "scipy", "matplotlib", "sklearn", "foolbox")


def loaded_by(*commands: list[str]) -> list[set[str]]:
    """The heavy packages that are imported after each of the commands, run one after the other."""
    code = (
        "import sys\n"
        "from menet.cli import main\n"
        f"for arguments in {commands!r}:\n"
        "    try:\n        main(arguments)\n"
        "    except SystemExit:\n        pass\n"
        f"    print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("LOADED")]


def test_help_imports_nothing_heavy() -> None:
    asked = [["--help"], ["--version"], ["data"], ["trian"], *([*name.split(), "--help"] for name in COMMANDS)]
    found = loaded_by(*asked)
    assert len(found) == len(asked)
    assert {" ".join(words): heavy for words, heavy in zip(asked, found, strict=True) if heavy} == {}


def test_choices_match_the_registries() -> None:
    from menet import attacks, data
    from menet.estimators import ESTIMATORS
    from menet.models import NETWORKS
    from menet.preprocessed import Preprocessed
    from menet.training import config, recipes

    assert set(options.ATTACKS) == set(attacks.NAMES)
    assert set(options.DATASETS) == set(data.NAMES)
    assert set(options.MODELS) == set(NETWORKS)
    assert set(options.ESTIMATORS) == set(ESTIMATORS)
    assert set(options.BASELINES) == Preprocessed.kinds.keys() - {"me-net"}
    assert get_args(options.Norm) == get_args(config.Norm)
    assert get_args(options.Objective) == get_args(config.Objective)
    assert get_args(options.Optimizer) == get_args(config.Optimizer)
    assert get_args(options.Schedule) == get_args(config.Schedule)
    assert get_args(options.Precision) == get_args(config.Precision)
    assert get_args(options.Recipe) == get_args(recipes.Kind)


@pytest.mark.parametrize("name", ["train", "prepare", "evaluate", "audit", "certify", "data rank", "reconstruct"])
def test_commands_agree_on_folders_and_devices(name: str) -> None:
    module, attribute = COMMANDS[name].target.split(":")
    fields = {
        one.name: one.default for one in dataclasses.fields(getattr(importlib.import_module(module), attribute))
    }
    if name != "reconstruct":
        assert fields["side"] is None
        assert fields["skip_unreadable"] is False
    assert fields.get("device", "auto") == "auto"


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"usage: menet {name}" in shown
    assert "{None}" not in shown
    assert "[bold]" not in shown
    if "resume" in COMMANDS[name].interrupted and name != "reproduce":
        assert "rerun the same command to resume" in " ".join(shown.replace("│", " ").split())


def test_a_mistyped_command_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reconstuct"]) == 2
    assert capsys.readouterr().err == "menet: unknown command 'reconstuct'; did you mean `menet reconstruct`?\n"


def test_a_group_of_commands_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("menet data: expected one of list, fetch, import, verify, rank, got none; ")
    assert told.count("\n") == 1
    assert main(["data", "--help"]) == 0
    assert "data fetch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "photos"], "unknown dataset 'photos'; did you mean folder:photos?"),
        (["train", "cifar"], "unknown dataset 'cifar'; did you mean 'cifar10'?"),
        (["prepare", "photos", "--out", "set"], "did you mean folder:photos?"),
        (["reproduce", "--datasets", "mnist", "table16"], "go first: menet reproduce table16 --datasets"),
        (["data", "rank", "photos"], "did you mean folder:photos?"),
        (["train", "digits", "--epsilon", "8"], "got 8; did you mean 8/255?"),
        (["evaluate", "torch.nn:Flatten", "--data", "digits", "--epsilon", "8"], "did you mean 8/255?"),
        (["evaluate", "network:ten", "--data", "digits", "--attacks", "pgd:epsilon=8"], "did you mean 8/255?"),
        (["train", "digits", "--epsilon", "-1"], "expected epsilon >= 0, such as 0.3 or 8/255, got '-1'"),
        (["train", "digits", "--p", "0.5"], "--p only applies to --defense me-net, got --defense none; add"),
        (["train", "digits", "--side", "64"], "only folder:PATH takes them"),
        (["train", "digits", "--step-size", "big"], "expected step_size > 0"),
        (["train", "digits", "--defense", "me-net", "--p", ".1", ".2", ".3"], "expected one or two prob"),
        (["evaluate", "torch.nn:Identity", "--data", "digits"], "expected logits of shape (1, 10)"),
        (["evaluate", "network:few", "--data", "digits"], "for each of the 10 classes of digits, got 3"),
        (["evaluate", "network:color", "--data", "digits"], "the model fails on a 1×28×28 image of digits: "),
        (["evaluate", "network:fails", "--data", "digits"], "raised RuntimeError: no weights (/"),
        (["evaluate", "network:Odd", "--data", "digits"], "image of digits: KeyError: 'layer' (/"),
        (["evaluate", "network:ten", "--data", "digits", "--out", "network.py"], "File exists: network.py"),
        (["evaluate", "network:ten", "--data", "digits", "--attacks", "pgd:steps=x"], "integer steps, got 'x'"),
        (["evaluate", "network:ten", "--data", "digits", "--attacks", "pgd:steps=2.5"], "integer steps, got 2.5"),
        (["evaluate", "network:ten", "--data", "digits", "--snapshots", "-1"], "expected snapshots >= 0"),
        (["evaluate", "network:ten", "--data", "digits", "--side", "9"], "expected digits alone, got"),
        (["audit", "network:ten", "--data", "digits", "--examples", "-3"], "expected examples >= 1, got -3"),
        (["reproduce", "figure1", "--workers", "0"], "expected workers >= 1, got 0"),
        (["audit", "network:few", "--data", "digits"], "expected a logit for each of the 10 classes"),
        (["evaluate", "network:few", "--device", "cuda"], "'cuda' here: it sees no GPU; use --device cpu"),
        (["reproduce", "figure1", "--device", "cuda"], "use --device cpu"),
    ],
)  # fmt: skip
def test_errors_say_what_may_be_meant(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "photos").mkdir()
    (tmp_path / "network.py").write_text(
        "from torch import nn\n"
        "def fails(): raise RuntimeError('no weights')\n"
        "class Odd(nn.Module):\n    def forward(self, images): raise KeyError('layer')\n"
        "def ten(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
        "def few(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 3))\n"
        "def color(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10))\n"
    )
    sys.modules.pop("network", None)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_output_that_nobody_reads_is_no_error() -> None:
    command = [sys.executable, "-m", "menet.cli", "data", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_folder_is_remembered_with_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from menet.commands.train import Train

    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    assert Train("folder:photos@64").config().dataset == f"folder:{tmp_path}/photos@64"


def test_the_split_of_a_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    dataset = options.dataset_of("photos", "", "test")
    assert f"photos: {len(dataset)} test images of 40 (split by a hash" in capsys.readouterr().out


def test_one_probability_is_enough() -> None:
    from menet.commands.train import Train

    assert Train("digits", defense="me-net", p=(0.5,)).config().defense["p"] == 0.5
    assert Train("digits", epsilon="8/255", step_size="2/255").config().epsilon == 8 / 255


def test_an_interrupted_command_says_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("menet.commands.train.Train.__call__", interrupt)
    assert main(["train", "digits"]) == 130
    told = capsys.readouterr().err.strip()
    assert told == "menet train: interrupted; the last checkpoint is kept; rerun the same command to resume"


def test_an_interrupt_while_modules_are_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    assert main(["evaluate", "RUN"]) == 130
    assert "finished batches are kept" in capsys.readouterr().err


def test_an_interrupt_that_a_library_swallowed_is_still_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # numpy, hit while scipy imports it, goes on and fails later with a RecursionError.
    def swallow(self: object) -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RecursionError

    monkeypatch.setattr("menet.commands.train.Train.__call__", swallow)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["train", "digits"]) == 130
    assert "the last checkpoint is kept" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr("menet.commands.train.Train.__call__", lambda self: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", "digits"])


def train_does(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Let `menet train` do `work`, and repeat interrupts quickly."""
    monkeypatch.setattr("menet.commands.train.Train.__call__", lambda self: work())
    monkeypatch.setattr("menet.cli.SECONDS_BETWEEN_INTERRUPTS", 0.01)


def test_an_interrupt_that_was_swallowed_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        for _ in range(6000):
            time.sleep(0.01)

    train_does(monkeypatch, work)
    assert main(["train", "digits"]) == 130


def test_cleaning_up_after_an_interrupt_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            for step in range(10):
                with contextlib.suppress(ValueError):
                    time.sleep(0.01)
                    steps.append(step)
                    raise ValueError

    train_does(monkeypatch, work)
    assert main(["train", "digits"]) == 130
    assert steps == list(range(10))


@pytest.mark.parametrize(("signals", "completed"), [(1, True), (2, False)])
def test_an_interrupt_waits_for_the_end_of_an_import_once(
    signals: int, completed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["import signal", *["signal.raise_signal(signal.SIGINT)"] * signals, "COMPLETED = True"]
    (tmp_path / "interrupted_module.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    found = []

    def work() -> None:
        module = importlib.import_module("interrupted_module")
        found.append(module.COMPLETED)
        time.sleep(60)

    train_does(monkeypatch, work)
    assert main(["train", "digits"]) == 130
    assert found == [True] * completed
    sys.modules.pop("interrupted_module", None)


def test_an_interrupt_after_the_end_does_not_kill() -> None:
    # Python gives SIGINT its default effect, death, before it deletes the globals of modules.
    code = """
import os, signal
from menet import cli

class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGINT):
        kill(process, number)

late = Late()
cli.main = lambda: 3
cli.run()
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3


@pytest.mark.slow
@pytest.mark.parametrize("module", ["tyro", "numpy", "menet.training.loop"])
def test_a_signal_during_an_import_is_one_line(module: str, tmp_path: Path) -> None:
    # Python tells of each import when it ends, so the signal comes at the same place on any machine.
    options = ["train", "digits", "--epochs", "500", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-X", "importtime", "-m", "menet.cli", *options]
    told = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if not line.startswith("import time:"):
                told.append(line)
            elif line.rpartition("|")[2].strip() == module:
                os.kill(process.pid, signal.SIGINT)
    assert process.returncode == 130, told
    assert "Traceback" not in "".join(told)
    assert told[-1].strip().endswith("rerun the same command to resume")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["config.json", "last.safetensors"])
def test_a_signal_during_training_is_one_line(file: str, tmp_path: Path) -> None:
    options = [
        "train",
        "digits",
        "--model",
        "small",
        "--limit",
        "200",
        "--epochs",
        "100000",
        "--out",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "menet.cli", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while not (tmp_path / file).exists() and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        told = process.communicate(timeout=240)[1]
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert told.strip().splitlines()[-1].endswith("rerun the same command to resume")


def test_a_missing_package_names_the_extra() -> None:
    from menet.errors import require

    with pytest.raises(ConfigurationError, match=r"pip install 'menet\[report\]'"):
        require("a_package_that_is_not_there", extra="report")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_sandwich_attacks_what_was_certified(precision, tmp_path, capsys):
    """With the default device, and in the precision of the votes: bfloat16 is another classifier."""
    arguments = ["certify", "mnist-menet-certified", "--data", "digits", "--stop", "2", "--partitions", "1"]
    options = ["--sandwich", "1", "--precision", precision, "--out", str(tmp_path)]
    seen = set()

    def noting(model, *rest, **options):
        seen.add(torch.is_autocast_enabled("cpu"))
        return fewest_pixels(model, *rest, **options, proposals=20)

    with patch("menet.evaluation.certify.fewest_pixels", noting):
        assert main([*arguments, *options]) == 0
    assert "l0 attacks turned" in capsys.readouterr().out
    assert seen == {precision == "bfloat16"}

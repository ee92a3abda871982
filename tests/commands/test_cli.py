"""The command line itself: quick help, choices that match the registries, interrupts and helpful errors."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from menet import cli
from menet.cli import COMMANDS, main
from menet.commands import options
from menet.errors import ConfigurationError

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
    from menet import data
    from menet.attacks import registry, threat
    from menet.estimators import ESTIMATORS
    from menet.models import NETWORKS
    from menet.preprocessed import Preprocessed
    from menet.training import config, recipes

    assert set(options.ATTACKS) == set(registry.NAMES)
    assert set(options.DATASETS) == set(data.NAMES)
    assert set(options.MODELS) == set(NETWORKS)
    assert set(options.ESTIMATORS) == set(ESTIMATORS)
    assert set(options.BASELINES) == Preprocessed.kinds.keys() - {"me-net"}
    assert get_args(options.Norm) == get_args(threat.Norm)
    assert get_args(options.Objective) == get_args(config.Objective)
    assert get_args(options.Optimizer) == get_args(config.Optimizer)
    assert get_args(options.Schedule) == get_args(config.Schedule)
    assert get_args(options.Precision) == get_args(config.Precision)
    assert get_args(options.Recipe) == get_args(recipes.Kind)


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
    assert capsys.readouterr().err == "menet data: expected one of list, fetch, import, verify, rank, got none\n"
    assert main(["data", "--help"]) == 0
    assert "data fetch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "photos"], "unknown dataset 'photos'; did you mean folder:photos?"),
        (["train", "cifar"], "unknown dataset 'cifar'; did you mean 'cifar10'?"),
        (["prepare", "photos", "--out", "set"], "did you mean folder:photos?"),
        (["data", "rank", "photos"], "did you mean folder:photos?"),
        (["train", "digits", "--epsilon", "8"], "got 8; did you mean 8/255?"),
        (["evaluate", "torch.nn:Flatten", "--data", "digits", "--epsilon", "8"], "did you mean 8/255?"),
        (["train", "digits", "--epsilon", "-1"], "expected epsilon >= 0, such as 0.3 or 8/255, got '-1'"),
        (["train", "digits", "--step-size", "big"], "expected step_size > 0"),
        (["train", "digits", "--defense", "me-net", "--p", ".1", ".2", ".3"], "expected one or two prob"),
        (["evaluate", "torch.nn:Identity", "--data", "digits"], "expected logits of shape (1, 10)"),
        (["evaluate", "network:few", "--data", "digits"], "for each of the 10 classes of digits, got 3"),
        (["evaluate", "network:color", "--data", "digits"], "the model fails on a 1×28×28 image of digits: "),
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
        "def few(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 3))\n"
        "def color(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10))\n"
    )
    sys.modules.pop("network", None)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


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


def test_a_missing_package_names_the_extra() -> None:
    from menet.errors import require

    with pytest.raises(ConfigurationError, match=r"pip install 'menet\[report\]'"):
        require("a_package_that_is_not_there", extra="report")

"""`menet doctor` and `menet completion`: what a bug report needs, and options by the tab key."""

import json
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from menet.cli import COMMANDS, main
from menet.commands import doctor


def test_the_doctor_finds_this_machine_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for words in ("**menet**", "- torch: ", "- bfloat16: CPU ", "- GPUs: ", "**data**", "- writable: "):
        assert words in shown
    assert shown.rstrip().endswith("all self-tests passed")


def test_a_failing_self_test_is_told_and_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> str:
        raise ArithmeticError("planted")

    monkeypatch.setattr(doctor, "SELF_TESTS", {"planted": fails})
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == ["planted"]
    assert found["self-test"]["planted"].startswith("FAILED: ArithmeticError: planted")


def test_the_doctor_names_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert doctor._short(Path("/home/somebody/.cache/menet")) == "~/.cache/menet"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def completed(*words: str) -> set[str]:
        given = " ".join(f"'{word}'" for word in words)
        code = f'{script}\nCOMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _menet; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert completed("menet", "") == {name.split()[0] for name in COMMANDS} | {"--help", "--version"}
    assert completed("menet", "re") == {name for name in COMMANDS if name.startswith("re")}
    assert completed("menet", "data", "f") == {"fetch"}
    assert {"--epsilon", "--attacks", "--help"} <= completed("menet", "evaluate", "--")
    assert completed("menet", "data", "rank", "--ene") == {"--energy"}
    assert completed("menet", "evaluate", "run") == set()


def test_every_option_is_offered_and_no_positional() -> None:
    options = {name: doctor._options(described)[1] for name, described in doctor._commands().items()}
    assert options.keys() == COMMANDS.keys()
    assert "--target" not in options["audit"]
    assert {f"--{one.name.replace('_', '-')}" for one in fields(doctor.Doctor)} <= set(options["doctor"])


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert "reconstruct" in shown
    assert "estimator" in shown
    if shutil.which(shell):
        subprocess.run([shell, "--no-execute"], input=shown, text=True, check=True)

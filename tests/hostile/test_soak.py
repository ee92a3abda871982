"""The quick part of `make soak`: a few damaged files of each format, and what a finding is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent / "soak.py"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(SOAK.parent))
    import soak

    return soak


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_few_of_each_format_survive_and_a_second_run_adds_to_the_table(tmp_path):
    document, counts = tmp_path / "reliability.md", tmp_path / "counts.json"
    document.write_text("before\n<!-- soak -->\nan earlier table\n<!-- /soak -->\nafter\n")
    command = [sys.executable, str(SOAK), "--counts", str(counts), "--write", str(document)]
    for stage, row in (
        ("published-files", "| mat plain | 3 | 3 | 0 |"),
        ("own-files", "| weights | 3 | 3 | 0 |"),
    ):
        arguments = [*command, "--size", "3", "--only", stage]
        found = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr
        assert row in found.stdout
    text = document.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "an earlier table" not in text
    assert "| mat plain | 3 | 3 | 0 |" in text
    assert "| weights | 3 | 3 | 0 |" in text
    assert f"| **all** | {3 * (text.count('| 3 | 3 | 0 |'))} |" in text


def test_a_finding_is_reported_and_counts_continue(tmp_path, soak, capsys):
    """A reader that raises anything but the project's own error, or accepts damage, is a finding."""
    file, kept = tmp_path / "file", tmp_path / "counts.json"
    file.write_bytes(b"0123456789" * 5)

    def careless() -> int:
        content = file.read_bytes()
        if len(content) < 50:
            raise IndexError
        return 1 + len(content)

    counts = soak.Counts(kept)
    soak.mutate(counts, "careless", file, careless, 30)
    assert "| careless | 30 |" in capsys.readouterr().out
    again = soak.Counts(kept)
    soak.mutate(again, "careless", file, careless, 40)
    soak.mutate(again, "careful", file, file.exists, 5)
    found = again.tallies["careless"]
    assert found.tried == 40
    assert found.findings[: len(counts.tallies["careless"].findings)] == counts.tallies["careless"].findings
    assert any("IndexError" in words for words in found.findings)
    assert any("accepted with another content" in words for words in found.findings)
    assert again.tallies["careful"].findings == []
    whole = soak.Counts(tmp_path / "other.json")
    soak.mutate(whole, "careless", file, careless, 40)
    assert whole.tallies["careless"].findings == found.findings, "a case is the same in every run"


def test_counts_of_other_sources_do_not_count(tmp_path, soak, capsys):
    kept = tmp_path / "counts.json"
    tallies = [{"name": "records", "tried": 3, "findings": [], "seconds": 1.0}]
    kept.write_text(json.dumps({"sources": "others", "tallies": tallies}))
    assert soak.Counts(kept).tallies == {}
    assert "the sources have changed" in capsys.readouterr().err


def test_every_stage_is_in_the_help_and_every_long_command_is_killed(soak):
    told = subprocess.run(
        [sys.executable, str(SOAK), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(stage in told for stage in soak.STAGES)
    resumed = {"prepare", "train", "evaluate", "certify", "audit", "reproduce"}
    assert {f"kill-{name}" for name in resumed} <= soak.STAGES.keys()


PROGRAM = """
import fcntl, os, sys, time
kind, out = sys.argv[1], sys.argv[2]
resumed = os.path.isdir(out)
try:
    os.makedirs(out, exist_ok=True)
    lock = open(f"{out}/.lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("is locked", file=sys.stderr)
        sys.exit(2)
    for number in range(4):
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        file = f"{out}/{number}.npy"
        if not os.path.exists(file):
            with open(file + ".part", "wb") as part:
                part.write(b"forgotten" * 99 if resumed and kind == "forgetful" else b"x" * 9999)
            os.replace(file + ".part", file)
except OSError as error:
    if kind == "rude":
        raise
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture
def small_soak(soak, tmp_path, monkeypatch):
    """A soak of one quick command: sound, forgetful (other content when resumed) or rude (a traceback)."""

    def start(words, environment=None):
        command = [sys.executable, "-c", PROGRAM, *words]
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def of(kind: str, kills: int = 2):
        names = ("prepare", "train", "evaluate", "certify", "audit", "reproduce")
        monkeypatch.setattr(soak, "menet", start)
        monkeypatch.setattr(soak, "commands", lambda run: dict.fromkeys(names, lambda out: (kind, str(out))))
        monkeypatch.setattr(soak, "TRAIN", (kind,))
        made = soak.Soak(tmp_path / kind, soak.Counts(tmp_path / f"{kind}.json"), 1, kills)
        made.work.mkdir()
        monkeypatch.setattr(soak.Soak, "run", made.work / "run")
        return made

    return of


def test_a_command_that_resumes_survives_kills_races_and_caches(small_soak):
    soak = small_soak("sound")
    soak.kill("train")
    soak.two_at_once()
    soak.caches()
    assert soak.counts.total().findings == []
    assert {name: one.tried for name, one in soak.counts.tallies.items()} == {
        "kill −9: train": 2,
        **{f"two at once: {name}": 1 for name in ("train", "evaluate", "certify", "prepare", "audit")},
        "compile cache: cold, warm, damaged, killed": 1,
    }


def test_a_command_that_forgets_is_a_finding(small_soak):
    soak = small_soak("forgetful", kills=8)
    soak.kill("train")
    assert any("another outcome" in finding for finding in soak.counts.total().findings)


def test_full_disks_are_tried_and_tracebacks_found(small_soak, tmp_path):
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a disk")
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)
    soak = small_soak("sound", kills=1)
    soak.full_disk()
    assert soak.counts.total().findings == []
    assert soak.counts.tallies["disk of 20 MB, full or read-only: evaluate"].tried == 1
    assert not (soak.work / "disk").is_mount()
    soak = small_soak("rude", kills=1)
    soak.full_disk()
    assert any("Traceback" in finding for finding in soak.counts.total().findings)

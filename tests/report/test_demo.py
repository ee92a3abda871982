"""The demonstration from end to end, at a size for tests."""

import dataclasses
import json

import pytest

from menet.cli import main
from menet.commands import demo
from menet.commands.demo_plan import BESIDE, FULL, QUICK, beside
from menet.preprocessed import Preprocessed

TINY = dataclasses.replace(
    QUICK,
    steps=2,
    epochs=1,
    estimated_epochs=1,
    images=100,
    training_steps=1,
    examples=10,
    batch=5,
    masks=3,
    pictures=1,
    certified=3,
    selection=5,
    estimation=20,
)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "QUICK", TINY)
    return tmp_path / "demo"


def test_demo_does_the_main_job_and_uses_it_again(tiny, capsys):
    assert main(["demo", "--quick", "--out", str(tiny)]) == 0
    printed = capsys.readouterr().out
    for words in ("What the numbers mean", "upper bound", "ME-Net", "right and proven", "report.html"):
        assert words in printed, words
    page = (tiny / "report.html").read_text()
    for part in ("accuracy", "pictures", "features", "certificate", "made"):
        assert f'id="{part}"' in page, part
    assert (tiny / "reconstruction.png").read_bytes().startswith(b"\x89PNG")
    (work,) = tiny.glob("quick-*")
    files = {path: path.read_bytes() for path in work.rglob("*") if path.suffix in (".jsonl", ".safetensors")}
    seconds = json.loads((work / "report.json").read_text())["seconds"]

    assert main(["demo", "--quick", "--out", str(tiny)]) == 0
    assert {path: path.read_bytes() for path in files} == files
    assert json.loads((work / "report.json").read_text())["seconds"] >= seconds
    assert main(["demo", "--quick", "--out", str(tiny), "--seed", "-1"]) == 2


def test_other_defenses_take_part(tiny, capsys, monkeypatch):
    small = dataclasses.replace(
        BESIDE["pixel-defend"], settings={"levels": 4, "width": 2, "layers": 0, "steps": 2}
    )
    monkeypatch.setitem(BESIDE, "pixel-defend", small)
    assert main(["demo", "--quick", "--out", str(tiny)]) == 0
    (work,) = tiny.glob("quick-*")
    trained = {path: path.stat().st_mtime_ns for path in work.glob("*/*.safetensors")}
    assert trained
    capsys.readouterr()
    assert main(["demo", "--quick", "--out", str(tiny), "--beside", "all"]) == 0
    printed, page = capsys.readouterr().out, (tiny / "report.html").read_text()
    # What was there is used again, and each other defense is attacked and told of.
    assert {path: path.stat().st_mtime_ns for path in trained} == trained
    for name, other in BESIDE.items():
        assert list((work / name / "evaluation").glob("*.jsonl")), name
        assert f"{other.title}: " in printed
        assert other.title in page


def test_defenses_to_put_beside_are_named(tmp_path, capsys):
    assert beside(("jpeg", "thermometer", "jpeg")) == ("thermometer", "jpeg")
    assert main(["demo", "--out", str(tmp_path), "--beside", "jpg"]) == 2
    assert "beside is 'jpg'; accepted are all, thermometer" in capsys.readouterr().err
    assert set(BESIDE) == Preprocessed.kinds.keys() - {"me-net"}


def test_settings_decide_the_folder():
    keys = {demo._key(plan, seed) for plan in (FULL, QUICK, TINY) for seed in (0, 1)}
    assert len(keys) == 6


def test_copies_are_trained_independently_of_what_they_attack():
    by = {network.folder: network.config(FULL, 0) for network in FULL.networks}
    for name in ("vanilla", "me-net"):
        first, second = by[name], by[f"{name}-copy"]
        assert first.seed != second.seed
        assert dataclasses.replace(second, seed=first.seed) == first
    for network in FULL.networks:
        assert all("-copy" in words for words in network.attacks if ",on=" in words)


def test_every_configuration_is_accepted():
    for plan in (FULL, dataclasses.replace(QUICK, beside=tuple(BESIDE))):
        for network in plan.networks:
            assert network.config(plan, 3).defense.get("name") == network.defense.get("name")

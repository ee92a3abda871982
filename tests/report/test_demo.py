"""The demonstration from end to end, at a size for tests."""

import dataclasses
import json

import pytest

from menet.cli import main
from menet.commands import demo
from menet.commands.demo_plan import FULL, QUICK

TINY = dataclasses.replace(
    QUICK,
    networks=tuple(
        dataclasses.replace(
            network, epochs=1, attacks=tuple(words.replace("steps=10", "steps=2") for words in network.attacks)
        )
        for network in QUICK.networks
    ),
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
    for plan in (FULL, QUICK):
        for network in plan.networks:
            config = network.config(plan, 3)
            assert bool(config.defense) == (network.p is not None)

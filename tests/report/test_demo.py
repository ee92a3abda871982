"""The demonstration from end to end, at a size for tests."""

import dataclasses
import json

import pytest

import menet.baselines  # noqa: F401 - registers them
from menet.cli import main
from menet.commands import demo
from menet.commands.demo import BASELINES, FULL, QUICK, chosen_baselines
from menet.preprocessed import Preprocessed

TINY = dataclasses.replace(
    QUICK,
    steps=2,
    suite=10,
    epochs=1,
    estimated_epochs=1,
    images=100,
    training_steps=1,
    examples=10,
    batch=5,
    draws=3,
    snapshots=1,
    certified=3,
    selection=5,
    estimation=20,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder that two tests share, with `--quick` made tiny; the second reuses the work of the first."""
    out = tmp_path_factory.mktemp("demo")
    small = dataclasses.replace(
        BASELINES["pixel-defend"], settings={"levels": 4, "width": 2, "layers": 0, "steps": 2}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "QUICK", TINY)
        patch.setitem(BASELINES, "pixel-defend", small)
        gan = {"latent": 4, "features": 1, "gan_steps": 2, "steps": 2, "starts": 2}
        patch.setitem(BASELINES, "defense-gan", dataclasses.replace(BASELINES["defense-gan"], settings=gan))
        yield out


@pytest.mark.slow
def test_demo_does_the_main_job_and_uses_it_again(tiny, capsys):
    assert main(["demo", "--quick", "--out", str(tiny)]) == 0
    # Lines are wrapped at the width of the terminal.
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("Does it help?", "upper bound", "ME-Net", "certified", "report.html"):
        assert words in printed, words
    page = (tiny / "report.html").read_text()
    for part in ("answer", "accuracy", "pictures", "features", "certificate", "made"):
        assert f'id="{part}"' in page, part
    assert (tiny / "reconstruction.png").read_bytes().startswith(b"\x89PNG")
    (work,) = tiny.glob("quick-*")
    files = {path: path.read_bytes() for path in work.rglob("*") if path.suffix in (".jsonl", ".safetensors")}
    seconds = json.loads((work / "report.json").read_text())["seconds"]

    assert main(["demo", "--quick", "--out", str(tiny)]) == 0
    assert {path: path.read_bytes() for path in files} == files
    assert json.loads((work / "report.json").read_text())["seconds"] >= seconds
    assert main(["demo", "--quick", "--out", str(tiny), "--seed", "-1"]) == 2


@pytest.mark.slow
def test_baselines_take_part(tiny, capsys):
    trained = {path: path.stat().st_mtime_ns for path in tiny.glob("quick-*/*/*.safetensors")}
    capsys.readouterr()
    chosen = ("thermometer", "total-variation", "pixel-defend", "jpeg")
    assert main(["demo", "--quick", "--out", str(tiny), "--baselines", *chosen]) == 0
    printed, page = capsys.readouterr().out, (tiny / "report.html").read_text()
    (work,) = tiny.glob("quick-*")
    # What was there is used again, and each baseline is attacked and reported.
    assert {path: path.stat().st_mtime_ns for path in trained} == trained
    for name in chosen:
        other = BASELINES[name]
        assert list((work / name / "evaluation").glob("*.jsonl")), name
        assert other.title in printed
        assert other.title in page


def test_unknown_baselines_are_refused(tmp_path, capsys):
    assert chosen_baselines(("jpeg", "thermometer", "jpeg")) == ("thermometer", "jpeg")
    assert main(["demo", "--out", str(tmp_path), "--baselines", "jpg"]) == 2
    assert "unknown baseline 'jpg'; choose from all, thermometer" in capsys.readouterr().err
    assert set(BASELINES) == Preprocessed.kinds.keys() - {"me-net"}


def test_settings_decide_the_folder():
    keys = {demo.plan_key(plan, seed) for plan in (FULL, QUICK, TINY) for seed in (0, 1)}
    assert len(keys) == 6


def test_surrogates_are_trained_independently_of_what_they_attack():
    by = {network.folder: network.config(FULL, 0) for network in FULL.networks}
    for name in ("vanilla",):
        first, second = by[name], by[f"{name}-surrogate"]
        assert first.seed != second.seed
        assert dataclasses.replace(second, seed=first.seed) == first
    for network in FULL.networks:
        assert all("-surrogate" in words for words in network.attacks if ",on=" in words)


def test_every_configuration_is_accepted():
    for plan in (FULL, dataclasses.replace(QUICK, baselines=tuple(BASELINES))):
        for network in plan.networks:
            assert network.config(plan, 3).defense.get("name") == network.defense.get("name")

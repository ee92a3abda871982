"""A run cut off at any moment ends as if it had not been; a disk that fails leaves the last good checkpoint."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from training_helpers import ENVIRONMENT, digest, plain, python, tiny

from menet.errors import CheckpointError, MenetError, TrainingError
from menet.files import replacing
from menet.models import weights
from menet.training import load_model, train
from menet.training.checkpoint import BEST, LAST
from menet.training.log import read_log
from menet.training.loop import Saving


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("killed_run.py")
    done = subprocess.run(
        python(str(script), str(folder)),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "ends.json").write_text(done.stdout.splitlines()[-1])
    return folder


def test_killed_and_resumed_ends_in_the_same_bits(killed):
    told = json.loads((killed / "ends.json").read_text())
    assert told["peace"] == 0
    ends = told["ends"]
    assert [status for _, status in ends] == [9, 9, 9, 9, 9, 9, 0]
    for name in (LAST, BEST):
        peace, peace_header = weights.load(killed / "peace" / name)
        fire, fire_header = weights.load(killed / "fire" / name)
        assert peace.keys() == fire.keys()
        assert all(torch.equal(peace[key], fire[key]) for key in peace), name
        assert peace_header == fire_header
        # safetensors writes the same content as the same bytes, so even the files agree.
        assert digest(killed / "peace" / name) == digest(killed / "fire" / name)


def test_log_of_a_killed_run_reads_as_if_it_had_not_been(killed):
    assert read_log(killed / "peace") == read_log(killed / "fire")
    steps = [row["step"] for row in read_log(killed / "fire") if row["kind"] == "step"]
    assert steps == list(range(1, 13))


def test_nothing_half_written_stays_behind_in_a_finished_run(killed):
    names = {path.name for path in (killed / "peace").iterdir()}
    assert names == {"config.json", "log.jsonl", LAST, BEST}


def test_checkpoint_holds_all_that_moves(killed):
    tensors, header = weights.load(killed / "fire" / LAST)
    kinds = {name.split(".")[0] for name in tensors}
    assert kinds == {"model", "optimizer", "generator"}
    assert {"model._extra_state", "generator.augmentation", "generator.attack"} <= tensors.keys()
    assert header["training"] == tiny().as_dict()
    assert header["progress"]["epoch"] == 3
    assert {"torch", "python"} <= header["versions"].keys()
    assert header["version"]


def test_a_planted_fault_is_seen(tmp_path, monkeypatch):
    """Were the attack's generator left out of the checkpoint, the comparison above would notice."""
    whole = train(tiny(epochs=1), tmp_path / "whole")

    class Stop(Exception):
        pass

    def interrupted(*arguments):
        original(*arguments)
        raise Stop

    from menet.training import loop

    original = loop.save_checkpoint
    monkeypatch.setattr(loop, "save_checkpoint", interrupted)
    with pytest.raises(Stop):
        train(tiny(epochs=1), tmp_path / "cut", saving=Saving(steps=2))
    monkeypatch.undo()
    tensors, header = weights.load(tmp_path / "cut" / LAST)
    tensors["generator.attack"] = torch.Generator().manual_seed(5).get_state()
    weights.save(tmp_path / "cut" / LAST, tensors, header)
    train(tiny(epochs=1), tmp_path / "cut")
    first, second = (weights.load(tmp_path / name / BEST)[0] for name in ("whole", "cut"))
    assert not all(torch.equal(first[key], second[key]) for key in first)
    assert whole.is_dir()


def test_full_disk_stops_with_one_sentence_and_keeps_the_last_checkpoint(tmp_path):
    """A real limit of the kernel on the size of files, in a process of its own."""
    folder = tmp_path / "run"
    train(plain(epochs=1), folder)
    before = digest(folder / LAST)
    # The same run, said to be unfinished, so that it goes on and has to write; now files may have 100 kB.
    tensors, header = weights.load(folder / LAST)
    header["training"]["epochs"] = 2
    weights.save(folder / LAST, tensors, header)
    before = digest(folder / LAST)
    program = (
        "import resource, sys; sys.path.insert(0, sys.argv[2]);"
        "from training_helpers import plain;"
        "from menet.training import train;"
        "from menet.errors import MenetError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: train(plain(epochs=2), sys.argv[1])\n"
        "except MenetError as error: print('REFUSED', type(error).__name__, error)"
    )
    done = subprocess.run(
        python("-c", program, str(folder), str(Path(__file__).parent)),
        env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "REFUSED CheckpointError" in done.stdout, done.stderr
    assert "cannot be written" in done.stdout
    assert "safetensors" in done.stdout
    assert digest(folder / LAST) == before
    assert not list(folder.glob(".*.part")), "a half-written file stayed behind"
    load_model(folder / LAST)


def test_no_space_left_is_said_as_such(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    train(plain(epochs=1), tmp_path / "run")
    before = digest(tmp_path / "run" / LAST)
    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(plain(epochs=1), tmp_path / "other")
    assert digest(tmp_path / "run" / LAST) == before
    assert not list((tmp_path / "other").glob("*.safetensors"))


def test_folder_that_cannot_be_written_is_refused_before_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    from menet.training import loop

    monkeypatch.setattr(loop, "_epoch", lambda *arguments: pytest.fail("work had started"))
    with pytest.raises(TrainingError, match=r"out is .*cannot be written"):
        train(plain(), tmp_path / "file" / "run")


def test_damaged_checkpoint_is_refused_and_left_alone(tmp_path):
    folder = train(plain(epochs=1), tmp_path / "run")
    content = (folder / LAST).read_bytes()
    (folder / LAST).write_bytes(content[: len(content) // 2])
    with pytest.raises(MenetError, match="damaged or cut short"):
        train(plain(epochs=1), folder)
    assert (folder / LAST).stat().st_size == len(content) // 2


def test_replacing_is_what_checkpoints_are_written_with(tmp_path, monkeypatch):
    seen = []

    def watched(path):
        seen.append(Path(path).name)
        return replacing(path)

    monkeypatch.setattr(weights, "replacing", watched)
    train(plain(epochs=1), tmp_path / "run")
    assert set(seen) == {LAST, BEST}

"""A run killed at any moment resumes to the same bits; a failing disk leaves the last good checkpoint."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from training_helpers import ENVIRONMENT, digest, full, plain, python, tiny

from menet import data
from menet.errors import CheckpointError, MenetError, TrainingError
from menet.files import locked, replacing
from menet.models import weights
from menet.training import load_model, train
from menet.training.checkpoint import BEST, LAST, load_verified, save_with_digest
from menet.training.loop import Saving
from menet.training.monitoring import Check, accuracy, read_log


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_log_of_a_killed_run_reads_as_if_it_had_not_been(killed):
    assert read_log(killed / "peace") == read_log(killed / "fire")
    steps = [row["step"] for row in read_log(killed / "fire") if row["kind"] == "step"]
    assert steps == list(range(1, 13))


@pytest.mark.slow
def test_nothing_half_written_stays_behind_in_a_finished_run(killed):
    names = {path.name for path in (killed / "peace").iterdir()}
    assert names == {"config.json", "log.jsonl", "curves.png", LAST, BEST, ".lock"}


@pytest.mark.slow
def test_checkpoint_holds_the_whole_state(killed):
    tensors, header = weights.load(killed / "fire" / LAST)
    kinds = {name.split(".")[0] for name in tensors}
    assert kinds - {"good"} == {"model", "averaged", "optimizer", "generator"}
    assert {"generator.model", "generator.augmentation", "generator.attack"} <= tensors.keys()
    assert not [name for name in tensors if name.endswith("_extra_state")]
    assert header["training"] == full().as_dict()
    assert header["progress"]["epoch"] == 3
    assert {"torch", "python"} <= header["versions"].keys()
    assert header["version"]


@pytest.mark.slow
def test_the_best_weights_are_the_averaged_ones(killed):
    tensors, _ = weights.load(killed / "fire" / LAST)
    best, _ = weights.load(killed / "fire" / BEST)
    last = {name.removeprefix("averaged."): value for name, value in tensors.items() if name.startswith("ave")}
    assert best.keys() == last.keys()
    raw = {name: tensors[f"model.{name}"] for name in last}
    assert not torch.equal(last["classifier.head.weight"], raw["classifier.head.weight"])
    assert not torch.equal(
        last["classifier.body.stem_norm.running_var"], raw["classifier.body.stem_norm.running_var"]
    )
    loaded = load_model(killed / "fire" / LAST)
    assert torch.equal(loaded.state_dict()["classifier.head.weight"], last["classifier.head.weight"])


@pytest.mark.parametrize("fault", ["generator.attack", "generator.model", "generator.augmentation", "averaged"])
def test_a_planted_fault_is_seen(tmp_path, monkeypatch, fault):
    """Were a generator or the average left out of the checkpoint, the comparison above would notice."""
    config = full(epochs=1, epsilon_warm_up=0.0)
    train(config, tmp_path / "whole")

    class Stop(Exception):
        pass

    def interrupted(*arguments):
        original(*arguments)
        raise Stop

    from menet.training import loop

    original = loop.save_checkpoint
    monkeypatch.setattr(loop, "save_checkpoint", interrupted)
    with pytest.raises(Stop):
        train(config, tmp_path / "cut", saving=Saving(steps=2))
    monkeypatch.undo()
    tensors, header = load_verified(tmp_path / "cut" / LAST)
    for name in [name for name in tensors if name.startswith("averaged.") and fault == "averaged"]:
        tensors[name] = tensors[name.replace("averaged.", "model.")].clone()
    if fault != "averaged":
        tensors[fault] = torch.Generator().manual_seed(5).get_state()
    save_with_digest(tmp_path / "cut" / LAST, tensors, header)
    train(config, tmp_path / "cut")
    first, second = (weights.load(tmp_path / name / BEST)[0] for name in ("whole", "cut"))
    assert not all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_an_interrupt_saves_at_the_end_of_its_step(tmp_path, monkeypatch, step):
    """In the middle of an epoch of four steps or in its last: nothing is lost, and the bits stay the same."""
    from menet.training import loop

    config = tiny(epochs=1)
    train(config, tmp_path / "whole")
    original, taken = loop.learning_rate_at, []

    def interrupting(config, at, steps):
        taken.append(at)
        if at == step:
            signal.raise_signal(signal.SIGINT)
        return original(config, at, steps)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate_at", interrupting)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "cut")
    assert taken == list(range(step + 1))
    assert signal.getsignal(signal.SIGINT) is handler
    assert load_verified(tmp_path / "cut" / LAST)[1]["progress"]["step"] == step + 1
    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate_at", interrupting)
        train(config, tmp_path / "cut")
    assert taken == [0, 1, 2, 3], "no step is repeated"
    first, second = (weights.load(tmp_path / name / BEST)[0] for name in ("whole", "cut"))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_second_interrupt_does_not_wait(tmp_path, monkeypatch):
    from menet.training import loop

    def impatient(config, at, steps):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second interrupt waited")

    monkeypatch.setattr(loop, "learning_rate_at", impatient)
    with pytest.raises(KeyboardInterrupt):
        train(plain(epochs=1), tmp_path)
    assert not (tmp_path / LAST).exists()


def test_the_last_good_weights_survive_a_kill(tmp_path, monkeypatch):
    """A run that is killed between its last good check and the collapse falls back to the same weights."""
    from menet.training import loop

    config = full(epochs=1, guard=2)
    good, collapsed = Check(0.4, 0.5), Check(0.0, 0.6)

    def attempt(folder, checks, *, cut):
        told, original = iter(checks), loop.save_checkpoint

        def interrupted(*arguments):
            original(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(loop, "check", lambda *arguments, **options: next(told))
            if cut:
                patch.setattr(loop, "save_checkpoint", interrupted)
            train(config, folder, saving=Saving(steps=3))

    attempt(tmp_path / "whole", [good, collapsed], cut=False)
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path / "cut", [good], cut=True)
    attempt(tmp_path / "cut", [collapsed], cut=False)
    assert [row.get("fell_back") for row in read_log(tmp_path / "cut") if row["kind"] == "guard"] == [False, True]
    for name in (LAST, BEST):
        assert digest(tmp_path / "whole" / name) == digest(tmp_path / "cut" / name)
    tensors, header = weights.load(tmp_path / "cut" / LAST)
    assert header["progress"]["fallbacks"] == 1
    assert torch.equal(tensors["averaged.classifier.head.weight"], tensors["good.classifier.head.weight"])


def test_full_disk_stops_with_one_sentence_and_keeps_the_last_checkpoint(tmp_path):
    """A real limit of the kernel on the size of files, in a process of its own."""
    folder = tmp_path / "run"
    train(plain(epochs=1), folder)
    # The same run, made unfinished, so that it resumes and has to write; now files may have 100 kB.
    tensors, header = load_verified(folder / LAST)
    header["training"]["epochs"] = 2
    save_with_digest(folder / LAST, tensors, header)
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
        env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert "REFUSED CheckpointError" in done.stdout, done.stderr
    assert "cannot write" in done.stdout
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
    with pytest.raises(TrainingError, match="cannot write the run folder"):
        train(plain(), tmp_path / "file" / "run")


def test_damaged_checkpoint_is_refused_and_left_alone(tmp_path):
    folder = train(plain(epochs=1), tmp_path / "run").folder
    content = (folder / LAST).read_bytes()
    (folder / LAST).write_bytes(content[: len(content) // 2])
    with pytest.raises(MenetError, match="damaged or truncated"):
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


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(MenetError, match="another process"):
        train(plain(epochs=1), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    train(plain(epochs=1), tmp_path / "run")


@pytest.mark.slow
def test_two_equal_commands_at_once(tmp_path):
    """Neither spoils the other, and whoever prints an accuracy prints what the run measured."""
    options = ["--model", "small", "--limit", "64", "--batch-size", "4", "--epochs", "6", "--validation", "50"]
    command = python("-m", "menet.cli", "train", "digits", *options, "--out", str(tmp_path / "run"))
    both = []
    for _ in range(2):
        both.append(
            subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        time.sleep(0.3)
    told = [process.communicate(timeout=240) for process in both]
    assert 0 in [process.returncode for process in both], told
    (test,) = [row for row in read_log(tmp_path / "run") if row["kind"] == "test"]
    for process, (out, error) in zip(both, told, strict=True):
        if process.returncode == 0:
            assert f"{test['accuracy']:.2%}" in out
        else:
            assert process.returncode == 2
            assert "another process" in error
    epochs = [row["epoch"] for row in read_log(tmp_path / "run") if row["kind"] == "epoch"]
    assert epochs == list(range(1, 7))


def test_test_accuracy_is_that_of_the_weights_named(tmp_path, monkeypatch):
    """The best epoch is not the last here; the accuracy told is the best one's."""
    from menet.training import loop

    scores = iter([{"validation": 0.5}, {"validation": 0.4}, {"validation": 0.3}])
    monkeypatch.setattr(loop, "_validate", lambda run: next(scores))
    result = train(plain(learning_rate=0.02, precision="float32"), tmp_path / "run")
    assert (result.epoch, result.weights) == (1, tmp_path / "run" / BEST)
    test_set = data.load("digits", "test")
    best, last = (accuracy(load_model(tmp_path / "run" / name), test_set) for name in (BEST, LAST))
    assert best != last
    assert result.test_accuracy == best
    (row,) = [row for row in read_log(tmp_path / "run") if row["kind"] == "test"]
    assert (row["epoch"], row["accuracy"]) == (1, best)
    # A finished run tells the same again, whatever else its log came to hold.
    with (tmp_path / "run" / "log.jsonl").open("ab") as log:
        log.write(b'{"kind": "note", "step": 0, "accuracy": 0.99}\n\xff\xfe\n')
    assert train(plain(learning_rate=0.02, precision="float32"), tmp_path / "run") == result


@pytest.mark.slow
@pytest.mark.parametrize("name", [BEST, LAST])
def test_loaded_models_do_not_replay_the_run_s_masks(killed, name):
    tensors, _ = weights.load(killed / "peace" / LAST)
    model = load_model(killed / "peace" / name)
    assert not torch.equal(model.generator.get_state(), tensors["generator.model"])

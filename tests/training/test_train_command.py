"""`menet train` from the command line: what options mean, and one line where they cannot."""

import json
import re

import pytest
from PIL import Image

from menet.cli import main
from menet.commands.train import Train
from menet.training import TrainingConfig, recipes

QUICK = ["--model", "small", "--limit", "32", "--batch-size", "16", "--epochs", "1", "--validation", "8"]


def test_options_override_the_recipe():
    config = Train(
        "mnist", recipe="paper", defense="me-net", p=(0.2, 0.4), objective="adversarial", epochs=3
    ).config()
    assert config.epochs == 3
    assert config.objective == "adversarial"
    assert config.defense["p"] == [0.2, 0.4]
    assert config.defense["estimator"]["name"] == "nuclear-norm"
    assert (config.steps, config.step_size, config.milestones) == (40, 0.01, (100, 150))
    assert Train("mnist").config() == recipes.mnist()


def test_a_run_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--defense", "me-net", "--estimator", "usvt", "--p", "0.8", "1.0", "--out", str(out)]
    assert main(["train", "digits", *QUICK, *options]) == 0
    told = capsys.readouterr()
    assert "test accuracy of the best epoch (1 of 1)" in told.out
    assert str(out / "best.safetensors") in told.out
    assert "epoch 1 of 1: loss" in told.err
    config = TrainingConfig.from_dict(json.loads((out / "config.json").read_text()))
    assert config.defense["p"] == [0.8, 1.0]
    assert main(["train", "digits", *QUICK, *options, "--seed", "4"]) == 2
    assert "belongs to another run: expected seed 0, got 4" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_folder_of_images_is_split_sensibly_and_the_split_is_told(tmp_path, capsys):
    for number in range(60):
        file = tmp_path / "photos" / f"class{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 99, 200 * (number % 2))).save(file)
    out = tmp_path / "run"
    assert main(["train", f"folder:{tmp_path / 'photos'}", "--epochs", "1", "--out", str(out)]) == 0
    told = capsys.readouterr().err
    config = TrainingConfig.from_dict(json.loads((out / "config.json").read_text()))
    assert (config.validation, config.batch_size) == (0.1, 8)
    counts = re.search(r"(\d+) training, (\d+) validation and (\d+) test images \(split by a hash", told)
    assert counts, told
    training, validation, test = map(int, counts.groups())
    assert training + validation + test == 60
    assert training >= 40
    assert f"{training // 8} steps of 8 in an epoch" in told


def test_photographs_of_any_size_need_two_options_and_the_run_remembers_them(tmp_path, capsys, monkeypatch):
    for number in range(80):
        file = tmp_path / "photos" / f"class{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8 + number % 3, 9), (number, 99, 200 * (number % 2))).save(file)
    for number in (3, 10):
        (tmp_path / "photos" / f"class{number % 2}" / f"{number}.png").write_bytes(b"damaged")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "folder:photos", "--out", "run"]) == 2
    assert "expected images of one size" in capsys.readouterr().err
    assert main(["train", "folder:photos", "--side", "8", "--out", "run"]) == 2
    assert "2 images cannot be read" in capsys.readouterr().err
    chosen = ["--side", "8", "--skip-unreadable"]
    assert main(["train", "folder:photos", *chosen, "--epochs", "1", "--out", "run"]) == 0
    assert "skipped 2 of 80 images" in capsys.readouterr().err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["dataset"] == f"folder:{tmp_path}/photos@8,skip-unreadable"
    quick = ["--attacks", "fgsm", "--stop", "4", "--draws", "1"]
    assert main(["evaluate", "run", *quick]) == 0
    assert re.search(r"\d+ test images of 78 \(split by a hash", capsys.readouterr().out)
    again = ["--data", "photos", *chosen, "--out", "again"]
    assert main(["evaluate", "run", *quick, *again]) == 0
    assert main(["compare", "run/evaluation", "again"]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--validation", "4000"], "expected validation < 4000, the number of training images of digits"),
        (["--validation", "4000"], "hold out fewer, or a fraction such as 0.1"),
        (["--defense", "me-net", "--estimator", "nuclear"], "did you mean 'nuclear-norm'"),
        (["--defense", "me-net", "--p", "0.6", "0.4"], "0.6"),
        (["--epochs", "0"], "expected an integer epochs >= 1, got 0"),
        (["--estimator", "usvt"], "me-net"),
        (["--defense", "me-net", "--settings", "[1]"], "settings"),
        (["--defense", "me-net", "--settings", "{"], "expected a JSON object for --settings"),
        (["--gradient", "exact"], "'none'"),
        (["--defense", "wishful"], "wishful"),
        (["--recipe", "paper"], "unknown recipe 'paper'"),
        (["--model", "lenet-6"], "unknown model 'lenet-6'"),
        (["--save-seconds", "0"], "expected seconds > 0, got 0"),
    ],
)
def test_what_cannot_work_ends_in_one_line(tmp_path, capsys, options, words):
    assert main(["train", "digits", *options, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("menet train: ")
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_help_teaches(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "nuclear-norm" in told
    if command == "train":
        assert "menet train digits --defense me-net" in told
        assert "torchrun" in told

"""`menet evaluate` and `menet certify` on a run folder, as a user calls them."""

import csv
import json
import re
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from menet import cli
from menet.data.dataset import DataWarning, warn_of_missing_classes
from menet.defense import MENet
from menet.estimators import USVT
from menet.evaluation import read_folder
from menet.models import build, weights
from menet.preprocessed import describe


def make_run(folder, dataset, seed: int = 0, constant: bool = False):
    network = build("small", dataset, generator=torch.Generator().manual_seed(seed))
    if constant:
        nn.init.zeros_(network.head.weight)
    model = MENet(network, USVT(), p=0.2)
    header = {"architecture": weights.describe(network), "defense": describe(model)}
    weights.save(folder / "best.safetensors", model.state_dict(), header)
    (folder / "config.json").write_text(json.dumps({"dataset": "digits"}))
    return folder


@pytest.fixture
def run(tmp_path, digits):
    (tmp_path / "run").mkdir()
    return make_run(tmp_path / "run", digits)


def evaluate(run, *words: str) -> int:
    few = ("--stop", "8", "--batch-size", "4", "--draws", "3")
    return cli.main(["evaluate", str(run), "--attacks", "fgsm", "pgd:steps=2,restarts=2", *few, *words])


def test_evaluate_writes_rows_and_prints_accuracies(run, capsys):
    assert evaluate(run, "--snapshots", "1") == 0
    told = capsys.readouterr().out
    for words in ("clean", "robust", "top-5", "worst case over draws", "hard over restarts", "fgsm"):
        assert words in told
    found = read_folder(run / "evaluation")
    assert found.keys() == {"fgsm", "pgd:steps=2,restarts=2"}
    assert found["fgsm"].evaluation["threat"]["epsilon"] == 0.3, "the paper's epsilon for digits"
    assert len(found["fgsm"].rows) == 8
    assert found["fgsm"].header["made"]["source"] == str(run)
    assert len(json.loads((run / "evaluation" / "accuracies.json").read_text())["fgsm"]) == 20
    assert not any(row["unusable_gradients"] for row in found["fgsm"].rows)
    assert "gradients were" not in told


@pytest.mark.filterwarnings("ignore::menet.attacks.GradientWarning")
def test_rows_and_the_command_say_where_gradients_were_unusable(tmp_path, digits, capsys):
    (tmp_path / "run").mkdir()
    evaluate(make_run(tmp_path / "run", digits, constant=True))
    told = capsys.readouterr().out
    assert "fgsm: gradients were NaN, infinite or zero for 8 of 8 examples" in told
    assert all(row["unusable_gradients"] is True for row in read_folder(tmp_path / "run/evaluation")["fgsm"].rows)


@pytest.mark.parametrize("attack", ["boundary:steps=3,tries=5", "hop-skip-jump:steps=1,tries=5"])
def test_attacks_that_need_a_deterministic_model_run_on_fixed_draws(run, attack):
    words = ["evaluate", str(run), "--attacks", f"{attack},draws=fixed:3", "--stop", "4"]
    assert cli.main(words) == 0
    (found,) = read_folder(run / "evaluation").values()
    assert found.evaluation["fixed_draws"] == {"draws": 3, "seed": 0}
    assert len(found.rows) == 4


def test_processes_share_the_work_and_the_last_one_prints(run, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, words in (("0", "other processes still work"), ("1", "robust")):
        monkeypatch.setenv("RANK", rank)
        assert evaluate(run) == 0
        assert words in capsys.readouterr().out


def test_two_models_are_compared(run, tmp_path, digits, capsys):
    (tmp_path / "other").mkdir()
    other = make_run(tmp_path / "other", digits, seed=1)
    assert evaluate(other) == 0
    assert evaluate(run, "--against", str(other / "evaluation")) == 0
    assert "McNemar" in capsys.readouterr().out


def test_models_under_different_budgets_are_not_compared(run, tmp_path, digits, capsys):
    (tmp_path / "other").mkdir()
    other = make_run(tmp_path / "other", digits, seed=1)
    assert evaluate(other, "--epsilon", "0.1") == 0
    assert evaluate(run, "--against", str(other / "evaluation")) == 2
    assert "expected one threat model epsilon, got 0.3 and 0.1" in capsys.readouterr().err


def test_compare_takes_two_runs_and_leaves_out_what_is_not_comparable(run, tmp_path, digits, capsys):
    (tmp_path / "other").mkdir()
    other = make_run(tmp_path / "other", digits, seed=1)
    few = ("--stop", "4", "--draws", "2")
    for folder, epsilon in ((run, "0.1"), (other, "0.2")):
        assert cli.main(["evaluate", str(folder), "--attacks", "fgsm", *few]) == 0
        assert (
            cli.main(["evaluate", str(folder), "--attacks", "fgsm:draws=fixed:2", "--epsilon", epsilon, *few])
            == 0
        )
    capsys.readouterr()
    table = tmp_path / "table.csv"
    assert cli.main(["compare", str(run), str(other / "evaluation"), "--out", str(table)]) == 0
    told = capsys.readouterr().out
    assert "McNemar" in told
    assert "left out: fgsm:draws=fixed:2: expected one threat model epsilon, got 0.1 and 0.2" in told
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert row["examples"] == "4"
    assert cli.main(["compare", str(run), str(tmp_path)]) == 2
    assert "run menet evaluate" in capsys.readouterr().err


def test_several_budgets_in_one_call(run):
    attacks = ("--attacks", "fgsm", "pgd:steps=2", "pgd:steps=2,epsilon=0.2", "--epsilon", "0.1", "8/255")
    assert cli.main(["evaluate", str(run), "--stop", "4", "--draws", "2", *attacks]) == 0
    found = {name: one.evaluation["threat"]["epsilon"] for name, one in read_folder(run / "evaluation").items()}
    assert found == {
        "fgsm:epsilon=0.1": 0.1,
        "fgsm:epsilon=8/255": 8 / 255,
        "pgd:steps=2,epsilon=0.1": 0.1,
        "pgd:steps=2,epsilon=8/255": 8 / 255,
        "pgd:steps=2,epsilon=0.2": 0.2,
    }


def test_a_larger_stop_extends_and_another_budget_names_the_remedy(run, capsys):
    def call(*words: str) -> int:
        return cli.main(["evaluate", str(run), "--attacks", "fgsm", "--draws", "2", *words])

    assert call("--stop", "3") == 0
    before = read_folder(run / "evaluation")["fgsm"]
    assert call("--stop", "8") == 0
    after = read_folder(run / "evaluation")["fgsm"]
    assert [row["index"] for row in after.rows] == list(range(8))
    assert after.rows[:3] == before.rows
    assert (after.evaluation["stop"], after.evaluation["batch_size"], after.missing) == (8, 3, ())
    assert call("--stop", "5") == 2
    assert "a larger stop extends it" in capsys.readouterr().err
    assert call("--stop", "8", "--epsilon", "0.1") == 2
    assert "write one in the attack (pgd:epsilon=…)" in capsys.readouterr().err


def test_certify_prints_radii(run, capsys):
    few = ("--stop", "6", "--selection", "5", "--estimation", "40", "--p", "0.1")
    assert cli.main(["certify", str(run), *few]) == 0
    told = capsys.readouterr().out
    assert " 0.1 " in told
    assert "perturbed" in told
    assert "abstentions" in told
    (found,) = read_folder(run / "certificate-0.1").values()
    assert len(found.rows) == 6
    assert (run / "certificate-0.1" / "certificate.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["certify", str(run), *few, "--partitions", "2"]) == 0
    told = capsys.readouterr().out
    assert "deterministic: no probability of error" in told
    assert "clean accuracy of the vote" in told
    (found,) = read_folder(run / "certificate-0.1-partitions").values()
    assert found.evaluation["cells"] == 10


@pytest.mark.parametrize(
    "words, message",
    [
        (["evaluate", "RUN", "--attacks", "magic"], "unknown attack 'magic'"),
        (["evaluate", "RUN", "--epsilon", "big"], "expected epsilon >= 0, such as 0.3 or 8/255, got 'big'"),
        (["evaluate", "RUN", "--device", "abacus"], "unknown device 'abacus'"),
        (["evaluate", "RUN", "--data", "nowhere"], "nowhere"),
        (["certify", "menet.models:build"], "cannot be called without arguments"),
        (["certify", "torch.nn:Identity", "--data", "digits"], "expected a ME-Net"),
    ],
)
def test_bad_use_is_one_line(run, capsys, words, message):
    words = [str(run) if word == "RUN" else word for word in words]
    assert cli.main(words) == 2
    told = capsys.readouterr().err.strip()
    assert message in told.splitlines()[-1]


OWN = """
from dataclasses import dataclass
import torch
import menet

@menet.estimators.register("row-mean-of-mine")
@dataclass(frozen=True)
class RowMean:
    def __call__(self, x, mask):
        mean = (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(mask, x, mean)

class Noise(menet.Preprocessed):
    name = "noise-of-mine"

    def __init__(self, classifier, sigma=0.1, gradient="exact", seed=0):
        super().__init__(classifier, gradient, seed)
        self.sigma = sigma

    def preprocess(self, images, generator):
        return images + self.sigma * torch.randn(images.shape, generator=generator)

    def settings(self):
        return {"sigma": self.sigma, "gradient": self.gradient}

@dataclass(frozen=True, kw_only=True)
class Lighter(menet.attacks.Attack):
    threat: menet.ThreatModel = menet.ThreatModel("linf", 0.1)

    def run(self, task):
        return task.result((task.images + self.threat.epsilon).clamp(0, 1))
"""


@pytest.mark.slow
def test_an_estimator_a_defense_and_an_attack_of_your_own(tmp_path, monkeypatch, capsys):
    """As a new user would have them: in a file of the current folder."""
    from menet.estimators import ESTIMATORS
    from menet.preprocessed import Preprocessed

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", str(tmp_path))])
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def (")

    def forget() -> None:
        sys.modules.pop("mine", None)
        ESTIMATORS.pop("row-mean-of-mine", None)
        Preprocessed.kinds.pop("noise-of-mine", None)

    quick = ["--model", "small", "--limit", "32", "--batch-size", "16", "--epochs", "1", "--validation", "0"]
    try:
        for options in (["--defense", "me-net", "--estimator", "mine:RowMean"], ["--defense", "mine:Noise"]):
            assert cli.main(["train", "digits", *quick, *options]) == 0
        own, noisy = (tmp_path / "runs" / f"digits-{name}-standard" for name in ("me-net", "noise-of-mine"))
        assert json.loads((own / "config.json").read_text())["defense"]["estimator"]["name"] == "row-mean-of-mine"
        forget()
        capsys.readouterr()
        for run in (own, noisy):
            assert cli.main(["evaluate", str(run)]) == 2, "loading a file imports nothing"
            told = capsys.readouterr().err
            assert "if it is your own, import its module first: menet --import MODULE" in told
            assert len(told.strip().splitlines()) == 1
        few = ["--attacks", "mine:Lighter", "--stop", "3", "--draws", "2"]
        assert cli.main(["--import", "mine", "evaluate", str(own), *few]) == 0
        assert cli.main(["--import", "mine", "evaluate", str(noisy), *few]) == 0
        assert read_folder(noisy / "evaluation")["mine:Lighter"].evaluation["attack"]["kind"] == "Lighter"
        capsys.readouterr()
        for words, message in (
            (["train", "digits", "--defense", "mine:RowMean"], "derive its class from menet.Preprocessed"),
            (
                ["train", "digits", "--defense", "me-net", "--estimator", "mine:Noise"],
                "estimators.register('name')",
            ),
            (["train", "digits", "--defense", "mine:absent"], "cannot be imported"),
            (["--import", "broken", "train", "digits"], "cannot be imported: it raised SyntaxError"),
            (["evaluate", str(own), "--attacks", "broken:Attack"], "SyntaxError"),
        ):
            assert cli.main(words) == 2
            told = capsys.readouterr().err.strip()
            assert message in told
            assert len(told.splitlines()) == 1
    finally:
        forget()


@pytest.mark.slow
def test_a_range_that_misses_classes_says_so(run, capsys):
    """Three digits are not ten classes: evaluate, certify and audit tell it in one line."""
    few = ["--data", "digits"]
    for words in (
        ["evaluate", str(run), *few, "--attacks", "fgsm", "--stop", "3", "--draws", "1"],
        ["certify", str(run), *few, "--stop", "3", "--selection", "2", "--estimation", "5"],
    ):
        assert cli.main(words) == 0
        told = capsys.readouterr().err
        assert re.search(r"examples 0 to 2 of digits hold \d of its 10 classes \(none of .*, …\)", told)


def test_a_range_with_all_classes_is_not_mentioned(digits):
    few = replace(digits, name="few", labels=torch.tensor([0, 1, 0, 2]), classes=("cat", "dog", "owl"))
    with warnings.catch_warnings(action="error"):
        warn_of_missing_classes(few, 0, 4)
    with pytest.warns(DataWarning, match=r"examples 0 to 2 of few hold 2 of its 3 classes \(none of owl\)"):
        warn_of_missing_classes(few, 0, 3)

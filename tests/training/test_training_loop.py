"""What a run does and leaves behind."""

import json
import re
import sys
import time
import types
from dataclasses import replace

import pytest
import torch
from torch import nn
from training_helpers import plain, tiny

from menet import MENet, data
from menet.data import load
from menet.distributed import Worker
from menet.errors import CheckpointError, MenetError, TrainingError
from menet.models import Network, weights
from menet.preprocessed import describe
from menet.training import TrainingConfig, load_model, loop, train
from menet.training.batches import Batches, estimated_ahead
from menet.training.checkpoint import BEST, LAST, Progress, load_verified, save_with_digest
from menet.training.config import averaged_copy, build_model, me_net, number_type, update_average
from menet.training.loop import Saving
from menet.training.monitoring import Check, accuracy, read_log
from menet.training.objectives import Adversarial


@pytest.fixture(autouse=True, scope="module")
def _few_test_images():
    """Runs of a dozen steps are not worth a thousand test images."""

    def few(name, split="train", root=None):
        dataset = load(name, split, root)
        if split == "train":
            return dataset
        return replace(dataset, images=dataset.images[:50], labels=dataset.labels[:50])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", few)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tiny(), tmp_path_factory.mktemp("run") / "run", saving=Saving(log_steps=2)).folder


def test_a_run_folder_says_what_it_is(run):
    assert TrainingConfig.from_dict(json.loads((run / "config.json").read_text())) == tiny()
    rows = read_log(run)
    assert [row["kind"] for row in rows].count("epoch") == 3
    assert [row["step"] for row in rows if row["kind"] == "step"] == [2, 4, 6, 8, 10, 12]
    epoch = next(row for row in rows if row["kind"] == "epoch")
    assert {"loss", "accuracy", "validation", "validation_attacked", "best", "epoch"} <= epoch.keys()
    assert rows[-1]["kind"] == "test"


def test_best_is_the_epoch_with_the_highest_score_under_attack(run):
    epochs = [row for row in read_log(run) if row["kind"] == "epoch"]
    best = max(epochs, key=lambda row: (row["validation_attacked"], -row["epoch"]))
    _, header = weights.load(run / BEST)
    assert header["scores"]["epoch"] == best["epoch"]
    assert header["scores"]["validation_attacked"] == best["validation_attacked"]


def test_load_model_needs_the_file_alone(run, tmp_path):
    model = load_model(run)
    assert isinstance(model, MENet)
    assert not model.training
    assert describe(model) == tiny().defense
    images, _ = load("digits", "test").batch(slice(0, 8))
    elsewhere = tmp_path / "elsewhere.safetensors"
    elsewhere.write_bytes((run / BEST).read_bytes())
    again = load_model(elsewhere)
    assert torch.equal(model.reseed(1)(images), again.reseed(1)(images))
    last = load_model(run / LAST)
    stored, _ = weights.load(run / LAST)
    assert torch.equal(last.classifier.head.weight, stored["model.classifier.head.weight"])
    (run.parent / "only").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="expected a run folder"):
        load_model(run.parent / "only")


def test_load_model_of_a_bare_network(tmp_path):
    model = load_model(train(plain(epochs=1), tmp_path / "run"))
    assert isinstance(model, Network)


@pytest.mark.parametrize(
    "change",
    [
        {"defense": {"name": "me-net", "estimator": {"name": "guess"}}},
        {"defense": "me-net"},
        {"defense": {}},
        {"architecture": {"name": "lenet"}},
    ],
)
def test_load_model_refuses_a_header_that_lies(run, tmp_path, change):
    tensors, header = load_verified(run / BEST)
    path = tmp_path / "lying.safetensors"
    save_with_digest(path, tensors, {**header, **change})
    with pytest.raises(CheckpointError):
        load_model(path)


def test_a_finished_run_is_not_done_again(run, monkeypatch):
    before = (run / "log.jsonl").read_bytes()
    monkeypatch.setattr(loop, "_epoch", lambda *arguments: pytest.fail("trained again"))
    monkeypatch.setattr(loop, "accuracy", lambda *arguments, **options: pytest.fail("scored again"))
    assert train(tiny(), run).folder == run
    assert (run / "log.jsonl").read_bytes() == before


def test_scoring_leaves_the_model_as_it_was():
    dataset = load("digits", "train")
    model = build_model(tiny(), dataset).train()
    state = model.generator.get_state()
    first = accuracy(model, dataset, torch.arange(600), seed=3)
    assert model.training
    assert torch.equal(model.generator.get_state(), state)
    assert accuracy(model, dataset, torch.arange(600), seed=3) == first


@pytest.mark.parametrize("objective", ["standard", "adversarial"])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, objective):
    config = plain(objective=objective, epochs=2)
    original = loop._finish_epoch

    def poisoned(run, scores):
        original(run, scores)
        next(run.state.model.parameters()).data[0] = torch.nan

    monkeypatch.setattr(loop, "_finish_epoch", poisoned)
    with pytest.raises(TrainingError, match=r"epoch 2, step 1.*last good checkpoint"):
        train(config, tmp_path / "run")
    tensors, header = weights.load(tmp_path / "run" / LAST)
    assert header["progress"]["epoch"] == 1
    assert all(value.isfinite().all() for value in tensors.values() if value.is_floating_point())
    monkeypatch.undo()
    train(config, tmp_path / "run")


def test_weights_that_are_no_numbers_are_never_saved(tmp_path, monkeypatch):
    original = torch.optim.SGD.step

    def poisoned(self, *arguments):
        original(self, *arguments)
        self.param_groups[0]["params"][0].data[0] = torch.inf

    monkeypatch.setattr(torch.optim.SGD, "step", poisoned)
    with pytest.raises(TrainingError, match="not finite at epoch 1, step 1"):
        train(plain(), tmp_path / "run", saving=Saving(steps=1))
    assert not (tmp_path / "run" / LAST).exists()


def test_divergence_is_reported(tmp_path):
    with pytest.raises(TrainingError, match="epoch"):
        train(plain(learning_rate=1e18, epochs=3, model="lenet"), tmp_path / "run")


def test_attack_leaves_batch_statistics_alone_and_the_defense_in_training(without_annotation_checks):
    modes, model = [], build_model(tiny(), load("digits", "train")).train()
    norm = model.classifier.body.stem_norm

    def attack(model, images, labels, generator):
        modes.append((model.training, norm.training))
        return types.SimpleNamespace(images=images)

    images, labels = load("digits", "train").batch(slice(0, 8))
    Adversarial(attack)(model, images, labels, torch.Generator())
    assert modes == [(True, False)]
    assert norm.training


@pytest.mark.parametrize(
    "changes",
    [
        {"defense": me_net("mask-only")},
        {"defense": me_net("nuclear-norm", gradient="exact"), "eot": 2},
        {"defense": me_net("soft-impute", (0.8, 1.0)), "objective": "standard"},
        {"defense": me_net("tubal"), "objective": "standard"},
        {"objective": "trades"},
        {"objective": "n-fgsm", "defense": me_net("nuclear-norm", gradient="exact"), "eot": 2},
        {"objective": "n-fgsm", "norm": "l2", "epsilon": 1.0},
        {"ema": 0.99, "label_smoothing": 0.1, "clip_gradient": 0.5, "schedule": "cosine"},
        {"model": "compact"},
        {"objective": "trades", "defense": {}, "eot": 1},
        {"norm": "l2", "epsilon": 1.0},
        {"optimizer": "adamw", "learning_rate": 1e-3},
        {"precision": "bfloat16"},
        {"channels_last": False, "schedule": "step", "milestones": (1,)},
        {"validation": 0},
    ],
    ids=str,
)
def test_every_choice_runs_and_loads(tmp_path, changes):
    folder = train(tiny(**{"epochs": 1, "limit": 32, "validation": 8, **changes}), tmp_path / "run").folder
    model = load_model(folder)
    assert model(torch.rand(2, 1, 28, 28)).isfinite().all()
    row = next(row for row in read_log(folder) if row["kind"] == "epoch")
    assert row["loss"] > 0


def test_auto_precision_is_bfloat16_only_where_the_processor_has_it(monkeypatch):
    cpu = torch.device("cpu")
    for avx, amx in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        expected = torch.bfloat16 if avx or amx else torch.float32
        assert number_type("auto", cpu) == expected
        assert number_type("float32", cpu) == torch.float32
        assert number_type("bfloat16", cpu) == torch.bfloat16


def test_tensorboard_is_fed_where_it_is_installed(tmp_path, monkeypatch):
    scalars = []

    class SummaryWriter:
        def __init__(self, folder):
            scalars.append(folder)

        def add_scalar(self, name, value, step):
            scalars.append((name, step))

        def close(self):
            scalars.append("closed")

    from menet.training import monitoring

    monkeypatch.setattr(monitoring.importlib.util, "find_spec", lambda name: name == "tensorboard" or None)
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter)
    )
    train(plain(epochs=1), tmp_path / "run", saving=Saving(log_steps=1))
    assert ("step/loss", 4) in scalars
    assert ("test/accuracy", 4) in scalars
    assert scalars[-1] == "closed"


def test_nothing_global_is_drawn_from(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(tiny(epochs=1), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_matter(tmp_path):
    runs = [train(tiny(epochs=1, seed=seed), tmp_path / str(number)) for number, seed in enumerate((1, 1, 2))]
    first, again, other = (weights.load(run.weights)[0] for run in runs)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["classifier.head.weight"], other["classifier.head.weight"])


def test_frozen_parts_of_a_defense_stay_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    from menet.training.config import build_optimizer

    groups = build_optimizer(plain(), model).param_groups
    assert len(groups[0]["params"]) == 2


def test_averaged_weights_follow_their_definition():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    config = plain(ema=0.5)
    averaged = averaged_copy(config, model)
    assert averaged_copy(plain(), model) is None
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(1, 4):
        model(torch.rand(4, 1, 5, 5) + step)
        for weight in model.parameters():
            weight.data.add_(step)
        update_average(averaged, model, 0.5, step)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * value
            else:
                expected[name] = value.clone()
    for name, value in averaged.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    assert not any(weight.requires_grad for weight in averaged.parameters())


def test_the_averaged_model_is_the_one_that_is_judged(tmp_path, monkeypatch):
    judged = []
    monkeypatch.setattr(loop, "accuracy", lambda model, *arguments, **options: judged.append(model) or 0.5)
    monkeypatch.setattr(loop, "save_weights", lambda path, config, model, scores: judged.append(model))
    monkeypatch.setattr(loop, "load_weights", lambda path, model: judged.append(model) or {"epoch": 1})
    train(plain(epochs=1, ema=0.9), tmp_path / "run")
    assert len(judged) == 4
    assert len(set(map(id, judged))) == 1
    assert not next(judged[0].parameters()).requires_grad


def test_clipping_bounds_the_step(tmp_path, monkeypatch):
    norms = []
    original = torch.optim.SGD.step

    def watched(self, *arguments):
        gradients = [weight.grad.flatten() for group in self.param_groups for weight in group["params"]]
        norms.append(float(torch.cat(gradients).norm()))
        return original(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    train(plain(epochs=1, clip_gradient=0.01), tmp_path / "run")
    assert max(norms) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.usefixtures("curves")
def test_curves_are_drawn_and_their_absence_is_told_once(tmp_path, monkeypatch, capsys):
    train(plain(epochs=1), tmp_path / "drawn")
    assert (tmp_path / "drawn" / "curves.png").read_bytes().startswith(b"\x89PNG")
    from menet.training import monitoring

    find = monitoring.importlib.util.find_spec
    without = lambda name: None if name == "matplotlib" else find(name)  # noqa: E731
    monkeypatch.setattr(monitoring.importlib.util, "find_spec", without)
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_PICTURES", 0.0)
    train(plain(), tmp_path / "run")
    assert capsys.readouterr().err.count("no curves.png without matplotlib") == 1
    assert not (tmp_path / "run" / "curves.png").exists()


def test_the_speed_and_the_time_left_are_told(tmp_path, capsys):
    train(plain(), tmp_path / "run")
    first, *_, last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch")]
    assert re.search(r"epoch 1 of 3: .*, images/s \d[\d.e+]*, run .* left$", first)
    assert last.endswith("run 0 s left")


@pytest.mark.parametrize("config", [tiny(objective="standard"), tiny()], ids=["estimates", "images"])
@pytest.mark.parametrize("cores", [1, 99], ids=["in between", "in a thread"])
def test_batches_made_ahead_are_those_made_in_turn(config, cores, monkeypatch):
    """A slow thread or a slow consumer, the same bits; and generators hold what was taken, not what was made."""
    monkeypatch.setattr("menet.training.batches.cores", lambda: cores)
    batches = Batches.of(config)
    model = build_model(config, batches.dataset).train()
    defense = estimated_ahead(config, model)
    assert (defense is not None) == (config.objective == "standard")
    names = ("augmentation", "model") if defense is not None else ("augmentation",)
    taken, states = [], []
    for pause in (0.0, 0.05):
        generators = {name: torch.Generator().manual_seed(3) for name in names}
        with batches.ahead(0, 1, generators, Worker(), defense) as ready:
            for images, labels in ready:
                time.sleep(pause)
                taken.append((images, labels))
                states.append([one.get_state() for one in generators.values()])
    in_turn, order = torch.Generator().manual_seed(3), batches.order(0)
    model.generator.manual_seed(3)
    for number in range(1, 4):
        images, labels = batches.batch(order, number, in_turn, Worker())
        if defense is not None:
            images = model.reconstruct(images)
        for turn in (0, 3):
            assert torch.equal(taken[turn + number - 1][0], images)
            assert torch.equal(taken[turn + number - 1][1], labels)
            assert torch.equal(states[turn + number - 1][0], in_turn.get_state())
            if defense is not None:
                assert torch.equal(states[turn + number - 1][1], model.generator.get_state())
    assert len(taken) == 6


def test_a_fault_while_a_batch_is_made_ahead_stops_the_run(tmp_path, monkeypatch):
    threads = torch.get_num_threads()

    def broken(*arguments):
        raise MenetError("a disk that fails")

    monkeypatch.setattr(Batches, "batch", broken)
    with pytest.raises(MenetError, match="a disk that fails"):
        train(plain(), tmp_path / "run")
    assert torch.get_num_threads() == threads


def test_estimates_are_not_made_ahead_of_what_training_changes():
    config = tiny(objective="standard")
    model = build_model(config, load("digits", "train"))
    assert estimated_ahead(config, model) is model
    assert estimated_ahead(tiny(), model) is None
    assert estimated_ahead(replace(config, defense={}), model.classifier) is None
    model.learned = nn.Linear(2, 2)
    assert estimated_ahead(config, model) is None
    model.learned.requires_grad_(False)
    assert estimated_ahead(config, model) is model


def test_collapse_is_a_fall_of_robust_accuracy_that_fgsm_does_not_share():
    good = Progress(robust=0.4)
    assert Check(pgd=0.1, fgsm=0.6).overfitted(good)
    assert not Check(pgd=0.1, fgsm=0.15).overfitted(good), "an unlucky moment lowers both"
    assert not Check(pgd=0.0, fgsm=0.2, chance=0.1).overfitted(good), "near chance nothing is said"
    assert not Check(pgd=0.3, fgsm=0.9).overfitted(good)
    assert Check(pgd=0.02, fgsm=0.9).overfitted(Progress()), "robust accuracy may never rise"
    assert not Check(pgd=0.0, fgsm=0.2).overfitted(Progress()), "nothing learned yet"
    assert Check(pgd=0.35, fgsm=0.4).good(good)
    assert not Check(pgd=0.25, fgsm=0.4).good(good)
    assert not Check(pgd=0.0, fgsm=0.0).good(Progress())
    assert Check(pgd=0.25, fgsm=0.9, chance=0.1).good(Progress()), "the best so far"
    assert Check(pgd=0.2, fgsm=0.3).good(Progress())
    assert not Check(pgd=0.2, fgsm=0.3, chance=0.1).good(Progress())


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_a_collapse_falls_back_to_the_last_good_weights_and_says_so(tmp_path, monkeypatch, capsys, ema):
    seen, checks = [], iter([Check(0.4, 0.5), Check(0.5, 0.5), Check(0.1, 0.7), Check(0.5, 0.5)])

    def told(model, *arguments, **options):
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return next(checks)

    original, states = loop._guard, []

    def watched(run):
        before = {name: value.clone() for name, value in run.state.judged.state_dict().items()}
        original(run)
        model, judged = run.state.model.state_dict(), run.state.judged.state_dict()
        states.append((before, dict(model), dict(judged), len(run.state.optimizer.state)))
        states[-1] = tuple(
            {name: value.clone() for name, value in one.items()} if isinstance(one, dict) else one
            for one in states[-1]
        )

    monkeypatch.setattr(loop, "check", told)
    monkeypatch.setattr(loop, "_guard", watched)
    config = plain(objective="n-fgsm", guard=3, ema=ema)
    folder = train(config, tmp_path / "run").folder
    error = capsys.readouterr().err
    assert error.count("catastrophic overfitting at epoch 3, step 2") == 1
    assert "robust accuracy 10.0% (highest 50.0%), under FGSM 70.0%; fell back to the last good weights" in error
    rows = [row for row in read_log(folder) if row["kind"] == "guard"]
    assert [row["step"] for row in rows] == [3, 6, 9, 12]
    assert [row["fell_back"] for row in rows] == [False, False, True, False]
    good = states[1][0]
    _, model, judged, moments = states[2]
    assert moments == 0, "momentum is part of what led to the collapse"
    for name, value in good.items():
        assert torch.equal(model[name], value)
        assert torch.equal(judged[name], value)
    _, header = weights.load(folder / LAST)
    assert header["progress"]["fallbacks"] == 1


def test_standard_training_and_runs_without_validation_are_not_guarded(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "check", lambda *arguments, **options: pytest.fail("checked"))
    train(plain(guard=1, epochs=1), tmp_path / "standard")
    train(plain(guard=1, epochs=1, objective="n-fgsm", validation=0), tmp_path / "unvalidated")
    train(plain(guard=0, epochs=1, objective="n-fgsm"), tmp_path / "off")

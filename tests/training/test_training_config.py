"""Bad configurations are refused before work starts, by the name of the field; good ones survive JSON."""

import json
from dataclasses import replace

import pytest
from training_helpers import plain, tiny

from menet.errors import CheckpointError, ConfigurationError, DataError, MenetError
from menet.training import TrainingConfig, loop, recipes, train
from menet.training.batches import Batches
from menet.training.checkpoint import LAST, load_verified, save_with_digest
from menet.training.config import attack_strength_at, learning_rate_at, me_net

pytestmark = pytest.mark.usefixtures("without_annotation_checks")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("epochs", 1.5),
        ("batch_size", 0),
        ("steps", 0),
        ("eot", 0),
        ("limit", 0),
        ("validation", -1),
        ("seed", -1),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("learning_rate", "fast"),
        ("step_size", -0.1),
        ("epsilon", float("inf")),
        ("momentum", 1.0),
        ("ema", 1.0),
        ("ema", -0.1),
        ("label_smoothing", 1.0),
        ("clip_gradient", 0.0),
        ("epsilon_warm_up", 1.5),
        ("weight_decay", -1e-4),
        ("objective", "magic"),
        ("optimizer", "lion"),
        ("schedule", "warp"),
        ("precision", "float8"),
        ("norm", "l7"),
        ("model", "lenet-6"),
        ("milestones", (150, 100)),
        ("defense", {"name": "wishful"}),
        ("defense", me_net("guess")),
        ("defense", me_net(p=(0.6, 0.4))),
        ("defense", me_net(masks=0)),
        ("defense", me_net(color="red")),
        ("prepared", "somewhere"),
    ],
)
def test_the_field_is_named(field, value):
    changed = {"schedule": "step", field: value} if field == "milestones" else {field: value}
    with pytest.raises(ConfigurationError, match=f"(expected|unknown|invalid) .*{field}"):
        TrainingConfig(**changed)


def test_the_reason_inside_a_defense_is_told():
    with pytest.raises(ConfigurationError, match="did you mean 'nuclear-norm'"):
        TrainingConfig(defense=me_net("nuclear"))
    with pytest.raises(ConfigurationError, match=r"0\.9"):
        TrainingConfig(defense=me_net(p=(0.9, 0.1)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (plain(batch_size=65), "expected batch_size <= 64.*got 65"),
        (plain(limit=5000), "expected limit <= .*got 5000"),
        (plain(limit=None, validation=4000, batch_size=1), "expected batch_size <= 0.*got 1"),
        (plain(dataset="digitz"), "digitz"),
        (tiny(objective="standard", prepared="nowhere"), "no prepared set in nowhere"),
    ],
)
def test_what_does_not_fit_the_data_is_refused_before_work(tmp_path, monkeypatch, config, words):
    monkeypatch.setattr(loop, "_epoch", lambda *arguments: pytest.fail("work had started"))
    with pytest.raises(MenetError, match=words):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_absent_dataset_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(DataError, match="menet data fetch cifar10"):
        train(plain(dataset="cifar10"), tmp_path / "run", root=tmp_path / "empty")
    assert not (tmp_path / "run").exists()


def test_batch_must_divide_among_processes():
    with pytest.raises(ConfigurationError, match="multiple of the 3 processes, got 16"):
        Batches.of(plain(), world=3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "lenet"}, "expected model 'small', got 'lenet'"),
        ({"defense": me_net()}, "expected defense {}, got"),
        ({"epochs": 5}, "expected epochs 1, got 5"),
        ({"seed": 3}, "expected seed 0, got 3"),
    ],
)
def test_checkpoint_of_another_run_is_refused(tmp_path_factory, changes, words, finished):
    with pytest.raises(CheckpointError, match=words):
        train(plain(epochs=1, **{name: value for name, value in changes.items() if name != "epochs"})
              if "epochs" not in changes else plain(**changes), finished)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(plain(epochs=1), tmp_path_factory.mktemp("finished") / "run").folder


def test_checkpoint_whose_tensors_are_another_networks_is_refused(tmp_path, finished):
    train(plain(epochs=1, model="lenet"), tmp_path / "other")
    tensors, _ = load_verified(tmp_path / "other" / LAST)
    _, header = load_verified(finished / LAST)
    save_with_digest(tmp_path / "mixed" / LAST, tensors, header)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        train(plain(epochs=1), tmp_path / "mixed")


@pytest.mark.parametrize("make", recipes.RECIPES.values(), ids=lambda make: make.__name__)
def test_recipes_survive_json(make):
    for config in (make(), recipes.with_defense(make()), recipes.adversarial(recipes.with_defense(make()))):
        assert TrainingConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_unknown_settings_in_a_file_are_refused():
    with pytest.raises(ConfigurationError, match="unknown setting 'color'"):
        TrainingConfig.from_dict({**plain().as_dict(), "color": "red"})
    with pytest.raises(ConfigurationError):
        TrainingConfig.from_dict({"milestones": 3})


def test_appendix_b():
    """Table of Appendix B: model, augmentation, epochs, rate, decay; and the attacks while training."""
    table = {
        "cifar10": ("resnet18", True, 200, 0.1, (100, 150), 8 / 255, 7, 2 / 255),
        "mnist": ("lenet", False, 200, 0.01, (100, 150), 0.3, 40, 0.01),
        "svhn": ("resnet18", True, 200, 0.01, (100, 150), 8 / 255, 7, 2 / 255),
        "tiny-imagenet": ("densenet121", True, 90, 0.1, (30, 60), 8 / 255, 7, 2 / 255),
    }
    for dataset, row in table.items():
        config = recipes.by_name(dataset, "paper")
        assert config.recipe == "paper"
        assert config.optimizer == "sgd"
        assert config.momentum == 0.9
        assert config.weight_decay == 1e-4
        assert (
            config.model, config.augmentation, config.epochs, config.learning_rate, config.milestones,
            config.epsilon, config.steps, config.step_size,
        ) == row  # fmt: skip
        assert recipes.by_name(dataset, "short").schedule == "one-cycle"
    with pytest.raises(ConfigurationError, match="unknown recipe 'paper' for dataset 'digits'"):
        recipes.by_name("digits", "paper")


def test_learning_rate_schedules():
    step = recipes.paper_cifar10()
    assert learning_rate_at(step, 0, 10) == pytest.approx(0.1)
    assert learning_rate_at(step, 999, 10) == pytest.approx(0.1)
    assert learning_rate_at(step, 1000, 10) == pytest.approx(0.01)
    assert learning_rate_at(step, 1500, 10) == pytest.approx(0.001)
    cycle = replace(recipes.digits(), learning_rate=1.0, epochs=10)
    rates = [learning_rate_at(cycle, number, 10) for number in range(100)]
    assert rates[0] == pytest.approx(1 / 25)
    assert max(rates) == pytest.approx(1.0, abs=1e-3)
    assert 25 <= rates.index(max(rates)) <= 35
    assert rates[-1] == pytest.approx(1e-4)
    assert rates[:29] == sorted(rates[:29])
    assert rates[31:] == sorted(rates[31:], reverse=True)
    falling = replace(cycle, schedule="cosine")
    rates = [learning_rate_at(falling, number, 10) for number in range(100)]
    assert rates[0] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)
    assert rates == sorted(rates, reverse=True)


def test_the_budget_rises_to_all_of_it():
    config = replace(recipes.digits(), epochs=10, epsilon_warm_up=0.2)
    strengths = [attack_strength_at(config, number, 10) for number in range(100)]
    assert 0 < strengths[0] < 0.1
    assert strengths[:20] == sorted(set(strengths[:20]))
    assert strengths[20:] == [1.0] * 80
    assert attack_strength_at(replace(config, epsilon_warm_up=0.0), 0, 10) == 1.0


def test_recipes_for_two_cores_take_the_same_time():
    for dataset in ("mnist", "cifar10", "svhn", "tiny-imagenet"):
        rows = [
            recipes.cores(dataset, objective, defense)
            for objective in ("standard", "n-fgsm", "adversarial")
            for defense in ({}, me_net())
            if (dataset, objective) != ("mnist", "standard")
        ]
        costs = [config.epochs * recipes.passes(config) for config in rows]
        assert max(costs) < 1.3 * min(costs)
        assert all(config.recipe == "cores" and config.ema > 0 for config in rows)
    # A longer standard training of a LeNet would gain nothing.
    assert recipes.cores("mnist").epochs == recipes.cores("mnist", defense=me_net()).epochs == 6
    assert recipes.at_equal_time(recipes.cifar10()) == recipes.cifar10()

"""The standard suite: strong in expectation, honest in what it selects on, and noticed when it is weakened."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attack_models import LINF, RandomMasks, accuracy
from torch import Tensor, nn

import menet.attacks.standard as suite_module
import menet.evaluation.runner as runner_module
from menet.attacks import PGD, CrossEntropy, LowFrequency, Margin, RandomSearch, Standard, ThreatModel, build
from menet.attacks.losses import ExpectedLoss
from menet.attacks.standard import CLEAN, PASSES, gradient_views
from menet.errors import ConfigurationError
from menet.evaluation import EvaluationSettings, evaluate
from menet.evaluation.attack_spec import AttackRun
from menet.evaluation.runner import score
from menet.seeding import batch_seed


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class MaskedLinear(nn.Module):
    """Two classes by the sign of w·(mask∘x)/p + b: the best perturbation in expectation is -ε·sign(w).

    With `noise`, w has an error of that size in each draw: the gradient of one draw misleads.
    """

    def __init__(self, p: float = 0.2, noise: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.randn(1, 8, 8, generator=generator(5))
        self.p, self.noise = p, noise
        self.reseed(0)

    def reseed(self, seed: int) -> None:
        self.generator = generator(seed)

    def forward(self, images: Tensor) -> Tensor:
        mask = torch.rand(images.shape, generator=self.generator) < self.p
        weight = self.weight + self.noise * torch.randn(images.shape, generator=self.generator)
        score = ((images - 0.4) * mask * weight).sum((1, 2, 3)) / self.p + 6
        return torch.stack([score, -score], 1)


class Coin(nn.Module):
    """Predicts by chance alone, whatever the image: no attack can lower its accuracy of one half."""

    sensitive = False
    """Whether the same draw may fall otherwise for another image."""

    def __init__(self) -> None:
        super().__init__()
        self.reseed(0)

    def reseed(self, seed: int) -> None:
        self.generator = generator(seed)

    def forward(self, images: Tensor) -> Tensor:
        chance = torch.randn(len(images), generator=self.generator)
        if self.sensitive:
            chance = chance * torch.sin(1e4 * images.sum((1, 2, 3)))
        still = 0.0 * images.sum((1, 2, 3))
        return torch.stack([chance + still, -chance - still], 1)


class Examples:
    """A dataset of given images."""

    name, classes, split = "given", ("a", "b"), "test"

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, index: slice) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def gray(count: int) -> tuple[Tensor, Tensor]:
    return torch.full((count, 1, 8, 8), 0.5), torch.zeros(count, dtype=torch.int64)


def reached(attack, model: MaskedLinear) -> float:
    """How far the mean score fell, as a fraction of what is possible."""
    images, labels = gray(8)
    found = attack(model.eval(), images, labels, generator=generator()).images
    fall = -((found - 0.5) * model.weight).sum((1, 2, 3)).mean()
    return float(fall / (attack.threat.epsilon * model.weight.abs().sum()))


SMALL = ThreatModel("linf", 0.05)


def test_the_suite_finds_the_perturbation_that_is_best_in_expectation():
    assert reached(Standard(threat=SMALL, budget=400), MaskedLinear(p=0.5, noise=2)) > 0.93


def test_a_dropped_expectation_is_noticed(monkeypatch):
    """Gradients that all come from one draw: the bound of the test above must tell the difference."""
    sound = ExpectedLoss.gradient_of

    def of_one_draw(self, *given):
        self.model.model.reseed(1)
        return sound(self, *given)

    monkeypatch.setattr(ExpectedLoss, "gradient_of", of_one_draw)
    assert reached(Standard(threat=SMALL, budget=400), MaskedLinear(p=0.5, noise=2)) < 0.8


def test_a_weakened_member_is_noticed(monkeypatch):
    class Lazy(PGD):
        def step_rule(self, task):
            rule = super().step_rule(task)
            rule.first_size /= 1000
            return rule

    monkeypatch.setattr(suite_module, "PGD", Lazy)
    suite = Standard(threat=SMALL, budget=400, gradients_only=True)
    assert reached(suite, MaskedLinear(p=0.5, noise=2)) < 0.5


def accuracy_of_the_coin(folder: Path) -> float:
    """Expected robust accuracy as `evaluate` reports it for a model that no attack can change."""
    images, labels = gray(200)
    run = AttackRun("standard", Standard(threat=SMALL, budget=20), Coin())
    settings = EvaluationSettings(draws=20)
    found = evaluate(run.model, Examples(images, labels), [run], folder, settings)["standard"]
    assert {row["member"] for row in found.rows} <= {CLEAN, "gradient, margin", "random search"}
    assert all(row["gradients"] >= 0 for row in found.rows)
    return sum(rank == 0 for row in found.rows for rank in row["adversarial"]["ranks"]) / (200 * 20)


CHANCE = 4 * 0.5 / math.sqrt(200 * 20)


def test_selection_is_not_scoring(tmp_path):
    """Chosen on the draws it is scored on, the worst of several candidates would look worse than chance."""
    assert abs(accuracy_of_the_coin(tmp_path) - 0.5) < CHANCE


def test_a_selection_on_the_scoring_draws_is_noticed(tmp_path, monkeypatch):
    """A suite that knows the scoring seed, and a model whose draw follows the image too, as with any defense."""
    seed = 7

    def on_scoring_draws(self, images, examples):
        self.task.model.model.reseed(seed)
        scores = score(self.task.model.model, images, self.task.labels[examples], self.draws)
        return (scores.ranks == 0).sum(0), scores.mean_probability

    def known(given: int, purpose: str, label: str, first: int) -> int:
        return seed if purpose == "scoring" else batch_seed(given, purpose, label, first)

    monkeypatch.setattr(Coin, "sensitive", True)
    sound = accuracy_of_the_coin(tmp_path / "sound")
    monkeypatch.setattr(suite_module._Selection, "_score", on_scoring_draws)
    monkeypatch.setattr(runner_module, "batch_seed", known)
    assert abs(sound - 0.5) < CHANCE < 0.5 - accuracy_of_the_coin(tmp_path / "unsound")


def test_members_and_selection_use_different_draws(masked, some):
    seen: dict[bool, set[bytes]] = {True: set(), False: set()}

    class Watched(RandomMasks):
        def forward(self, images: Tensor) -> Tensor:
            seen[torch.is_grad_enabled()].add(self.generator.get_state().numpy().tobytes())
            return super().forward(images)

    model = Watched(masked.classifier)
    Standard(threat=LINF, budget=40)(model, some[0][:8], some[1][:8], generator=generator())
    assert min(map(len, seen.values())) > 0
    assert not seen[True] & seen[False]


def test_it_is_at_least_as_strong_as_pgd_and_says_what_it_spent(masked, some):
    images, labels = some[0][:60], some[1][:60]
    threat = ThreatModel("linf", 0.1)
    result = Standard(threat=threat, budget=400)(masked, images, labels, generator=generator())
    pgd = PGD(threat=threat, steps=40, eot=10)(masked, images, labels, generator=generator())
    assert accuracy(masked, result.images, labels, 50) <= accuracy(masked, pgd.images, labels, 50) + 0.02
    assert result.gradients.max() <= 400 + 50, "the surrogate's own gradients come on top"
    assert (result.gradients < 400).any(), "examples that are broken leave early"
    assert len(result.members) == 60
    assert "gradients mean" in repr(result)


class Views(MaskedLinear):
    """Gradients are right one way and zero, or noise, the other."""

    def __init__(self, right: str, noisy: bool) -> None:
        super().__init__()
        self.view, self.right, self.noisy = right, right, noisy

    def with_gradient(self, gradient: str) -> "Views":
        other = Views(self.right, self.noisy)
        other.view = gradient
        return other

    def forward(self, images: Tensor) -> Tensor:
        if self.view == self.right:
            return super().forward(images)
        noise = torch.randn(images.shape, generator=self.generator) if self.noisy else torch.zeros_like(images)
        return super().forward(images.detach() + (images - images.detach()) * noise)


@pytest.mark.parametrize("right", ["bpda", "exact"])
@pytest.mark.parametrize("noisy", [False, True])
def test_passes_go_through_the_gradients_that_lead_somewhere(right: str, noisy: bool, monkeypatch):
    attack = Standard(threat=ThreatModel("linf", 0.05), budget=200, gradients_only=True)
    model = Views(right, noisy).eval()
    assert reached(attack, model) > 0.9
    # At so few passes only the first way gets any.
    monkeypatch.setattr(Standard, "_ordered_views", lambda self, task: (gradient_views(task.model.model), 0))
    blind = reached(attack, model)
    assert blind > 0.9 if right == "exact" else blind < 0.5


def test_without_gradients_the_suite_goes_on(masked, some):
    images, labels = some[0][:30], some[1][:30]

    class Opaque:
        """Nothing of what is behind can be seen."""

        def __call__(self, images: Tensor) -> Tensor:
            return masked(images).detach()

    result = Standard(threat=LINF, budget=200)(Opaque(), images, labels, generator=generator())
    assert set(result.members) <= {CLEAN, "random search"}
    assert accuracy(masked, result.images, labels, 20) < accuracy(masked, images, labels, 20) - 0.1


@pytest.mark.slow
def test_a_deterministic_model_gets_autoattack(plain, some):
    images, labels = some[0][:4], some[1][:4]
    result = Standard(threat=ThreatModel("linf", 0.15))(plain, images, labels, generator=generator())
    assert set(result.members) <= {CLEAN, "AutoAttack"}
    assert accuracy(plain, result.images, labels) < accuracy(plain, images, labels)


def test_settings_are_checked_and_recorded():
    assert build("standard", epsilon=0.1, budget="quick").passes == PASSES["quick"]
    assert Standard(budget=123).version == 5
    for budget in ("slow", 0, True):
        with pytest.raises(ConfigurationError, match="expected budget"):
            Standard(budget=budget)


# l0 and low frequencies


def test_pixels_are_counted_once_whatever_their_channels():
    threat = ThreatModel("l0", 3)
    origin = torch.rand(4, 3, 6, 6, generator=generator())
    moved = threat.project(torch.rand(4, 3, 6, 6, generator=generator(1)), origin)
    assert threat.distance(moved, origin).tolist() == [3, 3, 3, 3]
    threat.check(moved, origin)
    brightest = (torch.rand(4, 3, 6, 6, generator=generator(1)) - origin).abs().sum(1).flatten(1).topk(3).indices
    kept = (moved != origin).any(1).flatten(1)
    assert kept.gather(1, brightest).all()


@pytest.mark.parametrize("name", ["pgd", "random-search"])
def test_l0_attacks_find_the_pixels_that_matter(name):
    """Of a linear score the best three pixels are known: those whose change to 0 or 1 lowers it most."""
    model, (images, labels) = MaskedLinear(p=0.7), gray(8)
    settings = {"steps": 60, "eot": 20} if name == "pgd" else {"proposals": 400, "draws": 20}
    attack = build(name, norm="l0", epsilon=3, **settings)
    found = attack(model, images, labels, generator=generator()).images
    fall = -((found - 0.5) * model.weight).sum((1, 2, 3))
    possible = 0.5 * model.weight.abs().flatten().topk(3).values.sum()
    assert float(fall.mean() / possible) > 0.85


def test_random_search_keeps_no_lucky_proposal():
    """Every image scores the same in expectation: what is kept must not depend on how lucky a draw was."""
    images, labels = gray(16)
    search = RandomSearch(threat=SMALL, proposals=20)
    result = search(Coin(), images, labels, generator=generator(), loss_history=True)
    assert result.loss_history.shape == (21, 16)
    assert search.resolved(True).draws == 10
    assert search.resolved(False).draws == 1


@pytest.mark.parametrize(
    ("settings", "deterministic", "random"),
    [({}, (40, 1), (200, 2)), ({"steps": 30}, (30, 1), (30, 10)), ({"eot": 3}, (40, 3), (40, 3))],
)
def test_steps_and_draws_of_pgd_follow_the_model(settings, deterministic, random):
    """What is recorded is what runs: on a random model, many steps of few draws rather than few of many."""
    attack = PGD(threat=SMALL, **settings)
    resolved = {kind: attack.resolved(kind) for kind in (False, True)}
    assert [(one.steps, one.eot) for one in resolved.values()] == [deterministic, random]
    images, labels = gray(4)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    for model, (steps, draws) in ((linear, deterministic), (MaskedLinear(), random)):
        result = attack(model, images, labels, generator=generator(), loss_history=True)
        assert len(result.loss_history) == steps + 1
        assert (result.gradients == steps * draws).all()


@pytest.mark.parametrize(
    ("settings", "deterministic", "random"),
    [
        ({}, CrossEntropy(), Margin()),
        ({"step_size": 0.01}, CrossEntropy(), CrossEntropy()),
        ({"loss": CrossEntropy()}, CrossEntropy(), CrossEntropy()),
        ({"threat": ThreatModel("l0", 2)}, CrossEntropy(), CrossEntropy()),
    ],
)
def test_the_loss_of_pgd_follows_the_model_unless_constant_steps_ask_for_the_published_attack(
    settings, deterministic, random
):
    attack = PGD(**{"threat": SMALL, "steps": 3, "eot": 1, **settings})
    assert (attack.resolved(False).loss, attack.resolved(True).loss) == (deterministic, random)
    images, labels = gray(4)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    for model, expected in ((linear, deterministic), (MaskedLinear(), random)):
        losses = {}
        for name, one in (
            ("left", attack),
            *((loss, replace(attack, loss=loss)) for loss in (CrossEntropy(), Margin())),
        ):
            if isinstance(model, MaskedLinear):
                model.reseed(0)
            losses[name] = one(model, images, labels, generator=generator(), loss_history=True).loss_history
        assert torch.equal(losses["left"], losses[expected])
        assert not torch.equal(losses[CrossEntropy()], losses[Margin()])


def test_norms_that_an_attack_does_not_know_are_refused():
    for name in ("square", "autoattack", "hop-skip-jump", "low-frequency"):
        with pytest.raises(ConfigurationError, match=r"expected norm linf or l2 for .*, got l0"):
            build(name, norm="l0", epsilon=3)


@pytest.mark.parametrize("norm, epsilon", [("linf", 0.2), ("l2", 2.0)])
def test_low_frequency_perturbations_are_smooth_and_inside(plain, some, norm, epsilon):
    images, labels = some[0][:40].clamp(0.3, 0.7), some[1][:40]
    attack = LowFrequency(threat=ThreatModel(norm, epsilon), steps=20, loss=Margin())
    found = attack(plain, images, labels, generator=generator()).images
    perturbation = found - images
    steps = (perturbation[..., 1:] - perturbation[..., :-1]).abs().max()
    assert steps < 0.6 * perturbation.abs().max()
    assert accuracy(plain, found, labels) < accuracy(plain, images, labels)

"""Faults that would pass for robustness: unusable gradients, overflowing budgets, models that work in place."""

import math
import re
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from menet.attacks import (
    APGD,
    CW,
    CWL2,
    FGSM,
    PGD,
    SPSA,
    ApproximateInput,
    AutoAttack,
    AutoAttackRand,
    Boundary,
    ClassifierOnly,
    CrossEntropy,
    GradientWarning,
    Margin,
    MultiTargeted,
    ProjectedBPDA,
    Square,
    StepRule,
    ThreatModel,
    Transfer,
    WorstCase,
    is_deterministic,
)

THREAT = ThreatModel("linf", 0.1)
WITH_GRADIENTS = {
    "fgsm": FGSM(threat=THREAT),
    "pgd": PGD(threat=THREAT, steps=3),
    "pgd, eot in small passes": PGD(threat=THREAT, steps=2, eot=3, max_batch=4),
    "pgd, restarts": PGD(threat=THREAT, steps=2, restarts=2),
    "cw": CW(threat=THREAT, steps=2),
    "apgd": APGD(threat=THREAT, steps=3),
    "projected bpda": ProjectedBPDA(threat=THREAT, steps=2),
    "approximate input": ApproximateInput(threat=THREAT, steps=2, reconstruct=lambda images: images),
    "multi-targeted": MultiTargeted(PGD(threat=THREAT, steps=2), classes=2),
    "worst case": WorstCase((FGSM(threat=THREAT), SPSA(threat=THREAT, steps=1, samples=4))),
    "autoattack-rand": AutoAttackRand(threat=THREAT, steps=2, eot=2),
    "autoattack": AutoAttack(threat=THREAT, attacks=("apgd-ce", "apgd-t"), steps=2),
    "cw-l2": CWL2(steps=2, binary_search_steps=1),
}
every_gradient_attack = pytest.mark.parametrize("attack", WITH_GRADIENTS.values(), ids=WITH_GRADIENTS.keys())


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a mask."""

    @staticmethod
    def forward(ctx, images, factor):
        ctx.factor = factor
        return images.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def with_gradient(model, factor):
    """`model` with the gradient of its images multiplied by `factor`, a number or one per example."""
    return lambda images: model(_Scaled.apply(images, factor))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def right(plain, digits) -> tuple[Tensor, Tensor]:
    """Eight digits that the undefended network classifies correctly."""
    images, labels = digits[0][4000:4100], digits[1][4000:4100]
    correct = plain(images).argmax(1) == labels
    return images[correct][:8], labels[correct][:8]


@every_gradient_attack
@pytest.mark.parametrize("factor", [math.nan, 0.0, math.inf], ids=["nan", "zero", "inf"])
def test_unusable_gradients_are_counted_and_warned_about_once(attack, factor, plain, right):
    with pytest.warns(GradientWarning, match="8 of 8 examples are NaN, infinite or zero") as caught:
        result = attack(with_gradient(plain, factor), *right, generator=generator())
    assert len([one for one in caught if one.category is GradientWarning]) == 1
    assert result.unusable_gradients.all()
    assert "unusable gradients 8" in repr(result)


@every_gradient_attack
def test_sound_gradients_give_no_warning(attack, plain, right):
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientWarning)
        result = attack(plain, *right, generator=generator())
    assert not result.unusable_gradients.any()


def test_attacks_without_gradients_say_nothing_of_them(plain, right):
    for attack in (
        SPSA(threat=THREAT, steps=1, samples=4),
        Square(threat=THREAT, max_queries=4),
        Boundary(threat=THREAT, steps=2),
    ):
        result = attack(with_gradient(plain, math.nan), *right, generator=generator())
        assert result.unusable_gradients is None


@pytest.mark.parametrize("factor", [math.nan, 0.0], ids=["nan", "zero"])
def test_only_the_examples_concerned_are_marked(factor, plain, right):
    images, labels = right
    images = images.clone()
    images[2, 0, 0, 0] = 1.0

    def model(batch: Tensor) -> Tensor:
        marked = batch[:, :, :1, :1] > 0.5
        return plain(_Scaled.apply(batch, torch.where(marked, factor, 1.0)))

    for attack in (PGD(threat=THREAT, steps=3), PGD(threat=THREAT, steps=2, eot=3, max_batch=4)):
        with pytest.warns(GradientWarning, match="1 of 8 examples"):
            result = attack(model, images, labels, generator=generator())
        assert result.unusable_gradients.nonzero().flatten().tolist() == [2]


def test_a_transfer_and_the_classifier_report_the_gradients_that_were_used(plain, right):
    broken = with_gradient(plain, math.nan)
    for attack in (
        Transfer(FGSM(threat=THREAT), broken),
        ClassifierOnly(threat=THREAT, steps=1, reconstruct=lambda images: images, classifier=broken),
    ):
        with pytest.warns(GradientWarning):
            assert attack(plain, *right, generator=generator()).unusable_gradients.all()
    assert not Transfer(FGSM(threat=THREAT), plain)(broken, *right).unusable_gradients.any()


@pytest.mark.parametrize("norm, epsilon", [("linf", 0.1), ("l2", 1.5)])
def test_the_rest_of_a_gradient_with_nan_still_works(norm, epsilon, plain, right):
    images, labels = right
    factor = torch.ones(28, 28)
    factor[:, :14] = math.nan
    attack = FGSM(threat=ThreatModel(norm, epsilon))
    with pytest.warns(GradientWarning):
        found = attack(with_gradient(plain, factor), images, labels).images
    zeroed = attack(with_gradient(plain, factor.nan_to_num(0)), images, labels).images
    assert torch.equal(found, zeroed)
    assert (found != images).flatten(1).any(1).all()


def test_nan_in_one_draw_leaves_the_other_draws_usable(plain, right):
    images, labels = right
    calls = []

    def model(batch: Tensor) -> Tensor:
        calls.append(1)
        return plain(_Scaled.apply(batch, math.nan if len(calls) % 2 else 1.0))

    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientWarning)
        result = FGSM(threat=THREAT, eot=4, max_batch=8)(model, images, labels)
    assert torch.equal(result.images, FGSM(threat=THREAT)(plain, images, labels).images)


def test_a_loss_at_its_limit_on_a_misclassified_example_is_no_fault(plain, right):
    images, labels = right
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientWarning)
        result = PGD(threat=THREAT, steps=2, loss=Margin(0.0))(
            plain, images, (labels + 1) % 10, generator=generator()
        )
    assert not result.unusable_gradients.any()


def test_saturated_logits_of_a_correct_example_are_a_fault(plain, right):
    with pytest.warns(GradientWarning):
        result = PGD(threat=THREAT, steps=2, loss=CrossEntropy())(
            lambda images: 1e4 * plain(images), *right, generator=generator()
        )
    assert result.unusable_gradients.any()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_huge_epsilon_allows_the_whole_pixel_range(norm, plain, right):
    images, labels = right
    for kind, settings in ((FGSM, {}), (PGD, {"steps": 5}), (APGD, {"steps": 5})):
        found = [
            kind(threat=ThreatModel(norm, epsilon), **settings)(
                plain, images, labels, generator=generator()
            ).images
            for epsilon in (1e3, 1e20, 1e38, 1e300)
        ]
        assert all(torch.equal(found[0], other) for other in found[1:])
        assert kind is FGSM or (plain(found[0]).argmax(1) != labels).all()
        assert ((found[0] - images).flatten(1).norm(dim=1) > 5).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1.0, 1e22, 1e37])
def test_l2_direction_has_length_one_whatever_the_scale(scale):
    gradient = scale * torch.randn(4, 3, 5, 5, generator=generator())
    direction = ThreatModel("l2", 1.0).direction(gradient)
    torch.testing.assert_close(direction.flatten(1).norm(dim=1), torch.ones(4))
    projected = ThreatModel("l2", 0.5, low=-1).project(gradient, torch.zeros_like(gradient))
    assert (projected.flatten(1).norm(dim=1) <= 0.5 + 1e-6).all()
    assert scale < 1 or (projected.flatten(1).norm(dim=1) > 0.49).all()


@pytest.mark.parametrize(
    "attack",
    [
        *WITH_GRADIENTS.values(),
        Square(threat=THREAT, max_queries=4),
        SPSA(threat=THREAT, steps=1, samples=4),
        Boundary(threat=THREAT, steps=2),
    ],
    ids=lambda attack: attack.title,
)
def test_a_model_that_works_in_place_gives_the_same_result_and_leaves_the_images_alone(attack, plain, right):
    images, labels = right
    before = images.clone()

    def in_place(batch: Tensor) -> Tensor:
        return plain(batch.mul_(0.5).add_(0.25))

    def out_of_place(batch: Tensor) -> Tensor:
        return plain(batch * 0.5 + 0.25)

    found = attack(in_place, images, labels, generator=generator()).images
    assert torch.equal(images, before)
    assert torch.equal(found, attack(out_of_place, images, labels, generator=generator()).images)
    assert is_deterministic(in_place, images)
    assert torch.equal(images, before)


def test_determinism_is_exact_equality(plain, masked, right):
    assert is_deterministic(plain, right[0])
    assert not is_deterministic(masked, right[0])
    calls = []

    def drifting(images: Tensor) -> Tensor:
        calls.append(1)
        return plain(images) + 1e-6 * len(calls)

    assert not is_deterministic(drifting, right[0])


def test_a_model_in_training_mode_keeps_its_statistics_and_its_mode(right):
    images, labels = right
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(784, 10)).train()
    with pytest.warns(UserWarning, match=r"in training mode.*call model\.eval\(\) first"):
        found = FGSM(threat=THREAT, eot=1)(model, images, labels)
    assert all(module.training for module in model.modules())
    assert int(model[0].num_batches_tracked) == 0
    with warnings.catch_warnings(action="error"):
        evaluated = FGSM(threat=THREAT, eot=1)(model.eval(), images, labels)
    assert torch.equal(found.images, evaluated.images)


def test_a_result_prints_a_summary(plain, right):
    result = PGD(threat=THREAT, steps=2, step_size=0.1, keep="best", eot=1)(plain, *right, generator=generator())
    assert re.fullmatch(
        r"AttackResult\(8 examples, linf mean 0\.1 max 0\.1, l2 mean [\d.]+ max [\d.]+, queries mean 3 max 3, "
        r"gradients mean 2 max 2, unusable gradients 0\)",
        repr(result),
    )
    assert repr(PGD(threat=THREAT)(plain, right[0][:0], right[1][:0])) == "AttackResult(0 examples, failed 0)"


@dataclass(frozen=True, kw_only=True)
class AveragedPGD(PGD):
    """PGD with averaged gradients and a decaying step that returns the mean of its iterates."""

    def step_rule(self, task):
        return _Averaged(self.threat, task.images)


class _Averaged(StepRule):
    def __init__(self, threat, origin) -> None:
        self.threat, self.origin = threat, origin
        self.mean, self.iterates = torch.zeros_like(origin), []

    def step(self, images, gradient, losses):
        self.iterates.append(images)
        self.mean = 0.5 * self.mean + gradient
        size = self.threat.epsilon / len(self.iterates)
        return self.threat.project(images + size * self.threat.direction(self.mean), self.origin)

    def select(self, last):
        return torch.stack([*self.iterates, last]).mean(0)


@pytest.mark.parametrize("restarts", [1, 3])
def test_another_way_of_stepping_is_one_rule(restarts, plain, right):
    images, labels = right
    attack = AveragedPGD(threat=THREAT, steps=4, restarts=restarts)
    result = attack(plain, images, labels, generator=generator(), loss_history=True)
    assert result.loss_history.shape == (5, 8)
    # The last loss is that of the selected images.
    torch.testing.assert_close(result.loss_history[-1], CrossEntropy()(plain(result.images), labels))
    assert (result.loss_history[-1] > result.loss_history[0]).all()
    assert attack.title == "AveragedPGD"

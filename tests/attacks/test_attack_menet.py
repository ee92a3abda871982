"""Attacks on ME-Net itself: expectation over masks, exact gradients, and other libraries' attacks."""

import pytest
import torch
from attack_models import accuracy, network, train
from torch import Tensor, nn

from menet.attacks import FGSM, PGD, AutoAttack, Boundary, CrossEntropy, ThreatModel
from menet.attacks.base import Queries
from menet.attacks.losses import ExpectedLoss
from menet.defense import MENet
from menet.estimators import USVT, NuclearNorm

PAPER = ThreatModel("linf", 0.3)


@pytest.fixture(scope="module")
def menet(digits) -> MENet:
    """A ME-Net of the digits, trained through its masks; the release's USVT is quick enough for that."""
    images, labels = digits
    torch.manual_seed(0)
    return train(MENet(network(), USVT()), images[:4000], labels[:4000], epochs=4)


@pytest.mark.slow
# Seen when this was written, accuracy with one mask → 20 masks: bpda 29 → 26 %, exact 70 → 47 %.
@pytest.mark.parametrize("gradient, least", [("bpda", 0.0), ("exact", 0.1)])
def test_eot_over_masks_lowers_accuracy_at_equal_steps(gradient, least, menet, some):
    images, labels = some[0][:80], some[1][:80]
    model = menet.with_gradient(gradient)
    survival = {}
    for masks in (1, 20):
        model.reseed(0)
        attack = PGD(threat=PAPER, steps=10, step_size=PAPER.epsilon / 4, keep="best", eot=masks)
        found = attack(model, images, labels, generator=torch.Generator().manual_seed(0)).images
        # Scored on fresh masks, the same ones for both.
        model.reseed(5)
        with torch.no_grad():
            survival[masks] = torch.stack([model(found).argmax(1) == labels for _ in range(20)]).float().mean(0)
    gain = survival[1] - survival[20]
    # Paired by example, since digits differ more among themselves than the attacks do.
    assert gain.mean() > least + 2 * gain.std() / len(gain) ** 0.5


def test_attacks_for_deterministic_models_run_on_a_fixed_bank_of_masks(menet, some):
    images, labels = some[0][:10], some[1][:10]
    fixed = menet.fixed(draws=3)
    suite = AutoAttack(threat=PAPER, attacks=("apgd-ce", "square"), steps=5, max_queries=10)
    for attack in (suite, Boundary(threat=PAPER, steps=20)):
        result = attack(fixed, images, labels, generator=torch.Generator().manual_seed(0))
        found = result.images if result.unprojected is None else result.unprojected
        assert accuracy(fixed, found, labels) < accuracy(fixed, images, labels)


def test_exact_gradients_agree_with_finite_differences_of_the_eot_loss(digits):
    images, labels = digits
    # Off the range of pixels and of estimates, whose clipping has a corner.
    pixels, classes = (images[:2] * 0.6 + 0.2).double(), labels[:2]
    torch.manual_seed(1)
    estimator = NuclearNorm(tol=1e-12, max_iter=20_000)
    model = MENet(network(4).double(), estimator, gradient="exact").eval()
    oracle = ExpectedLoss(Queries(model, classes), CrossEntropy(), classes, draws=3)

    def value(at: Tensor) -> Tensor:
        model.reseed(7)
        return oracle.value(at)

    model.reseed(7)
    losses, gradient = oracle.gradient(pixels)
    torch.testing.assert_close(losses, value(pixels), rtol=1e-6, atol=1e-8)
    random = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = torch.randn(pixels.shape, generator=random, dtype=torch.float64)
        numeric = (value(pixels + 1e-5 * direction) - value(pixels - 1e-5 * direction)) / 2e-5
        torch.testing.assert_close((gradient * direction).sum((1, 2, 3)), numeric, rtol=2e-3, atol=1e-5)


def test_foolbox_pyautoattack_and_art_take_it_unchanged(menet, some):
    from art.attacks.evasion import FastGradientMethod
    from art.estimators.classification import PyTorchClassifier
    from foolbox import PyTorchModel
    from foolbox.attacks import LinfFastGradientAttack
    from pyautoattack.autopgd_base import APGDAttack

    images, labels, epsilon = some[0][:40], some[1][:40], 0.3
    ours = FGSM(threat=ThreatModel("linf", epsilon))(menet, images, labels).images
    bounded = PyTorchModel(menet, bounds=(0, 1), device="cpu")
    foolboxs = LinfFastGradientAttack()(bounded, images, labels, epsilons=epsilon)[1]
    wrapped = PyTorchClassifier(menet, nn.CrossEntropyLoss(), (1, 28, 28), 10, clip_values=(0, 1))
    arts = FastGradientMethod(wrapped, eps=epsilon).generate(images.numpy(), labels.numpy())
    with torch.random.fork_rng(devices=[]):
        reference = APGDAttack(menet, n_iter=3, eps=epsilon, eot_iter=2, seed=0)
        autos = reference.perturb(images, labels, best_loss=True)
    clean = accuracy(menet, images, labels, draws=10)
    for found in (ours, foolboxs, torch.from_numpy(arts), autos):
        assert (found - images).abs().max() <= epsilon + 1e-6
        assert accuracy(menet, found, labels, draws=10) < clean - 0.2

"""The small functions from a batch to its loss, against their definitions written out."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from training_helpers import tiny

from menet.attacks import PGD
from menet.attacks.base import frozen_batchnorm
from menet.distributed import Worker
from menet.training.objectives import (
    NFGSM,
    Adversarial,
    DivergenceFrom,
    Standard,
    Trades,
    build_objective,
    training_attack,
    weakened,
)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(8, 1, 6, 6, generator=generator), torch.randint(4, (8,), generator=generator)


@pytest.fixture
def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 4))


def attack(**changes) -> PGD:
    return training_attack(tiny(epsilon=0.2, **changes))


def test_standard_is_cross_entropy(model, batch):
    loss, logits = Standard()(model, *batch, torch.Generator())
    torch.testing.assert_close(loss, functional.cross_entropy(model(batch[0]), batch[1]))
    torch.testing.assert_close(logits, model(batch[0]))


def test_adversarial_is_cross_entropy_at_what_the_attack_finds(model, batch):
    images, labels = batch
    found = attack()(model, images, labels, generator=torch.Generator().manual_seed(3)).images
    loss, _ = Adversarial(attack())(model, images, labels, torch.Generator().manual_seed(3))
    torch.testing.assert_close(loss, functional.cross_entropy(model(found), labels))
    assert loss > functional.cross_entropy(model(images), labels)
    assert float((found - images).abs().max()) <= 0.2 + 1e-6


def test_n_fgsm_is_one_step_from_twice_the_noise_without_projection(model, batch):
    """de Jorge et al. 2022, algorithm 1, written out."""
    images, labels = batch
    noise = torch.empty_like(images).uniform_(-1, 1, generator=torch.Generator().manual_seed(3))
    noisy = (images + 2 * 0.2 * noise).clamp(0, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(functional.cross_entropy(model(noisy), labels), noisy)
    moved = (noisy.detach() + 0.2 * gradient.sign()).clamp(0, 1)
    loss, logits = NFGSM(attack())(model, images, labels, torch.Generator().manual_seed(3))
    torch.testing.assert_close(logits, model(moved))
    torch.testing.assert_close(loss, functional.cross_entropy(model(moved), labels))
    assert float((moved - images).abs().max()) > 0.3


def test_n_fgsm_averages_its_gradient_over_draws(batch):
    """A model whose two draws pull a pixel apart: the step follows their mean."""
    images, labels = torch.full((1, 1, 1, 2), 0.5), torch.zeros(1, dtype=torch.int64)
    seen = []

    def random_model(batch):
        seen.append(len(batch))
        # In turn, logits with a large slope one way and a small one the other way.
        slopes = torch.tensor([[9.0], [-1.0]]).repeat(len(batch), 1)[: len(batch)]
        return torch.cat([batch.flatten(1).sum(1, keepdim=True) * slopes, torch.zeros(len(batch), 1)], 1)

    class Model(nn.Module):
        def forward(self, batch):
            return random_model(batch)

    objective = build_objective(tiny(objective="n-fgsm", epsilon=0.01, eot=4), Worker())
    objective(Model(), images, labels, torch.Generator().manual_seed(0))
    assert sum(seen[:-1]) == 4, "the gradient takes four draws"
    assert seen[-1] == 1, "the loss takes one"


@pytest.mark.parametrize("objective", ["adversarial", "n-fgsm", "trades"])
def test_a_budget_that_rises_scales_the_attack(objective):
    built = build_objective(tiny(objective=objective, epsilon=0.2, step_size=0.1), Worker())
    weaker = weakened(built, 0.5)
    assert (weaker.attack.threat.epsilon, weaker.attack.step_size) == (0.1, 0.05)
    assert weakened(built, 1.0) is built
    assert weakened(Standard(), 0.5) == Standard()


@pytest.mark.parametrize("objective", ["standard", "adversarial", "n-fgsm", "trades"])
def test_label_smoothing_spreads_the_targets(model, batch, objective):
    images, labels = batch
    config = tiny(objective=objective, defense={}, epsilon=0.2, beta=0.0, label_smoothing=0.3)
    loss, logits = build_objective(config, Worker())(model, images, labels, torch.Generator().manual_seed(3))
    logits = model(images) if objective == "trades" else logits
    targets = 0.7 * functional.one_hot(labels, 4) + 0.3 / 4
    torch.testing.assert_close(loss, -(targets * logits.log_softmax(-1)).sum(1).mean())


def test_the_attack_writes_no_gradient_of_the_weights(model, batch):
    loss, _ = Adversarial(attack())(model, *batch, torch.Generator().manual_seed(0))
    assert all(weight.grad is None for weight in model.parameters())
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_trades_is_its_definition(model, batch):
    images, labels = batch
    loss, moved = Trades(attack(), beta=6.0)(model, images, labels, torch.Generator().manual_seed(3))
    clean = model(images).softmax(-1)
    other = moved.softmax(-1)
    divergence = (clean * (clean.log() - other.log())).sum(-1).mean()
    torch.testing.assert_close(loss, functional.cross_entropy(model(images), labels) + 6 * divergence)
    assert divergence > 0
    without, _ = Trades(attack(), beta=0.0)(model, images, labels, torch.Generator().manual_seed(3))
    torch.testing.assert_close(without, functional.cross_entropy(model(images), labels))


def test_trades_attack_raises_the_divergence(model, batch):
    images, labels = batch
    reference = model(images).softmax(-1).detach()
    raised = DivergenceFrom(reference)
    torch.testing.assert_close(raised(model(images), labels), torch.zeros(8), rtol=0, atol=1e-6)
    # Rows of several draws are measured against the same references again.
    assert raised(model(images).repeat(3, 1), labels.repeat(3)).shape == (24,)
    trades = Trades(attack(), beta=1.0)
    _, moved = trades(model, images, labels, torch.Generator().manual_seed(0))
    noise = images + 0.2 * (torch.rand(images.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1)
    assert raised(moved, labels).mean() > 2 * raised(model(noise.clamp(0, 1)), labels).mean()


def test_the_configured_attack(batch):
    config = tiny(norm="l2", epsilon=0.7, steps=3, step_size=0.2, eot=4, batch_size=1024)
    built = training_attack(config, Worker(1, 2))
    assert (built.threat.norm, built.threat.epsilon) == ("l2", 0.7)
    assert (built.steps, built.step_size, built.eot, built.random_start) == (3, 0.2, 4, True)
    assert (built.threat.rank, built.threat.world, built.max_batch) == (1, 2, 512)


def test_batchnorm_is_frozen_and_modes_are_restored():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(), nn.BatchNorm2d(1))
    model[2].eval()
    before = model[0].running_mean.clone()

    def interrupted() -> None:
        with frozen_batchnorm(model):
            assert [module.training for module in model] == [False, True, False]
            model(torch.rand(2, 1, 4, 4) + 5)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert [module.training for module in model] == [True, True, False]
    assert torch.equal(model[0].running_mean, before)

"""Expectation over a model's randomness: the gradient is right, the memory bounded, and it matters."""

import pytest
import torch
from attack_models import RandomMasks, accuracy, network
from torch import Tensor, nn

from menet.attacks import APGD, DLR, PGD, AutoAttackRand, CrossEntropy, Margin, ThreatModel
from menet.attacks.base import Queries
from menet.attacks.losses import ExpectedLoss
from menet.errors import AttackError


def expected(model, labels: Tensor, loss=None, draws: int = 3, max_batch: int = 512) -> ExpectedLoss:
    return ExpectedLoss(Queries(model, labels), loss or CrossEntropy(), labels, draws=draws, max_batch=max_batch)


@pytest.fixture
def double(digits) -> tuple[RandomMasks, Tensor, Tensor]:
    images, labels = digits
    torch.manual_seed(2)
    return RandomMasks(network(4).double()), images[:5].double(), labels[:5]


@pytest.mark.parametrize("loss", [CrossEntropy(), Margin(), DLR()], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("max_batch", [512, 4], ids=["one pass", "many passes"])
def test_gradient_agrees_with_finite_differences_of_the_same_masks(loss, max_batch, double):
    model, images, labels = double
    oracle = expected(model, labels, loss, draws=7, max_batch=max_batch)
    random = torch.Generator().manual_seed(0)

    def value(at: Tensor) -> Tensor:
        model.reseed(11)
        return oracle.value(at)

    model.reseed(11)
    losses, gradient = oracle.gradient(images)
    torch.testing.assert_close(losses, value(images))
    for _ in range(5):
        direction = torch.randn(images.shape, generator=random, dtype=images.dtype)
        numeric = (value(images + 1e-6 * direction) - value(images - 1e-6 * direction)) / 2e-6
        torch.testing.assert_close((gradient * direction).sum((1, 2, 3)), numeric, rtol=1e-4, atol=1e-6)


def test_draws_are_independent_and_their_mean_is_taken(double):
    model, images, labels = double
    model.reseed(5)
    together = expected(model, labels, draws=4).gradient(images)
    model.reseed(5)
    single = [expected(model, labels, draws=1).gradient(images) for _ in range(4)]
    torch.testing.assert_close(together[0], torch.stack([losses for losses, _ in single]).mean(0))
    torch.testing.assert_close(together[1], torch.stack([gradient for _, gradient in single]).mean(0))
    assert not torch.equal(single[0][1], single[1][1])


@pytest.mark.parametrize("max_batch, draws, batch", [(8, 20, 5), (3, 7, 5), (512, 2, 5), (1, 1, 5), (5, 6, 1)])
def test_no_forward_pass_is_larger_than_max_batch(max_batch, draws, batch, digits):
    images, labels = digits
    sizes = []

    def model(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return rows.flatten(1)[:, 300:310]

    queries = Queries(model, labels[:batch])
    ExpectedLoss(queries, CrossEntropy(), labels[:batch], draws=draws, max_batch=max_batch).gradient(
        images[:batch]
    )
    assert max(sizes) <= max_batch
    assert sum(sizes) == draws * batch
    assert (queries.counts == draws).all()


def test_a_model_without_gradients_is_explained(digits):
    images, labels = digits
    with pytest.raises(AttackError, match="not differentiable"):
        PGD(threat=ThreatModel("linf", 0.1))(
            lambda rows: rows.round().detach().flatten(1)[:, :10],
            images[:2],
            labels[:2],
            generator=torch.Generator().manual_seed(0),
        )


def test_eot_lowers_the_accuracy_of_a_random_model_at_equal_steps(masked, some):
    images, labels = some[0][:100], some[1][:100]
    threat = ThreatModel("linf", 0.1)
    left = {}
    for draws in (1, 20):
        masked.reseed(0)
        attack = PGD(threat=threat, steps=10, step_size=0.025, eot=draws)
        found = attack(masked, images, labels, generator=torch.Generator().manual_seed(0)).images
        left[draws] = accuracy(masked, found, labels, draws=40)
    assert left[20] < left[1] - 0.04


def test_a_random_model_is_attacked_by_momentum_in_expectation_unless_told_otherwise(masked, some):
    images, labels = some[0][:60], some[1][:60]
    threat = ThreatModel("linf", 0.1)
    accuracies = {}
    attacks = {
        "one draw": PGD(threat=threat, steps=40, step_size=0.00625, eot=1),
        "constant": PGD(threat=threat, steps=10, step_size=0.025, eot=10),
        "default": PGD(threat=threat, steps=10),
    }
    for name, attack in attacks.items():
        masked.reseed(0)
        found = attack(masked, images, labels, generator=torch.Generator().manual_seed(0)).images
        accuracies[name] = accuracy(masked, found, labels, draws=40)
    assert accuracies["default"] < accuracies["constant"] + 0.01
    assert accuracies["default"] < accuracies["one draw"] - 0.02


def test_a_deterministic_model_is_attacked_as_before(some):
    images, labels = some[0][:10], some[1][:10]
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10, bias=False))
    with torch.no_grad():
        network[1].weight.copy_(torch.randn(10, 784, generator=torch.Generator().manual_seed(0)) / 28)
    threat = ThreatModel("linf", 0.1)
    explicit = PGD(threat=threat, steps=5, step_size=0.05, keep="best", eot=1)
    found = [
        attack(network, images, labels, generator=torch.Generator().manual_seed(1)).images
        for attack in (PGD(threat=threat, steps=5), explicit)
    ]
    assert torch.equal(*found)


def test_autoattack_rand_is_not_weaker_than_the_reference_on_a_random_model(masked, some):
    from pyautoattack.autopgd_base import APGDAttack

    images, labels = some[0][:60], some[1][:60]
    threat = ThreatModel("linf", 0.1)
    masked.reseed(0)
    found = AutoAttackRand(threat=threat, steps=8, eot=6)(
        masked, images, labels, generator=torch.Generator().manual_seed(0)
    )
    with torch.random.fork_rng(devices=[]):
        reference = APGDAttack(masked, n_iter=8, eps=threat.epsilon, loss="ce", eot_iter=6, seed=0)
        theirs = reference.perturb(images, labels, best_loss=True)
    ours = accuracy(masked, found.images, labels, draws=40)
    assert found.candidates.shape[0] == 2
    assert ours <= accuracy(masked, theirs, labels, draws=40) + 0.01


def test_iterates_are_compared_by_their_mean_loss(masked, some):
    images, labels = some[0][:20], some[1][:20]
    attack = APGD(threat=ThreatModel("linf", 0.1), steps=10, eot=5, threshold=0.75)
    result = attack(masked, images, labels, generator=torch.Generator().manual_seed(0), loss_history=True)
    assert result.loss_history.shape == (11, 20)
    assert (result.queries == 11 * 5).all()
    best = result.loss_history.amax(0)
    assert (best >= result.loss_history[-1]).all()
    fresh = expected(masked, labels, draws=50).value(result.images)
    assert (fresh - best).abs().mean() < 0.5 * best.mean()

"""The certificate against enumeration of all masks, and against attacks inside its radius."""

import itertools
import math

import pytest
import torch
from evaluation_models import trained
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from menet.defense import MENet
from menet.errors import ConfigurationError
from menet.estimators import USVT, MaskOnly, NuclearNorm, SoftImpute, TubalNuclearNorm
from menet.evaluation import CertificateSettings, Worker, certified_accuracies, certified_radius, certify
from menet.evaluation.accuracy import lower_bound
from menet.evaluation.certify import certificates, observation
from menet.evaluation.records import read, shards

ESTIMATORS = [USVT(), SoftImpute(), NuclearNorm(), MaskOnly(), TubalNuclearNorm()]


class Tiny(nn.Module):
    """A random network of two layers for images of a few pixels."""

    def __init__(self, entries: int, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.first = torch.randn(entries, 12, generator=random)
        self.second = torch.randn(12, 3, generator=random)

    def forward(self, images: Tensor) -> Tensor:
        return ((images - 0.5).flatten(1) @ self.first * 2).relu() @ self.second


def tiny(estimator, p: float, channels: str, shape: tuple[int, int, int], seed: int = 0):
    return MENet(Tiny(math.prod(shape), seed), estimator, p=p, channels=channels).eval()


def exact_shares(model, images: Tensor) -> Tensor:
    """Each class's fraction of the vote over all masks, by going through every one of them."""
    shape = model.mask_shape(images)
    size = math.prod(shape)
    every = torch.tensor(list(itertools.product([False, True], repeat=size))).view(-1, *shape)
    seen = every.flatten(1).sum(1).double()
    weights = model.mean_p**seen * (1 - model.mean_p) ** (size - seen)
    shares = torch.zeros(len(images), 3, dtype=torch.float64)
    with torch.no_grad():
        for number, image in enumerate(images):
            chosen = model(image.expand(len(every), *image.shape), every).argmax(1)
            shares[number].index_add_(0, chosen, weights)
    return shares


SETTINGS = [
    ("joint", (1, 2, 3), 0.15, 1),
    ("joint", (2, 2, 2), 0.08, 2),
    ("separate", (2, 2, 3), 0.15, 1),
]


@pytest.mark.parametrize("channels, shape, p, entries", SETTINGS)
@pytest.mark.parametrize("estimator", [USVT(), MaskOnly()], ids=["usvt", "mask-only"])
def test_no_change_within_the_exact_radius_turns_the_vote(estimator, channels, shape, p, entries):
    """Every set of pixels, every corner of the cube they can move in, and random values besides."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(6, *shape, generator=random)
    attacked = 0
    for seed in range(3):
        model = tiny(estimator, p, channels, shape, seed)
        assert observation(model, shape[0]) == (pytest.approx(p), entries)
        for image, shares in zip(images, exact_shares(model, images), strict=True):
            share, winner = shares.max(0)
            radius = certified_radius(min(1.0, share.item()), p, entries, shape[1] * shape[2])
            for changed in range(1, (radius or 0) + 1):
                attempts = [
                    (places, values)
                    for places in itertools.combinations(range(shape[1] * shape[2]), changed)
                    for values in (
                        torch.zeros(shape[0], changed),
                        torch.ones(shape[0], changed),
                        torch.rand(shape[0], changed, generator=random),
                    )
                ]
                batch = image.flatten(1).repeat(len(attempts), 1, 1)
                for number, (places, values) in enumerate(attempts):
                    batch[number, :, list(places)] = values
                after = exact_shares(model, batch.view(-1, *shape))[:, winner]
                assert (after > 0.5).all()
                assert (after >= share - (1 - (1 - p) ** (entries * changed)) - 1e-9).all()
                attacked += len(attempts)
    assert attacked > 50


@pytest.mark.parametrize("channels, shape, p, entries", SETTINGS)
def test_bounds_from_draws_are_below_the_exact_shares(channels, shape, p, entries):
    images = torch.rand(150, *shape, generator=torch.Generator().manual_seed(1))
    model = tiny(MaskOnly(), p, channels, shape)
    settings = CertificateSettings(selection=50, estimation=300, alpha=0.01)
    found = certificates(model, images, settings)
    exact = exact_shares(model, images)
    own = exact.gather(1, found.prediction[:, None])[:, 0]
    assert (found.lower_bound > own + 1e-9).double().mean() <= 0.03
    certified = found.radius >= 0
    assert certified.any()
    assert (exact.argmax(1) == found.prediction)[certified].double().mean() >= 0.97
    for share, radius, votes in zip(
        found.lower_bound.tolist(), found.radius.tolist(), found.votes.tolist(), strict=True
    ):
        assert share == lower_bound(votes, 300, 0.01)
        expected = certified_radius(share, p, entries, shape[1] * shape[2])
        assert radius == (-1 if expected is None else expected)


class AnyChange(nn.Module):
    """Class 1 as soon as any pixel is not gray: the worst case that the certificate must allow for."""

    def forward(self, images: Tensor) -> Tensor:
        changed = (images != 0.5).flatten(1).any(1).float()
        return torch.stack([1 - changed, changed], 1)


@pytest.mark.parametrize("channels, entries", [("joint", 3), ("separate", 1)])
def test_the_radius_is_the_largest_that_holds_in_the_worst_case(channels, entries):
    p = 0.2 if entries == 3 else 0.15
    model = MENet(AnyChange(), MaskOnly(), p=p, channels=channels).eval()
    gray = torch.full((1, 3, 4, 4), 0.5)
    assert (model.votes(gray, 20) == torch.tensor([20, 0])).all()
    radius = certified_radius(1.0, p, entries)
    assert radius == {3: 1, 1: 4}[entries]
    for changed, kept in ((radius, True), (radius + 1, False)):
        attacked = gray.clone().flatten(2)
        attacked[:, :, :changed] = 1
        votes = model.votes(attacked.view_as(gray).repeat(4000, 1, 1, 1), 1)[:, 0].double().mean()
        assert votes.item() == pytest.approx((1 - p) ** (entries * changed), abs=0.03)
        assert ((1 - p) ** (entries * changed) > 0.5) == kept


@pytest.mark.parametrize("channels", ["joint", "separate"])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda one: type(one).__name__)
def test_estimates_depend_on_observed_entries_alone(estimator, channels):
    """What the certificate rests on: bit for bit, whatever stands in the entries that are not shown."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 8, 8, generator=random)
    model = MENet(nn.Identity(), estimator, p=0.4, channels=channels).eval()
    mask = model.sample_mask(images, random)
    other = torch.rand(images.shape, generator=random)
    if channels == "separate" or mask.ndim == 4:
        shown = mask.expand_as(images)
    else:
        shown = mask.unflatten(2, (3, 8)).transpose(1, 2)
    changed = torch.where(shown, images, other)
    assert not torch.equal(changed, images)
    assert torch.equal(model.estimate(images, mask), model.estimate(changed, mask))


@given(st.floats(0, 1), st.floats(0.001, 1), st.integers(1, 4))
def test_the_radius_is_the_largest_that_the_inequality_allows(share, p, entries):
    radius = certified_radius(share, p, entries)
    if radius is None:
        assert share <= 0.5
    else:
        assert radius == 0 or (1 - p) ** (entries * radius) > 1.5 - share
        assert not (1 - p) ** (entries * (radius + 1)) > 1.5 - share


def test_known_radii():
    assert certified_radius(0.99, 0.05) == 13
    assert certified_radius(0.99, 0.05, entries=3) == 4
    assert certified_radius(1.0, 0.5) == 0
    assert certified_radius(0.5, 0.1) is None
    assert certified_radius(0.9, 0.0, pixels=16) == 16
    assert certified_radius(1.0, 0.001, pixels=16) == 16
    with pytest.raises(ConfigurationError, match="expected `pixels`"):
        certified_radius(0.9, 0.0)
    with pytest.raises(ConfigurationError, match=r"got 0\.9 and p 1\.5"):
        certified_radius(0.9, 1.5)


@pytest.fixture(scope="module")
def sparse():
    """A ME-Net that sees one pixel in ten."""
    return trained(p=0.1, epochs=3)


@pytest.mark.slow
def test_no_attack_within_a_certified_radius_succeeds(sparse, digits):
    """Pixels chosen by the gradient's size, by chance, and as a block, all set to the farther extreme."""
    images, _ = digits.batch(slice(0, 40))
    found = certificates(sparse, images, CertificateSettings(selection=50, estimation=400))
    held = found.radius >= 1
    assert held.sum() >= 5
    images, predictions, radii = images[held], found.prediction[held], found.radius[held]
    leaf = images.clone().requires_grad_()
    sparse.reseed(5)
    loss = nn.functional.cross_entropy(sum(sparse(leaf) for _ in range(20)), predictions, reduction="sum")
    (slope,) = torch.autograd.grad(loss, leaf)
    random = torch.Generator().manual_seed(0)
    rankings = [slope.abs(), *(torch.rand(images.shape, generator=random) for _ in range(2))]
    rankings.append(-(images - images.roll((1, 1), (2, 3))).abs())
    sparse.reseed(6)
    for ranking in rankings:
        attacked = images.clone().flatten(1)
        for row, places in enumerate(ranking.flatten(1).argsort(1, descending=True)):
            changed = places[: int(radii[row])]
            attacked[row, changed] = (attacked[row, changed] < 0.5).float()
        assert ((attacked.view_as(images) != images).flatten(1).sum(1) == radii).all()
        assert torch.equal(sparse.vote(attacked.view_as(images), draws=150), predictions)


def test_certificates_of_a_dataset_are_rows_that_continue_and_merge(sparse, digits, tmp_path):
    settings = CertificateSettings(stop=12, batch_size=5, selection=10, estimation=60, alpha=0.01, seed=1)
    alone = certify(sparse, digits, tmp_path / "alone", settings)
    for rank in (0, 1):
        certify(sparse, digits, tmp_path / "two", settings, worker=Worker(rank, 2))
    both = read(*shards(tmp_path / "two", "certificate"))
    assert [{**row, "seconds": 0} for row in both.rows] == [{**row, "seconds": 0} for row in alone.rows]
    assert len(alone.rows) == 12
    assert len({seed for row in alone.rows for seed in row["seeds"].values()}) == 6
    accuracies = certified_accuracies(alone)
    values = [one.value for one in accuracies.values()]
    assert values == sorted(values, reverse=True)
    assert values[-1] == 0
    right = [row for row in alone.rows if row["prediction"] == row["label"] and row["radius"] >= 0]
    assert values[0] == len(right) / 12
    assert certified_accuracies(alone, [100])[100].value == 0


def test_a_model_in_training_mode_is_certified_and_left_as_it_was(sparse, digits, tmp_path):
    settings = CertificateSettings(stop=3, selection=5, estimation=20)
    expected = certify(sparse, digits, tmp_path / "eval", settings)
    assert expected.evaluation["batch_size"] == 3, "no more is certified than was asked for"
    sparse.train()
    found = certify(sparse, digits, tmp_path / "train", settings)
    assert all(module.training for module in sparse.modules())
    sparse.eval()
    assert [{**row, "seconds": 0} for row in found.rows] == [{**row, "seconds": 0} for row in expected.rows]


def test_models_without_fresh_masks_are_refused(sparse, some):
    images, _ = some
    for model in (sparse.classifier, sparse.fixed(3)):
        with pytest.raises(ConfigurationError, match="draws fresh masks"):
            observation(model, 1)
    with pytest.raises(ConfigurationError, match="two different seeds"):
        certificates(sparse, images, selection_seed=1, estimation_seed=1)
    with pytest.raises(ConfigurationError, match=r"alpha < 0\.5, got 0\.7"):
        CertificateSettings(alpha=0.7)

"""The defense inside foolbox, pyautoattack and ART."""

import numpy
import pytest
import torch
from torch import Tensor, nn

from menet.adapters import art_preprocessor
from menet.errors import ConfigurationError
from menet.estimators import USVT, NuclearNorm
from menet.images import to_image, to_matrix
from menet.masks import bernoulli

art = pytest.importorskip("art.estimators.classification", reason="needs ART: pip install 'menet[art]'")


@pytest.fixture
def pictures() -> Tensor:
    return torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def linear(side: int = 8) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 5))


def classifier(model: nn.Module, side: int = 8, **options):
    return art.PyTorchClassifier(
        model,
        nn.CrossEntropyLoss(),
        input_shape=(3, side, side),
        nb_classes=5,
        clip_values=(0, 1),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        **options,
    )


@pytest.mark.parametrize("channels", ["joint", "separate"])
def test_the_preprocessor_masks_and_estimates(channels, pictures):
    preprocessor = art_preprocessor(NuclearNorm(), 0.6, seed=3, channels=channels)
    estimates, labels = preprocessor(pictures.numpy(), numpy.arange(6))
    matrices = to_matrix(pictures, channels)
    random = torch.Generator().manual_seed(3)
    if channels == "separate":
        mask = bernoulli((6, 1, 8, 8), 0.6, random)
    else:
        mask = bernoulli(matrices.shape, 0.6, random)
    expected = to_image(NuclearNorm()(matrices, mask), pictures.shape, channels)
    torch.testing.assert_close(torch.from_numpy(estimates), expected)
    assert estimates.dtype == numpy.float32
    assert (labels == numpy.arange(6)).all()
    again, _ = preprocessor(pictures.numpy())
    assert not numpy.array_equal(estimates, again)


def test_bpda_passes_gradients_unchanged(pictures):
    preprocessor = art_preprocessor(NuclearNorm(), 0.6)
    preprocessor(pictures.numpy())
    slope = numpy.random.default_rng(0).normal(size=pictures.shape)
    assert preprocessor.estimate_gradient(pictures.numpy(), slope) is slope


def test_exact_gradients_are_those_of_the_last_masks(pictures):
    pictures = pictures * 0.5 + 0.25
    preprocessor = art_preprocessor(USVT(), 0.7, gradient="exact")
    preprocessor(pictures.numpy())
    random = torch.Generator().manual_seed(4)
    slope, direction = (torch.randn(pictures.shape, generator=random) for _ in range(2))
    exact = torch.from_numpy(preprocessor.estimate_gradient(pictures.numpy(), slope.numpy()))

    def along(size: float) -> Tensor:
        return (preprocessor.defense.estimate(pictures + size * direction, preprocessor.mask) * slope).sum()

    numeric = (along(1e-3) - along(-1e-3)) / 2e-3
    torch.testing.assert_close((exact * direction).sum(), numeric, rtol=0.05, atol=0.05)
    with pytest.raises(ConfigurationError, match="expected the images of the last call"):
        preprocessor.estimate_gradient(pictures[:2].numpy(), slope[:2].numpy())


@pytest.mark.parametrize("gradient", ["bpda", "exact"])
def test_art_attacks_and_trains_behind_the_preprocessor(gradient, pictures):
    from art.attacks.evasion import FastGradientMethod

    defended = classifier(
        linear(), preprocessing_defences=art_preprocessor(NuclearNorm(), 0.8, gradient=gradient)
    )
    labels = numpy.eye(5)[[0, 1, 2, 3, 4, 0]]
    found = FastGradientMethod(defended, eps=0.1).generate(pictures.numpy(), labels)
    assert 0.09 < numpy.abs(found - pictures.numpy()).max() <= 0.1 + 1e-6
    defended.fit(pictures.numpy(), labels, batch_size=3, nb_epochs=1, verbose=False)


def test_the_preprocessor_says_where_it_applies(pictures):
    only_predicting = art_preprocessor(NuclearNorm(), 0.5, apply_fit=False)
    assert (only_predicting.apply_fit, only_predicting.apply_predict) == (False, True)
    wrapped = classifier(linear(), preprocessing_defences=only_predicting)
    assert wrapped.predict(pictures.numpy()).shape == (6, 5)

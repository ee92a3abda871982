"""Images the baselines are tested on."""

import numpy as np
import pytest
import torch
from torch import Tensor

from menet import data


@pytest.fixture(scope="session")
def photographs() -> Tensor:
    """Eight 32×32 colour crops of the photographs inside scikit-learn, on [0, 1]."""
    from sklearn.datasets import load_sample_images

    crops = []
    for photograph in load_sample_images().images:
        for top, left in ((20, 40), (150, 260), (220, 420), (330, 120)):
            crops.append(photograph[top : top + 64 : 2, left : left + 64 : 2])
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float() / 255


@pytest.fixture(scope="session")
def digits() -> Tensor:
    """Handwritten digits `(2000, 1, 28, 28)` on [0, 1]."""
    dataset = data.load("digits", "train")
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:2000]
    return dataset.batch(order)[0]

"""Problems the estimators are tested on."""

import numpy as np
import pytest
import torch
from torch import Tensor

from menet import images, masks


@pytest.fixture(scope="session")
def photographs() -> Tensor:
    """Eight 32×32 colour crops of the photographs inside scikit-learn, on [0, 1]."""
    from sklearn.datasets import load_sample_images

    crops = []
    for photograph in load_sample_images().images:
        for top, left in ((20, 40), (150, 260), (220, 420), (330, 120)):
            crops.append(photograph[top : top + 64 : 2, left : left + 64 : 2])
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float() / 255


@pytest.fixture(scope="session", params=[0.3, 0.5, 0.9])
def problem(request: pytest.FixtureRequest, photographs: Tensor) -> tuple[Tensor, Tensor]:
    """Real images as matrices `(8, 32, 96)` and a mask for each."""
    matrices = images.to_matrix(photographs)
    return matrices, masks.bernoulli(matrices.shape, request.param, torch.Generator().manual_seed(1))


def random_problem(
    generator: torch.Generator, *shape: int, p: float = 0.6, rank: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """A noisy low-rank matrix (or batch of them) and a mask."""
    *batch, m, n = shape
    left = torch.randn(*batch, m, rank, generator=generator, dtype=dtype)
    right = torch.randn(*batch, rank, n, generator=generator, dtype=dtype)
    noise = torch.randn(*batch, m, n, generator=generator, dtype=dtype)
    return left @ right / rank + 0.05 * noise, masks.bernoulli(shape, p, generator)

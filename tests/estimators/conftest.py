"""Problems the estimators are tested on."""

import pytest
import torch
from torch import Tensor

from menet import images, masks


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

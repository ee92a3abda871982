"""No baseline computes in bfloat16 under autocast, in either pass, whatever the processor."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from menet import baselines

SETTINGS = {
    "thermometer": {"levels": 4},
    "total-variation": {"weight": 0.3},
    "bit-depth": {},
    "median": {},
    "resize-pad": {"interpolation": "bilinear"},
    "discretize": {"colors": 12},
    "jpeg": {},
    "image-quilting": {"patches": 100},
    "defense-gan": {"latent": 4, "features": 2, "gan_steps": 1, "steps": 2, "starts": 2},
    "pixel-defend": {"levels": 8, "width": 2, "layers": 1, "steps": 2},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Autocast belongs to a thread: with several, chunks would be computed in threads that do not have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("gradient", ["exact", "bpda"])
@pytest.mark.parametrize("name", SETTINGS)
def test_forward_and_backward_are_those_of_float32(name, gradient, photographs):
    images = photographs[:2, :, :12, :12]
    module = baselines.build(name, nn.Identity(), gradient=gradient, **SETTINGS[name]).eval()
    module.fit(images, torch.Generator().manual_seed(0))

    def passes() -> tuple[Tensor, Tensor]:
        leaf = images.clone().requires_grad_()
        seen = module.reseed(0).reconstruct(leaf)
        (slope,) = torch.autograd.grad(seen.square().sum(), leaf)
        return seen.detach(), slope

    expected = passes()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = passes()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: baselines.total_variation(x, x.detach() > 0.3, 0.3),
        lambda x: baselines.smooth_jpeg(x, 50),
        lambda x: baselines.blended_colors(x, torch.linspace(0, 1, 36).view(12, 3)),
    ],
    ids=["total_variation", "smooth_jpeg", "blended_colors"],
)
def test_functions_alone_are_those_of_float32(function, photographs):
    def passes() -> tuple[Tensor, Tensor]:
        leaf = photographs[:2, :, :16, :16].clone().requires_grad_()
        seen = function(leaf)
        (slope,) = torch.autograd.grad(seen.square().sum(), leaf)
        return seen.detach(), slope

    expected = passes()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = passes()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])

"""Image quilting: the cut against brute force, neighbors against all distances, compiled against torch."""

import itertools
import subprocess
import sys

import pytest
import torch

from menet import baselines, kernels
from menet.baselines import ImageQuilting, TotalVariation, minimum_error_cut, nearest_patches, quilt
from menet.baselines.image_quilting import PATCHES_AT_ONCE, draw_patches, places
from menet.baselines.resize_pad import cropping
from menet.errors import ConfigurationError


def fitted(images, **settings) -> ImageQuilting:
    module = ImageQuilting(torch.nn.Flatten(), **{"patches": 500, **settings}).eval()
    return module.fit(images, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("length", "overlap"), [(1, 1), (1, 4), (5, 1), (5, 2), (4, 4), (6, 3)])
def test_cut_is_the_best_of_all_paths(length, overlap, generator):
    # Few values make ties frequent.
    errors = torch.randint(0, 4, (30, length, overlap), generator=generator)
    found = minimum_error_cut(errors)
    paths = [
        path
        for path in itertools.product(range(overlap), repeat=length)
        if all(abs(a - b) <= 1 for a, b in itertools.pairwise(path))
    ]
    for error, path in zip(errors, found.tolist(), strict=True):
        assert tuple(path) in paths
        totals = [sum(int(error[i, j]) for i, j in enumerate(one)) for one in paths]
        assert sum(int(error[i, j]) for i, j in enumerate(path)) == min(totals)


@pytest.mark.parametrize(
    ("side", "overlap", "shape"), [(5, 2, (32, 32)), (4, 3, (9, 12)), (3, 0, (9, 7)), (5, 2, (5, 5))]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_compiled_loops_and_torch_join_alike(side, overlap, shape, channels, generator, monkeypatch):
    rows, columns = (len(places(one, side, overlap)) for one in shape)
    size = (6, rows, columns, channels, side, side)
    # Coarse values, so that many cuts are ties.
    patches = (torch.randint(0, 4, size, generator=generator) * 60).to(torch.uint8)
    fast = quilt(patches, *shape, overlap)
    monkeypatch.setattr(kernels, "_available", lambda: False)
    plain = quilt(patches, *shape, overlap)
    assert fast.shape == (6, channels, *shape)
    assert torch.equal(fast, plain)


def test_two_patches_are_joined_along_their_cut():
    # They agree in the middle column of the overlap: to its left the first must remain, to its right the second.
    first, second = torch.full((6, 6), 10), torch.full((6, 6), 200)
    first[:, 4] = second[:, 1] = 77
    image = quilt(torch.stack([first, second]).view(1, 1, 2, 1, 6, 6).to(torch.uint8), 6, 9, 3)
    assert image[0, 0].tolist() == [[10, 10, 10, 10, 77, 200, 200, 200, 200]] * 6


def test_patches_of_one_image_give_it_back(digits):
    images = (digits[:3] * 255).round() / 255
    module = fitted(images, neighbors=1, patches=10_000)
    assert module.settings()["patches"] == 3 * 24 * 24
    torch.testing.assert_close(module.reconstruct(images), images)


@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("size", [10, 700, PATCHES_AT_ONCE + 5000])
def test_neighbors_are_the_nearest(count, size, generator):
    bank = torch.randint(0, 256, (size, 12), generator=generator).to(torch.uint8)
    queries = torch.rand(20, 12, generator=generator).double()
    found = nearest_patches(queries, bank, count)
    distances = torch.cdist(queries, bank.double() / 255)
    expected = distances.topk(count, largest=False).values
    torch.testing.assert_close(distances.gather(1, found), expected)
    assert all(len(set(one)) == count for one in found.tolist())


def test_bank_holds_patches_of_the_images(digits, generator):
    images = (digits[:4, :, :9, 5:13] * 255).round() / 255
    bank = draw_patches(images, 10_000, 5, generator)
    windows = images.unfold(2, 5, 1).unfold(3, 5, 1).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    assert torch.equal(bank, (windows * 255).round().to(torch.uint8))
    few = draw_patches(images, 7, 5, generator)
    assert few.shape == (7, 1, 5, 5)
    assert all((one == bank).flatten(1).all(1).any() for one in few)


@pytest.mark.slow
def test_a_bank_of_a_million_patches_stays_within_a_gigabyte():
    code = """
import resource, torch
from menet.baselines import ImageQuilting
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def quilted(count, patches):
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=random, dtype=torch.uint8)
    module = ImageQuilting(torch.nn.Identity(), patches=patches).eval().fit(images, random)
    module(images[:2] / 255)
    return len(module.bank)
quilted(4, 1000)
before = peak()
print(quilted(10_000, 1_000_000), (peak() - before) * 1024)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    patches, grown = map(int, found.stdout.split())
    assert patches == 1_000_000
    assert grown < 10**9


def test_every_patch_is_one_of_the_neighbors(digits):
    module = fitted(digits[:50], neighbors=4, overlap=0, patch=4)
    image = digits[60:61]
    allowed = nearest_patches(module._patches_of(image)[0].flatten(1), module.bank.flatten(1), 4)
    seen = set()
    for seed in range(20):
        quilted = module.reseed(seed).reconstruct(image)
        parts = (module._patches_of(quilted)[0] * 255).round().to(torch.uint8)
        among = (module.bank[allowed] == parts[:, None]).flatten(2).all(2)
        assert among.any(1).all()
        seen |= set(among[20].nonzero().flatten().tolist())
    assert len(seen) > 1


def test_noise_is_mostly_removed(digits):
    module = fitted(digits[:1000], patches=20_000, neighbors=1)
    clean = digits[1500:1520]
    noisy = (clean + 0.2 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    quilted = module.reconstruct(noisy)
    assert (quilted - clean).square().mean() < 0.5 * (noisy - clean).square().mean()


def test_crops_are_windows_at_full_size(generator):
    line = torch.arange(8.0)
    whole = cropping(8, 8, torch.rand(3, generator=generator)) @ line
    torch.testing.assert_close(whole, line.expand(3, -1))
    half = cropping(8, 4, torch.tensor([0.0, 0.999])) @ line
    assert (half[0].min(), half[0].max()) == (0, 3)
    assert (half[1].min(), half[1].max()) == (4, 7)


@pytest.mark.parametrize("kind", [ImageQuilting, TotalVariation])
def test_crops_are_taken_at_inference_and_differentiated(kind, digits):
    module = kind(torch.nn.Flatten(), crop=0.5).fit(digits[:20], torch.Generator().manual_seed(0))
    images = digits[:4].clone().requires_grad_()
    assert torch.equal(module.train().cropped(images), images)
    module.eval().reseed(0)
    module(images).sum().backward()
    # A crop of half the side sees a quarter of the image: the gradient of BPDA is zero outside.
    assert 0.2 < float((images.grad != 0).float().mean()) < 0.5
    logits = module.average(digits[:4], 3, of="probabilities")
    assert logits.isfinite().all()
    assert kind.from_settings(torch.nn.Flatten(), module.settings()).crop == 0.5


def test_constant_images_are_quilted(generator):
    module = fitted(torch.full((3, 1, 8, 8), 0.4), neighbors=10)
    assert torch.equal(module.reconstruct(torch.full((2, 1, 8, 8), 0.9)), torch.full((2, 1, 8, 8), 102 / 255))
    assert module(torch.rand(0, 1, 8, 8)).shape == (0, 64)


def test_what_does_not_fit_is_refused_with_the_numbers(digits):
    with pytest.raises(ConfigurationError, match="at least 10 patches, the neighbors to draw from, got 4"):
        fitted(torch.rand(1, 1, 6, 6))
    with pytest.raises(ConfigurationError, match=r"expected neighbors from 1 to 5, .* got 10"):
        ImageQuilting(torch.nn.Identity(), patches=5)
    with pytest.raises(ConfigurationError, match="images of at least 5×5, a patch, got 4×28"):
        fitted(digits[:, :, :4])
    with pytest.raises(ConfigurationError, match="call fit"):
        ImageQuilting(torch.nn.Identity(), patches=50)(digits[:2])
    module = fitted(digits[:10])
    with pytest.raises(ConfigurationError, match="images of at least 5×5, a patch, got 3×28"):
        module(digits[:2, :, :3])
    with pytest.raises(ConfigurationError, match="expected images of 1 channels, as in fit, got 3"):
        module(torch.rand(2, 3, 8, 8))
    with pytest.raises(ConfigurationError, match="expected overlap from 0 to 4, less than a patch, got 5"):
        ImageQuilting(torch.nn.Identity(), overlap=5)
    with pytest.raises(ConfigurationError, match=r"expected crop in \(0, 1\], got 0"):
        ImageQuilting(torch.nn.Identity(), crop=0.0)
    with pytest.raises(ConfigurationError, match="from 1 to 3 neighbors"):
        nearest_patches(torch.rand(2, 4), torch.zeros(3, 4, dtype=torch.uint8), 4)
    with pytest.raises(ConfigurationError, match="expected 2×2 patches for an image, got 1×2"):
        quilt(torch.zeros(1, 1, 2, 1, 5, 5, dtype=torch.uint8), 8, 8, 2)
    assert baselines.build("image-quilting", torch.nn.Identity(), patches=20).name == "image-quilting"

"""The baselines that are a formula, against their definitions and other libraries."""

import io

import numpy as np
import pytest
import torch
from art.defences.preprocessor import FeatureSqueezing
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.ndimage import median_filter
from torch import Tensor, nn

import menet
from menet import baselines, models
from menet.attacks import PGD, ThreatModel
from menet.baselines import (
    BitDepth,
    Discretize,
    MedianSmoothing,
    ResizePad,
    Thermometer,
    blended_colors,
    jpeg,
    median_smooth,
    nearest_colors,
    reduce_depth,
    smooth_jpeg,
    thermometer,
)
from menet.baselines.feature_squeezing import learn_colors, ramp
from menet.baselines.resize_pad import resampling
from menet.errors import ConfigurationError
from menet.preprocessed import Preprocessed


@given(st.floats(0, 1, width=32), st.integers(1, 40))
def test_thermometer_codes_are_the_definition(value, levels):
    codes = thermometer(torch.full((1, 1, 1, 1), value), levels).flatten()
    thresholds = [float(torch.tensor(level, dtype=torch.float32) / levels) for level in range(levels)]
    assert codes.tolist() == [float(value > threshold) for threshold in thresholds]


def test_thermometer_keeps_channels_together_and_counts_levels(photographs):
    codes = thermometer(photographs, 16).unflatten(1, (3, 16))
    assert set(codes.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(codes, codes.cummin(2).values), "no level is on above one that is off"
    torch.testing.assert_close(codes.mean(2), photographs, rtol=0, atol=1 / 16)


def test_ramp_of_athalye_et_al_rounds_up_to_the_codes(photographs):
    off_the_edges = photographs * 0.99 + 0.003
    leaf = off_the_edges.clone().requires_grad_()
    assert torch.equal(ramp(leaf, 10).ceil(), thermometer(leaf, 10))
    (slope,) = torch.autograd.grad(ramp(leaf, 10).sum(), leaf)
    # One unit from every level that is on: brighter pixels move more codes.
    assert torch.equal(slope, thermometer(off_the_edges, 10).unflatten(1, (3, 10)).sum(2))


def test_thermometer_fits_the_network_that_is_built_for_it(photographs):
    channels = Thermometer.classifier_channels(3, {"levels": 4})
    network = models.build("small", channels=channels, side=32)
    assert Thermometer(network, levels=4)(photographs).shape == (8, 10)
    assert BitDepth.classifier_channels(3, {}) == 3


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_bit_depth_is_arts(photographs, bits):
    theirs, _ = FeatureSqueezing(clip_values=(0, 1), bit_depth=bits)(photographs.numpy())
    torch.testing.assert_close(reduce_depth(photographs, bits), torch.from_numpy(theirs).float())
    assert len(reduce_depth(photographs, bits).unique()) <= 2**bits


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_median_is_scipys(photographs, size):
    theirs = median_filter(photographs.numpy(), size=(1, 1, size, size), mode="reflect")
    assert torch.equal(median_smooth(photographs, size), torch.from_numpy(theirs))


def test_median_gradient_goes_to_the_median():
    images = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: median_smooth(x, 3), images.requires_grad_(), eps=1e-7)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("side, size", [(32, 29), (28, 31), (10, 10), (16, 5)])
def test_resampling_is_torchs(interpolation, side, size):
    image = torch.rand(1, 2, side, side, generator=torch.Generator().manual_seed(0))
    matrix = resampling(side, 40, torch.tensor([size]), torch.tensor([3]), image.dtype, interpolation)
    framed = matrix @ image @ matrix.mT
    expected = torch.zeros(1, 2, 40, 40)
    options = {"mode": interpolation}
    if interpolation == "bilinear":
        options["align_corners"] = False
    expected[..., 3 : 3 + size, 3 : 3 + size] = nn.functional.interpolate(image, (size, size), **options)
    torch.testing.assert_close(framed, expected)


def test_resize_pad_draws_every_size_and_place_and_passes_exact_gradients():
    module = ResizePad(nn.Identity(), smallest=1.0, largest=331 / 299)
    seen = module.reconstruct(torch.ones(2000, 1, 28, 28))
    assert seen.shape == (2000, 1, 31, 31)
    rows = (seen.sum((1, 3)) > 0).int()
    sizes, tops = rows.sum(1), rows.argmax(1)
    assert set(sizes.tolist()) == {28, 29, 30, 31}
    assert {(int(size), int(top)) for size, top in zip(sizes, tops, strict=True)} == {
        (size, top) for size in (28, 29, 30, 31) for top in range(32 - size)
    }
    small = torch.rand(2, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    narrow = ResizePad(nn.Identity(), 0.6, 1.0, "bilinear")
    assert torch.autograd.gradcheck(lambda x: narrow.reseed(0).reconstruct(x), small.requires_grad_())
    leaf = torch.rand(2, 1, 28, 28).requires_grad_()
    assert module.with_gradient("bpda").reconstruct(leaf).shape == (2, 1, 31, 31)


def test_discretization_takes_the_nearest_color(photographs):
    codebook = learn_colors(photographs, 20, torch.Generator().manual_seed(0))
    pixels = photographs.movedim(1, -1).reshape(-1, 3)
    expected = codebook[torch.cdist(pixels.double(), codebook.double()).argmin(1)]
    found = nearest_colors(photographs, codebook).movedim(1, -1).reshape(-1, 3)
    torch.testing.assert_close(found, expected)
    assert torch.equal(codebook, learn_colors(photographs, 20, torch.Generator().manual_seed(0)))
    # Twenty colors of the data serve it better than 27 evenly spaced ones.
    evenly = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0])] * 3)
    error = (nearest_colors(photographs, codebook) - photographs).square().mean()
    assert error < 0.5 * (nearest_colors(photographs, evenly) - photographs).square().mean()


def test_discretization_needs_fitting_and_enough_colors(digits):
    module = Discretize(nn.Identity(), colors=2)
    with pytest.raises(ConfigurationError, match="call fit"):
        module(digits[:2])
    module.fit((digits[:50] * 255).to(torch.uint8), torch.Generator().manual_seed(0))
    assert module.settings() == {"colors": 2, "channels": 1, "gradient": "bpda"}
    assert len(module.reconstruct(digits[:10]).unique()) == 2
    with pytest.raises(ConfigurationError, match="at least 2 distinct colors, got 1"):
        module.fit(torch.zeros(3, 1, 8, 8), torch.Generator())


def by_pillow(images: Tensor, quality: int, subsampling: bool) -> Tensor:
    decoded = []
    for image in (images * 255).round().to(torch.uint8):
        pixels = image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy()
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(
            file, "JPEG", quality=quality, subsampling=2 if subsampling else 0
        )
        back = torch.from_numpy(np.array(Image.open(file)))
        decoded.append(back[None] if len(image) == 1 else back.permute(2, 0, 1))
    return torch.stack(decoded) / 255


@pytest.mark.parametrize("quality", [10, 50, 75, 95])
@pytest.mark.parametrize("subsampling", [True, False])
@pytest.mark.parametrize("side", [32, 27])
def test_jpeg_is_pillows(photographs, quality, subsampling, side):
    for images in (photographs[..., :side, :side], photographs[:, :1, :side, :side]):
        mine, theirs = jpeg(images, quality, subsampling), by_pillow(images, quality, subsampling)
        difference = (mine - theirs).abs() * 255
        loss = (theirs - images).abs().mean() * 255
        # Codecs compute in whole numbers, so a coefficient may round the other way now and then.
        assert difference.mean() < max(0.75, 0.1 * loss)
        assert difference.median() <= 1


def test_smooth_jpeg_has_the_slopes_of_its_coefficients(photographs):
    images = photographs[:1, :, :16, :16].double() * 0.9 + 0.05
    assert torch.autograd.gradcheck(
        lambda x: smooth_jpeg(x, 30), images.requires_grad_(), atol=1e-5, fast_mode=True
    )
    with torch.no_grad():
        compressed = jpeg(images, 30)
        assert (smooth_jpeg(images, 30) - compressed).abs().mean() < 0.5 * (images - compressed).abs().mean()


def test_blended_colors_are_near_the_nearest_and_have_their_slopes(photographs, generator):
    images = photographs[:2, :, :8, :8].double()
    codebook = learn_colors(photographs.double(), 12, generator)
    assert torch.autograd.gradcheck(
        lambda x: blended_colors(x, codebook), images.requires_grad_(), atol=1e-5, fast_mode=True
    )
    with torch.no_grad():
        nearest = nearest_colors(images, codebook)
        assert (blended_colors(images, codebook) - nearest).abs().mean() < 0.5 * (images - nearest).abs().mean()
    for few in (codebook[:1], codebook[:1].expand(3, -1)):
        assert torch.isfinite(blended_colors(images, few)).all()


@pytest.mark.parametrize(
    "name, settings", [("jpeg", {"quality": 50}), ("discretize", {"colors": 20}), ("median", {"size": 3})]
)
def test_attacks_find_more_through_the_default_gradient_than_through_the_identity(photographs, name, settings):
    """Most small perturbations are removed; the identity ignores which."""
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3072, 5))
    nn.init.normal_(linear[1].weight, generator=torch.Generator().manual_seed(0))
    defended = baselines.build(name, linear, **settings)
    defended.fit(photographs, torch.Generator().manual_seed(0))
    plain = defended.with_gradient("bpda")
    plain.surrogate = lambda images: images
    labels = defended(photographs).argmax(1)
    losses = []
    for view in (defended, plain):
        attack = PGD(threat=ThreatModel(norm="linf", epsilon=2 / 255), steps=20)
        found = attack(view, photographs, labels, generator=torch.Generator().manual_seed(1)).images
        losses.append(nn.functional.cross_entropy(defended(found), labels).item())
    assert losses[0] > 1.1 * losses[1]


@pytest.mark.parametrize("name", ["thermometer", "bit-depth", "discretize", "jpeg", "pixel-defend"])
def test_exact_gradient_of_steps_is_zero(photographs, name):
    settings = {"pixel-defend": {"levels": 4, "width": 2, "layers": 1, "steps": 1}}.get(name, {})
    module = baselines.build(name, nn.Identity(), gradient="exact", **settings).eval()
    module.fit(photographs[..., :8, :8], torch.Generator().manual_seed(0))
    leaf = photographs[..., :8, :8].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module.reconstruct(leaf).sum(), leaf)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_every_baseline_is_registered_by_importing_menet():
    names = {"thermometer", "total-variation", "pixel-defend", "bit-depth", "median", "resize-pad", "discretize"}
    assert names | {"jpeg"} <= Preprocessed.kinds.keys()
    assert menet.baselines is baselines
    assert isinstance(baselines.build("median", nn.Identity(), size=3), MedianSmoothing)


@pytest.mark.parametrize(
    "name, setting, value",
    [
        ("thermometer", "levels", 0),
        ("thermometer", "width", 2.0),
        ("bit-depth", "bits", 0),
        ("median", "size", 0),
        ("resize-pad", "largest", 0.5),
        ("discretize", "colors", 0),
        ("jpeg", "quality", 0),
    ],
)
def test_invalid_settings_are_named(name, setting, value):
    with pytest.raises(ConfigurationError, match=f"{setting}.*{value}"):
        baselines.build(name, nn.Identity(), **{setting: value})

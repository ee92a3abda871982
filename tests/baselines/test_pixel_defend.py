"""PixelCNN: causality, likelihood; PixelDefend against the plain greedy procedure."""

import math

import pytest
import torch

from menet.baselines import PixelCNN, PixelDefend, purify, train_pixel_cnn
from menet.baselines.pixel_cnn import Raster
from menet.errors import ConfigurationError


@pytest.fixture(scope="module")
def trained(digits) -> PixelCNN:
    network = PixelCNN(channels=1, levels=16, width=16, layers=2)
    return train_pixel_cnn(network, digits[:1500, :, ::2, ::2], torch.Generator().manual_seed(0), steps=120)


def random_network(channels: int, levels: int = 5) -> PixelCNN:
    network = PixelCNN(channels, levels, width=4, layers=3)
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return network.requires_grad_(False)


@pytest.mark.parametrize("channels", [1, 3])
def test_no_value_depends_on_itself_or_later_ones(channels):
    network = random_network(channels).double()
    images = torch.rand(2, channels, 6, 7, generator=torch.Generator().manual_seed(0)).double()
    before = network(images)
    # Values in their order: row by row, in a pixel channel by channel. Each is changed in a copy of its own.
    count = 6 * 7 * channels
    ordered = images.movedim(1, -1).flatten(1)
    changed = (ordered[:, None] + 0.5 * torch.eye(count)).flatten(0, 1)
    after = network(changed.unflatten(1, (6, 7, channels)).movedim(-1, 1)).unflatten(0, (2, count))
    moved = (after - before[:, None]).abs().amax((0, 3)).movedim(1, -1).flatten(1) > 1e-12
    assert not moved.tril().any(), "a value changed the distribution of itself or of an earlier one"
    for later, first in ((1, 0), (count - 1, count - 2)):
        assert moved[first, later], "a value must depend on the one before it"
    if channels == 3:
        assert moved[60:63, 60:63].tolist() == [[False, True, True], [False, False, True], [False, False, False]]


def test_likelihood_of_digits_beats_uniform_and_marginal_distributions(trained, digits):
    held_out = digits[1500:1700, :, ::2, ::2]
    with torch.no_grad():
        bits = float(trained.bits_per_dimension(held_out))
    frequency = torch.bincount(trained.quantize(held_out).flatten(), minlength=16) / held_out.numel()
    marginal = float(-(frequency * frequency.clamp(min=1e-9).log2()).sum())
    assert math.isfinite(bits)
    assert bits < marginal < math.log2(16)


def test_likelihoods_are_probabilities():
    network = random_network(1, levels=3)
    # All images of 2×2 pixels: their probabilities sum to one.
    every = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0])] * 4).view(81, 1, 2, 2)
    chance = torch.stack([(-network.bits_per_dimension(one[None]) * 4).exp2() for one in every])
    assert float(chance.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_raster_gives_what_a_full_pass_gives(channels):
    network = random_network(channels)
    images = torch.rand(3, channels, 5, 6, generator=torch.Generator().manual_seed(0))
    expected = network(images)
    raster = Raster(network, images)
    for row in range(5):
        for column in range(6):
            for channel in range(channels):
                logits = raster.logits_at(row, column, channel)
                torch.testing.assert_close(logits, expected[:, channel, :, row, column])
                raster.write(row, column, channel, images[:, channel, row, column])


@pytest.mark.parametrize("channels", [1, 3])
def test_purification_is_the_greedy_procedure(channels):
    network = random_network(channels, levels=9)
    images = torch.rand(4, channels, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = images.clone()
    levels = torch.arange(9) / 8
    for row in range(4):
        for column in range(5):
            for channel in range(channels):
                logits = network(expected)[:, channel, :, row, column]
                for image in range(4):
                    value = images[image, channel, row, column]
                    allowed = [level for level in range(9) if abs(levels[level] - value) <= 0.2]
                    chosen = max(allowed, key=lambda level: float(logits[image, level]))
                    expected[image, channel, row, column] = levels[chosen]
    torch.testing.assert_close(purify(network, images, 0.2), expected)


def test_purified_images_stay_near_and_are_more_likely(trained, digits):
    clean = trained.quantize(digits[1700:1720, :, ::2, ::2]) / 15
    noise = torch.rand(clean.shape, generator=torch.Generator().manual_seed(0)) * 0.4 - 0.2
    noisy = (clean + noise).clamp(0, 1)
    purified = purify(trained, noisy, 0.2)
    assert float((purified - noisy).abs().max()) <= 0.2 + 1e-4
    assert trained.bits_per_dimension(purified) < trained.bits_per_dimension(noisy)
    assert (purified - clean).abs().mean() < 0.7 * (noisy - clean).abs().mean()
    assert torch.equal(purify(trained, noisy[3:4], 0.2), purified[3:4])


def test_values_with_no_level_in_reach_stay():
    network = random_network(1, levels=2)
    images = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 0.4 + 0.3
    assert torch.equal(purify(network, images, 0.1), images)
    bytes_ = torch.arange(256).view(1, 1, 16, 16) / 255
    torch.testing.assert_close(purify(random_network(1, levels=256), bytes_, 0.0), bytes_)


def test_fitting_takes_bytes_and_adopts_their_channels(digits):
    module = PixelDefend(torch.nn.Identity(), levels=4, width=2, layers=1, steps=2).eval()
    with pytest.raises(ConfigurationError, match="call fit"):
        module.preprocess(digits[:2], torch.Generator())
    module.fit((digits[:20] * 255).to(torch.uint8), torch.Generator().manual_seed(0))
    assert module.settings()["channels"] == 1
    assert not any(parameter.requires_grad for parameter in module.parameters())
    again = PixelDefend(torch.nn.Identity(), levels=4, width=2, layers=1, steps=2)
    again.fit((digits[:20] * 255).to(torch.uint8), torch.Generator().manual_seed(0))
    for mine, theirs in zip(module.pixel_cnn.parameters(), again.pixel_cnn.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ConfigurationError, match=r"expected images of 1 channels.*got 3"):
        module.preprocess(torch.rand(1, 3, 8, 8), torch.Generator())


def test_invalid_settings_are_named():
    with pytest.raises(ConfigurationError, match="expected levels from 2 to 256, got 1"):
        PixelCNN(levels=1)
    with pytest.raises(ConfigurationError, match=r"expected epsilon in \[0, 1\], got 2"):
        PixelDefend(torch.nn.Identity(), epsilon=2)

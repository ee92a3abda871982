"""PixelCNN and PixelCNN++: causality, likelihood; PixelDefend against the plain greedy procedure."""

import math
from pathlib import Path

import pytest
import torch

from menet.baselines import (
    PixelCNN,
    PixelCNNPlusPlus,
    PixelDefend,
    purify,
    train_pixel_cnn,
    train_pixel_cnn_plus,
)
from menet.baselines import pixel_cnn as training_module
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
    raster = network.raster(images)
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


def plus_network(channels: int, levels: int = 5, width: int = 4) -> PixelCNNPlusPlus:
    """A tiny one with outputs far from zero, so that a forbidden dependence would show."""
    network = PixelCNNPlusPlus(channels, levels, width=width, layers=1, mixtures=2)
    network.reset(generator(1))
    network.initialize(torch.rand(8, channels, 8, 8, generator=generator(2)))
    return network.requires_grad_(False).eval()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("channels", [1, 3])
def test_plus_plus_no_value_depends_on_itself_or_later_ones(channels):
    """By gradients of the log-probabilities of every value with respect to every value."""
    network = plus_network(channels).double()
    images = torch.rand(1, channels, 8, 8, generator=generator()).double().requires_grad_()
    # A random combination of the levels: a plain sum over a distribution can have gradient zero.
    weights = torch.rand(5, generator=generator(3)).double()
    scores = (network(images) * weights[:, None, None]).sum(2)[0].movedim(0, -1).flatten()
    count = len(scores)
    rows = [torch.autograd.grad(score, images, retain_graph=True)[0] for score in scores]
    depends = torch.stack([row[0].movedim(0, -1).flatten() for row in rows]).abs() > 1e-14
    assert not depends.triu().any(), "a value depends on itself or on a later one"
    # What it may depend on, it does: the value before it in its row, and all pixels above, with no blind spot.
    assert all(depends[number, number - 1] for number in range(1, count) if number % (8 * channels))
    assert depends[-channels:, : count // 2].all()


def test_plus_plus_has_the_size_of_its_publication():
    with torch.device("meta"):
        network = PixelCNNPlusPlus()
    kinds = [type(layer).__name__ for layer in network.in_order()]
    # Two streams, six blocks of five gated layers, one more in the two that follow a doubling.
    assert kinds.count("Gate") == 2 * (6 * 5 + 2)
    assert network.settings() == {"channels": 3, "levels": 256, "width": 160, "layers": 5, "mixtures": 10}
    assert network.in_order()[-1].outputs == 100
    assert sum(one.numel() for one in network.parameters()) == pytest.approx(53e6, rel=0.05)


@pytest.mark.parametrize("channels", [1, 3])
def test_plus_plus_likelihoods_are_probabilities_and_agree(channels):
    network = plus_network(channels).double()
    images = network.quantize(torch.rand(3, channels, 8, 8, generator=generator())) / 4
    logits = network(images.double())
    torch.testing.assert_close(logits.logsumexp(2), torch.zeros_like(logits[:, :, 0]))
    chosen = logits.gather(2, network.quantize(images)[:, :, None]).mean() / -math.log(2)
    torch.testing.assert_close(network.bits_per_dimension(images.double()), chosen)


@pytest.mark.parametrize("channels", [1, 3])
def test_plus_plus_raster_gives_what_a_full_pass_gives(channels):
    network = plus_network(channels)
    images = torch.rand(2, channels, 8, 12, generator=generator())
    expected, raster = network(images), network.raster(images)
    for row in range(8):
        for column in range(12):
            for channel in range(channels):
                logits = raster.logits_at(row, column, channel)
                torch.testing.assert_close(logits, expected[:, channel, :, row, column], atol=1e-4, rtol=1e-4)
                raster.write(row, column, channel, images[:, channel, row, column])


def test_initialization_by_the_data_gives_unit_deviations():
    network = PixelCNNPlusPlus(1, 16, width=4, layers=1, mixtures=2)
    network.reset(generator())
    images = torch.rand(16, 1, 8, 8, generator=generator(1))
    network.initialize(images)
    deviation, mean = torch.std_mean(network.mixture(images), (0, 2, 3))
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=0.01, rtol=0)
    torch.testing.assert_close(deviation, torch.ones_like(deviation), atol=0.05, rtol=0)


def tiny_plus(images: torch.Tensor, **options: object) -> tuple[PixelCNNPlusPlus, float]:
    network = PixelCNNPlusPlus(1, 8, width=4, layers=1, mixtures=3)
    return network, train_pixel_cnn_plus(network, images, generator(), batch_size=16, **options)


def test_training_plus_plus_lowers_the_held_out_bits(digits):
    images = digits[:200, :, 2:26:3, 2:26:3]
    _, before = tiny_plus(images, steps=1)
    network, after = tiny_plus(images, steps=36)
    assert math.isfinite(before)
    assert after < before - 0.3
    assert after < math.log2(8)
    assert not network.training


def test_plus_plus_stops_when_held_out_images_say_so_and_keeps_the_best(digits, monkeypatch):
    said = iter([3.0, 2.0, 2.5, 2.4, 2.3, 1.0])
    seen: list[torch.Tensor] = []

    def judged(self, held_out):
        found = next(said)
        seen.append(next(self.averaged.parameters()).clone())
        self.waited += 1
        if found < self.best:
            self.best, self.waited = found, 0
            self.kept = {name: value.clone() for name, value in self.averaged.state_dict().items()}

    monkeypatch.setattr(training_module._PlusTraining, "judge", judged)
    network, bits = tiny_plus(digits[:40, :, 2:26:3, 2:26:3], steps=1000, patience=3)
    assert bits == 2.0
    assert len(seen) == 5, "it must stop after three judgments that were no better"
    assert torch.equal(next(network.parameters()), seen[1])


def test_overfitting_ends_the_training_of_plus_plus(monkeypatch):
    """Training images dark, held-out ones bright: what is learned makes them ever less likely."""
    images = 0.3 * torch.rand(40, 1, 8, 8, generator=generator(6))
    # The split is the first thing that the training draws.
    bright = torch.randperm(40, generator=generator())[:4]
    images[bright] += 0.7
    judged: list[float] = []
    original = training_module._PlusTraining.judge

    def counted(self, held_out):
        original(self, held_out)
        judged.append(self.best)

    monkeypatch.setattr(training_module._PlusTraining, "judge", counted)
    tiny_plus(images, steps=300, patience=2)
    assert len(judged) < 50, "300 steps are 100 passes over 36 images; it must stop before"
    assert judged[-1] == judged[-3] == min(judged)


def test_killed_and_resumed_the_training_of_plus_plus_ends_in_the_same_bits(digits, tmp_path: Path, monkeypatch):
    images = digits[:60, :, 2:26:3, 2:26:3]
    expected, bits = tiny_plus(images, steps=12)

    class Killed(Exception):
        pass

    original = training_module._PlusTraining.save

    def killing(self, path):
        original(self, path)
        if self.step == 8:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(training_module._PlusTraining, "save", killing)
        with pytest.raises(Killed):
            tiny_plus(images, steps=12, checkpoint=tmp_path / "fit.pt")
    resumed, again = tiny_plus(images, steps=12, checkpoint=tmp_path / "fit.pt")
    assert again == bits
    for mine, theirs in zip(resumed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_pixel_defend_purifies_by_plus_plus_greedily(digits):
    module = PixelDefend(
        torch.nn.Identity(),
        epsilon=0.3,
        levels=8,
        width=4,
        layers=1,
        mixtures=2,
        steps=2,
        likelihood="pixel-cnn++",
    ).eval()
    module.fit((digits[:40, :, 2:26:3, 2:26:3] * 255).to(torch.uint8), generator())
    assert math.isfinite(float(module.held_out_bits))
    images = torch.rand(2, 1, 8, 8, generator=generator(4))
    expected, levels = images.clone(), torch.arange(8) / 7
    for row in range(8):
        for column in range(8):
            logits = module.pixel_cnn(expected)[:, 0, :, row, column]
            far = (levels - images[:, 0, row, column, None]).abs() > 0.3
            expected[:, 0, row, column] = logits.masked_fill(far, -torch.inf).argmax(-1) / 7
    torch.testing.assert_close(module.preprocess(images, generator()), expected)
    again = PixelDefend.from_settings(torch.nn.Identity(), module.settings())
    again.load_state_dict(module.state_dict())
    assert again.settings() == module.settings()
    assert torch.equal(again.held_out_bits, module.held_out_bits)
    with pytest.raises(ConfigurationError, match="unknown likelihood 'gan'; choose from pixel-cnn, pixel-cnn"):
        PixelDefend(torch.nn.Identity(), likelihood="gan")
    with pytest.raises(ConfigurationError, match="expected sides divisible by 4"):
        module.preprocess(torch.rand(1, 1, 6, 6), generator())

"""Crops and flips against plain slicing, image by image."""

import itertools
from functools import partial

import pytest
import torch

from menet.data import load
from menet.errors import ConfigurationError
from menet.training.batches import crop_and_flip


def all_outcomes(image: torch.Tensor, padding: int) -> list[torch.Tensor]:
    _, height, width = image.shape
    padded = torch.zeros(image.shape[0], height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + height, padding : padding + width] = image
    reach = range(2 * padding + 1)
    crops = [padded[:, y : y + height, x : x + width] for y, x in itertools.product(reach, reach)]
    return [*crops, *(crop.flip(-1) for crop in crops)]


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 6, 9)])
def test_every_outcome_is_a_crop_and_all_occur_equally(
    kind: torch.dtype, shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    image = (torch.rand(shape, generator=generator) * 255).to(kind)
    outcomes = torch.stack(all_outcomes(image, 1)).flatten(1)
    count = 3600
    drawn = crop_and_flip(image.expand(count, *shape), generator=generator, padding=1).flatten(1)
    matches = (drawn[:, None] == outcomes).all(-1)
    assert (matches.sum(1) == 1).all()
    # 18 outcomes, 200 each on average; a fair draw strays by more than 60 with probability below 1e-3.
    assert (matches.sum(0) - count / 18).abs().max() < 60


def test_each_image_draws_for_itself_and_channels_move_together(generator: torch.Generator) -> None:
    images = torch.rand(64, 1, 16, 16, generator=generator).repeat(1, 3, 1, 1)
    drawn = crop_and_flip(images, generator=generator)
    assert torch.equal(drawn[:, 0], drawn[:, 2])
    assert not torch.equal(drawn, images)


def test_the_generator_alone_decides() -> None:
    images = torch.rand(32, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    first, second, other = (crop_and_flip(images, generator=torch.Generator().manual_seed(s)) for s in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_bytes_and_scaled_images_are_augmented_alike() -> None:
    dataset, index = load("digits", "test"), torch.arange(0, 100, 3)
    first, second = (torch.Generator().manual_seed(3) for _ in range(2))
    early, _ = dataset.batch(index, partial(crop_and_flip, generator=first))
    late = crop_and_flip(dataset.batch(index)[0], generator=second)
    assert torch.equal(early, late)


def test_nothing_to_do_does_nothing(generator: torch.Generator) -> None:
    images = torch.rand(5, 3, 8, 8, generator=generator)
    assert torch.equal(crop_and_flip(images, generator=generator, padding=0, flip=False), images)
    flipped = crop_and_flip(images, generator=generator, padding=0)
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(-1)) for a, b in zip(flipped, images, strict=True))
    assert crop_and_flip(images[:0], generator=generator).shape == (0, 3, 8, 8)
    with pytest.raises(ConfigurationError, match="padding >= 0, got -1"):
        crop_and_flip(images, generator=generator, padding=-1)

"""Image ⇄ matrix, and masks."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from menet import images, linalg, masks
from menet.errors import ConfigurationError


@given(
    batch=st.lists(st.integers(0, 3), max_size=2),
    c=st.integers(1, 4),
    h=st.integers(1, 6),
    w=st.integers(1, 6),
    channels=st.sampled_from(["joint", "separate"]),
)
@settings(max_examples=20)
def test_an_image_survives_being_a_matrix(batch: list[int], c: int, h: int, w: int, channels: str) -> None:
    image = torch.rand(*batch, c, h, w, generator=torch.Generator().manual_seed(0))
    matrix = images.to_matrix(image, channels)
    assert matrix.shape == ((*batch, h, c * w) if channels == "joint" else (*batch, c, h, w))
    torch.testing.assert_close(images.to_image(matrix, image.shape, channels), image)


def test_joint_puts_channels_side_by_side() -> None:
    image = torch.stack([torch.full((2, 2), value) for value in (0.0, 0.5, 1.0)])
    assert images.to_matrix(image)[0].tolist() == [-1, -1, 0, 0, 1, 1]


def test_estimates_beyond_the_range_are_clipped() -> None:
    assert images.to_image(torch.tensor([[-3.0, 3.0]]), (1, 1, 2)).flatten().tolist() == [0, 1]


def test_unknown_layout_is_named(without_annotation_checks: None) -> None:
    with pytest.raises(ConfigurationError, match="unknown channels 'stacked'; choose from joint, separate"):
        images.to_matrix(torch.zeros(3, 2, 2), "stacked")  # type: ignore[arg-type]


def test_the_papers_schedule() -> None:
    expected = [0.60, 0.62, 0.64, 0.66, 0.68, 0.70, 0.72, 0.74, 0.76, 0.78]
    assert masks.schedule(0.6, 0.8, 10) == pytest.approx(expected)
    assert masks.schedule(0.5, 0.5, 1) == (0.5,)


@given(seed=st.integers(0, 2**31), p=st.floats(0, 1))
@settings(max_examples=20)
def test_same_generator_same_mask(seed: int, p: float) -> None:
    draw = [masks.bernoulli((3, 4, 5), p, torch.Generator().manual_seed(seed)) for _ in range(2)]
    assert torch.equal(*draw)


def test_a_mask_leaves_the_global_generator_alone(generator: torch.Generator) -> None:
    before = torch.get_rng_state()
    masks.bernoulli((10, 10), 0.5, generator)
    assert torch.equal(before, torch.get_rng_state())


def test_one_probability_per_image(generator: torch.Generator) -> None:
    fraction = masks.bernoulli((3, 100, 100), torch.tensor([0.0, 0.3, 1.0]), generator).float().mean((1, 2))
    assert fraction.tolist() == pytest.approx([0, 0.3, 1], abs=0.02)


def test_a_bank_uses_its_probabilities_in_turn(generator: torch.Generator) -> None:
    bank = masks.bank(5, (50, 50), [0.0, 1.0], generator)
    assert bank.float().mean((1, 2)).tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda g: masks.bernoulli((2, 2), 1.5, g), "expected 0 <= p <= 1, got 1.5"),
        (lambda g: masks.bernoulli((2, 2), -0.1, g), "expected 0 <= p <= 1, got -0.1"),
        (lambda g: masks.bernoulli((2, 2), float("nan"), g), "expected 0 <= p <= 1, got nan"),
        (
            lambda g: masks.bernoulli((2, 2), torch.tensor([0.1, 0.2, 0.3]), g),
            r"one probability per leading entry of \(2, 2\), got shape \(3,\)",
        ),
        (lambda g: masks.schedule(0.8, 0.6), "0 <= a <= b <= 1, got 0.8→0.6"),
        (lambda g: masks.schedule(0.6, 0.8, 0), "expected n >= 1, got 0"),
        (lambda g: masks.bank(0, (2, 2), 0.5, g), "expected count >= 1, got 0"),
    ],
)
def test_bad_masks_are_named(call: object, named: str, generator: torch.Generator) -> None:
    with pytest.raises(ConfigurationError, match=named):
        call(generator)  # type: ignore[operator]


@given(seed=st.integers(0, 2**31), energy=st.floats(0.05, 0.999))
@settings(max_examples=20)
def test_approximate_rank_is_the_fewest_with_the_energy(seed: int, energy: float) -> None:
    x = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    squares = torch.linalg.svdvals(x).square()
    fractions = squares.cumsum(-1) / squares.sum(-1, keepdim=True)
    for rank, held in zip(linalg.approximate_rank(x, energy).tolist(), fractions, strict=True):
        assert held[rank - 1] >= energy - 1e-9
        assert rank == 1 or held[rank - 2] < energy + 1e-9


def test_approximate_rank_of_simple_matrices() -> None:
    assert linalg.approximate_rank(torch.stack([torch.zeros(3, 5), torch.ones(3, 5)])).tolist() == [0, 1]
    assert linalg.approximate_rank(torch.eye(10), 0.9).item() == 9
    assert linalg.approximate_rank(torch.ones(0, 3, 5)).shape == (0,)


@pytest.mark.parametrize("shape, cells", [((28, 28), 28), ((5, 7), 4), ((1, 9), 9), ((3, 3), 1)])
def test_partitions_divide_the_pixels_evenly(shape: tuple[int, int], cells: int, generator) -> None:
    found = masks.partitions(5, cells, shape, generator)
    assert found.shape == (5, *shape)
    assert len({tuple(one.flatten().tolist()) for one in found}) == (1 if cells == 1 else 5)
    for one in found:
        sizes = torch.bincount(one.flatten(), minlength=cells)
        assert sizes.sum() == shape[0] * shape[1]
        assert int(sizes.max() - sizes.min()) <= 2
        # Runs along the curve have one pixel in each cell, wherever the first of them begins.
        along = one.flatten()[masks.curve(*shape)].tolist()
        runs = [
            [along[:at], *(along[i : i + cells] for i in range(at, len(along), cells))] for at in range(cells)
        ]
        assert any(all(len(set(run)) == len(run) for run in cut) for cut in runs)


def test_a_random_cell_is_a_cell_of_a_partition(generator) -> None:
    p = torch.tensor([1 / 28] * 3000 + [0.1] * 3000)
    found = masks.random_cells(p, (28, 28), generator)
    assert found.shape == (6000, 1, 28, 28)
    for part, cells in ((found[:3000], 28), (found[3000:], 10)):
        sizes = part.flatten(1).sum(1)
        assert set(sizes.tolist()) <= set(range(784 // cells - 1, 784 // cells + 3))
        seen = part.float().mean((0, 1))
        torch.testing.assert_close(
            seen, torch.full((28, 28), 1 / cells), rtol=0, atol=6 * (1 / cells / 3000) ** 0.5
        )
    assert masks.random_cells(p[:0], (28, 28), generator).shape == (0, 1, 28, 28)
    with pytest.raises(ConfigurationError, match="expected 0 < p <= 1 for cells, got 0"):
        masks.random_cells(torch.zeros(1), (4, 4), generator)
    with pytest.raises(ConfigurationError, match="1 <= cells <= 16, the pixels, got 1 and 17"):
        masks.partitions(1, 17, (4, 4), generator)


def test_the_curve_visits_every_pixel_and_keeps_neighbors_together() -> None:
    for height, width in ((8, 8), (28, 28), (5, 7)):
        order = masks.curve(height, width)
        assert sorted(order.tolist()) == list(range(height * width))
    rows, columns = masks.curve(8, 8) // 8, masks.curve(8, 8) % 8
    assert (rows.diff().abs() + columns.diff().abs() == 1).all()

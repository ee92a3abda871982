"""The total-variation solver against a convex solver, and what it must not depend on."""

import importlib
from collections.abc import Callable

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor

from menet import kernels
from menet.baselines.total_variation import TotalVariation, objective, total_variation
from menet.errors import ConfigurationError
from menet.masks import bernoulli

# `menet.baselines.total_variation` is both a function and a file.
solver = importlib.import_module("menet.baselines.total_variation")


def by_cone_solver(x: np.ndarray, mask: np.ndarray, weight: float) -> float:
    z = cvxpy.Variable(x.shape)
    fit = cvxpy.norm(cvxpy.multiply(mask, z - x), "fro")
    rows = cvxpy.sum(cvxpy.norm(z[1:] - z[:-1], 2, axis=1))
    columns = cvxpy.sum(cvxpy.norm(z[:, 1:] - z[:, :-1], 2, axis=0))
    problem = cvxpy.Problem(cvxpy.Minimize(fit + weight * (rows + columns)))
    return problem.solve(solver=cvxpy.CLARABEL)


@pytest.mark.parametrize("p", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("weight", [0.03, 0.1, 0.5])
def test_objective_is_within_a_thousandth_of_the_convex_solvers(photographs, digits, p, weight):
    pictures = torch.cat([photographs[::5].flatten(0, 1)[:4, 4:28, 4:28], digits[:2, 0, :24, :24]])
    mask = bernoulli(pictures.shape, p, torch.Generator().manual_seed(1))
    found = objective(total_variation(pictures, mask, weight).double(), pictures.double(), mask, weight)
    for one, kept, value in zip(pictures, mask, found, strict=True):
        best = by_cone_solver(one.double().numpy(), kept.double().numpy(), weight)
        assert value <= best * (1 + 1e-3) + 1e-4
        assert value >= best * (1 - 1e-5) - 1e-6


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("weight", [0.03, 0.08, 0.2, 0.5, 1.0])
def test_stops_within_a_thousandth_of_the_limit(photographs, digits, weight, compiled, monkeypatch):
    pictures = torch.cat([photographs.flatten(0, 1)[:, :28, :28], digits[:24, 0]])
    mask = bernoulli(pictures.shape, 0.5, torch.Generator().manual_seed(3))
    exact = pictures.double()
    end = objective(total_variation(exact, mask, weight, tol=1e-8, max_iter=2000), exact, mask, weight)
    if not compiled:
        monkeypatch.setattr(kernels, "_available", lambda: False)
    stop = objective(total_variation(pictures, mask, weight).double(), exact, mask, weight)
    assert float((stop / end).max()) < 1 + 1e-3


def test_a_stalled_objective_does_not_stop_while_the_state_moves(photographs, monkeypatch):
    pictures = photographs.flatten(0, 1).double()
    mask = bernoulli(pictures.shape, 0.3, torch.Generator().manual_seed(3))

    def value(tol: float = solver.TOLERANCE, max_iter: int = 400) -> Tensor:
        return objective(total_variation(pictures, mask, 0.1, tol, max_iter), pictures, mask, 0.1)

    end, stop = value(1e-8, 2000), value()
    assert float((stop / end).max()) < 1 + 1e-3
    # One of these stalls for twelve iterations before its objective falls again.
    monkeypatch.setattr(solver, "MOVEMENT", float("inf"))
    assert float((value() / end).max()) > 1 + 1e-3


def test_large_weights_leave_rows_and_columns_equal(photographs):
    mask = bernoulli(photographs.shape, 0.5, torch.Generator().manual_seed(0))
    estimate = total_variation(photographs, mask, 0.5)
    for dim in (-2, -1):
        equal = (estimate.diff(dim=dim) == 0).all(-3 - dim)
        assert equal.float().mean() > 0.5


def test_dropped_pixels_do_not_leak(photographs):
    mask = bernoulli(photographs.shape, 0.5, torch.Generator().manual_seed(0))
    expected = total_variation(photographs, mask)
    for other in (0.0, 1.0, torch.nan, torch.inf):
        assert torch.equal(total_variation(torch.where(mask, photographs, other), mask), expected)


def test_what_dropped_pixels_hold_does_not_reach_the_gradient(photographs):
    mask = bernoulli(photographs[:1].shape, 0.5, torch.Generator().manual_seed(0))
    gradients = []
    for other in (0.0, torch.nan):
        leaf = torch.where(mask, photographs[:1], other).requires_grad_()
        gradients += torch.autograd.grad(total_variation(leaf, mask).square().sum(), leaf)
    assert torch.equal(*gradients)
    assert not gradients[0][~mask].any()


def test_fills_gaps_better_than_their_mean(photographs):
    mask = bernoulli(photographs.shape, 0.5, torch.Generator().manual_seed(0))
    estimate = total_variation(photographs, mask)
    mean = (photographs * mask).sum((-2, -1), keepdim=True) / mask.sum((-2, -1), keepdim=True)

    def error(guess: Tensor) -> float:
        return float((guess - photographs)[~mask].square().mean().sqrt())

    assert error(estimate) < 0.6 * error(mean.expand_as(photographs))


@pytest.fixture(scope="module")
def crops(photographs) -> Tensor:
    """Pieces of photographs in double precision, with noise, so that no two pixels are equal."""
    noise = torch.rand(3, 14, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return photographs[:3, 0, :14, :12].double() + 0.1 * noise


def value_and_gradient(x: Tensor, mask: Tensor, weight: float) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """For each of a batch, a sum of the minimizer's entries with random weights, and its gradient."""
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)

    def value(x: Tensor) -> Tensor:
        return (total_variation(x, mask, weight, tol=1e-14, max_iter=20_000) * weights).sum((-2, -1))

    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(leaf).sum(), leaf)
    return value, gradient


@pytest.mark.parametrize("p", [0.4, 0.9])
@pytest.mark.parametrize("weight", [0.03, 0.1, 0.3, 0.6])
def test_gradient_is_that_of_the_minimizer(crops, generator, weight, p):
    mask = bernoulli(crops.shape, p, generator)
    value, gradient = value_and_gradient(crops, mask, weight)
    assert not gradient[~mask].any()
    for _ in range(3):
        direction = torch.randn(crops.shape, generator=generator, dtype=torch.float64)
        numeric = (value(crops + 1e-6 * direction) - value(crops - 1e-6 * direction)) / 2e-6
        error = ((gradient * direction).sum((1, 2)) - numeric) / gradient.flatten(1).norm(dim=1)
        assert float(error.abs().max()) < 2e-3


def test_gradient_at_a_kink_is_between_those_of_its_sides(crops, generator):
    """Two equal rows of kept pixels come back equal, and any change of one of them separates them."""
    x, mask = crops.clone(), bernoulli(crops.shape, 0.6, generator)
    x[:, 5], mask[:, 5] = x[:, 4], mask[:, 4]
    value, gradient = value_and_gradient(x, mask, 0.03)
    here = value(x)
    for _ in range(3):
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        along = (gradient * direction).sum((1, 2))
        sides = torch.stack([(value(x + h * direction) - here) / h for h in (1e-4, -1e-4)])
        assert bool((sides[0] - sides[1]).abs().max() > 1e-2), "there is a kink"
        assert bool(((along > sides.amin(0) - 1e-2) & (along < sides.amax(0) + 1e-2)).all())


def test_each_gradient_is_found_as_if_it_were_alone(photographs, generator):
    x = photographs[:, 0]
    mask = bernoulli(x.shape, 0.5, generator)
    gradients = []
    for part in (slice(None), slice(5, 6)):
        leaf = x[part].clone().requires_grad_()
        gradients += torch.autograd.grad(total_variation(leaf, mask[part], 0.3).square().sum(), leaf)
    assert torch.allclose(gradients[0][5:6], gradients[1], atol=1e-4 * float(gradients[1].abs().max()))


def test_shapes_without_a_batch_with_two_and_with_nothing(photographs):
    mask = bernoulli((32, 32), 0.5, torch.Generator().manual_seed(0))
    one = total_variation(photographs[0, 0], mask)
    torch.testing.assert_close(total_variation(photographs, mask)[0, 0], one, rtol=0, atol=2e-3)
    assert total_variation(photographs[:0], mask).shape == (0, 3, 32, 32)
    assert torch.equal(total_variation(photographs[0, 0], torch.zeros_like(mask)), torch.zeros(32, 32))
    flat = torch.full((1, 5, 9), 0.25)
    torch.testing.assert_close(total_variation(flat, torch.ones_like(flat, dtype=torch.bool)), flat)


def test_each_problem_is_solved_as_if_it_were_alone(photographs):
    mask = bernoulli(photographs.shape, 0.5, torch.Generator().manual_seed(0))
    together = total_variation(photographs, mask)
    alone = torch.cat([total_variation(photographs[i : i + 1], mask[i : i + 1]) for i in range(8)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_invalid_settings_are_named():
    with pytest.raises(ConfigurationError, match="expected weight > 0, got 0"):
        TotalVariation(torch.nn.Identity(), weight=0)
    with pytest.raises(ConfigurationError, match=r"expected p in \[0, 1\], .*got 1\.5"):
        TotalVariation(torch.nn.Identity(), p=1.5)
    with pytest.raises(ConfigurationError, match="expected max_iter >= 1, got 0"):
        total_variation(torch.zeros(2, 3, 3), torch.ones(2, 3, 3, dtype=torch.bool), max_iter=0)


@pytest.mark.parametrize("shape", [(5, 32, 32), (3, 28, 28), (2, 1, 9), (2, 6, 1), (2, 40, 17)])
@pytest.mark.parametrize("weight", [0.03, 0.5])
def test_compiled_loops_take_the_same_steps(shape, weight, generator, monkeypatch):
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    kept = torch.rand(shape, generator=generator) < 0.5
    fast = total_variation(x, kept, weight)
    monkeypatch.setattr(kernels, "_available", lambda: False)
    torch.testing.assert_close(fast, total_variation(x, kept, weight), rtol=1e-7, atol=1e-9)

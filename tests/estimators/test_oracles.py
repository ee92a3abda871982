"""The estimators against what others compute: cvxpy's optimum, plain NumPy iteration, SciPy's decomposition."""

import cvxpy
import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from benchmarks import published
from menet import estimators, images, masks
from tests.estimators.conftest import random_problem


def objective(estimate: Tensor, x: Tensor, mask: Tensor, mu: float) -> float:
    return published.nuclear_objective(estimate.double().numpy(), x.double().numpy(), mask.numpy(), mu)


def optimum(x: Tensor, mask: Tensor, mu: float) -> float:
    """The least value of the nuclear-norm problem, by a cone solver driven to high accuracy."""
    best = published.nuclear_norm(x.double().numpy(), mask.numpy(), mu, eps=1e-9, max_iters=20_000)
    return published.nuclear_objective(best, x.double().numpy(), mask.numpy(), mu)


def test_nuclear_norm_reaches_the_cone_solvers_optimum_on_images(problem: tuple[Tensor, Tensor]) -> None:
    x, mask = problem
    estimate = estimators.nuclear_norm(x, mask)
    for index in (0, 3):
        best = optimum(x[index], mask[index], 1.0)
        assert objective(estimate[index], x[index], mask[index], 1.0) <= best * (1 + 1e-4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mu", [0.05, 0.5, 4.0])
def test_nuclear_norm_reaches_the_optimum_of_random_problems(seed: int, mu: float) -> None:
    x, mask = random_problem(torch.Generator().manual_seed(seed), 8, 11, p=0.4 + 0.15 * seed)
    estimate = estimators.nuclear_norm(x, mask, mu, tol=1e-6)
    assert objective(estimate, x, mask, mu) <= optimum(x, mask, mu) * (1 + 1e-4) + 1e-9


def test_the_reported_gap_bounds_the_true_one(problem: tuple[Tensor, Tensor]) -> None:
    x, mask = problem
    loose = estimators.NuclearNorm(tol=1e-2).solve(x, mask)
    tight = estimators.NuclearNorm(tol=1e-9).solve(x.double(), mask)
    for index in range(len(x)):
        best = objective(tight.estimate[index], x[index], mask[index], 1.0)
        excess = objective(loose.estimate[index], x[index], mask[index], 1.0) / best - 1
        assert -1e-9 <= excess <= float(loose.gap[index]) + 1e-9
    assert (tight.gap < 1e-6).all()
    assert (tight.iterations >= loose.iterations).all()
    for index, rank in enumerate(tight.rank.tolist()):
        assert rank == np.linalg.matrix_rank(tight.estimate[index].numpy(), rtol=1e-6)


def test_soft_impute_has_the_fixed_point_of_the_plain_iteration(problem: tuple[Tensor, Tensor]) -> None:
    x, mask = problem
    estimate = estimators.soft_impute(x, mask)
    for index in range(0, 8, 3):
        limit = published.soft_impute_limit(x[index].double().numpy(), mask[index].numpy())
        difference = np.linalg.norm(estimate[index].double().numpy() - limit) / np.linalg.norm(limit)
        assert difference <= 1e-3


def test_soft_impute_is_nuclear_norm_with_half_mu(problem: tuple[Tensor, Tensor]) -> None:
    x, mask = problem
    soft = estimators.soft_impute(x.double(), mask, 0.5, restore_observed=False, tol=1e-9)
    torch.testing.assert_close(soft, estimators.nuclear_norm(x.double(), mask, 1.0, tol=1e-9), atol=1e-6, rtol=0)


def test_restoring_puts_observed_entries_back(problem: tuple[Tensor, Tensor]) -> None:
    x, mask = problem
    restored = estimators.soft_impute(x, mask)
    free = estimators.soft_impute(x, mask, restore_observed=False)
    assert torch.equal(restored[mask], x[mask])
    assert torch.equal(restored[~mask], free[~mask])
    assert not torch.equal(free[mask], x[mask])


def test_usvt_is_the_published_rule(problem: tuple[Tensor, Tensor]) -> None:
    x, mask = problem
    expected = [published.usvt(a.double().numpy(), m.numpy()) for a, m in zip(x, mask, strict=True)]
    torch.testing.assert_close(
        estimators.usvt(x.double(), mask), torch.from_numpy(np.stack(expected)), atol=1e-9, rtol=0
    )


def test_usvt_universal_keeps_what_chatterjee_keeps(problem: tuple[Tensor, Tensor]) -> None:
    x, mask = problem
    estimate = estimators.usvt(x.double(), mask, "universal")
    for index in range(len(x)):
        filled = torch.where(mask[index], x[index], 0).double().numpy()
        fraction = mask[index].double().mean().item()
        left, values, right = scipy.linalg.svd(filled, full_matrices=False)
        values[values < 2.01 * np.sqrt(96 * fraction)] = 0
        np.testing.assert_allclose(estimate[index].numpy(), left * values @ right / fraction, atol=1e-9)


def test_tubal_is_the_optimum_of_its_convex_problem(photographs: Tensor) -> None:
    x = (photographs[0, :, :10, :12] * 2 - 1).double()
    mask = masks.bernoulli(x.shape, 0.6, torch.Generator().manual_seed(0))
    transform = scipy.fft.dct(np.eye(3), norm="ortho", axis=0)
    unknown = [cvxpy.Variable((10, 12)) for _ in range(3)]
    mixed = [sum(transform[k, c] * unknown[c] for c in range(3)) for k in range(3)]
    seen, pixels = mask.double().numpy(), x.numpy()
    misfit = sum(cvxpy.sum_squares(cvxpy.multiply(seen[c], unknown[c] - pixels[c])) for c in range(3))
    problem = cvxpy.Problem(cvxpy.Minimize(sum(cvxpy.norm(part, "nuc") for part in mixed) + misfit))
    problem.solve(solver=cvxpy.SCS, eps=1e-7)
    estimate = estimators.tubal_nuclear_norm(x, mask, tol=1e-9)
    for channel in range(3):
        np.testing.assert_allclose(estimate[channel].numpy(), unknown[channel].value, atol=2e-3)


def test_tubal_of_one_channel_is_nuclear_norm(photographs: Tensor) -> None:
    gray = (photographs.mean(1, keepdim=True) * 2 - 1).double()
    mask = masks.bernoulli(gray.shape, 0.6, torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        estimators.tubal_nuclear_norm(gray, mask, tol=1e-9)[:, 0],
        estimators.nuclear_norm(gray[:, 0], mask[:, 0], tol=1e-9),
        atol=1e-6,
        rtol=0,
    )


@pytest.mark.parametrize("name", ["usvt", "soft-impute", "nuclear-norm", "tubal"])
@pytest.mark.parametrize("p", [0.5, 0.9])
def test_single_precision_agrees_with_double_on_images(name: str, p: float, photographs: Tensor) -> None:
    # Solved closely, so that what is compared is rounding and not where the iterations stopped.
    estimator = estimators.build(name) if name == "usvt" else estimators.build(name, tol=1e-7, max_iter=500)
    layout = "separate" if name == "tubal" else "joint"
    x = images.to_matrix(photographs, layout)
    mask = masks.bernoulli(x.shape, p, torch.Generator().manual_seed(0))
    torch.testing.assert_close(estimator(x, mask).double(), estimator(x.double(), mask), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_fully_observed_low_rank_matrix_comes_back(rank: int) -> None:
    x, _ = random_problem(torch.Generator().manual_seed(rank), 3, 12, 17, rank=rank)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    x = left[..., :rank] * values[..., None, :rank] @ right[..., :rank, :]
    mask = torch.ones_like(x, dtype=torch.bool)
    torch.testing.assert_close(estimators.usvt(x, mask), x)
    torch.testing.assert_close(estimators.soft_impute(x, mask), x)
    torch.testing.assert_close(estimators.nuclear_norm(x, mask, 1e-9), x, atol=1e-6, rtol=0)
    torch.testing.assert_close(estimators.tubal_nuclear_norm(x, mask, 1e-9), x, atol=1e-6, rtol=0)


@pytest.mark.parametrize("values", [(3, 3, 3, 1, 1), (2, 2, 0, 0, 0), (4, 1, 1, 0.2, 0.2), (1, 1, 1, 1, 1)])
def test_exact_gradients_where_singular_values_repeat_or_vanish(values: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(7, 5, generator=generator, dtype=torch.float64)).Q
    x = (left * torch.tensor(values, dtype=torch.float64) @ right.mT)[None].requires_grad_()
    mask = torch.ones_like(x, dtype=torch.bool)
    tight = {"tol": 1e-13, "max_iter": 3000}
    assert torch.autograd.gradcheck(lambda x: estimators.nuclear_norm(x, mask, **tight), x, atol=1e-5)
    for other in (
        lambda x: estimators.soft_impute(x, mask, 0.5, False, **tight),
        lambda x: estimators.tubal_nuclear_norm(x[None], mask, **tight),
    ):
        assert torch.autograd.gradcheck(other, x, atol=1e-5, fast_mode=True)
    # Dropping singular values is differentiable only where those kept differ from those dropped.
    kept = 3 if values == (3, 3, 3, 1, 1) else 2
    if values[kept - 1] != values[kept]:
        assert torch.autograd.gradcheck(lambda x: estimators.usvt(x, mask, kept / 5 + 0.01), x, atol=1e-5)
    (gradient,) = torch.autograd.grad(estimators.usvt(x, mask, 0.5).sum(), x)
    assert gradient.isfinite().all()

"""The minimum is reached at every scale, size, rank and λ, and where it is not, a warning says so."""

import hypothesis.strategies as some
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from menet import estimators, kernels, linalg
from menet.estimators import solver, splitting
from menet.estimators.base import ConvergenceWarning


def made(seed: int, m: int, n: int, rank: int, p: float, noise: float) -> tuple[Tensor, Tensor]:
    """A noisy matrix of that rank, and a mask with at least one observed entry."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(m, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(rank, n, generator=generator, dtype=torch.float64)
    extra = torch.randn(m, n, generator=generator, dtype=torch.float64)
    mask = torch.rand(m, n, generator=generator) < p
    mask[0, 0] = True
    return left @ right / rank**0.5 + noise * extra, mask


def objective(estimate: Tensor, x: Tensor, mask: Tensor, shrinkage: float) -> float:
    """½‖mask∘(X − x)‖² + λ‖X‖_* in double precision."""
    values = np.linalg.svd(estimate.double().numpy(), compute_uv=False)
    residual = torch.where(mask, x - estimate.double(), 0.0)
    return float(residual.square().sum()) / 2 + shrinkage * float(values.sum())


def lower_bound(x: Tensor, mask: Tensor, shrinkage: float, accuracy: float = 1e-4) -> float:
    """A value that no objective is below: the dual one of a plain splitting by NumPy's SVD, run long enough."""
    a, seen = np.where(mask.numpy(), x.numpy(), 0.0), mask.numpy()
    largest = np.linalg.norm(a, 2)
    best = 0.0
    for fraction in (0.1, 0.3, 1.0, 0.03):
        level = max(fraction * largest, shrinkage)
        weight, governing = level / shrinkage, a.copy()
        for _ in range(2000):
            left, values, right = np.linalg.svd(governing, full_matrices=False)
            values = np.maximum(values - level, 0)
            estimate = left * values @ right
            dual = np.where(seen, governing - estimate, 0.0) / weight
            dual *= min(1.0, shrinkage / max(np.linalg.norm(dual, 2), 1e-300))
            best = max(best, float((dual * a).sum() - (dual**2).sum() / 2))
            value = (np.where(seen, a - estimate, 0.0) ** 2).sum() / 2 + shrinkage * values.sum()
            if value - best <= accuracy * value:
                return best
            other = 2 * estimate - governing
            governing += 1.6 * (np.where(seen, (other + weight * a) / (1 + weight), other) - estimate)
    raise AssertionError("the reference did not converge")


@given(
    seed=some.integers(0, 2**31),
    m=some.integers(2, 24),
    n=some.integers(2, 40),
    rank=some.integers(1, 8),
    p=some.floats(0.25, 1.0),
    noise=some.sampled_from([0.0, 0.02, 0.3]),
    magnitude=some.floats(-6, 6),
    fraction=some.floats(-6, 0),
    dtype=some.sampled_from([torch.float32, torch.float64]),
    compiled=some.booleans(),
)
@pytest.mark.slow
@settings(max_examples=60)
def test_the_minimum_is_reached_at_every_scale_and_shrinkage(
    seed, m, n, rank, p, noise, magnitude, fraction, dtype, compiled
):
    """λ from 1e-6 to 1 of its maximum, at which the estimate is zero."""
    x, mask = made(seed, m, n, rank, p, noise)
    x = (x * 10**magnitude).to(dtype).double()
    shrinkage = 10**fraction * float(torch.linalg.matrix_norm(x * mask, 2))
    bound = lower_bound(x, mask, shrinkage)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(kernels, "_available", lambda: False)
        for estimator, excess in (
            (estimators.NuclearNorm(mu=2 * shrinkage), 1.5e-3),
            (estimators.SoftImpute(shrinkage, restore_observed=False), 3e-4),
        ):
            # What a λ of 1e-6 asks for is smaller than the rounding of a result in single precision.
            rounding = float((x * mask).square().sum()) * torch.finfo(dtype).eps ** 2
            value = objective(estimator(x.to(dtype), mask), x, mask, shrinkage)
            assert value <= bound * (1 + excess) + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("magnitude", [1.0, 1e2, 1e5])
def test_a_small_shrinkage_recovers_a_matrix_of_low_rank(dtype: torch.dtype, magnitude: float) -> None:
    truth, mask = made(0, 60, 110, 3, 0.6, 0.0)
    estimate = estimators.nuclear_norm((truth * magnitude).to(dtype), mask, 0.01).double() / magnitude
    hidden = ~mask
    assert float((estimate - truth)[hidden].norm() / truth[hidden].norm()) < 5e-3


@pytest.mark.parametrize("name", ["soft-impute", "nuclear-norm", "tubal", "usvt"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_of_any_finite_size(name, compiled, magnitude, dtype, monkeypatch):
    if not compiled:
        monkeypatch.setattr(kernels, "_available", lambda: False)
    x, mask = made(1, 3 * 12, 20, 2, 0.7, 0.1)
    if name == "tubal":
        x, mask = x.reshape(3, 12, 20), mask.reshape(3, 12, 20)
    leaf = (x * magnitude).to(dtype).requires_grad_()
    parameters = {} if name in ("soft-impute", "usvt") else {"mu": 2 * magnitude}
    estimator = estimators.build(name, **parameters)
    estimate = estimator(leaf, mask)
    (gradient,) = torch.autograd.grad((estimate / magnitude).sum() * magnitude, leaf)
    plain = estimators.build(name, **({} if not parameters else {"mu": 2.0}))
    usual = x.to(dtype).requires_grad_()
    expected = plain(usual, mask)
    (other,) = torch.autograd.grad(expected.sum(), usual)
    torch.testing.assert_close(estimate / magnitude, expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(gradient, other, rtol=0, atol=0.1)


def test_a_default_mu_on_huge_entries_keeps_what_is_observed() -> None:
    x, mask = made(2, 24, 30, 2, 0.7, 0.0)
    huge = (x * 1e30).float()
    estimate = estimators.nuclear_norm(huge, mask)
    torch.testing.assert_close(estimate[mask] / 1e30, huge[mask] / 1e30, rtol=0, atol=1e-3)


def test_shrinking_by_the_vectors_of_a_matrix_nearby_is_exact_to_first_order(generator) -> None:
    """A tenth of the distance leaves a hundredth of the error; at the matrix itself there is none."""
    x, other = torch.randn(2, 3, 20, 12, generator=generator, dtype=torch.float64)
    threshold = torch.linalg.svdvals(x)[:, 5] * 0.99  # in the midst of the singular values, none of them at it
    vectors = linalg.decompose(x).vectors

    def error(distance: float) -> Tensor:
        moved = x + distance * other
        exact = linalg.shrink(linalg.decompose(moved), threshold)
        return torch.linalg.matrix_norm(linalg.shrink_nearby(moved, vectors, threshold) - exact)

    assert (error(0) < 1e-12).all()
    assert (error(1e-4) > 1e-12).all()
    assert (error(1e-5) < 0.02 * error(1e-4)).all()


def test_the_spectral_norm_of_any_finite_size() -> None:
    x = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.matrix_norm(x, 2)
    for magnitude in (1e30, 1e-30):
        torch.testing.assert_close(linalg.largest_singular_value(x * magnitude) / magnitude, expected)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_reaching_the_limit_is_warned_about(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(kernels, "_available", lambda: False)
    x, mask = made(3, 20, 30, 4, 0.5, 0.1)
    for call in (estimators.NuclearNorm(mu=1e-3, max_iter=5), estimators.NuclearNorm(mu=1e-3, max_iter=60).solve):
        with pytest.warns(ConvergenceWarning, match="1 of 1 matrices did not converge in"):
            call(x, mask)
    found = estimators.NuclearNorm(mu=1e-3).solve(x, mask)
    assert float(found.gap) < 1e-3
    assert int(found.iterations) < 1000


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_a_table_beyond_small_sizes_needs_few_iterations(compiled, monkeypatch):
    """By steps in a subspace, or from an estimate of low rank; a smooth image in the same batch as alone."""
    if not compiled:
        monkeypatch.setattr(kernels, "_available", lambda: False)
    x, mask = made(4, 110, 100, 3, 0.6, 0.1)
    wave = torch.sin(torch.arange(110)[:, None] / 9 + torch.arange(100) / 7).double()
    pair, both = torch.stack([x, wave]).float(), mask.expand(2, -1, -1)
    estimator = estimators.SoftImpute(1.0, restore_observed=False, tol=1e-2)
    found = estimator.solve(pair, both)
    assert int(found.iterations[0]) <= (20 if compiled else 6)
    assert (found.gap <= 2e-3).all()
    for index in range(2):
        alone = estimator.solve(pair[index], mask)
        assert int(alone.iterations) == int(found.iterations[index])
        torch.testing.assert_close(alone.estimate, found.estimate[index], rtol=0, atol=1e-4)


def test_steps_in_a_subspace_converge_or_say_that_they_did_not():
    x, mask = made(6, 130, 100, 4, 0.6, 0.1)
    x, mask = (x * mask).float()[None, None], mask[None, None]

    def steps(level: float) -> tuple[Tensor, ...]:
        return solver.low_rank(x, mask, torch.tensor([level]), 1e-2, 1000)

    estimate, taken, rank = steps(2.5)
    assert int(taken) > 0
    found = estimators.SoftImpute(2.5, restore_observed=False, tol=1e-6).solve(x[0, 0].double(), mask[0, 0])
    assert int(rank) == int(found.rank) == 4
    assert (estimate[0, 0] - found.estimate).norm() < 2e-2 * found.estimate.norm()
    # The subspace has at most 32 directions here, and a small λ leaves more.
    too_many = steps(0.3)
    assert int(too_many[1]) == int(too_many[2]) == 0
    rest = estimators.SoftImpute(0.3, restore_observed=False, tol=1e-2).solve(x[0, 0], mask[0, 0])
    assert int(rest.rank) > 32
    assert float(rest.gap) < 5e-3


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("x", ["zeros", "one row", "rank one", "constant"])
def test_degenerate_matrices_beyond_small_sizes(compiled, x, monkeypatch):
    """Where an estimate of low rank has no more than a few directions to find."""
    if not compiled:
        monkeypatch.setattr(kernels, "_available", lambda: False)
    random = torch.Generator().manual_seed(0)
    made_up = torch.zeros(1, 100, 120)
    if x == "one row":
        made_up[0, 3] = torch.randn(120, generator=random)
    elif x == "rank one":
        made_up[0] = torch.outer(torch.randn(100, generator=random), torch.randn(120, generator=random))
    elif x == "constant":
        made_up += 3
    mask = torch.rand(made_up.shape, generator=random) < 0.7
    estimate = estimators.nuclear_norm(made_up, mask, 0.1)
    assert estimate.isfinite().all()
    if x != "one row":
        assert (estimate - made_up).abs().max() < 0.1


def test_gradients_beyond_small_sizes() -> None:
    x, mask = made(5, 99, 98, 2, 0.7, 0.1)
    options = {"tol": 1e-9, "gradient_tol": 1e-9}
    for shrinkage in (3.0, None):
        assert torch.autograd.gradcheck(
            lambda x, level=shrinkage: estimators.soft_impute(x, mask, level, False, **options),
            x.requires_grad_(),
            atol=1e-4,
            fast_mode=True,
        )


def picture(rows: int = 130, columns: int = 100, kind: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A smooth image of high rank with a little noise, in [-1, 1], and a mask."""
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.linspace(0, 3, rows), torch.linspace(0, 3, columns), indexing="ij")
    waves = torch.sin(3 * y * x + y) * torch.cos((2 * x - y) ** 2)
    noisy = 0.8 * waves + 0.02 * torch.randn(rows, columns, generator=generator)
    return noisy.to(kind), torch.rand(rows, columns, generator=generator) < 0.6


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("mu", [0.2, 0.05, 0.01])
def test_large_images_are_split_to_the_same_minimum(mu, kind, monkeypatch):
    x, mask = picture(kind=kind)
    newton = estimators.NuclearNorm(mu).solve(x, mask)
    monkeypatch.setattr(splitting, "SMALLEST", 97)
    split = estimators.NuclearNorm(mu)
    found = split.solve(torch.stack([x, 2 * x.flip(0)]), torch.stack([mask, mask.flip(0)]))
    assert not torch.equal(found.estimate[0], newton.estimate)
    assert float(found.gap[0]) < 2e-3
    values = [objective(estimate, x, mask, mu / 2) for estimate in (found.estimate[0], newton.estimate)]
    assert values[0] < values[1] * (1 + 1e-4)
    assert torch.equal(split(x, mask), found.estimate[0])
    # One matrix is as good as one in a batch, and without a gradient as with one.
    assert torch.equal(split(x.clone().requires_grad_(), mask).detach(), found.estimate[0])


@pytest.mark.parametrize(("tol", "doubles"), [(0.02, False), (1e-5, True)])
def test_bright_images_take_double_precision_only_for_a_small_tolerance(tol, doubles, monkeypatch):
    # The brightness is one singular value far above all others, and the Gram matrix squares the ratio.
    monkeypatch.setattr(splitting, "SMALLEST", 97)
    used = []
    decompose = splitting._decompose
    monkeypatch.setattr(splitting, "_decompose", lambda x: used.append(x.dtype) or decompose(x))
    x, mask = picture()
    x = (x + 2).float()
    found = estimators.NuclearNorm(0.05, tol=tol).solve(x, mask)
    assert (torch.float64 in used) == doubles
    reference = estimators.NuclearNorm(0.05, tol=1e-6).solve(x.double(), mask)
    values = [objective(one.estimate, x, mask, 0.025) for one in (found, reference)]
    assert values[0] <= values[1] * (1 + 1e-4)


def test_gradients_of_large_images(monkeypatch):
    monkeypatch.setattr(splitting, "SMALLEST", 97)
    x, mask = picture()
    options = {"tol": 1e-10, "gradient_tol": 1e-10}
    for steps in (400, splitting.IMAGE_STEPS):
        # With the usual number of steps Newton's method finishes.
        monkeypatch.setattr(splitting, "IMAGE_STEPS", steps)
        assert torch.autograd.gradcheck(
            lambda x: estimators.nuclear_norm(x, mask, 0.2, **options),
            x.requires_grad_(),
            fast_mode=True,
            atol=1e-5,
        )


def test_large_images_without_shrinkage_or_with_few_steps(monkeypatch):
    x, mask = picture()
    kept = estimators.nuclear_norm(x, mask, 0.0)
    monkeypatch.setattr(splitting, "SMALLEST", 97)
    assert torch.equal(estimators.nuclear_norm(x, mask, 0.0), kept)
    with pytest.warns(ConvergenceWarning, match="1 of 1 matrices did not converge in 5 iterations"):
        assert estimators.nuclear_norm(x, mask, 0.2, max_iter=5).isfinite().all()
    assert not estimators.nuclear_norm(x, torch.zeros_like(mask), 0.2).any()

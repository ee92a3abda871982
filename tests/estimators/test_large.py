"""Completion by factors: the convex minimum with a certificate, sparse input, weights, effects, gradients."""

import warnings

import numpy as np
import pytest
import scipy.sparse
import torch

from menet import estimators
from menet.errors import ConfigurationError
from menet.estimators import large
from menet.estimators.base import ConvergenceWarning
from menet.estimators.entries import Completion, observed_entries
from menet.estimators.factored import factored
from menet.estimators.large import complete


def table(rows=40, columns=25, rank=3, p=0.6, noise=0.1, seed=0):
    """A noisy matrix of low rank with NaN at unobserved entries, and the truth."""
    random = np.random.default_rng(seed)
    truth = random.standard_normal((rows, rank)) @ random.standard_normal((rank, columns))
    noisy = truth + noise * random.standard_normal(truth.shape)
    return np.where(random.random(truth.shape) < p, noisy, np.nan), truth


def oracle(x, shrinkage, weights=None, effects="none", bounds=None):
    """The minimum and its estimate by a cone solver."""
    cvxpy = pytest.importorskip("cvxpy")
    seen = ~np.isnan(x)
    weights = np.ones(x.shape) if weights is None else weights
    low = cvxpy.Variable(x.shape)
    rows, columns = cvxpy.Variable((x.shape[0], 1)), cvxpy.Variable((1, x.shape[1]))
    model = low
    if effects in ("rows", "both"):
        model = model + rows @ np.ones((1, x.shape[1]))
    if effects in ("columns", "both"):
        model = model + np.ones((x.shape[0], 1)) @ columns
    misfit = cvxpy.multiply(np.sqrt(weights) * seen, model - np.where(seen, x, 0))
    limits = [] if bounds is None else [model >= bounds[0], model <= bounds[1]]
    goal = cvxpy.Problem(cvxpy.Minimize(0.5 * cvxpy.sum_squares(misfit) + shrinkage * cvxpy.normNuc(low)), limits)
    goal.solve(solver="SCS", eps=1e-7, max_iters=20_000)
    return goal.value, np.asarray(model.value)


@pytest.mark.parametrize("shrinkage", [20.0, 3.0, 0.3])
@pytest.mark.parametrize("turned", [False, True])
def test_reaches_the_minimum_of_the_dense_solver(shrinkage, turned):
    x, _ = table()
    x = x.T if turned else x
    found = complete(x, shrinkage=shrinkage, tol=1e-8)
    tensor = torch.from_numpy(x)
    dense = estimators.SoftImpute(shrinkage=shrinkage, restore_observed=False, tol=1e-7).solve(
        tensor, ~tensor.isnan()
    )
    assert found.gap <= 1e-8
    assert found.rank == int(dense.rank)
    assert np.abs(found.dense() - dense.estimate.numpy()).max() < 1e-4


@pytest.mark.parametrize("effects", ["none", "rows", "columns", "both"])
@pytest.mark.parametrize("weighted", [False, True])
def test_weights_and_effects_against_a_cone_solver(effects, weighted):
    x, _ = table(12, 9, rank=2, p=0.8)
    x = x + np.arange(12)[:, None] - 3 * np.arange(9)
    weights = np.random.default_rng(1).random(x.shape) + 0.1 if weighted else None
    found = complete(x, shrinkage=1.5, weights=weights, effects=effects, tol=1e-7)
    value, estimate = oracle(x, 1.5, weights, effects)
    assert found.gap <= 1e-7
    assert found.objective == pytest.approx(value, rel=1e-4)
    assert np.abs(found.dense() - estimate).max() < 2e-2


def test_effects_are_not_shrunk():
    x = 100 + np.arange(20.0)[:, None] + 10 * np.arange(8.0)
    x[3, 4] = x[0, 7] = np.nan
    found = complete(x, shrinkage=5.0, effects="both")
    assert found.rank == 0
    assert found.dense()[3, 4] == pytest.approx(143)
    assert found.dense()[0, 7] == pytest.approx(170)


def test_sparse_input_is_the_dense_one():
    x, _ = table()
    x[0, 0] = 0.0
    rows, columns = np.nonzero(~np.isnan(x))
    sparse = scipy.sparse.coo_array((x[rows, columns], (rows, columns)), shape=x.shape)
    dense = complete(x, shrinkage=3.0)
    torches = torch.sparse_coo_tensor(np.stack([rows, columns]), torch.from_numpy(sparse.data), x.shape)
    for given in (sparse, sparse.tocsr(), sparse.tocsc(), torches, torches.coalesce().to_sparse_csr()):
        found = complete(given, shrinkage=3.0)
        assert found.gap <= 1e-3
        assert np.abs(found.dense() - dense.dense()).max() < 1e-6
    assert np.allclose(dense.at(rows, columns), dense.dense()[rows, columns])


def test_a_wide_sparse_problem_is_certified_without_densifying():
    random = np.random.default_rng(0)
    left, right = random.standard_normal((3000, 3)), random.standard_normal((400, 3))
    rows, columns = np.divmod(random.choice(3000 * 400, 60_000, replace=False), 400)
    values = np.einsum("ek,ek->e", left[rows], right[columns]) + 0.1 * random.standard_normal(60_000)
    x = scipy.sparse.coo_array((values, (rows, columns)), shape=(3000, 400))
    found = complete(x, shrinkage=8.0)
    assert found.gap <= 1e-3
    assert found.rank < 20
    rows, columns = random.integers(3000, size=5000), random.integers(400, size=5000)
    truth = np.einsum("ek,ek->e", left[rows], right[columns])
    assert np.sqrt(np.mean((found.at(rows, columns) - truth) ** 2)) < 0.5
    # The certificate is not taken on trust: the residual has no singular value beyond λ.
    residual = scipy.sparse.coo_array((values - found.at(*x.coords), x.coords), shape=x.shape)
    norm = np.linalg.norm(residual.toarray(), 2)
    assert norm <= 8.0 * 1.01


def test_limit_on_the_rank_and_bounds():
    x, _ = table(noise=0.3)
    free = complete(x, shrinkage=0.5)
    found = complete(x, shrinkage=0.5, rank=3, bounds=(-1.0, 1.5))
    assert free.rank > 3
    assert found.rank == 3
    assert found.gap > free.gap
    assert found.dense().min() >= -1.0
    assert found.dense().max() <= 1.5


def test_rows_of_the_completion_are_projections():
    x, _ = table()
    found = complete(x, shrinkage=2.0, effects="both", tol=1e-9)
    again = found.project(x)
    assert np.abs(again.dense() - found.dense()).max() < 1e-3
    with pytest.raises(ConfigurationError, match="expected rows of 25 columns, got 24"):
        found.project(x[:, 1:])


def test_a_start_saves_sweeps_and_changes_nothing():
    x, _ = table(100, 80)
    far = complete(x, shrinkage=4.0)
    cold, warm = complete(x, shrinkage=3.0, tol=1e-7), complete(x, shrinkage=3.0, tol=1e-7, start=far)
    assert warm.gap <= 1e-7
    assert np.abs(cold.dense() - warm.dense()).max() < 1e-3
    assert complete(x, shrinkage=3.0, start=cold).sweeps == 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("effects", ["none", "rows", "columns", "both"])
def test_one_pass_over_a_tall_matrix_is_a_sweep(effects, weighted):
    random = np.random.default_rng(0)
    x, _ = table(60, 7)
    x[3], x[:, 2] = np.nan, np.nan
    entries = observed_entries(x, weights=random.random(x.shape) if weighted else None)
    solver = large._Solver(entries, effects, None, 1e-3, 10)
    solver.shrinkage = 0.7
    sides = [random.standard_normal((side, 3)) for side in x.shape]
    given = solver.assemble(*sides, *(random.standard_normal(side) for side in x.shape))
    left, right = (part.copy() for part in given)
    minimum = solver.solve(entries, left, right, solver.free_left)
    solver.solve(solver.across, right, left, solver.free_right)
    assert solver.alternate_at_once(*given) == pytest.approx(minimum, rel=1e-12)
    assert np.abs(given[0] - left).max() < 1e-10
    assert np.abs(given[1] - right).max() < 1e-10


def test_gram_matrix_of_the_residual():
    x, _ = table(60, 7)
    solver = large._Solver(observed_entries(x), "none", None, 1e-3, 10)
    solver.residuals[:] = solver.entries.values
    filled = np.nan_to_num(x)
    assert np.allclose(solver.gram(), filled.T @ filled, atol=1e-12)


def test_a_tall_matrix_in_single_precision_without_a_warning():
    x, truth = table(3000, 40, rank=2)
    sparse = scipy.sparse.csr_array(np.nan_to_num(x).astype(np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = complete(sparse, shrinkage=8.0)
    assert found.gap <= 1e-3
    assert found.rank == 2
    assert found.sweeps < 20
    assert np.sqrt(np.mean((found.dense() - truth) ** 2)) < 0.2


def test_gradients():
    x, _ = table(12, 9, rank=2)
    mask = torch.from_numpy(~np.isnan(x))
    tensor = torch.from_numpy(np.nan_to_num(x)).requires_grad_()
    options = {"tol": 1e-13, "gradient_tol": 1e-9, "max_iter": 2000}
    for shrinkage in (2.0, None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            # With the default λ a singular value is barely left, and the solver is not precise enough for
            # differences over 1e-6, the default.
            check = torch.autograd.gradcheck(
                lambda x, level=shrinkage: factored(x, mask, level, **options),
                tensor,
                # The default λ is so small here that the minimizer is found to about 1e-8.
                eps=1e-4,
                atol=3e-4,
                fast_mode=True,
            )
        assert check


def test_gradients_are_those_of_the_dense_solver():
    x, _ = table(60, 40)
    mask = torch.from_numpy(~np.isnan(x))
    outgoing = torch.from_numpy(np.random.default_rng(2).standard_normal(x.shape))
    gradients = []
    for function in (factored, lambda x, mask, level, **o: estimators.soft_impute(x, mask, level, False, **o)):
        tensor = torch.from_numpy(np.nan_to_num(x)).requires_grad_()
        (gradient,) = torch.autograd.grad(function(tensor, mask, 2.0, tol=1e-9), tensor, outgoing)
        gradients.append(gradient)
    assert (gradients[0] - gradients[1]).norm() < 1e-3 * gradients[1].norm()


def test_empty_rows_constant_columns_and_thin_matrices_are_finite():
    x, _ = table()
    x[:, 4], x[:, 5], x[3] = np.nan, 7.0, np.nan
    for effects in ("none", "both"):
        found = complete(x, shrinkage=1.0, effects=effects)
        assert np.isfinite(found.dense()).all()
    assert np.abs(complete(x, shrinkage=1.0).dense()[3]).max() < 1e-12
    for shape in ((1, 1), (1, 6), (6, 1)):
        assert np.isfinite(complete(np.ones(shape), shrinkage=0.1).dense()).all()
    nothing = complete(np.full((4, 3), np.nan), shrinkage=1.0)
    assert (nothing.dense() == 0).all()
    assert nothing.gap == 0
    assert complete(np.ones((4, 3)), shrinkage=1e9).rank == 0


def test_bad_input_is_named(without_annotation_checks):
    x, _ = table(6, 5)
    twice = scipy.sparse.coo_array(([1.0, 2.0], ([0, 0], [1, 1])), shape=(3, 3))
    outside = scipy.sparse.csr_array(np.eye(3))
    outside.indices = outside.indices + 7
    backwards = scipy.sparse.csr_array(np.eye(3))
    backwards.indptr = backwards.indptr[::-1].copy()
    for make, named in (
        (lambda: complete(outside), "a valid sparse matrix, got one with bad indices"),
        (lambda: complete(backwards), "a valid sparse matrix, got one with bad indices"),
        (lambda: complete(twice), "each entry once, got a sparse matrix with 1 duplicates"),
        (lambda: complete(x, np.ones((5, 6), bool)), r"expected a mask of shape \(6, 5\), got \(5, 6\)"),
        (lambda: complete(x, shrinkage=0), "expected a finite shrinkage > 0, got 0"),
        (lambda: complete(x, weights=-np.ones(x.shape)), r"expected finite weights >= 0, got -1.0"),
        (lambda: complete(x, weights=np.ones(3)), r"expected weights of shape \(6, 5\), got \(3,\)"),
        (lambda: complete(np.where(np.isnan(x), np.inf, x)), "expected finite values at observed entries"),
        (lambda: complete(1e300 * x), "expected values of at most 1e"),
        (lambda: complete(x, rank=0), "expected rank >= 1, got 0"),
        (lambda: complete(x, bounds=(1, 0)), "expected bounds"),
        (lambda: complete(np.ones(3)), r"expected a matrix .*, got shape \(3,\)"),
        (
            lambda: complete(scipy.sparse.csr_array((3, 3)), np.ones((3, 3), bool)),
            "expected no mask with a sparse",
        ),
    ):
        with pytest.raises(ConfigurationError, match=named):
            make()
    with pytest.raises(TypeError, match="expected x to hold real numbers, got <U1"):
        complete(np.array([["a", "b"]]))
    with pytest.raises(TypeError, match="expected a mask of booleans"):
        complete(x, np.ones(x.shape))
    with pytest.warns(ConvergenceWarning, match="did not converge in 1 sweeps"):
        complete(x, shrinkage=1e-3, max_iter=1, tol=1e-9)


def test_entries_of_weight_zero_are_unobserved():
    x, _ = table()
    weights = (np.random.default_rng(3).random(x.shape) < 0.8).astype(float)
    hidden = np.where(weights > 0, x, np.nan)
    assert len(observed_entries(x, weights=weights).values) == np.isfinite(hidden).sum()
    one, other = complete(x, shrinkage=2.0, weights=weights), complete(hidden, shrinkage=2.0)
    assert isinstance(one, Completion)
    assert np.abs(one.dense() - other.dense()).max() < 1e-2

"""The λ path, the choice of λ by held-out entries, and bounds on the estimate."""

import numpy as np
import pytest
import torch
from test_large import oracle, table

from menet import estimators, kernels, masks
from menet.errors import ConfigurationError
from menet.estimators.path import cross_validate, cross_validate_large, path, path_large
from menet.estimators.splitting import constrained


def batch(count=3, rows=24, columns=16, noise=0.1):
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(count, side, 2, generator=random, dtype=torch.float64) for side in (rows, columns))
    truth = left @ right.mT
    noisy = truth + noise * torch.randn(truth.shape, generator=random, dtype=torch.float64)
    return noisy, masks.bernoulli(truth.shape, 0.7, random), truth


@pytest.mark.parametrize("turned", [False, True])
def test_each_point_of_the_path_is_a_cold_solution(turned):
    x, mask, _ = batch()
    if turned:
        x, mask = x.mT, mask.mT
    found = path(x, mask, count=6, tol=1e-7)
    assert found.estimates.shape == (3, 6, *x.shape[1:])
    assert (found.estimates[:, 0] == 0).all()
    assert (found.ranks[:, 0] == 0).all()
    assert (found.ranks.diff(dim=1) >= 0).float().mean() > 0.5
    for index in range(3):
        for place in (1, 3, 5):
            level = float(found.lambdas[index, place])
            cold = estimators.SoftImpute(level, restore_observed=False, tol=1e-7).solve(x[index], mask[index])
            assert (found.estimates[index, place] - cold.estimate).abs().max() < 1e-4
            assert int(found.ranks[index, place]) == int(cold.rank)


def test_a_warm_subspace_reaches_the_minimum_at_every_lambda():
    # From rank one to beyond what a subspace holds at this size, so that Newton's method takes over.
    x, mask, _ = batch(3, 120, 100, noise=0.3)
    found = path(x, mask, count=12, smallest=0.02, tol=1e-3)
    assert found.ranks[0, 1] < 4
    assert found.ranks[0, -1] > 32
    for place in (2, 5, 8, 11):
        for index in range(3):
            level = float(found.lambdas[index, place])
            cold = estimators.SoftImpute(level, restore_observed=False, tol=1e-4).solve(x[index], mask[index])
            difference = (found.estimates[index, place] - cold.estimate).norm() / cold.estimate.norm()
            assert difference < 5e-3
            assert abs(int(found.ranks[index, place]) - int(cold.rank)) <= 2


def test_folds_beyond_small_sizes_with_and_without_compiled_loops(monkeypatch):
    x, mask, _ = batch(1, 120, 100, noise=0.3)
    ours = cross_validate(x, mask, generator=torch.Generator().manual_seed(0))
    exact = cross_validate(x, mask, generator=torch.Generator().manual_seed(0), tol=1e-4)
    monkeypatch.setattr(kernels, "suit", lambda *_: False)
    torches = cross_validate(x, mask, generator=torch.Generator().manual_seed(0))
    for found in (ours, torches):
        torch.testing.assert_close(found.errors, exact.errors, rtol=0.03, atol=0)
        assert torch.equal(found.best, exact.best)


def test_given_lambdas_are_sorted_and_may_differ_by_matrix():
    x, mask, _ = batch()
    found = path(x, mask, [0.5, 3.0])
    assert found.lambdas.tolist() == [[3.0, 0.5]] * 3
    each = path(x, mask, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert each.lambdas[2].tolist() == [6.0, 5.0]
    with pytest.raises(ConfigurationError, match="expected finite lambdas > 0"):
        path(x, mask, [0.0, 1.0])
    with pytest.raises(ConfigurationError, match="expected lambdas of shape"):
        path(x, mask, torch.ones(2, 4))


def test_the_chosen_lambda_is_close_to_the_best():
    x, mask, truth = batch(4, 40, 30, noise=0.5)
    chosen = cross_validate(x, mask, generator=torch.Generator().manual_seed(1), count=10)
    assert chosen.errors.shape == (4, 10)
    found = path(x, mask, chosen.lambdas)
    hidden = (~mask)[:, None]
    errors = ((found.estimates - truth[:, None]).square() * hidden).sum((2, 3)) / hidden.sum((2, 3))
    at_choice = errors.gather(1, (chosen.lambdas == chosen.best[:, None]).int().argmax(1, keepdim=True))[:, 0]
    assert (at_choice <= 1.25 * errors.amin(1)).all()
    assert (chosen.simplest >= chosen.best).all()
    one = cross_validate(x, mask, generator=torch.Generator().manual_seed(1), count=10, shared=True)
    assert one.best.shape == ()
    assert one.errors.shape == (10,)


def test_looser_folds_make_the_same_choice():
    x, mask, _ = batch(2, 40, 30, noise=0.5)
    loose, tight = (
        cross_validate(x, mask, generator=torch.Generator().manual_seed(2), count=10, **options)
        for options in ({}, {"tol": 1e-4})
    )
    assert (loose.best == tight.best).all()
    torch.testing.assert_close(loose.errors, tight.errors, rtol=0.05, atol=0)


def test_folds_hold_out_every_entry_once_and_repeat_with_the_seed():
    x, mask, _ = batch(1)
    runs = [
        cross_validate(x, mask, [1.0, 2.0], generator=torch.Generator().manual_seed(3)).errors for _ in range(2)
    ]
    assert torch.equal(*runs)
    # With a λ that gives zero, the pooled error is that of zero over all observed entries.
    zero = cross_validate(x, mask, [1e6, 2e6], generator=torch.Generator().manual_seed(3)).errors
    assert zero[0, 0].item() == pytest.approx(x[mask].square().mean().sqrt().item())
    with pytest.raises(ConfigurationError, match="expected folds <= the number of observed entries"):
        cross_validate(x, mask, generator=torch.Generator(), folds=1000)
    with pytest.raises(ConfigurationError, match="expected folds >= 2, got 1"):
        cross_validate(x, mask, generator=torch.Generator(), folds=1)


def test_large_path_and_choice_agree_with_the_dense_ones():
    x, _ = table(40, 30, noise=0.5)
    tensor = torch.from_numpy(x)
    levels = [20.0, 8.0, 3.0]
    dense = path(tensor, ~tensor.isnan(), levels, tol=1e-6)
    for index, found in enumerate(path_large(x, levels, tol=1e-6)):
        assert np.abs(found.dense() - dense.estimates[index].numpy()).max() < 1e-2
    chosen = cross_validate_large(x, generator=torch.Generator().manual_seed(0), count=6)
    assert chosen.errors.shape == (6,)
    assert float(chosen.best) in chosen.lambdas.tolist()
    with pytest.raises(ConfigurationError, match="expected folds <="):
        cross_validate_large(np.ones((1, 2)), generator=torch.Generator(), folds=3)


@pytest.mark.parametrize("effects", ["none", "rows", "columns", "both"])
@pytest.mark.parametrize("turned", [False, True])
def test_bounds_against_a_cone_solver(effects, turned):
    x, _ = table(10, 8, rank=2, p=0.7)
    x = (x + 2 + np.arange(10)[:, None] / 5).T if turned else x + 2 + np.arange(10)[:, None] / 5
    tensor = torch.from_numpy(x)
    weights = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.2
    found = constrained(
        tensor, ~tensor.isnan(), 0.7, bounds=(1.0, 3.0), weights=weights, effects=effects, tol=1e-5
    )
    value, estimate = oracle(x, 0.7, weights.numpy(), effects, (1.0, 3.0))
    assert float(found.gap) <= 1e-5
    assert found.estimate.min() >= 1.0
    assert found.estimate.max() <= 3.0
    assert np.abs(found.estimate.numpy() - estimate).max() < 3e-2
    assert value > 0


def test_bounds_that_do_not_bind_change_nothing_in_a_batch():
    x, mask, _ = batch()
    free = estimators.soft_impute(x, mask, 1.0, False, tol=1e-6)
    found = constrained(x, mask, 1.0, bounds=(-100.0, 100.0), tol=1e-6)
    assert (found.estimate - free).abs().max() < 1e-2
    assert (found.gap <= 1e-6).all()


def test_bad_constraints_are_named(without_annotation_checks):
    x, mask, _ = batch(1)
    for bounds in ((0.0, float("inf")), (1.0, 0.0)):
        with pytest.raises(ConfigurationError, match="expected finite bounds"):
            constrained(x, mask, bounds=bounds)
    with pytest.raises(ConfigurationError, match="expected finite weights >= 0"):
        constrained(x, mask, bounds=(0.0, 1.0), weights=-torch.ones_like(x))
    with pytest.raises(ConfigurationError, match="expected weights that broadcast"):
        constrained(x, mask, bounds=(0.0, 1.0), weights=torch.ones(7))
    with pytest.raises(ConfigurationError, match="unknown effects"):
        constrained(x, mask, bounds=(0.0, 1.0), effects="all")

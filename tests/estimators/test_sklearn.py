"""The imputers keep scikit-learn's contract, and complete tables in their own units."""

import pickle

import numpy as np
import pytest
from test_large import table

pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'menet[sklearn]'")

from sklearn.base import clone
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from menet.errors import ConfigurationError
from menet.estimators.sklearn import NuclearNormImputer, SoftImputer, USVTImputer

IMPUTERS = [SoftImputer(), NuclearNormImputer(), USVTImputer()]
every = pytest.mark.parametrize("imputer", IMPUTERS, ids=lambda imputer: type(imputer).__name__)


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(IMPUTERS)
def test_contract_of_scikit_learn(estimator, check, without_annotation_checks):
    check(estimator)


def scaled_table(**options):
    """A table whose columns have very different units."""
    x, truth = table(80, 12, **options)
    units, offsets = 10.0 ** np.arange(-3, 9)[: x.shape[1]], 5 * 10.0 ** np.arange(-3, 9)
    return x * units + offsets, truth * units + offsets, units


@every
def test_fills_in_the_tables_own_units(imputer):
    x, truth, units = scaled_table(p=0.8)
    found = clone(imputer).fit_transform(x)
    missing = np.isnan(x)
    assert np.array_equal(found[~missing], x[~missing])
    error = np.sqrt(np.mean(((found - truth) / units)[missing] ** 2))
    mean = np.sqrt(np.mean(((SimpleImputer().fit_transform(x) - truth) / units)[missing] ** 2))
    assert error < 0.8 * mean


@every
def test_new_rows_are_projected_on_what_was_learned(imputer):
    x, truth, units = scaled_table(p=0.8)
    fitted = clone(imputer).fit(x[:60])
    found, missing = fitted.transform(x[60:]), np.isnan(x[60:])
    error = np.sqrt(np.mean(((found - truth[60:]) / units)[missing] ** 2))
    mean = np.sqrt(np.mean(((SimpleImputer().fit(x[:60]).transform(x[60:]) - truth[60:]) / units)[missing] ** 2))
    assert error < mean
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).transform(x[60:]), found)
    # One row at a time is the same.
    assert np.allclose(fitted.transform(x[60:61]), found[:1])


@every
def test_feature_names_and_frames(imputer):
    pandas = pytest.importorskip("pandas")
    x, _, _ = scaled_table()
    frame = pandas.DataFrame(x, columns=[f"c{i}" for i in range(x.shape[1])])
    found = clone(imputer).set_output(transform="pandas").fit_transform(frame)
    assert list(found.columns) == list(frame.columns)
    assert not found.isna().any().any()


@every
def test_in_a_pipeline(imputer):
    x, truth, _ = scaled_table()
    model = make_pipeline(clone(imputer), LinearRegression()).fit(x, truth[:, 0])
    assert np.isfinite(model.predict(x)).all()


def test_in_a_grid_search_and_by_cross_validation():
    x, _, _ = scaled_table(noise=0.5)
    search = GridSearchCV(SoftImputer(), {"shrinkage": [1e3, 1.0]}, cv=2).fit(x)
    assert search.best_params_["shrinkage"] == 1.0
    chosen = SoftImputer("cv").fit(x)
    assert 0.1 < chosen.shrinkage_ < 30
    assert chosen.cross_validation_.errors.shape == (20,)


def test_mu_is_twice_the_shrinkage():
    x, _, _ = scaled_table()
    one, other = SoftImputer(1.5, tol=1e-8).fit_transform(x), NuclearNormImputer(3.0, tol=1e-8).fit_transform(x)
    assert np.allclose(one, other)
    estimate = SoftImputer(1.5, restore_observed=False).fit_transform(x)
    assert not np.allclose(estimate[~np.isnan(x)], x[~np.isnan(x)])


def test_bounds_hold_for_every_estimate():
    x, truth = table(60, 10, noise=0.3)
    ratings = np.clip(np.round(3 + x), 1, 5)
    for imputer in (SoftImputer(1.0, bounds=(1, 5)), NuclearNormImputer(2.0, bounds=(1, 5), effects="both")):
        found = imputer.set_params(restore_observed=False).fit_transform(ratings)
        assert found.min() >= 1
        assert found.max() <= 5
        hidden = np.isnan(ratings)
        assert np.mean((found - np.clip(3 + truth, 1, 5))[hidden] ** 2) < 0.8


CASES = ["empty row", "empty column", "constant column", "one row", "one column", "nothing"]


@every
@pytest.mark.parametrize("case", CASES)
def test_degenerate_tables_are_finite(imputer, case):
    x, _ = table(20, 6)
    if case == "empty row":
        x[3] = np.nan
    elif case == "empty column":
        x[:, 2] = np.nan
    elif case == "constant column":
        x[:, 2] = 0.1
    x = {"one row": x[:1], "one column": x[:, :1], "nothing": np.full((4, 3), np.nan)}.get(case, x)
    found = clone(imputer).fit_transform(x)
    assert found.shape == x.shape
    assert np.isfinite(found).all()
    if case == "empty column":
        assert (np.abs(found[:, 2]) < 1e-9).all()


@every
def test_bad_tables_are_refused(imputer):
    with pytest.raises(ConfigurationError, match="expected finite values or NaN, got infinity"):
        clone(imputer).fit(np.array([[1.0, np.inf], [2.0, 3.0]]))
    with pytest.raises(ValueError, match="could not convert string to float"):
        clone(imputer).fit(np.array([["a", "b"], ["c", "d"]]))


def test_bad_parameters_are_named(without_annotation_checks):
    x, _ = table(6, 5)
    with pytest.raises(ConfigurationError, match="expected shrinkage to be a number, None or 'cv', got 'auto'"):
        SoftImputer("auto").fit(x)
    with pytest.raises(ConfigurationError, match="expected a finite shrinkage > 0, got 0"):
        SoftImputer(0).fit(x)
    with pytest.raises(ConfigurationError, match="expected keep in"):
        USVTImputer(keep=2.0).fit(x)

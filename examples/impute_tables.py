"""Fill in real tables and photographs with entries removed, beside scikit-learn's own imputers."""

import time

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_sample_images, load_wine
from sklearn.impute import KNNImputer, SimpleImputer

from menet.estimators import complete
from menet.estimators.sklearn import SoftImputer

MISSING = 0.3


def main() -> None:
    random = np.random.default_rng(0)
    photograph = load_sample_images().images[0][::4, ::4].mean(-1)
    tables = {
        "breast cancer": load_breast_cancer().data,
        "wine": load_wine().data,
        "diabetes": load_diabetes().data,
        "digits": load_digits().data[:500],
        "photograph": photograph,
    }
    methods = {
        "column mean": SimpleImputer(keep_empty_features=True),
        "5 neighbors": KNNImputer(keep_empty_features=True),
        "SoftImputer": SoftImputer("cv"),
    }
    print(f"{MISSING:.0%} of the entries removed; error there in units of each column's deviation, and seconds")
    print(f"{'':<14}" + "".join(f"{name:>20}" for name in methods) + f"{'within 90 % band':>20}")
    for name, data in tables.items():
        data = data[:, data.std(0) > 0]
        hidden = random.random(data.shape) < MISSING
        table = np.where(hidden, np.nan, data)
        line = f"{name:<14}"
        for imputer in methods.values():
            start = time.perf_counter()
            found = imputer.fit_transform(table)
            seconds = time.perf_counter() - start
            error = np.sqrt(np.mean(((found - data) / data.std(0))[hidden] ** 2))
            line += f"{error:>11.3f} {seconds:>6.2f} s"
        # Held-out entries tell how wide a 90 % band must be; the removed ones how many it covers.
        held = ~hidden & (random.random(data.shape) < 0.1)
        scaled = (table - np.nanmean(table, 0)) / np.nanstd(table, 0)
        completion = complete(np.where(held, np.nan, scaled), shrinkage=methods["SoftImputer"].shrinkage_)
        width = np.quantile(np.abs(completion.dense() - scaled)[held], 0.9)
        truth = (data - np.nanmean(table, 0)) / np.nanstd(table, 0)
        covered = np.mean(np.abs(completion.dense() - truth)[hidden] <= width)
        print(f"{line}{covered:>20.1%}")


if __name__ == "__main__":
    main()

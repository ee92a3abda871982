"""How a network separates classes: t-SNE, and distances within and between them (the paper's figures 4, 5)."""

from collections.abc import Sequence

import numpy as np

from menet.errors import require
from menet.evaluation.snapshots import Features
from menet.report.figures import FAINT, Figure, PercentFormatter, color, legend, plain, sheet, styled

CLASS_COLORS = (
    "#2f6db3", "#c8473f", "#2c8a5f", "#a2609f", "#c27c1a", "#4a9aa8", "#8a7a5a", "#5b5fc7", "#d97fa5", "#6b7682",
)  # fmt: skip
MOST = 600
"""Examples in a figure; distances are of all pairs."""


def t_sne(named: Sequence[tuple[str, Features]], seed: int = 0) -> Figure:
    """t-SNE of the features, one row per model: clean images left, adversarial ones right."""
    from threadpoolctl import threadpool_limits

    TSNE = require("sklearn.manifold", extra="demo").TSNE
    with styled():
        figure = sheet(4.8, 2.5 * len(named) + 0.4)
        places = figure.subplots(len(named), 2, squeeze=False)
        classes: set[int] = set()
        for row, (name, features) in enumerate(named):
            labels = features.labels[:MOST]
            classes |= set(labels.tolist())
            for column, kind in enumerate(("clean", "adversarial")):
                vectors = getattr(features, kind)[:MOST].astype(np.float64)
                perplexity = min(30.0, max(2.0, (len(vectors) - 1) / 3))
                tool = TSNE(perplexity=perplexity, init="pca", random_state=seed, max_iter=500, n_jobs=1)
                # For so few points threads cost more than they bring, and they wait by spinning.
                with threadpool_limits(1):
                    spots = tool.fit_transform(vectors)
                place = places[row, column]
                place.scatter(*spots.T, s=9, c=[_class_color(label) for label in labels.tolist()], linewidths=0)
                place.set_title(f"{plain(name)}\n{kind}", fontsize=10)
                place.set_xticks([])
                place.set_yticks([])
        handles = [places[0, 0].scatter([], [], s=24, c=_class_color(label)) for label in sorted(classes)[:10]]
        names = [str(label) for label in sorted(classes)[:10]]
        figure.legend(handles, names, loc="outside upper left", ncols=10, columnspacing=0.7, handletextpad=0.05)
    return figure


def distances(named: Sequence[tuple[str, Features]]) -> Figure:
    """Empirical CDFs of distances between features: within a class solid, between classes dashed.

    Each network has its own scale, so distances are in units of its mean distance between clean images of
    different classes; compare how far the two curves of a network lie apart.
    """
    with styled():
        figure = sheet(4.8, 4.6)
        places = figure.subplots(2, 1, sharex=True)
        for place, kind in zip(places, ("clean", "adversarial"), strict=True):
            for position, (name, features) in enumerate(named):
                unit = _pairs(features.clean[:MOST], features.labels[:MOST])[1].mean() or 1.0
                within, between = _pairs(getattr(features, kind)[:MOST], features.labels[:MOST])
                for values, line, word in ((within, "-", "same class"), (between, "--", "other class")):
                    if len(values):
                        at = np.quantile(values / unit, np.linspace(0, 1, 200))
                        place.plot(
                            at, np.linspace(0, 1, 200), line, color=color(position), label=f"{name}, {word}"
                        )
            place.set_title(f"{kind} images")
            place.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            place.set_ylabel("fraction of pairs")
            place.set_xlim(left=0)
        places[1].set_xlabel("distance / mean distance between classes, clean")
        legend(figure, places[0])
    return figure


def _pairs(vectors: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances of all pairs of one class, and of all pairs of two classes."""
    from scipy.spatial.distance import pdist

    same = np.equal.outer(labels, labels)[np.triu_indices(len(labels), 1)]
    apart = pdist(vectors.astype(np.float64))
    return apart[same], apart[~same]


def _class_color(label: int) -> str:
    return CLASS_COLORS[label % len(CLASS_COLORS)] if label >= 0 else FAINT

"""Planted records of one attack on one model."""

import numpy as np

from menet.evaluation.records import FORMAT as RECORDS
from menet.evaluation.records import Records

CLASSES, DRAWS = 12, 7


def scores(random: np.random.Generator, label: int) -> dict:
    ranks = random.integers(0, CLASSES, DRAWS) * random.integers(0, 2, DRAWS)
    predictions = [label if rank == 0 else int((label + 1 + rank) % CLASSES) for rank in ranks]
    predictions = [one if one != label or rank == 0 else (label + 1) % CLASSES
                   for one, rank in zip(predictions, ranks, strict=True)]  # fmt: skip
    rank = int(random.integers(0, CLASSES))
    mean = {"prediction": label if rank == 0 else (label + 1) % CLASSES, "rank": rank, "probability": 0.25}
    return {"predictions": predictions, "ranks": ranks.tolist(), "mean": mean}


def records(seed: int = 0, label: str = "pgd", count: int = 9, epsilon: float = 0.1) -> Records:
    random = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        true = int(random.integers(0, CLASSES))
        rows.append(
            {
                "index": index,
                "label": true,
                "clean": scores(random, true),
                "adversarial": scores(random, true),
                "perturbation": {"linf": 0.125, "l2": 1.5, "l0": 40},
                "queries": int(random.integers(1, 10**6)),
                "gradients": 400,
                "member": ["exact", "bpda"][index % 2],
                "restarts": random.integers(0, 3, 4).tolist(),
                "image": f"{int(random.integers(2**62)):016x}",
                "failed": bool(index % 3 == 0),
                "unusable_gradients": False,
                "seconds": 0.5,
                "seeds": {"attack": 2**62 + index, "scoring": 5, "clean": 7},
            }
        )
    evaluation = {
        "label": label,
        "start": 0,
        "stop": count,
        "model": {"kind": "MENet", "architecture": {"name": "lenet"}, "defense": {"name": "me-net"}},
        "dataset": {
            "name": "mnist",
            "split": "test",
            "classes": CLASSES,
            "class_names": [str(number) for number in range(CLASSES)],
            "shape": [1, 2, 2],
        },
        "attack": {"kind": "PGD", "steps": 40, "eot": 10},
        "gradient": "exact",
        "fixed_draws": None,
        "threat": {"norm": "linf", "epsilon": epsilon, "low": 0.0, "high": 1.0},
        "scoring": {"draws": DRAWS, "restart_draws": 2, "max_batch": 512},
        "seed": 3,
    }
    header = {"format": RECORDS, "evaluation": evaluation, "made": {"python": "3.12", "versions": {"torch": "2"}}}
    return Records(header, tuple(rows))


def certificate(seed: int = 0, count: int = 9, partitions: int | None = None) -> Records:
    """Planted certificates, by random masks or by partitions."""
    random, rows = np.random.default_rng(seed), []
    for index in range(count):
        counts = random.integers(0, 30, CLASSES)
        rows.append(
            {
                "index": index,
                "label": int(random.integers(0, CLASSES)),
                "prediction": int(counts.argmax()),
                "votes": int(counts.max()),
                "counts": counts.tolist(),
                "lower_bound": float(random.random()),
                "runner_up": float(random.random()),
                "radius": int(random.integers(-1, 12)),
                "seconds": 0.25,
                **({"patch": 2} if partitions else {"seeds": {"selection": 2**60 + index, "estimation": 3}}),
            }
        )
    planted = records(count=count).header
    evaluation = {
        **{name: planted["evaluation"][name] for name in ("model", "dataset", "start", "stop", "seed")},
        "label": "certificate", "p": 0.04, "alpha": 0.001, "partitions": partitions,
        **({"cells": 25} if partitions else {}),
    }  # fmt: skip
    return Records({**planted, "evaluation": evaluation}, tuple(rows))

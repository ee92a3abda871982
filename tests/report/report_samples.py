"""Records written by hand, with numbers that a report must show."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from menet.evaluation import jsonl
from menet.evaluation.records import FORMAT, shard_path
from menet.evaluation.snapshots import Features, pack, save_features

EXAMPLES, MASKS = 40, 8
HOSTILE = "<script>alert('x')</script> & \"co\""
MADE = {
    "source": "by hand",
    "python": "3.11.0",
    "versions": {"menet": "0.0.test", "torch": "9.9.9"},
    "system": "Linux",
    "processor": "Imaginary Processor 3000",
    "cores": 2,
    "threads": 2,
    "device": "cpu",
    "processes": 1,
}


def evaluation(label: str, *, defense: bool, epsilon: float = 0.2, **attack: Any) -> dict[str, Any]:
    threat = {"norm": "linf", "epsilon": epsilon, "low": 0.0, "high": 1.0}
    settings = {"kind": "PGD", "threat": threat, "steps": 20, "eot": 1, "restarts": 1, **attack}
    if settings.pop("transferred", False):
        settings = {"kind": "Transfer", "attack": settings, "source": {"kind": "Network"}}
    estimator = {"name": "nuclear-norm", "mu": 1.0}
    return {
        "label": label,
        "model": {
            "kind": "MENet" if defense else "Network",
            "architecture": {"name": "lenet", "channels": 1, "side": 8, "classes": 10},
            "defense": {"name": "me-net", "estimator": estimator, "p": [0.4, 0.6]} if defense else {},
            "weights": "0123456789abcdef" * 4,
        },
        "dataset": {
            "name": "digits",
            "split": "test",
            "examples": 1000,
            "shape": [1, 8, 8],
            "classes": 10,
            "class_names": [str(digit) for digit in range(10)],
        },
        "start": 0,
        "stop": EXAMPLES,
        "batch_size": 10,
        "attack": settings,
        "gradient": "bpda" if defense else None,
        "threat": threat,
        "scoring": {"draws": MASKS if defense else 1, "restart_draws": 1, "max_batch": 512},
        "seed": 5,
        "snapshots": 2,
        "loss_history": True,
    }


def answer(label: int, right: bool, masks: int) -> dict[str, Any]:
    prediction = label if right else (label + 1) % 10
    mean = {"prediction": prediction, "rank": int(not right), "probability": 0.75 if right else 0.125}
    return {"predictions": [prediction] * masks, "ranks": [int(not right)] * masks, "mean": mean}


def write(folder: Path, about: dict[str, Any], right: int, clean: int = 38) -> None:
    """Records in which `right` of 40 examples survive the attack, under every mask, and `clean` without one."""
    masks = about["scoring"]["draws"]
    rows = []
    for index in range(EXAMPLES):
        label = index % 10
        row = {
            "index": index,
            "label": label,
            "clean": answer(label, index < clean, masks),
            "adversarial": answer(label, index < right, masks),
            "perturbation": {"linf": 0.2, "l2": 1.0, "l0": 64},
            "queries": 20,
            "failed": False,
            "unusable_gradients": False,
            "seconds": 0.5,
            "seeds": {"attack": 1, "clean": 2, "scoring": 3},
            "loss_history": [0.1, 0.5, 0.9],
        }
        if index < 2:
            row["snapshots"] = pictures(label, bool(about["model"]["defense"]))
        rows.append(row)
    append(folder, about, rows)


def pictures(label: int, seen: bool) -> dict[str, Any]:
    image = torch.linspace(0, 1, 64).reshape(1, 8, 8)
    other = (image + 0.2 * torch.sign(image - 0.5)).clamp(0, 1)
    kinds = {"clean": image, "adversarial": other}
    if seen:
        kinds |= {"clean_seen": image * 0.9, "adversarial_seen": other * 0.9}
    return {kind: {"image": pack(one), "prediction": label, "probability": 0.5} for kind, one in kinds.items()}


def write_certificate(folder: Path, radii: list[int]) -> None:
    about = evaluation("certificate", defense=True)
    about = {key: about[key] for key in ("label", "model", "dataset", "seed")}
    about |= {"start": 0, "stop": len(radii), "p": 0.1, "entries": 1, "alpha": 0.001}
    rows = [
        {
            "index": index,
            "label": 1,
            "prediction": 1,
            "votes": 9,
            "lower_bound": 0.9,
            "radius": radius,
            "seconds": 0.1,
        }
        for index, radius in enumerate(radii)
    ]
    append(folder, about, rows)


def append(folder: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    with jsonl.Appender(shard_path(folder, about["label"])) as file:
        file.append([{"format": FORMAT, "evaluation": about, "made": MADE}, *rows])


def sample(folder: Path, name: str = "ME-Net") -> Path:
    """A folder with everything that a report can show; the defended model is called `name`."""
    plain, defended = folder / "vanilla", folder / "defended"
    write(plain / "evaluation", evaluation("pgd:on=copy", defense=False, transferred=True), right=30)
    write(plain / "evaluation", evaluation("pgd", defense=False), right=1)
    write(defended / "evaluation", evaluation("pgd:on=copy", defense=True, transferred=True), right=31)
    write(defended / "evaluation", evaluation("pgd", defense=True), right=23)
    for size, right in ((0.1, 33), (0.3, 9)):
        about = evaluation(f"pgd:epsilon={size:g}", defense=True, epsilon=size)
        write(defended / "evaluation", about, right=right)
    for masks, right in ((5, 17), (20, 14)):
        write(defended / "evaluation", evaluation(f"pgd:eot={masks}", defense=True, eot=masks), right=right)
    write_certificate(defended / "certificate", [-1, 0, 0, 1, 1, 2, 3, 3, 5, 5])
    random = np.random.default_rng(0)
    for model in (plain, defended):
        vectors = random.normal(size=(EXAMPLES, 6)).astype(np.float32)
        features = Features("pgd:on=copy", np.arange(EXAMPLES) % 10, vectors, vectors + 1)
        save_features(features, model / "evaluation")
    finding = {
        "name": "noise is harmless",
        "status": "warn",
        "meaning": "Noise of size epsilon takes 7% away.",
        "numbers": {"clean": 0.9375, "noisy": [0.8125, 0.75]},
    }
    (defended / "audit.json").write_text(json.dumps({"format": "menet.audit/1", "findings": [finding]}))
    notes = {
        "title": "A report of planted numbers",
        "names": {"vanilla": "vanilla", "defended": name},
        "paper": [{"model": name, "attack": "pgd", "accuracy": 0.528, "where": "table 3"}],
        "seconds": 125,
    }
    (folder / "report.json").write_text(json.dumps(notes))
    return folder

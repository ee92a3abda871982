"""Networks that come with the package: small files of weights, and what was measured on each.

A packed file holds weights in half precision, its largest matrices as two factors of low rank and its largest
convolutions in 8 bits. What is measured is the packed network itself, so its numbers hold for exactly what is
loaded. `measured.json` comes from the published results (`menet models measured`).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import menet
from menet import data
from menet.errors import CheckpointError, ConfigurationError
from menet.models import weights
from menet.preprocessed import Preprocessed, describe, rebuild
from menet.training.checkpoint import (
    DIGEST,
    FIT,
    LAST,
    load_model,
    load_verified,
    model_tensors,
    save_with_digest,
    weights_file,
)
from menet.training.config import fit_defense

FOLDER = Path(menet.__file__).parent / "pretrained"
MEASURED = "measured.json"
LICENSE = "MIT, as the package; the training data have their own terms"


def names() -> tuple[str, ...]:
    """The names of the networks that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.safetensors")))


def locate(run: str | os.PathLike[str]) -> Path:
    """The path that `run` names: a path that exists, a folder under `runs/`, or a network of the package."""
    path, shipped = Path(run), FOLDER / f"{os.fspath(run)}.safetensors"
    if path.exists():
        return path
    if (Path("runs") / path).exists():
        return Path("runs") / path
    return shipped if os.fspath(run) in names() else path


def pack(
    run: str | os.PathLike[str],
    path: str | os.PathLike[str],
    rank: int = 64,
    defense: Mapping[str, Any] | None = None,
) -> int:
    """Write the best epoch of `run` to a small file at `path`, and return its size in bytes.

    Weights are in half precision, matrices whose factors of rank `rank` take less are written as these, and large
    convolutions in 8 bits (`weights.pack`). Evaluate the file, not the run: that its accuracy stands has to be
    measured. With `defense` (its name and settings), the network gets that defense in front of it, without
    training behind it; one that learns from data is fitted to the training images first, and resumes if this was
    interrupted.
    """
    if rank < 1:
        raise ConfigurationError(f"expected rank >= 1, got {rank}")
    tensors, header = load_verified(weights_file(Path(run)))
    state = model_tensors(tensors, "averaged") or model_tensors(tensors)
    kept = {name: value for name, value in header.items() if name not in (DIGEST, "progress")}
    kept |= {"seconds": training_of(run).get("seconds"), "packed": {"dtype": "float16", "rank": rank}}
    if defense is not None:
        if kept.get("defense"):
            raise ConfigurationError(
                f"expected a network without a defense, got one behind {kept['defense']['name']}"
            )
        defended = rebuild(load_model(run), dict(defense))
        if isinstance(defended, Preprocessed) and type(defended).fit is not Preprocessed.fit:
            if not kept.get("dataset"):
                raise ConfigurationError(
                    f"expected a network that says its dataset, to fit {defended.name} to, got {os.fspath(run)}; "
                    "pack a run of menet train"
                )
            images = data.load(str(kept["dataset"]), "train").images
            fit_defense(defended, images, seed=0, checkpoint=Path(f"{os.fspath(path)}.{FIT}"))
        state, kept["defense"] = defended.state_dict(), describe(defended)
    save_with_digest(Path(path), weights.pack(state, rank), kept)
    return Path(path).stat().st_size


@dataclass(frozen=True)
class Card:
    """What is known of a network that comes with the package."""

    name: str
    dataset: str
    model: str
    defense: dict[str, Any]
    training: dict[str, Any]
    measured: tuple[dict[str, Any], ...]
    """One for each threat model it was evaluated under, as on the board."""
    size: int
    """Bytes of the file."""

    @property
    def limits(self) -> str:
        """What the network must not be used for."""
        return (
            "Trained for research on two cores, smaller and shorter than the literature's; robust only as far as "
            "measured here, under this threat model and these attacks. Not for decisions about people."
        )


def card(name: str) -> Card:
    """The card of a network that comes with the package."""
    if name not in names():
        raise ConfigurationError(f"unknown network {name!r}; choose from {', '.join(names()) or 'none'}")
    path = FOLDER / f"{name}.safetensors"
    header = load_verified(path)[1]
    return Card(
        name,
        str(header.get("dataset")),
        str(header["architecture"]["name"]),
        dict(header.get("defense", {})),
        dict(header.get("training", {})),
        tuple(_measured().get(name, ())),
        path.stat().st_size,
    )


def training_of(run: str | os.PathLike[str]) -> dict[str, Any]:
    """What a model was trained by, and in how many seconds, as far as its run folder or weights file says.

    The time is from the run's first file to its last one, pauses included.
    """
    path = locate(run)
    if not path.exists():
        return {"source": os.fspath(run)}
    made: dict[str, Any] = {}
    if path.is_file():
        header = load_verified(path)[1]
        made, seconds = {"config": header.get("training", {})}, header.get("seconds")
        made |= {"packed": header["packed"]} if "packed" in header else {}
    else:
        if (path / "config.json").is_file():
            made = {"config": _config(path / "config.json")}
        times = [(path / name).stat().st_mtime for name in ("config.json", LAST) if (path / name).is_file()]
        seconds = round(max(times) - min(times)) if times else None
    return {**made, "seconds": seconds} if seconds else made


def _config(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"expected a JSON object in {path}: {error}; restore it or remove it") from error


def dataset_of(path: Path) -> str | None:
    """The dataset that a weights file says its network was trained on."""
    try:
        found = weights.load(path)[1].get("dataset")
    except CheckpointError:
        return None
    return found if isinstance(found, str) else None


def _measured() -> dict[str, list[dict[str, Any]]]:
    path = FOLDER / MEASURED
    found: dict[str, list[dict[str, Any]]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    )
    return found

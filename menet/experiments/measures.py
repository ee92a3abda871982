"""Jobs that measure something other than accuracy: ranks, reconstructions and their errors, features, time."""

import json
import time
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from menet import data
from menet.data import Dataset
from menet.data.dataset import SPLITS
from menet.defense import MENet
from menet.errors import RecordError
from menet.evaluation.snapshots import features_of, pack, save_features, unpack
from menet.experiments.jobs import Evaluate, Job, Train, Workspace, describe_defense
from menet.files import write_atomically
from menet.images import split_channels, to_matrix
from menet.linalg import approximate_rank
from menet.preprocessed import Preprocessed, rebuild
from menet.progress import reporting
from menet.training import load_model

BATCH = 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class Measurement(Job):
    """A job whose result is one JSON file."""

    def result(self, workspace: Workspace) -> Any:
        """The result that was measured."""
        path = workspace.ready(self) / "result.json"
        try:
            return json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path} is damaged ({error}); remove its folder to measure it again") from error

    def run(self, folder: Path, workspace: Workspace) -> None:
        write_atomically(folder / "result.json", json.dumps(self.measure(workspace)))

    @abstractmethod
    def measure(self, workspace: Workspace) -> Any:
        """The result, as JSON values."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Quantity(Measurement):
    """A measurement that is one number, for a cell of a table."""

    @abstractmethod
    def number(self, workspace: Workspace) -> dict[str, Any]:
        """The number as a cell shows it: `unit`, `value`, and what else is known of it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Ranks(Measurement):
    """The approximate rank of images of both splits: the fewest singular values that hold 90% of the energy."""

    dataset: str
    limit: int | None = None
    energy: float = 0.9

    kind: ClassVar[str] = "ranks"

    def measure(self, workspace: Workspace) -> dict[str, Any]:
        splits = [data.load(self.dataset, split, workspace.data) for split in SPLITS]
        total = sum(map(len, splits))
        # Of a limit each split has its part.
        fraction = 1.0 if self.limit is None else min(1.0, self.limit / total)
        samples = [split.sample(max(1, round(fraction * len(split)))) for split in splits]
        ranks = torch.cat([ranks_of(sample, len(sample), self.energy) for sample in samples])
        return {"dataset": self.dataset, "images": len(ranks), "histogram": ranks.bincount().tolist()}

    def title(self) -> str:
        return f"ranks of {self.dataset}"


def ranks_of(dataset: Dataset, count: int, energy: float = 0.9) -> Int[Tensor, " n"]:
    """The approximate rank of each of the first `count` images, on the [0,1] scale, channels side by side."""
    ranks = []
    with reporting(f"ranks of {dataset.name}", count) as reporter:
        for start in range(0, count, BATCH):
            images, _ = dataset.batch(slice(start, min(start + BATCH, count)))
            # The energy of an image is that of its pixels in [0,1]; `to_matrix` scales them to [-1,1].
            ranks.append(approximate_rank((to_matrix(images, "joint") + 1) / 2, energy))
            reporter.advance(len(images))
    return torch.cat(ranks)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reconstructions(Measurement):
    """A few test images, masked with each p and reconstructed by the estimator."""

    dataset: str
    defense: dict[str, Any]
    """ME-Net; its p is replaced by each of `probabilities`."""
    probabilities: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    examples: int = 2
    seed: int = 0

    kind: ClassVar[str] = "reconstructions"

    @torch.no_grad()
    def measure(self, workspace: Workspace) -> dict[str, Any]:
        dataset = data.load(self.dataset, "test", workspace.data)
        images, _ = dataset.batch(slice(0, self.examples))
        columns = []
        for p in self.probabilities:
            model = rebuild(nn.Identity(), {**self.defense, "p": p})
            assert isinstance(model, MENet)
            mask = model.sample_mask(images, torch.Generator().manual_seed(self.seed))
            seen = model.eval().estimate(images, mask)
            shown = split_channels(mask, images.shape[1]) if mask.ndim == 3 else mask
            masked = torch.where(shown.expand_as(images), images, torch.zeros_like(images))
            columns.append(
                {
                    "p": p,
                    "masked": [pack(one) for one in masked],
                    "estimate": [pack(one) for one in seen],
                    "error": [(a - b).square().mean().sqrt().item() for a, b in zip(seen, images, strict=True)],
                }
            )
        return {"originals": [pack(one) for one in images], "columns": columns}

    def title(self) -> str:
        return f"reconstructions of {self.dataset} by {self.defense['estimator']['name']}"


@dataclass(frozen=True, eq=False, kw_only=True)
class EstimationError(Quantity):
    """How far estimates are from the images: the root mean square error of an image, mean over test images."""

    dataset: str
    defense: dict[str, Any]
    """ME-Net with one p."""
    examples: int | None = None
    """This many images from the start of the test set; all if None."""
    seed: int = 0

    kind: ClassVar[str] = "error"

    @torch.no_grad()
    def measure(self, workspace: Workspace) -> dict[str, Any]:
        dataset = data.load(self.dataset, "test", workspace.data)
        model = rebuild(nn.Identity(), self.defense).to(workspace.device).eval()
        assert isinstance(model, MENet)
        generator = torch.Generator().manual_seed(self.seed)
        count = min(self.examples or len(dataset), len(dataset))
        errors = []
        for start in range(0, count, BATCH):
            images, _ = dataset.batch(slice(start, min(start + BATCH, count)))
            images = images.to(workspace.device)
            estimates = model.reconstruct(images, generator)
            errors.append((estimates - images).double().square().mean((1, 2, 3)).sqrt().cpu())
        found = torch.cat(errors)
        deviation = float(found.std()) if count > 1 else 0.0
        return {"mean": float(found.mean()), "deviation": deviation, "examples": count}

    def number(self, workspace: Workspace) -> dict[str, Any]:
        """With an interval of 95 %, of the normal distribution, over images."""
        found = self.result(workspace)
        margin = 1.96 * found["deviation"] / found["examples"] ** 0.5
        return {
            "unit": "RMSE",
            "value": found["mean"],
            "low": found["mean"] - margin,
            "high": found["mean"] + margin,
            "examples": found["examples"],
            "dataset": self.dataset,
        }

    def title(self) -> str:
        return f"error of {describe_defense(self.defense)} on {self.dataset}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Redistributed(Measurement):
    """Images attacked on one network, and what a ME-Net makes of them: the paper's figure 10.

    Clean and adversarial images are classified by the attacked network, their estimates, both under one mask, by
    the ME-Net.
    """

    attacked: Evaluate
    """Its records must hold snapshots of the images to show."""
    defended: Train
    seed: int = 0

    kind: ClassVar[str] = "redistributed"

    @torch.no_grad()
    def measure(self, workspace: Workspace) -> dict[str, Any]:
        records = self.attacked.records(workspace)
        rows = [row for row in records.rows if "snapshots" in row]
        model = load_model(workspace.ready(self.defended) / "run").eval().to(workspace.device)
        assert isinstance(model, MENet)
        examples: list[dict[str, Any]] = [{"label": row["label"], **row["snapshots"]} for row in rows]
        for kind in ("clean", "adversarial"):
            images = torch.stack([unpack(row["snapshots"][kind]["image"]) for row in rows]).to(workspace.device)
            seen = model.reconstruct(images, torch.Generator().manual_seed(self.seed))
            probability, prediction = model.classifier(seen).softmax(-1).max(-1)
            for number, example in enumerate(examples):
                example[f"{kind}_seen"] = {
                    "image": pack(seen[number]),
                    "prediction": int(prediction[number]),
                    "probability": float(probability[number]),
                }
        return {"examples": examples, "class_names": records.evaluation["dataset"]["class_names"]}

    def title(self) -> str:
        return f"estimates by {self.defended.summary()} after {self.attacked.title()}"


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureVectors(Job):
    """The penultimate-layer features of clean images and of their adversarial examples."""

    attacked: Evaluate
    """Its records must hold snapshots of the images to use."""

    kind: ClassVar[str] = "vectors"

    def run(self, folder: Path, workspace: Workspace) -> None:
        model = load_model(workspace.ready(self.attacked.model) / "run").to(workspace.device)
        save_features(features_of(model, self.attacked.records(workspace)), folder)

    def title(self) -> str:
        return f"features of {self.attacked.title()}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Timing(Quantity):
    """Seconds per image that a preprocessing takes on this machine, in a batch, best of a few rounds."""

    dataset: str
    defense: dict[str, Any]
    batch_size: int = 128
    rounds: int = 5

    kind: ClassVar[str] = "cost"

    @torch.no_grad()
    def measure(self, workspace: Workspace) -> dict[str, Any]:
        dataset = data.load(self.dataset, "test", workspace.data)
        images, _ = dataset.batch(slice(0, min(self.batch_size, len(dataset))))
        images = images.to(workspace.device)
        model = rebuild(nn.Identity(), self.defense).to(workspace.device)
        assert isinstance(model, Preprocessed)
        model.fit(images, torch.Generator().manual_seed(0))
        model.eval()
        seconds = []
        for number in range(self.rounds):
            generator = torch.Generator().manual_seed(number)
            began = time.perf_counter()
            model.preprocess(images, generator)
            if images.device.type == "cuda":
                torch.cuda.synchronize(images.device)
            seconds.append((time.perf_counter() - began) / len(images))
        return {
            "seconds": min(seconds),
            "rounds": seconds,
            "batch": len(images),
            "threads": torch.get_num_threads(),
            "device": images.device.type,
        }

    def number(self, workspace: Workspace) -> dict[str, Any]:
        return {"unit": "ms", "value": 1000 * self.result(workspace)["seconds"]}

    def title(self) -> str:
        return f"time of {describe_defense(self.defense)} on {self.dataset}"

"""Jobs: pieces of work known by the content of their configuration, each in a folder of its own.

prepare → train → evaluate, certify → table or figure. A job's key is the SHA-256 of its configuration, in which
the jobs it needs stand by their keys: a changed setting gives new keys to what depends on it and nothing else.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from menet import data
from menet.attacks import Margin
from menet.defense import MENet
from menet.errors import ConfigurationError
from menet.evaluation import CertificateSettings, Records, Settings, assign, certify, evaluate, read_folder
from menet.experiments.store import Store
from menet.preprocessed import Preprocessed
from menet.training import TrainingConfig, load_model, train
from menet.training.prepare import prepare

FORMAT = 1
"""Part of every key: raised when a job of the same configuration would compute something else."""


DONE = "done.json"
"""The marker of a finished job, in its folder."""

JobKind = TypeVar("JobKind", bound="Job")


@dataclass(frozen=True)
class Places:
    """Where things are and on what jobs run; no part of any key."""

    root: Path
    data: Path | None = None
    """Folder of the datasets; `MENET_DATA` or the user's cache folder if None."""
    device: str = "cpu"
    threads: int = 1
    """Of each job; results of one seed agree to the last bit only for one number of threads."""
    address: str | None = None
    """Where job folders are kept beyond this machine; any address that fsspec knows."""

    def folder(self, job: "Job") -> Path:
        """The folder that a job writes to."""
        return self.root / self.name(job)

    def name(self, job: "Job") -> str:
        """The name of a job's folder, here and in the store."""
        return f"{job.kind}/{job.key[:20]}"

    @property
    def store(self) -> Store | None:
        """The store at `address`, if there is one."""
        return None if self.address is None else Store(self.address)

    def ready(self, job: "Job") -> Path:
        """The folder of a finished job, to read from; brought here first where only the store has it."""
        folder, store = self.folder(job), self.store
        if store is not None and not (folder / DONE).is_file():
            store.bring(self.name(job), folder, DONE)
        return folder


@dataclass(frozen=True, eq=False)
class Job(ABC):
    """One piece of work; two jobs are the same when their keys are."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def needs(self) -> tuple["Job", ...]:
        """The jobs that must be finished before."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """All that decides the result, as JSON values; other jobs by their keys."""

    @abstractmethod
    def run(self, folder: Path, places: Places) -> None:
        """Do the work in `folder`, or go on with what a stopped run left there."""

    @abstractmethod
    def title(self) -> str:
        """One line for people."""

    @cached_property
    def key(self) -> str:
        canonical = json.dumps(
            {"format": FORMAT, "kind": self.kind, **self.content()},
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.key == other.key


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepare(Job):
    """Algorithm 1's training set: each image estimated under every mask of the schedule."""

    dataset: str
    defense: dict[str, Any]
    limit: int | None = None
    seed: int = 0

    kind: ClassVar[str] = "prepare"

    @property
    def needs(self) -> tuple[Job, ...]:
        return ()

    def content(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "defense": self.defense, "limit": self.limit, "seed": self.seed}

    def run(self, folder: Path, places: Places) -> None:
        prepare(self.dataset, self.defense, folder / "set", root=places.data, limit=self.limit, seed=self.seed)

    def title(self) -> str:
        return f"prepare {self.dataset} {defense_words(self.defense)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Train(Job):
    """A model; from prepared estimates where `prepared` is given."""

    config: TrainingConfig
    prepared: Prepare | None = None

    kind: ClassVar[str] = "train"

    @property
    def needs(self) -> tuple[Job, ...]:
        return () if self.prepared is None else (self.prepared,)

    def content(self) -> dict[str, Any]:
        config = self.config.as_dict()
        del config["recipe"]
        return {"config": config, "prepared": self.prepared.key if self.prepared else None}

    def run(self, folder: Path, places: Places) -> None:
        config = self.config
        if self.prepared is not None:
            config = replace(config, prepared=str(places.ready(self.prepared) / "set"))
        train(config, folder / "run", root=places.data)

    def title(self) -> str:
        config = self.config
        words = [config.objective, config.dataset, config.model, defense_words(config.defense)]
        return f"train {' '.join(filter(None, words))}" + (f" seed {config.seed}" if config.seed else "")


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluate(Job):
    """One attack on one model, scored on fresh masks: one row per example."""

    model: Train
    attack: str
    """A name of `menet.attacks.NAMES`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The attack's settings; `kappa` is the confidence of a margin loss."""
    gradient: str | None = None
    source: Train | None = None
    """The model an attack transfers from."""
    gray: bool = False
    """Attack the network behind the preprocessing, blind to it."""
    examples: int | None = None
    """So many from the start of the test set; all if None."""
    masks: int = 100
    batch: int = 100
    pictures: int = 0
    seed: int = 0

    kind: ClassVar[str] = "evaluate"

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.model,) if self.source is None else (self.model, self.source)

    def content(self) -> dict[str, Any]:
        return {
            "model": self.model.key,
            "attack": self.attack,
            "settings": self.settings,
            "gradient": self.gradient,
            "source": self.source.key if self.source else None,
            "gray": self.gray,
            "examples": self.examples,
            "masks": self.masks,
            "batch": self.batch,
            "pictures": self.pictures,
            "seed": self.seed,
        }

    def run(self, folder: Path, places: Places) -> None:
        model = load_model(places.ready(self.model) / "run")
        settings = dict(self.settings)
        kappa = settings.pop("kappa", None)
        if kappa is not None:
            settings["loss"] = Margin(kappa)
        words, loader = self.attack, None
        options = {"gradient": self.gradient} if self.gradient and isinstance(model, Preprocessed) else {}
        if self.source is not None:
            copy = load_model(places.ready(self.source) / "run")
            options["on"], loader = "copy", lambda _: copy
        elif self.gray and isinstance(model, Preprocessed):
            options["on"] = "classifier"
        assignment = assign(words, model, loader, **settings, **options)
        if self.attack in ("boundary", "hop-skip-jump") and isinstance(model, MENet):
            # A decision-based walk needs a model that answers alike; it is scored on fresh masks all the same.
            assignment = replace(assignment, model=model.fixed(10, self.seed))
        dataset = data.load(self.model.config.dataset, "test", places.data)
        evaluate(
            model,
            dataset,
            [assignment],
            folder / "records",
            Settings(
                stop=None if self.examples is None else min(self.examples, len(dataset)),
                batch=self.batch,
                masks=self.masks,
                seed=self.seed,
                pictures=self.pictures,
            ),
            source=self.model.key[:20],
            device=places.device,
        )

    def records(self, places: Places) -> Records:
        """The rows it made."""
        (found,) = read_folder(places.ready(self) / "records").values()
        return found

    def title(self) -> str:
        settings = ",".join(f"{name}={_short(value)}" for name, value in sorted(self.settings.items()))
        access = "transfer " if self.source else "gray-box " if self.gray else ""
        way = f" {self.gradient}" if self.gradient else ""
        return f"{access}{self.attack}({settings}){way} on {self.model.title().removeprefix('train ')}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Certify(Job):
    """Certificates of a ME-Net's vote."""

    model: Train
    settings: CertificateSettings

    kind: ClassVar[str] = "certify"

    @property
    def needs(self) -> tuple[Job, ...]:
        return (self.model,)

    def content(self) -> dict[str, Any]:
        return {"model": self.model.key, "settings": vars(self.settings)}

    def run(self, folder: Path, places: Places) -> None:
        model = load_model(places.ready(self.model) / "run")
        if not isinstance(model, MENet):
            raise ConfigurationError(f"model is a {type(model).__name__}; certificates need a MENet")
        dataset = data.load(self.model.config.dataset, "test", places.data)
        certify(model, dataset, folder / "records", self.settings, device=places.device)

    def records(self, places: Places) -> Records:
        """The rows it made."""
        (found,) = read_folder(places.ready(self) / "records").values()
        return found

    def title(self) -> str:
        return f"certify {self.model.title().removeprefix('train ')}"


def transformed(job: JobKind, change: Callable[[Job], Job]) -> JobKind:
    """`job` with `change` applied to it and, before, to all that it needs; `change` keeps a job's kind."""
    parts = {
        one.name: transformed(value, change)
        for one in fields(job)
        if isinstance(value := getattr(job, one.name), Job)
    }
    changed = change(replace(job, **parts))
    assert isinstance(changed, type(job))
    return changed


def defense_words(defense: Mapping[str, Any]) -> str:
    """A defense in a few words: `me-net nuclear-norm p 0.4→0.6`."""
    if not defense:
        return ""
    if defense["name"] != "me-net":
        return str(defense["name"])
    p = defense["p"]
    schedule = "→".join(f"{one:g}" for one in p) if isinstance(p, list | tuple) else f"{p:g}"
    masks = "" if defense["masks"] == 10 else f" {defense['masks']} masks"
    return f"me-net {defense['estimator']['name']} p {schedule}{masks}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

"""Jobs: units of work identified by a hash of their configuration, each in a folder of its own.

prepare → train → evaluate, certify → table or figure; jobs that measure something other than accuracy are in
`measures`. A job's key is the SHA-256 of its configuration, in which the jobs it needs appear by their keys:
changing a setting changes the keys of the jobs that depend on it, and no others.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet import data
from menet.attacks import Margin, Standard
from menet.attacks.losses import MAX_BATCH
from menet.defense import MENet
from menet.distributed import Worker
from menet.evaluation import (
    CertificateSettings,
    EvaluationSettings,
    Records,
    certify,
    evaluate,
    parse_attack,
    read_folder,
)
from menet.files import Store, write_atomically
from menet.masks import bernoulli
from menet.preprocessed import Preprocessed
from menet.training import TrainingConfig, load_model, pretrained, train
from menet.training.prepared import prepare

FORMAT = 2
"""Part of every key: raised when a job of the same configuration would compute something else."""
DONE = "done.json"
"""The marker of a finished job, in its folder."""
FROZEN_DRAWS = 10
"""Draws in the frozen mask bank that decision-based attacks query."""
VOTES = 10
"""Draws in the paper's majority vote."""
SCHEDULED = "schedule"
"""The view of a ME-Net whose draws take their p from the training schedule, in records."""

JobKind = TypeVar("JobKind", bound="Job")


@dataclass(frozen=True)
class Workspace:
    """The folders that jobs read and write, and the device and threads they run on; not part of any key."""

    root: Path
    data: Path | None = None
    """Folder of the datasets; `MENET_DATA` or the user's cache folder if None."""
    device: str = "cpu"
    """cpu, cuda, cuda:0, …; training, evaluation and preparation all run on it."""
    threads: int = 1
    """Threads per job; results of one seed agree to the last bit only for one number of threads."""
    bfloat16: bool = False
    """Attack ME-Nets with their networks in bfloat16, which rows and tables say."""
    shipped: bool = False
    """Take a network that ships with the package where it was trained as a job says, which tables say."""
    address: str | None = None
    """Remote store of job folders; any address that fsspec supports."""

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
        """The folder of a finished job, downloaded first if only the store has it."""
        folder, store = self.folder(job), self.store
        if store is not None and not (folder / DONE).is_file():
            store.download(self.name(job), folder, DONE)
        return folder


@dataclass(frozen=True, eq=False)
class Job(ABC):
    """One unit of work; two jobs are equal if their keys are."""

    kind: ClassVar[str]

    @property
    def needs(self) -> tuple["Job", ...]:
        """The jobs that must be finished before this one: those among its fields."""
        values = (getattr(self, one.name) for one in fields(self))
        return tuple(value for value in values if isinstance(value, Job))

    def content(self) -> dict[str, Any]:
        """Everything that determines the result, as JSON values: the fields, with other jobs by their keys."""
        return {one.name: _as_json(getattr(self, one.name)) for one in fields(self)}

    @abstractmethod
    def run(self, folder: Path, workspace: Workspace) -> None:
        """Do the work in `folder`, resuming from what an interrupted run left there."""

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

    def run(self, folder: Path, workspace: Workspace) -> None:
        prepare(
            self.dataset,
            self.defense,
            folder / "set",
            root=workspace.data,
            limit=self.limit,
            seed=self.seed,
            device=workspace.device,
        )

    def title(self) -> str:
        return f"prepare {self.dataset} {describe_defense(self.defense)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Train(Job):
    """A trained model; trained on prepared estimates where `prepared` is given."""

    config: TrainingConfig
    prepared: Prepare | None = None

    kind: ClassVar[str] = "train"

    def content(self) -> dict[str, Any]:
        config = self.config.as_dict()
        del config["recipe"]
        return {"config": config, "prepared": _as_json(self.prepared)}

    def run(self, folder: Path, workspace: Workspace) -> None:
        config = self.config
        if workspace.shipped and (file := self.shipped()) is not None:
            write_atomically(folder / "run", file.read_bytes())
            return
        if self.prepared is not None:
            config = replace(config, prepared=str(workspace.ready(self.prepared) / "set"))
        train(config, folder / "run", root=workspace.data, device=workspace.device)

    def shipped(self) -> Path | None:
        """The network of the package that was trained so, if there is one; its weights are packed."""
        if self.prepared is not None:
            return None
        # As JSON has them: a file's header has lists where a configuration has tuples.
        wanted = json.loads(json.dumps(self.content()["config"]))
        for name in pretrained.names():
            made = dict(pretrained.card(name).training)
            made.pop("recipe", None)
            if made == wanted:
                return pretrained.FOLDER / f"{name}.safetensors"
        return None

    def title(self) -> str:
        return f"train {self.summary()}"

    def summary(self) -> str:
        """The model in a few words: `adversarial mnist lenet me-net nuclear-norm p 0.4→0.6`."""
        config = self.config
        words = [config.objective, config.dataset, config.model, describe_defense(config.defense)]
        words.append("exact" if config.defense.get("gradient") == "exact" else "")
        words.append(f"{config.eot} draws" if config.eot > 1 else "")
        return " ".join(filter(None, words)) + (f" seed {config.seed}" if config.seed else "")

    def steps(self, training_images: int) -> int:
        """Optimizer steps of the whole run on a dataset of so many training images."""
        config = self.config
        limit = config.limit if self.prepared is None else self.prepared.limit
        images = min(limit or training_images, training_images) - config.held_out(training_images)
        return config.epochs * (images * self.copies // config.batch_size)

    @property
    def copies(self) -> int:
        """How many estimates of an image an epoch shows."""
        every = self.prepared is not None and self.config.every_copy
        return int(self.config.defense["masks"]) if every else 1

    def described(self) -> str:
        """How it is trained, in a few words: `adversarial, 200 epochs, fresh masks`."""
        config, defense = self.config, self.config.defense
        words = [config.objective, f"{config.epochs} epoch{'s' * (config.epochs != 1)}"]
        if defense.get("name") == "me-net":
            masks = defense["masks"]
            if self.copies > 1:
                words.append(f"all {masks} estimates of an image per epoch")
            elif self.prepared is not None:
                words.append(f"one of {masks} estimates of an image per epoch" if masks > 1 else "one estimate")
            elif "bank" in defense:
                words.append(f"{masks} fixed masks per image" if masks > 1 else "one fixed mask per image")
            else:
                words.append("fresh masks")
        if defense.get("name") == "pixel-defend":
            plus = defense.get("likelihood") == "pixel-cnn++"
            words.append("PixelCNN++ of its publication" if plus else "a small PixelCNN in place of PixelCNN++")
        if defense.get("name") == "defense-gan":
            steps = defense.get("gan_steps", 0)
            words.append("the generator of its publication" if steps >= 200_000 else "a small generator")
        if defense.get("name") == "image-quilting":
            patches = defense.get("patches", 0)
            words.append("the bank of its publication" if patches >= 1_000_000 else "a small bank")
        return ", ".join(words)


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluate(Job):
    """One attack on one model, scored on fresh draws of its masks: one record per example."""

    model: Train
    attack: str
    """A name of `menet.attacks.NAMES`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The attack's settings; `kappa` is the confidence of a margin loss, `epsilon` None is no budget."""
    gradient: str | None = None
    surrogate: Train | None = None
    """The model that a transfer attack takes its gradients from; `gradient` is then that of its defense."""
    gray: bool = False
    """Gray-box: attack the network behind the preprocessing, unaware of it."""
    examples: int | None = None
    """Attack this many images from the start of the test set; all if None."""
    draws: int = 100
    """Fresh random draws of the defense that each image is scored on."""
    batch_size: int = 100
    max_batch: int = MAX_BATCH
    """Largest number of images in one forward pass."""
    snapshots: int = 0
    """Images to keep in the records, clean and adversarial, from the start of the test set."""
    seed: int = 0

    parts: "tuple[EvaluatePart, ...]" = ()
    """The jobs that do the work side by side, if any; where the rows are made changes none, so not in the key."""

    kind: ClassVar[str] = "evaluate"

    @property
    def needs(self) -> tuple[Job, ...]:
        return self.parts or super().needs

    def content(self) -> dict[str, Any]:
        content = super().content()
        del content["parts"]
        if self.attack == "standard":
            # Another version of the suite finds other images at the same budget.
            content["suite"] = Standard().version
        return content

    def split(self, parts: int) -> "Evaluate":
        """The same evaluation, of the same rows, as `parts` jobs and one that gathers their rows."""
        if parts < 2:
            return self
        whole = replace(self, parts=())
        return replace(self, parts=tuple(EvaluatePart(whole=whole, part=k, of=parts) for k in range(parts)))

    def run(self, folder: Path, workspace: Workspace) -> None:
        if not self.parts:
            self.measure(folder, workspace, Worker())
            return
        (folder / "records").mkdir(exist_ok=True)
        for part in self.parts:
            for rows in sorted((workspace.ready(part) / "records").iterdir()):
                write_atomically(folder / "records" / rows.name, rows.read_bytes())

    def measure(self, folder: Path, workspace: Workspace, worker: Worker) -> None:
        """Write the rows of every batch whose turn is `worker`'s."""
        model = load_model(workspace.ready(self.model) / "run")
        settings = dict(self.settings)
        if settings.get("epsilon", 0) is None:
            settings["epsilon"] = math.inf
        kappa = settings.pop("kappa", None)
        if kappa is not None:
            settings["loss"] = Margin(kappa)
        loader, attacked = None, model
        options: dict[str, Any] = {}
        if self.surrogate is not None:
            attacked = surrogate = load_model(workspace.ready(self.surrogate) / "run")
            options["on"], loader = "surrogate", lambda _: surrogate
        if self.gradient and isinstance(attacked, Preprocessed):
            options["gradient"] = self.gradient
        if self.surrogate is None and self.gray and isinstance(model, Preprocessed):
            options["on"] = "classifier"
        if self.attack in ("boundary", "hop-skip-jump") and isinstance(model, MENet):
            # Decision-based attacks need a deterministic model; scoring still uses fresh draws.
            options["draws"] = f"fixed:{FROZEN_DRAWS}:{self.seed}"
        attack_run = parse_attack(self.attack, model, loader, **settings, **options)
        if hasattr(attack_run.attack, "max_batch"):
            bounded: Any = attack_run.attack
            attack_run = replace(attack_run, attack=replace(bounded, max_batch=self.max_batch))
        if self.surrogate is None and getattr(attack_run.attack, "eot", 1) is None:
            # The paper's attacks draw one mask per step; by default an attack on a random model averages ten.
            single: Any = attack_run.attack
            attack_run = replace(attack_run, attack=replace(single, eot=1))
        views = {SCHEDULED: (FromSchedule(model), VOTES)} if isinstance(model, MENet) else None
        dataset = data.load(self.model.config.dataset, "test", workspace.data)
        evaluate(
            model,
            dataset,
            [attack_run],
            folder / "records",
            EvaluationSettings(
                stop=None if self.examples is None else min(self.examples, len(dataset)),
                batch_size=self.batch_size,
                draws=self.draws,
                seed=self.seed,
                max_batch=self.max_batch,
                snapshots=self.snapshots,
                bfloat16=workspace.bfloat16 and isinstance(model, MENet),
            ),
            source=self.model.key[:20],
            device=workspace.device,
            worker=worker,
            views=views,
        )

    def records(self, workspace: Workspace) -> Records:
        """The records it wrote."""
        return _read_records(self, workspace)

    def title(self) -> str:
        settings = ",".join(f"{name}={_short(value)}" for name, value in sorted(self.settings.items()))
        access = "transfer " if self.surrogate else "gray-box " if self.gray else ""
        gradient = f" {self.gradient}" if self.gradient else ""
        return f"{access}{self.attack}({settings}){gradient} on {self.model.summary()}"


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluatePart(Job):
    """Every `of`-th batch of an evaluation, from batch `part` on: as process `part` of `of` would write it."""

    whole: Evaluate
    part: int
    of: int

    kind: ClassVar[str] = "part"

    @property
    def needs(self) -> tuple[Job, ...]:
        return self.whole.needs

    def run(self, folder: Path, workspace: Workspace) -> None:
        self.whole.measure(folder, workspace, Worker(self.part, self.of))

    def title(self) -> str:
        return f"part {self.part + 1} of {self.of} of {self.whole.title()}"


class FromSchedule(nn.Module):
    """A ME-Net that draws p from its training schedule in evaluation too, as the paper's majority vote does."""

    def __init__(self, model: MENet) -> None:
        super().__init__()
        self.model = model

    def reseed(self, seed: int) -> None:
        self.model.reseed(seed)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        model, count = self.model, len(images)
        schedule = torch.tensor(model.schedule)
        p = schedule[torch.randint(len(schedule), (count,), generator=model.generator)]
        mask = bernoulli((count, *model.mask_shape(images)), p, model.generator, images.device)
        logits: Tensor = model(images, mask)
        return logits


@dataclass(frozen=True, eq=False, kw_only=True)
class Certify(Job):
    """Certificates of the vote of a ME-Net or of experts."""

    model: Train
    settings: CertificateSettings

    kind: ClassVar[str] = "certify"

    def run(self, folder: Path, workspace: Workspace) -> None:
        model = load_model(workspace.ready(self.model) / "run")
        dataset = data.load(self.model.config.dataset, "test", workspace.data)
        certify(model, dataset, folder / "records", self.settings, device=workspace.device)

    def records(self, workspace: Workspace) -> Records:
        """The records it wrote."""
        return _read_records(self, workspace)

    def title(self) -> str:
        return f"certify {self.model.summary()}"


def split_evaluations(job: JobKind, parts: Callable[[Evaluate], int]) -> JobKind:
    """`job` with the evaluations it needs, and itself, split into as many jobs as `parts` says for each."""

    def change(one: Job) -> Job:
        return one.split(parts(one)) if isinstance(one, Evaluate) and not one.parts else one

    return transformed(job, change)


def transformed(job: JobKind, change: Callable[[Job], Job]) -> JobKind:
    """`job` with `change` applied first to all jobs it needs, then to itself; `change` keeps a job's kind."""
    changed = _transformed(job, change)
    assert isinstance(changed, type(job))
    return changed


@cache
def _transformed(job: Job, change: Callable[[Job], Job]) -> Job:
    # Cached, because the cells of a table share their models.
    values = {one.name: getattr(job, one.name) for one in fields(job)}
    needs = {name: _transformed(value, change) for name, value in values.items() if isinstance(value, Job)}
    return change(replace(job, **needs))


def describe_defense(defense: Mapping[str, Any]) -> str:
    """A defense in a few words: `me-net nuclear-norm p 0.4→0.6`."""
    if not defense:
        return ""
    if defense["name"] != "me-net":
        return str(defense["name"])
    masks = "" if defense["masks"] == 10 else f" {defense['masks']} masks"
    masks += " from a bank" if "bank" in defense else ""
    seen = "".join(f" {defense[name]}" for name in ("encoding", "mask") if name in defense)
    return f"me-net {defense['estimator']['name']}{seen} {format_schedule(defense['p'])}{masks}"


def format_schedule(p: float | Sequence[float]) -> str:
    """A schedule of p as tables and titles print it: `p 0.8→1`."""
    return "p " + "→".join(f"{one:g}" for one in (p if isinstance(p, Sequence) else (p,)))


def _read_records(job: Job, workspace: Workspace) -> Records:
    (found,) = read_folder(workspace.ready(job) / "records").values()
    return found


def _as_json(value: Any) -> Any:
    if isinstance(value, Job):
        return value.key
    return vars(value) if is_dataclass(value) else value


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

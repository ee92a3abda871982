"""Options that commands share: what they accept, and the model, dataset, device and budget that they name.

Nothing heavy is imported before a command runs: names are read from the sources of their registries. A test
compares them with the registries.
"""

import difflib
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from menet.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from menet import data

Norm = Literal["linf", "l2"]
Objective = Literal["standard", "adversarial", "n-fgsm", "trades"]
Optimizer = Literal["sgd", "adamw"]
Schedule = Literal["step", "one-cycle", "cosine"]
Precision = Literal["auto", "float32", "bfloat16"]
Recipe = Literal["short", "cores", "paper", "certificate"]


def _registered(files: str, pattern: str) -> tuple[str, ...]:
    """The names of a registry, read from its source: importing it would import torch."""
    sources = sorted(Path(__file__).parent.parent.glob(files))
    return tuple(
        name for source in sources for name in re.findall(pattern, source.read_text("utf-8"), re.MULTILINE)
    )


ESTIMATORS = _registered("estimators/*.py", r'^@register\("([\w-]+)"\)')
DATASETS = _registered("data/__init__.py", r'\bname="([\w-]+)",')
MODELS = _registered("models/__init__.py", r'^    "([\w-]+)": lambda')
BASELINES = _registered("baselines/**/*.py", r'^    name: ClassVar\[str\] = "([\w-]+)"')
ATTACKS = _registered("attacks/__init__.py", r'^    "([\w-]+)": Entry\(')

Run = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="RUN",
        help="A run folder or weights file of `menet train`, a name of `menet models list`, or "
        "package.module:factory, whose code is executed.",
    ),
]
Data = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="NAME",
        help=f"{', '.join(DATASETS[:-1])}, or a folder of images. Default: the dataset of the training run.",
        help_behavior_hint="",
    ),
]
Split = Annotated[str, tyro.conf.arg(metavar="{train,test}", help="Part of the dataset.")]
Side = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="INT",
        help="Resize and crop the images of a folder to this size. Default: keep it.",
        help_behavior_hint="",
    ),
]
SkipUnreadable = Annotated[
    bool, tyro.conf.arg(help="Leave out the images of a folder that cannot be decoded.", help_behavior_hint="")
]
Root = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="PATH",
        help="Folder of the datasets. Default: $MENET_DATA, else the user's cache folder.",
        help_behavior_hint="",
    ),
]
Tables = Annotated[
    tuple[Literal["csv", "latex", "json"], ...],
    tyro.conf.arg(metavar="[{csv,latex,json} …]", help_behavior_hint="(default: none)"),
]
Dataset = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="DATASET",
        help=f"{', '.join(DATASETS[:-1])}, or folder:PATH with one folder of images per class. Written "
        "folder:PATH@64,skip-unreadable, the options --side 64 and --skip-unreadable are part of the name.",
    ),
]
Epsilon = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="FLOAT",
        help="Perturbation budget in pixels of [0,1], such as 8/255. "
        "Default: the paper's, 0.3 for digits and mnist, 8/255 for the others.",
        help_behavior_hint="",
    ),
]
Epsilons = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="[FLOAT …]",
        help="Perturbation budget in pixels of [0,1], such as 8/255, or several. "
        "Default: the paper's, 0.3 for digits and mnist, 8/255 for the others.",
        help_behavior_hint="",
    ),
]
MaxBatch = Annotated[
    int,
    tyro.conf.arg(
        help="Largest number of images in one forward pass. Lower it to save memory; results do not change."
    ),
]
Seed = Annotated[int, tyro.conf.arg(help="Random seed.")]
Device = Annotated[
    str,
    tyro.conf.arg(
        help="cpu, cuda or cuda:1. auto: cuda where there is a GPU, else cpu; under torchrun each process has "
        "its own."
    ),
]


class Subject(NamedTuple):
    """What a command works on."""

    model: "torch.nn.Module"
    source: str
    """Where the model came from."""
    dataset: "data.Dataset"
    device: "torch.device"


def subject_of(
    run: str,
    name: str | None,
    split: str,
    root: Path | None = None,
    side: int | None = None,
    skip_unreadable: bool = False,
    device: str = "auto",
) -> Subject:
    """The model `run` on the device, and the dataset `name`, whose images it classifies."""
    chosen = device_of(device)
    search_here()
    model, source = model_of(run)
    dataset = dataset_of(name, run, split, root, side, skip_unreadable)
    check_model(model.to(chosen), dataset, chosen)
    return Subject(model, source, dataset, chosen)


def model_of(name: str) -> "tuple[torch.nn.Module, str]":
    """The model that `name` names, in evaluation mode, and where it came from.

    A run folder or weights file, a network that comes with the package, or `package.module:factory` with a
    function of no arguments that returns an `nn.Module`; modules in the current folder can be imported.
    """
    from torch import nn

    from menet.training.pretrained import locate, names

    if locate(name).exists():
        from menet.training import load_model

        return load_model(locate(name)).eval(), name
    module, sign, attribute = name.partition(":")
    if not sign or not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        known = ", ".join(names()) or "none"
        raise ConfigurationError(
            f"expected a run folder, a weights file, a network of the package ({known}) "
            f"or package.module:factory, got {name!r}"
        )
    found = imported(name)
    model = found if isinstance(found, nn.Module) else _call(name, found)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"expected {name!r} to return a torch.nn.Module, got a {type(model).__name__}")
    return model.eval(), name


def imported(name: str) -> Any:
    """What `package.module:name` names, or the module without a name; **the module's code is executed**.

    Modules in the current folder can be imported, as with `python -m`.
    """
    search_here()
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in filter(None, attribute.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{name!r} cannot be imported: {error}") from error
    except Exception as error:
        raise ConfigurationError(f"{name!r} cannot be imported: it raised {_raised(error)}") from error
    return found


def search_here() -> None:
    """Let modules in the current folder be imported."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def own_name(name: str, what: Literal["estimator", "defense"]) -> str:
    """The name under which `package.module:Class` has registered itself; other names as they are."""
    if ":" not in name:
        return name
    from menet.estimators import ESTIMATORS
    from menet.preprocessed import Preprocessed

    kind = imported(name)
    known: dict[str, Any] = dict(ESTIMATORS if what == "estimator" else Preprocessed.kinds)
    for registered, one in known.items():
        if one is kind:
            return registered
    remedy = (
        "decorate its class with @menet.estimators.register('name')"
        if what == "estimator"
        else "derive its class from menet.Preprocessed, and give it a `name`"
    )
    raise ConfigurationError(f"expected a registered {what} as {name!r}, got {kind!r:.80}; {remedy}")


def _call(name: str, factory: Any) -> Any:
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name!r} cannot be called without arguments: {error}") from error
    try:
        return factory()
    except Exception as error:
        raise ConfigurationError(f"{name!r} raised {_raised(error)}") from error


def _raised(error: Exception) -> str:
    """An error of the user's code in one line, with its place."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words:.200} ({place.filename}:{place.lineno})"


def check_dataset(name: str, side: int | None = None, skip_unreadable: bool = False) -> str:
    """`name`, if it is that of a dataset, with an absolute path and the options; the error for another says what
    may be meant."""
    from menet import data
    from menet.data import absolute

    kind = re.split("[:@,]", name)[0]
    if kind in data.NAMES:
        return absolute(name, side, skip_unreadable)
    close = difflib.get_close_matches(kind, data.NAMES, n=1)
    if Path(name).is_dir():
        hint = f"did you mean folder:{name}?"
    elif close:
        hint = f"did you mean {close[0]!r}?"
    else:
        hint = f"choose from {', '.join(data.NAMES)} (a folder of images is folder:PATH)"
    raise ConfigurationError(f"unknown dataset {name!r}; {hint}")


def dataset_of(
    name: str | None,
    run: str,
    split: str,
    root: Path | None = None,
    side: int | None = None,
    skip_unreadable: bool = False,
) -> "data.Dataset":
    """The dataset `name`, which may be a folder of images; without a name, the one the run was trained on."""
    from menet import data

    if name is None:
        name = trained_on(run)
    if name.partition(":")[0] not in data.NAMES and Path(name).is_dir():
        name = f"folder:{name}"
    dataset = data.load(check_dataset(name, side, skip_unreadable), split, root)
    if dataset.total is not None:
        print(f"{name}: {len(dataset)} {split} images of {dataset.total} (split by a hash of the file names)")
    return dataset


def trained_on(run: str) -> str:
    """The dataset that a run or a network of the package was trained on."""
    from menet.training import pretrained

    path = pretrained.locate(run)
    config = (path if path.is_dir() else path.parent) / "config.json"
    if config.is_file():
        try:
            found = json.loads(config.read_bytes()).get("dataset")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigurationError(
                f"expected a JSON object in {config}; name the dataset with --data"
            ) from error
        if isinstance(found, dict):
            found = found.get("name")
        if isinstance(found, str):
            return found
    if path.is_file() and (found := pretrained.dataset_of(path)):
        return found
    raise ConfigurationError(f"{run} does not say what it was trained on; name the dataset with --data")


def check_model(model: "torch.nn.Module", dataset: "data.Dataset", device: "torch.device") -> None:
    """Pass one image through the model and expect a logit for each class of the dataset.

    Afterwards a model with randomness of its own has drawn once; whoever measures it reseeds it first.
    """
    import torch

    images, _ = dataset.batch(slice(0, 1))
    shape = "×".join(map(str, images.shape[1:]))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = model(images.to(device))
    except Exception as error:
        raise ConfigurationError(
            f"the model fails on a {shape} image of {dataset.name}: {_raised(error)}"
        ) from error
    classes = len(dataset.classes)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or len(logits) != 1:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ConfigurationError(f"expected logits of shape (1, {classes}) for one image, got {got}")
    if logits.shape[1] < classes:
        raise ConfigurationError(
            f"expected a logit for each of the {classes} classes of {dataset.name}, got {logits.shape[1]}"
        )


def device_of(name: str) -> "torch.device":
    """The device of that name, if this machine has it; under torchrun, `cuda` is each process's own GPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"unknown device {name!r}; choose from auto, cpu, cuda, cuda:0, …") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"it sees {count} GPUs" if count else "it sees no GPU"
        raise ConfigurationError(f"PyTorch cannot use {name!r} here: {found}; use --device cpu")
    return device


def epsilon_of(text: str | float | None, dataset: str, norm: str = "linf") -> float:
    """`text` as a number (8/255 is one), or the paper's choice for the dataset."""
    if text is None and norm == "l0":
        raise ConfigurationError(
            "expected --epsilon, the number of pixels that may be perturbed, for l0; got none"
        )
    if text is None:
        from menet.training import recipes

        return recipes.by_name(dataset).epsilon
    value = fraction(text)
    if value is None or not value >= 0:
        raise ConfigurationError(f"expected epsilon >= 0, such as 0.3 or 8/255, got {text!r}")
    from menet.attacks import ThreatModel
    from menet.evaluation.attack_spec import check_budget

    check_budget(ThreatModel(norm, value))  # type: ignore[arg-type]
    return value


def fraction(text: str | float) -> float | None:
    """`text` as a number (8/255 is one); None if it is not a number."""
    from menet.evaluation.attack_spec import number_or_word

    value = number_or_word(text) if isinstance(text, str) else text
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def default_folder(run: str, name: str) -> Path:
    """Where a command puts its results: in the run folder, or under `runs` for a factory."""
    path = Path(run)
    if path.exists():
        return (path if path.is_dir() else path.parent) / name
    return Path("runs") / run.replace(":", ".") / name

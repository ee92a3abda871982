"""Names and choices that options accept, without the heavy imports that help can do without.

A test compares each with the registry it comes from.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

import tyro

Norm = Literal["linf", "l2"]
Objective = Literal["standard", "adversarial", "n-fgsm", "trades"]
Optimizer = Literal["sgd", "adamw"]
Schedule = Literal["step", "one-cycle", "cosine"]
Precision = Literal["auto", "float32", "bfloat16"]
Recipe = Literal["short", "cores", "paper"]


def _registered(files: str, pattern: str) -> tuple[str, ...]:
    """The names of a registry, read from its source: importing it would import torch."""
    sources = sorted(Path(__file__).parent.parent.glob(files))
    return tuple(
        name for source in sources for name in re.findall(pattern, source.read_text("utf-8"), re.MULTILINE)
    )


ESTIMATORS = _registered("estimators/*.py", r'^@register\("([\w-]+)"\)')
DATASETS = _registered("data/catalog.py", r'\bname="([\w-]+)",')
MODELS = _registered("models/registry.py", r'^    "([\w-]+)": lambda')
BASELINES = _registered("baselines/**/*.py", r'^    name: ClassVar\[str\] = "([\w-]+)"')
ATTACKS = _registered("attacks/registry.py", r'^    "([\w-]+)": Entry\(')

Run = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="RUN", help="A run folder or weights file of `menet train`, or package.module:factory."
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
Root = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="PATH",
        help="Folder of the datasets. Default: $MENET_DATA, else the user's cache folder.",
        help_behavior_hint="",
    ),
]
Dataset = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="DATASET", help=f"{', '.join(DATASETS[:-1])}, folder:PATH, or folder:PATH@SIDE to resize images."
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
MaxBatch = Annotated[
    int,
    tyro.conf.arg(
        help="Largest number of images in one forward pass. Lower it to save memory; results do not change."
    ),
]
Seed = Annotated[int, tyro.conf.arg(help="Random seed.")]
Device = Annotated[str, tyro.conf.arg(help="cpu, cuda, cuda:0, …")]

"""The measured results of the repository: train, pack, attack and publish, each step resumed where it stopped.

`python -m benchmarks.results` does what is missing; `--only TEXT` for the model of that name, or else for those
whose name contains it. Trained are the recipes of scale `cores`, unless the network ships with the package:
remove its file to train it again. What is attacked is the packed network, as it ships.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from menet.training.pretrained import FOLDER, pack

RANK = 64
EPSILON = {"mnist": "0.3", "cifar10": "8/255", "svhn": "8/255", "tiny-imagenet": "8/255"}
"""The paper's budgets, linf."""
STEP = {"mnist": "0.01", "cifar10": "2/255", "svhn": "2/255", "tiny-imagenet": "2/255"}
"""The paper's step sizes."""
TRAININGS = {
    "mnist/vanilla": "mnist",
    "mnist/adversarial": "mnist --objective adversarial",
    "mnist/menet-pure": "mnist --defense me-net --p 0.4 0.6",
    "mnist/menet-pure-p20-40": "mnist --defense me-net --p 0.2 0.4",
    "mnist/menet-adversarial": "mnist --defense me-net --p 0.4 0.6 --objective adversarial",
    # Three times the epochs: is what it lacks beside the paper a matter of training?
    "mnist/menet-adversarial-long": "mnist --defense me-net --p 0.4 0.6 --objective adversarial --epochs 12",
    # The published code runs USVT unless told otherwise.
    "mnist/menet-pure-usvt": "mnist --defense me-net --estimator usvt --p 0.4 0.6",
    "mnist/menet-pure-usvt-p20-40": "mnist --defense me-net --estimator usvt --p 0.2 0.4",
    "mnist/menet-adversarial-usvt": "mnist --defense me-net --estimator usvt --p 0.4 0.6 --objective adversarial",
    "mnist/menet-certified": "mnist --recipe certificate --model mlp --defense me-net --estimator mask-only "
    "--encoding ablation --mask pixels --p 0.057 --epochs 40 --learning-rate 0.002",
    "cifar10/vanilla": "cifar10 --epochs 8",
    "cifar10/adversarial": "cifar10 --objective n-fgsm",
    "cifar10/menet-pure": "cifar10 --defense me-net --p 0.8 1.0 --epochs 8",
    "cifar10/menet-pure-p40-60": "cifar10 --defense me-net --p 0.4 0.6 --epochs 4",
    "cifar10/thermometer": "cifar10 --defense thermometer --epochs 4",
    "cifar10/menet-adversarial": "cifar10 --defense me-net --p 0.8 1.0 --objective n-fgsm --epochs 13",
    "cifar10/menet-adversarial-p40-60": "cifar10 --defense me-net --p 0.4 0.6 --objective n-fgsm --epochs 13",
    "svhn/vanilla": "svhn --epochs 6",
    "svhn/adversarial": "svhn --objective n-fgsm --epochs 10",
    "svhn/menet-pure": "svhn --defense me-net --p 0.8 1.0 --epochs 6",
    "svhn/menet-adversarial": "svhn --defense me-net --p 0.8 1.0 --objective n-fgsm --epochs 9",
    # Ten classes of 300 images each are at hand: 300 of the 3,000 are held out, and the epochs are many.
    "tiny-imagenet/vanilla": "tiny-imagenet --validation 300 --epochs 40",
    "tiny-imagenet/adversarial": "tiny-imagenet --validation 300 --objective n-fgsm --epochs 66",
    "tiny-imagenet/menet-pure": "tiny-imagenet --validation 300 --defense me-net --p 0.8 1.0 --epochs 40",
    "tiny-imagenet/menet-adversarial": "tiny-imagenet --validation 300 --defense me-net --p 0.8 1.0 "
    "--objective n-fgsm --epochs 60",
}
"""The networks without adversarial training have less of the time: they withstand nothing either way."""
BUDGETS = tuple(
    f"standard:budget=quick,{threat}"
    for threat in (
        *("epsilon=0.05", "epsilon=0.1", "epsilon=0.2", "norm=l2,epsilon=1", "norm=l2,epsilon=2"),
        *("norm=l0,epsilon=4", "norm=l0,epsilon=8"),
    )
)
"""Other budgets and norms, on MNIST: does what is decided at ε = 0.3 hold for smaller and for other changes?"""
FEW_PIXELS = ("standard:norm=l0,epsilon=4", "standard:norm=l0,epsilon=8")
"""Where ME-Net adds to adversarial training at budget quick: does it at budget standard?"""
COMPARED = ("vanilla", "adversarial", "menet-pure", "menet-adversarial")
"""The models of that study."""
SHIPPED = ("vanilla", "adversarial", "menet-pure", "menet-adversarial", "menet-certified")
"""The models of MNIST and CIFAR-10 that ship with the package."""


@dataclass(frozen=True)
class Line:
    """A model of the board: a training, with a defense in front of its network or as it is."""

    training: str
    attacks: tuple[str, ...] = ("standard",)
    defense: dict[str, object] | None = None

    @property
    def random(self) -> bool:
        """Whether its answers depend on random draws."""
        return "menet" in self.training or (self.defense or {}).get("name") in RANDOM


RANDOM = ("resize-pad", "total-variation", "image-quilting", "me-net", "defense-gan")
"""The defenses with random draws of those that are put in front of a network."""
ROUNDED = ("standard", "coordinate-search")
"""One bit of depth has no gradient, and few pixels of a digit can be rounded otherwise within the budget."""
DEFENSE_GAN = (
    "standard",
    "fgsm:eot=1",
    "pgd:steps=20,gradient=bpda,eot=1",
    "pgd:steps=10,gradient=exact,eot=1",
    "on-manifold:steps=200,starts=3,eot=1,learning_rate=0.1",
)
"""A draw of its projection takes 160 passes through the generator, 25 ms of one core; the standard suite takes
400 draws for an example at budget quick, 2,500 at budget standard."""


def as_published(dataset: str) -> tuple[str, ...]:
    """The attacks of the paper on ME-Net, beside the standard suite; transfers from a network that ships."""
    paper = f"step_size={STEP[dataset]}"
    transfer = (f"pgd:steps=40,{paper},on={dataset}-vanilla",) if _ships(f"{dataset}/vanilla") else ()
    return (
        "standard",
        f"pgd:steps=40,gradient=bpda,{paper},eot=1,keep=last",
        f"pgd:steps=100,gradient=bpda,{paper},eot=1,keep=last",
        f"pgd:steps=40,{paper},on=classifier",
        "pgd:steps=100,gradient=exact,draws=frozen:1",
        *transfer,
    )


def lines(dataset: str) -> dict[str, Line]:
    """The lines of one dataset: the networks trained for it, then other defenses before one that ships."""
    trained = [name for name in TRAININGS if name.startswith(f"{dataset}/")]
    # What is made for certificates has no gradient by BPDA: its network sees twice the channels.
    paper = [name for name in trained if "menet" in name and "certified" not in name]
    found = {name: Line(name, as_published(dataset) if name in paper else ("standard",)) for name in trained}
    if dataset == "mnist":
        for name in (f"{dataset}/{model}" for model in COMPARED):
            more = (*BUDGETS, *FEW_PIXELS) if name == "mnist/menet-adversarial" else BUDGETS
            found[name] = replace(found[name], attacks=(*found[name].attacks, *more))
    if not _ships(f"{dataset}/vanilla"):
        return found
    before: dict[str, dict[str, object]] = {
        "jpeg": {"name": "jpeg", "quality": 50},
        "bit-depth": {"name": "bit-depth", "bits": 1 if dataset == "mnist" else 3},
        "median": {"name": "median", "size": 3},
        "resize-pad": {"name": "resize-pad"},
        "total-variation": {"name": "total-variation"},
        "image-quilting": {"name": "image-quilting", "patches": 20_000},
        "pixel-defend": {"name": "pixel-defend", "epsilon": 0.3 if dataset == "mnist" else 16 / 255},
        "menet-untrained": {"name": "me-net", "estimator": "nuclear-norm", "p": 0.5},
    }
    vanilla = f"{dataset}/vanilla"
    found |= {f"{dataset}/{name}": Line(vanilla, defense=settings) for name, settings in before.items()}
    if dataset == "mnist":
        found["mnist/bit-depth"] = replace(found["mnist/bit-depth"], attacks=ROUNDED)
    gan = {"name": "defense-gan", **({"gan_steps": 700} if dataset == "mnist" else {})}
    return found | {f"{dataset}/defense-gan": Line(vanilla, DEFENSE_GAN, gan)}


def main() -> None:
    """Do what is missing, in the order of the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/results"), help="folder of the trainings and records"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the published results")
    parser.add_argument("--only", default="", help="only the model of this name, or else those that contain it")
    parser.add_argument("--examples", type=int, default=1000, help="test images per attack")
    parser.add_argument("--draws", type=int, default=20, help="fresh draws that score each image")
    parser.add_argument("--budget", default="standard", help="of the standard suite")
    parser.add_argument("--bfloat16", action="store_true", help="attack random models in bfloat16")
    options = parser.parse_args()
    every = {name: line for dataset in EPSILON for name, line in lines(dataset).items()}
    for name, line in every.items():
        if name != options.only and (options.only in every or options.only not in name):
            continue
        dataset = name.partition("/")[0]
        # A transfer attack takes the vanilla network of its dataset.
        sources = [f"{dataset}/vanilla"] if any(f"on={dataset}" in one for one in line.attacks) else []
        for needed in dict.fromkeys((line.training, *sources)):
            if not _shipped(needed).is_file():
                _menet("train", *_options(needed), "--out", str(options.runs / needed))
                _packed(needed, Line(needed), options.runs)
        model, records = _packed(name, line, options.runs), options.runs / "records" / _flat(name)
        for attack in line.attacks:
            _menet(
                "evaluate", model, "--attacks", attack, "--epsilon", EPSILON[dataset],
                "--stop", str(options.examples), "--draws", str(options.draws), "--budget", options.budget,
                "--out", str(records), *(["--bfloat16"] if options.bfloat16 and line.random else []),
            )  # fmt: skip
        _menet("publish", model, "--name", name, "--evaluation", str(records), "--out", str(options.out))
    if options.out == parser.get_default("out"):
        # The cards of the package say what the repository's own results do.
        _menet("models", "measured", str(options.out))


def _options(training: str) -> list[str]:
    """The options of a training, of the recipe `cores` unless they name another."""
    words = TRAININGS[training].split()
    return words if "--recipe" in words else [*words, "--recipe", "cores"]


def _packed(name: str, line: Line, runs: Path) -> str:
    """The packed model, as commands take it: by its name if it ships with the package."""
    path = _shipped(name) if _ships(name) else runs / "packed" / f"{_flat(name)}.safetensors"
    if not path.is_file():
        trained = _shipped(line.training)
        pack(trained if trained.is_file() else runs / line.training, path, RANK, line.defense)
    return _flat(name) if _ships(name) else str(path)


def _ships(name: str) -> bool:
    """Whether the network of a line ships with the package."""
    dataset, _, model = name.partition("/")
    return dataset in ("mnist", "cifar10") and model in SHIPPED


def _shipped(name: str) -> Path:
    return FOLDER / f"{_flat(name)}.safetensors"


def _flat(name: str) -> str:
    return name.replace("/", "-")


def _menet(*arguments: str) -> None:
    print("menet " + " ".join(arguments), flush=True)
    subprocess.run([sys.executable, "-m", "menet.cli", *arguments], check=True)


if __name__ == "__main__":
    main()

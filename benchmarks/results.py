"""The measured results of the repository: train, pack, attack and publish, each step resumed where it stopped.

`python -m benchmarks.results` does what is missing; `--only TEXT` for the models whose name contains it. Trained
are the recipes of scale `cores`; what is attacked is the packed network, as it ships with the package.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from menet.training.pretrained import FOLDER, pack

RANK = 64
VANILLA = "mnist/vanilla"
SHIPPED = ("mnist/vanilla", "mnist/adversarial", "mnist/menet-pure", "mnist/menet-adversarial")
"""The models that ship with the package."""
TRAININGS = {
    "mnist/vanilla": "mnist",
    "mnist/adversarial": "mnist --objective adversarial",
    "mnist/menet-pure": "mnist --defense me-net --p 0.4 0.6",
    "mnist/menet-pure-p20-40": "mnist --defense me-net --p 0.2 0.4",
    "mnist/menet-adversarial": "mnist --defense me-net --p 0.4 0.6 --objective adversarial",
}
PAPER_STEPS = "step_size=0.01,eot=1,keep=last"


@dataclass(frozen=True)
class Line:
    """A model of the board: a training, with a defense in front of its network or as it is."""

    training: str
    attacks: tuple[str, ...] = ("standard",)
    defense: dict[str, object] | None = None


MENET = (
    "standard",
    f"pgd:steps=40,gradient=bpda,{PAPER_STEPS}",
    f"pgd:steps=100,gradient=bpda,{PAPER_STEPS}",
    "pgd:steps=40,step_size=0.01,on=classifier",
    "pgd:steps=40,step_size=0.01,on=mnist-vanilla",
)
DEFENSE_GAN = (
    "standard",
    "fgsm:eot=1",
    "pgd:steps=20,gradient=bpda,eot=1",
    "pgd:steps=10,gradient=exact,eot=1",
    "on-manifold:steps=200,starts=3,eot=1,learning_rate=0.1",
)
"""A draw of its projection takes 160 passes through the generator, 25 ms of one core; the standard suite takes
400 draws for an example at budget quick, 2,500 at budget standard."""
LINES = {
    "mnist/menet-adversarial": Line("mnist/menet-adversarial", MENET),
    "mnist/menet-pure": Line("mnist/menet-pure", MENET),
    "mnist/menet-pure-p20-40": Line("mnist/menet-pure-p20-40", MENET),
    "mnist/vanilla": Line("mnist/vanilla"),
    "mnist/adversarial": Line("mnist/adversarial"),
    "mnist/jpeg": Line("mnist/vanilla", defense={"name": "jpeg", "quality": 50}),
    "mnist/bit-depth": Line("mnist/vanilla", defense={"name": "bit-depth", "bits": 1}),
    "mnist/median": Line("mnist/vanilla", defense={"name": "median", "size": 3}),
    "mnist/resize-pad": Line("mnist/vanilla", defense={"name": "resize-pad"}),
    "mnist/total-variation": Line("mnist/vanilla", defense={"name": "total-variation"}),
    "mnist/defense-gan": Line("mnist/vanilla", DEFENSE_GAN, {"name": "defense-gan", "gan_steps": 700}),
    "mnist/image-quilting": Line("mnist/vanilla", defense={"name": "image-quilting"}),
    "mnist/menet-untrained": Line(
        "mnist/vanilla", defense={"name": "me-net", "estimator": "nuclear-norm", "p": 0.5}
    ),
}


def main() -> None:
    """Do what is missing, in the order of the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/results"), help="folder of the trainings and records"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the published results")
    parser.add_argument("--only", default="", help="only the models whose name contains this text")
    parser.add_argument("--examples", type=int, default=1000, help="test images per attack")
    parser.add_argument("--draws", type=int, default=20, help="fresh draws that score each image")
    parser.add_argument("--budget", default="standard", help="of the standard suite")
    options = parser.parse_args()
    for name, line in LINES.items():
        if options.only not in name:
            continue
        for needed in dict.fromkeys((line.training, VANILLA)):
            _menet("train", *TRAININGS[needed].split(), "--recipe", "cores", "--out", str(options.runs / needed))
            _packed(needed, LINES[needed], options.runs)
        model, records = _packed(name, line, options.runs), options.runs / "records" / _flat(name)
        for attack in line.attacks:
            _menet(
                "evaluate", model, "--attacks", attack, "--epsilon", "0.3", "--stop", str(options.examples),
                "--draws", str(options.draws), "--budget", options.budget, "--out", str(records),
            )  # fmt: skip
        _menet("publish", model, "--name", name, "--evaluation", str(records), "--out", str(options.out))
    _menet("models", "measured", str(options.out))


def _packed(name: str, line: Line, runs: Path) -> str:
    """The packed model, as commands take it: by its name if it ships with the package."""
    shipped = name in SHIPPED
    path = (FOLDER if shipped else runs / "packed") / f"{_flat(name)}.safetensors"
    if not path.is_file():
        pack(runs / line.training, path, RANK, line.defense)
    return _flat(name) if shipped else str(path)


def _flat(name: str) -> str:
    return name.replace("/", "-")


def _menet(*arguments: str) -> None:
    print("menet " + " ".join(arguments), flush=True)
    subprocess.run([sys.executable, "-m", "menet.cli", *arguments], check=True)


if __name__ == "__main__":
    main()

"""`menet demo`: train, attack, certify and report from end to end, on images that come with the package.

`FULL` and `QUICK` are what it trains and attacks.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from menet.commands import Csv, Json, Latex, Output, options, printing
from menet.commands.options import Objective, Seed
from menet.errors import ConfigurationError, require

EPSILON = 0.2
P, LOW_P = (0.4, 0.6), 0.1


@dataclass(frozen=True)
class Baseline:
    """A baseline defense with settings that suit digits."""

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    random: bool = False
    thresholds: bool = False
    """Whether it rounds the pixels of digits to black or white."""


BASELINES = {
    "thermometer": Baseline("thermometer encoding"),
    "total-variation": Baseline("total variation", random=True),
    "pixel-defend": Baseline(
        "PixelDefend",
        {"epsilon": EPSILON, "levels": 16, "width": 16, "layers": 2, "steps": 200},
        thresholds=True,
    ),
    "image-quilting": Baseline("image quilting", {"patches": 4000}, random=True),
    "defense-gan": Baseline(
        "Defense-GAN",
        {"latent": 32, "features": 8, "gan_steps": 1000, "steps": 20, "starts": 2},
        random=True,
    ),
    "bit-depth": Baseline("one-bit depth", {"bits": 1}, thresholds=True),
    "median": Baseline("median", {"size": 3}),
    "resize-pad": Baseline("resize and pad", random=True),
    "discretize": Baseline("two colors", {"colors": 2}, thresholds=True),
    "jpeg": Baseline("JPEG"),
}


@dataclass(frozen=True)
class Network:
    """One network of the demonstration and the attacks on it."""

    folder: str
    title: str
    epochs: int
    objective: Objective = "standard"
    defense: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    """Added to the seed of the demonstration: a surrogate is the same network trained independently."""
    attacks: tuple[str, ...] = ()
    certified: bool = False

    def config(self, plan: "Plan", seed: int) -> Any:
        """Its `TrainingConfig`."""
        from menet.training import recipes

        return replace(
            recipes.digits(),
            recipe="demo",
            model="small",
            defense=self.defense,
            objective=self.objective,
            epochs=self.epochs,
            learning_rate=0.1,
            epsilon=plan.epsilon,
            steps=plan.training_steps,
            step_size=2 * plan.epsilon / plan.training_steps,
            limit=plan.images,
            validation=0,
            seed=seed + self.seed,
        )


@dataclass(frozen=True)
class Plan:
    """The size of the demonstration."""

    name: str
    steps: int = 20
    """Steps of the transfer attack, and of the attack with one draw per gradient."""
    suite: str | int = "quick"
    """Budget of the standard suite."""
    epsilons: tuple[float, ...] = (0.1,)
    """Further budgets ε of the suite, for curves."""
    epochs: int = 4
    estimated_epochs: int = 4
    """Epochs of ME-Nets."""
    baselines: tuple[str, ...] = ()
    """Names in `BASELINES`."""
    images: int = 3000
    """Training images."""
    epsilon: float = EPSILON
    training_steps: int = 4
    """Steps of the attack in adversarial training."""
    examples: int = 50
    """Attacked test images."""
    batch: int = 50
    draws: int = 20
    """Fresh random draws that each image is scored on."""
    snapshots: int = 4
    certified: int = 100
    selection: int = 40
    estimation: int = 300

    @property
    def networks(self) -> tuple[Network, ...]:
        """All networks; the surrogate comes last."""
        transferred = f"pgd:steps={self.steps},eot=1,on=vanilla-surrogate"
        # One draw per gradient, as the paper attacks: what the suite is compared with.
        single = f"pgd:steps={self.steps},eot=1,gradient=bpda"
        suite = tuple(f"standard:budget={self.suite}{budget}" for budget in ("", *_budgets(self.epsilons)))
        vanilla = Network("vanilla", "vanilla", self.epochs, attacks=(transferred, *suite))
        random = (transferred, single, *suite)
        me_net = Network("me-net", "ME-Net", self.estimated_epochs, defense=_me_net(P), attacks=random)
        low_p = Network("me-net-low-p", f"ME-Net, p {LOW_P:g}", self.estimated_epochs, certified=True)
        return (
            vanilla,
            replace(vanilla, folder="adversarial", title="adversarial training", objective="adversarial"),
            me_net,
            replace(me_net, folder="me-net-adversarial", title="ME-Net, adversarial", objective="adversarial"),
            *(
                Network(
                    name,
                    BASELINES[name].title,
                    self.epochs,
                    defense={"name": name, **BASELINES[name].settings},
                    attacks=random if BASELINES[name].random else (transferred, *suite),
                )
                for name in self.baselines
            ),
            replace(low_p, defense=_me_net(LOW_P, tolerance=5e-2)),
            _surrogate(vanilla),
        )

    @property
    def introduction(self) -> tuple[str, ...]:
        """What was done, at the top of the report."""
        others = ", ".join(BASELINES[name].title for name in self.baselines)
        return (
            f"Small networks were trained on {self.images:,} real digits and attacked on {self.examples} test "
            f"images. The threat model is ℓ∞ with ε = {self.epsilon:g}: each pixel, from 0 (black) to 1 (white), "
            "may be perturbed by that much.",
            f"ME-Net masks about half of the pixels at random (p {P[0]:g}→{P[1]:g}), estimates the image from "
            "the rest by nuclear-norm minimization and classifies the estimate. It is trained plainly, and on "
            "adversarial examples as the paper's contender.",
            *([f"Baselines, with the same network and training: {others}."] * bool(others)),
        )

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a reader must know before reading the numbers."""
        rough = "Training was very short and examples are few. " if self.name == "quick" else ""
        thresholds = [BASELINES[name].title for name in self.baselines if BASELINES[name].thresholds]
        return (
            f"{rough}The networks are small and the images are digits, so no number here can be compared with "
            f"the paper's. A certificate needs a small p: it is computed for a second ME-Net, which observes "
            f"{100 * LOW_P:.0f}% of the pixels.",
            *(
                [
                    "Digits are nearly black and white. Defenses that round pixels to either "
                    f"({', '.join(thresholds)}) owe their robust accuracy to that, and lose it on photographs."
                ]
                if thresholds
                else []
            ),
        )


def chosen_baselines(names: tuple[str, ...]) -> tuple[str, ...]:
    """The baselines in `names`, each once; `all` means all of them."""
    for name in names:
        if name != "all" and name not in BASELINES:
            raise ConfigurationError(f"unknown baseline {name!r}; choose from all, {', '.join(BASELINES)}")
    return tuple(name for name in BASELINES if name in names or "all" in names)


def _surrogate(network: Network) -> Network:
    """The same network, trained independently, as the source of transfer attacks."""
    folder, title = f"{network.folder}-surrogate", f"{network.title} surrogate"
    return replace(network, folder=folder, title=title, seed=1, attacks=())


def _me_net(p: float | tuple[float, float], tolerance: float = 1e-2) -> dict[str, Any]:
    """ME-Net with an estimator that stops earlier than by default, which would double the time."""
    plain = list(p) if isinstance(p, tuple) else p
    return {"name": "me-net", "estimator": {"name": "nuclear-norm", "tol": tolerance}, "p": plain}


def _budgets(epsilons: tuple[float, ...]) -> list[str]:
    return [f",epsilon={epsilon:g}" for epsilon in epsilons]


FULL = Plan("full")
QUICK = Plan(
    "quick",
    steps=10,
    suite=60,
    epsilons=(),
    epochs=3,
    estimated_epochs=3,
    images=1200,
    training_steps=3,
    examples=60,
    batch=20,
    draws=10,
    certified=30,
    selection=20,
    estimation=100,
)


@dataclass(frozen=True)
class Demo:
    """Train four networks on real digits, attack each, certify, and answer whether the defense helps.

    A vanilla network and a ME-Net, each trained plainly and adversarially; transfer attacks, the paper's attack
    of one draw per gradient, and the standard suite at several budgets. A few minutes on two cores, no download.
    Safe to interrupt: rerun the same command to resume. `--baselines all` adds the defenses that ME-Net is
    compared with.
    """

    quick: bool = False
    """Under a minute: fewer images, epochs, steps and draws, so the intervals are wide."""

    out: Path = Path("runs/demo")
    """Folder for the report, the networks and the records."""

    baselines: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="[NAME …]",
            help=f"Baseline defenses to train and attack too: {', '.join(options.BASELINES)}, or all.",
            help_behavior_hint="(default: none)",
        ),
    ] = ()

    seed: Seed = 0

    json: Json = False

    csv: Csv = False

    latex: Latex = False

    @printing
    def __call__(self, out: Output) -> int:
        if self.seed < 0:
            raise ConfigurationError(f"expected seed >= 0, got {self.seed}")
        baselines = chosen_baselines(self.baselines)
        from menet import data
        from menet.files import replacing, write_atomically
        from menet.report.collect import RECONSTRUCTION
        from menet.training import train

        began = time.monotonic()
        plan = replace(QUICK if self.quick else FULL, baselines=baselines)
        work = self.out / f"{plan.name}-{plan_key(plan, self.seed)}"
        console = Console()

        console.print("[bold]1. Real images, masked at random and estimated by every estimator[/bold]")
        with replacing(self.out / RECONSTRUCTION) as temporary:
            _reconstruction(self.seed).savefig(temporary, format="png", dpi=160)
        write_atomically(work / RECONSTRUCTION, (self.out / RECONSTRUCTION).read_bytes())
        console.print(f"picture: {self.out / RECONSTRUCTION}")

        console.print(f"[bold]2. Training {len(plan.networks)} networks on {plan.images:,} digits[/bold]")
        for number, network in enumerate(plan.networks, 1):
            console.print(f"{number} of {len(plan.networks)}: {network.title}")
            train(network.config(plan, self.seed), work / network.folder)

        console.print(f"[bold]3. Attacking each on {plan.examples} test images[/bold]")
        testing = data.load("digits", "test")
        for network in plan.networks:
            if network.attacks:
                self._attack(plan, network, work, testing)

        console.print("[bold]4. Certifying against perturbed pixels[/bold]")
        for network in plan.networks:
            if network.certified:
                self._certify(plan, network, work, testing)

        console.print("[bold]5. Writing the report[/bold]")
        self._report(plan, work, time.monotonic() - began, console, out)
        return 0

    def _attack(self, plan: Plan, network: Network, work: Path, testing: Any) -> None:
        from menet.evaluation import parse_attack
        from menet.training import load_model

        folder = work / network.folder
        model = load_model(folder)
        attacks = [
            parse_attack(words, model, lambda name: load_model(work / name), epsilon=plan.epsilon)
            for words in network.attacks
        ]
        transfers = [one for one in attacks if one.source is not None]
        # Features are those of images under transfer attacks, as in the paper's figures 4 and 5.
        self._evaluate(plan, model, testing, transfers, folder, plan.examples)
        others = [one for one in attacks if one.source is None]
        self._evaluate(plan, model, testing, others, folder, plan.snapshots)

    def _evaluate(
        self, plan: Plan, model: Any, testing: Any, attacks: Sequence[Any], folder: Path, snapshots: int
    ) -> None:
        from menet.evaluation import EvaluationSettings, evaluate
        from menet.evaluation.snapshots import features_of, save_features

        if not attacks:
            return
        settings = EvaluationSettings(
            stop=plan.examples,
            batch_size=plan.batch,
            draws=plan.draws,
            seed=self.seed,
            snapshots=snapshots,
            loss_history=True,
        )
        records = folder / "evaluation"
        found = evaluate(model, testing, attacks, records, settings, source=folder.name)
        if snapshots >= plan.examples:
            for one in found.values():
                save_features(features_of(model, one), records)

    def _certify(self, plan: Plan, network: Network, work: Path, testing: Any) -> None:
        from menet.defense import MENet
        from menet.evaluation import CertificateSettings, certify
        from menet.training import load_model

        folder = work / network.folder
        model = load_model(folder)
        assert isinstance(model, MENet)
        settings = CertificateSettings(
            stop=plan.certified, selection=plan.selection, estimation=plan.estimation, seed=self.seed
        )
        certify(model, testing, folder / "certificate", settings, source=folder.name)

    def _report(self, plan: Plan, work: Path, seconds: float, console: Console, out: Output) -> None:
        from menet.files import write_atomically
        from menet.report.accuracy_tables import certificates, summary
        from menet.report.collect import NOTES, collect
        from menet.report.narrative import answer
        from menet.report.page import render_html, report_of

        # Baselines of an earlier run are in the folder too.
        there = tuple(name for name in BASELINES if (work / name / "evaluation").is_dir())
        plan = replace(plan, baselines=there)
        notes = {
            "title": "Networks under attack, on real digits",
            "introduction": plan.introduction,
            "meaning": plan.caveats,
            "names": {network.folder: network.title for network in plan.networks},
            "seconds": _first_time(work / NOTES, seconds),
        }
        write_atomically(work / NOTES, json.dumps(notes, indent=1, ensure_ascii=False))
        collection = collect(work)
        write_atomically(self.out / "report.html", render_html(report_of(collection)))
        out.table(summary(collection), console)
        out.table(certificates(collection.subjects), console)
        told = [*answer(collection), *plan.caveats]
        out.value(answer=told, report=self.out / "report.html", records=work)
        console.print("\n[bold]Does it help?[/bold]")
        for paragraph in told:
            console.print(f"• {paragraph}", markup=False, highlight=False)
        console.print(f"\nreport: {self.out / 'report.html'}\nrecords and networks: {work}")


def _reconstruction(seed: int) -> Any:
    """Crops of real photographs, half of their values masked, beside what each estimator reconstructs."""
    import numpy as np
    import torch

    from menet.commands.reconstruct import reconstructions
    from menet.estimators import ESTIMATORS
    from menet.report.pictures import reconstruction_grid

    china, flower = require("sklearn.datasets", extra="demo").load_sample_images().images
    crops = [china[150:278, 260:388], china[20:148, 40:168], flower[220:348, 420:548], flower[120:248, 160:288]]
    images = torch.from_numpy(np.stack([crop[::2, ::2] for crop in crops])).permute(0, 3, 1, 2).float() / 255
    names = [name for name in ESTIMATORS if name != "mask-only"]
    masked, estimates = reconstructions(images, names, p=0.5, seed=seed)
    return reconstruction_grid(images, masked, estimates, "Half of the values masked at random, then estimated")


def plan_key(plan: Plan, seed: int) -> str:
    """A hash of everything that decides the numbers; whichever baselines are chosen, finished work is reused."""
    from menet import __version__

    networks = [asdict(network) for network in replace(plan, baselines=tuple(BASELINES)).networks]
    content = json.dumps([asdict(replace(plan, baselines=())), networks, seed, __version__], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def _first_time(path: Path, seconds: float) -> float:
    """How long the work took when it was done; a run that only reused it took no time worth telling."""
    if path.is_file():
        try:
            before = json.loads(path.read_bytes()).get("seconds")
        except (ValueError, AttributeError, RecursionError):
            return seconds
        if isinstance(before, (int, float)):
            return max(float(before), seconds)
    return seconds

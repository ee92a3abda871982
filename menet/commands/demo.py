"""`menet demo`: train, attack, certify and report from end to end, on images that come with the package."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from menet.commands import demo_plan
from menet.commands.demo_plan import Network, Plan
from menet.commands.options import BASELINES, Seed
from menet.commands.output import Csv, Json, Latex, Output, printing
from menet.errors import ConfigurationError, require


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
            help=f"Baseline defenses to train and attack too: {', '.join(BASELINES)}, or all.",
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
        baselines = demo_plan.chosen_baselines(self.baselines)
        from menet import data
        from menet.files import replacing, write_atomically
        from menet.report.collect import RECONSTRUCTION
        from menet.training import train

        began = time.monotonic()
        plan = replace(demo_plan.QUICK if self.quick else demo_plan.FULL, baselines=baselines)
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
        there = tuple(name for name in demo_plan.BASELINES if (work / name / "evaluation").is_dir())
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

    networks = [asdict(network) for network in replace(plan, baselines=tuple(demo_plan.BASELINES)).networks]
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

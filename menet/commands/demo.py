"""`menet demo`: the main job from end to end, on images that come with the package."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from torch import nn

from menet import __version__, data
from menet.commands.demo_pictures import reconstruction
from menet.commands.demo_plan import BESIDE, FULL, QUICK, Network, Plan, beside
from menet.defense import MENet
from menet.errors import ConfigurationError
from menet.evaluation import Assignment, CertificateSettings, Settings, assign, certify, evaluate
from menet.evaluation.features import features_of, save_features
from menet.files import replacing, write_atomically
from menet.report.collect import NOTES, RECONSTRUCTION, collect
from menet.report.contents import report_of
from menet.report.html import page
from menet.report.plain_words import meaning
from menet.report.tables import certificates, overview
from menet.training import load_model, train


@dataclass(frozen=True)
class Demo:
    """Train three networks on real digits, attack each, certify, and say what the numbers mean.

    A network as usual, one trained on adversarial images and a ME-Net; transferred attacks, PGD through the
    estimator (BPDA) and in expectation over masks (EOT). A few minutes on two cores and no download. Started
    again, it goes on where it was and uses what is finished. `--beside all` puts the defenses that ME-Net is
    compared with beside it.
    """

    quick: bool = False
    """Under a minute: fewer images, epochs, steps and masks, so the intervals are wide."""

    out: Path = Path("runs/demo")
    """Folder for the report, the picture, the networks and the records."""

    beside: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="[NAME …]", help_behavior_hint="(default: none)")
    ] = ()
    """Other defenses to train and attack too: thermometer, total-variation, pixel-defend, bit-depth, median,
    resize-pad, discretise, jpeg, or all."""

    seed: int = 0
    """All randomness comes from it."""

    def __call__(self) -> int:
        if self.seed < 0:
            raise ConfigurationError(f"seed is {self.seed}; accepted are whole numbers from 0")
        began = time.monotonic()
        plan = replace(QUICK if self.quick else FULL, beside=beside(self.beside))
        work = self.out / f"{plan.name}-{_key(plan, self.seed)}"
        console = Console()

        console.print("[bold]1. Real images, masked and estimated by every method[/bold]")
        with replacing(self.out / RECONSTRUCTION) as temporary:
            reconstruction(self.seed).savefig(temporary, format="png", dpi=160)
        write_atomically(work / RECONSTRUCTION, (self.out / RECONSTRUCTION).read_bytes())
        console.print(f"picture: {self.out / RECONSTRUCTION}")

        console.print(f"[bold]2. Training {len(plan.networks)} networks on {plan.images:,} digits[/bold]")
        for number, network in enumerate(plan.networks, 1):
            console.print(f"{number} of {len(plan.networks)}: {network.title}")
            train(network.config(plan, self.seed), work / network.folder)

        console.print(f"[bold]3. Attacking each on {plan.examples} digits it has not seen[/bold]")
        testing = data.load("digits", "test")
        for network in plan.networks:
            if network.attacks:
                self._attack(plan, network, work, testing)

        console.print("[bold]4. Certifying: how many pixels cannot turn the vote[/bold]")
        for network in plan.networks:
            if network.certified:
                self._certify(plan, network, work, testing)

        console.print("[bold]5. Writing the report[/bold]")
        self._report(plan, work, time.monotonic() - began, console)
        return 0

    def _attack(self, plan: Plan, network: Network, work: Path, testing: data.Dataset) -> None:
        folder = work / network.folder
        model = load_model(folder)

        def load(name: str) -> nn.Module:
            return load_model(work / name)

        assignments = [assign(words, model, load, epsilon=plan.epsilon) for words in network.attacks]
        transferred = [one for one in assignments if one.source is not None]
        # Features are taken of the pictures of transferred attacks, as in the paper's figures 4 and 5.
        self._evaluate(plan, model, testing, transferred, folder, plan.examples)
        others = [one for one in assignments if one.source is None]
        self._evaluate(plan, model, testing, others, folder, plan.pictures)

    def _evaluate(
        self,
        plan: Plan,
        model: nn.Module,
        testing: data.Dataset,
        assignments: Sequence[Assignment],
        folder: Path,
        pictures: int,
    ) -> None:
        if not assignments:
            return
        settings = Settings(
            stop=plan.examples, batch=plan.batch, masks=plan.masks, seed=self.seed, pictures=pictures, trace=True
        )
        records = folder / "evaluation"
        found = evaluate(model, testing, assignments, records, settings, source=folder.name)
        if pictures >= plan.examples:
            for one in found.values():
                save_features(features_of(model, one), records)

    def _certify(self, plan: Plan, network: Network, work: Path, testing: data.Dataset) -> None:
        folder = work / network.folder
        model = load_model(folder)
        assert isinstance(model, MENet)
        settings = CertificateSettings(
            stop=plan.certified, selection=plan.selection, estimation=plan.estimation, seed=self.seed
        )
        certify(model, testing, folder / "certificate", settings, source=folder.name)

    def _report(self, plan: Plan, work: Path, seconds: float, console: Console) -> None:
        # What an earlier run has put beside is in the folder too.
        plan = replace(plan, beside=tuple(name for name in BESIDE if (work / name / "evaluation").is_dir()))
        notes = {
            "title": "Networks under attack, on real digits",
            "introduction": plan.introduction,
            "meaning": plan.caveats,
            "names": {network.folder: network.title for network in plan.networks},
            "seconds": _first_time(work / NOTES, seconds),
        }
        write_atomically(work / NOTES, json.dumps(notes, indent=1, ensure_ascii=False))
        collection = collect(work)
        write_atomically(self.out / "report.html", page(report_of(collection)))
        whole = overview(collection).only(
            "model",
            "attack",
            "expected",
            "by vote",
            explanation="In brackets are 95% intervals over examples. Expected: the share of fresh masks under "
            "which an example is right, averaged. By vote: the class that most masks choose is right.",
        )
        for table in (whole, certificates(collection.subjects)):
            console.print(table.rich())
            console.print(table.explanation, style="dim")
        console.print("\n[bold]What the numbers mean[/bold]")
        for paragraph in (*plan.caveats, *meaning(collection)):
            console.print(f"• {paragraph}", markup=False, highlight=False)
        console.print(f"\nreport: {self.out / 'report.html'}\nrecords and networks: {work}")


def _key(plan: Plan, seed: int) -> str:
    """A name for all that decides the numbers: what is kept under it can be used again, whatever is beside."""
    networks = [asdict(network) for network in replace(plan, beside=tuple(BESIDE)).networks]
    content = json.dumps([asdict(replace(plan, beside=())), networks, seed, __version__], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def _first_time(path: Path, seconds: float) -> float:
    """How long the work took when it was done; a run that only used it again took no time worth telling."""
    if path.is_file():
        before = json.loads(path.read_text()).get("seconds")
        if isinstance(before, (int, float)):
            return max(float(before), seconds)
    return seconds

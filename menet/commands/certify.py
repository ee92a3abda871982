"""`menet certify`: certified accuracy of a ME-Net against perturbed pixels."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from menet.commands import Csv, Json, Latex, Output, printing
from menet.commands.options import Data, Device, MaxBatch, Root, Run, Seed, Side, SkipUnreadable, Split

if TYPE_CHECKING:
    from menet.report.collect import Subject


@dataclass(frozen=True)
class Certify:
    """Certify the vote of a ME-Net, or of a network of experts: no perturbation of so many pixels can change it.

    The certificate bounds the number of perturbed pixels (an l0 threat model). It is strong if few pixels are
    observed (small p) and empty for p >= 0.5. Prints and draws the certified accuracy by pixels. Safe to
    interrupt: rerun the same command to resume. Examples:

      menet train mnist --defense me-net --mask pixels --encoding ablation --p 0.05 --model mlp --out runs/few
      menet certify runs/few --estimation 10000
      menet certify runs/few --partitions 20            without randomness: no alpha, no abstention
      menet train mnist --recipe certificate --out runs/experts
      menet certify runs/experts                        each expert sees one cell: the largest radii
    """

    run: Run

    data: Data = None

    split: Split = "test"

    root: Root = None

    side: Side = None

    skip_unreadable: SkipUnreadable = False

    p: float | None = None
    """Observation probability. Default: that of the run."""

    start: int = 0
    """First example."""

    stop: int | None = 500
    """One past the last example; a number larger than the dataset means all."""

    partitions: int | None = None
    """Certify by the votes on every cell of so many partitions into 1/p cells, in place of random draws. Experts
    have partitions of their own."""

    decision: Literal["pairwise", "plurality"] = "pairwise"
    """How votes decide. pairwise: the class that most votes rank above any other one; plurality: the most first
    choices."""

    selection: int = 100
    """Random draws that choose the class."""

    estimation: int = 1000
    """Most random draws that bound the probabilities of the class and its rivals."""

    looks: int = 4
    """How often an example may stop because more draws would not enlarge its radius."""

    alpha: float = 0.001
    """Probability that a certificate by random draws is wrong."""

    sandwich: int = 0
    """Attack so many of the correct votes with l0 attacks, over random masks in expectation, and report how far
    they stay above the certificate."""

    batch_size: int | None = None
    """Examples between two writes: at most this many are lost if the command is killed.
    Default: 20, or fewer where fewer are asked for."""

    max_batch: MaxBatch = 512

    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    """In which the network computes its votes; what is certified is the classifier of that precision. auto:
    bfloat16 where the processor has instructions for it, two to three times as fast, else float32."""

    seed: Seed = 0

    device: Device = "auto"

    out: Path | None = None
    """Folder for records and curve. Default: RUN/certificate, with -P, -partitions and -plurality for these
    options."""

    json: Json = False

    csv: Csv = False

    latex: Latex = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.commands.options import check_model, dataset_of, default_folder, device_of, model_of
        from menet.defense import MENet
        from menet.errors import ConfigurationError
        from menet.evaluation import CertificateSettings, Worker, certify
        from menet.evaluation.certify import certificate_summary
        from menet.models import Network
        from menet.report.accuracy_tables import certificates
        from menet.report.collect import Subject

        device = device_of(self.device)
        model, source = model_of(self.run)
        experts = isinstance(model, Network) and model.partitions is not None
        if not isinstance(model, MENet) and not experts:
            raise ConfigurationError(
                "expected a ME-Net or a network of experts, as certificates need one, got a "
                f"{type(model).__name__} in {self.run}"
            )
        if self.p is not None:
            if not isinstance(model, MENet):
                raise ConfigurationError(f"expected no p, since experts have cells of their own, got {self.p}")
            observed = MENet.from_settings(model.classifier, {**model.settings(), "p": self.p})
            assert isinstance(observed, MENet)
            model = observed.eval()
        dataset = dataset_of(self.data, self.run, self.split, self.root, self.side, self.skip_unreadable)
        check_model(model.to(device), dataset, device)
        settings = CertificateSettings(
            start=self.start,
            stop=None if self.stop is None else min(self.stop, len(dataset)),
            batch_size=self.batch_size,
            selection=self.selection,
            estimation=self.estimation,
            looks=self.looks,
            alpha=self.alpha,
            partitions=self.partitions,
            decision=self.decision,
            seed=self.seed,
            max_batch=self.max_batch,
            precision=self.precision,
        )
        name = "certificate" + ("" if self.p is None else f"-{self.p:g}")
        name += ("" if self.partitions is None else "-partitions") + f"-{self.decision}" * (
            self.decision != "pairwise"
        )
        folder = self.out or default_folder(self.run, name)
        worker = Worker.from_environment()
        records = certify(model, dataset, folder, settings, source=source, device=device, worker=worker)
        if records.missing:
            print(f"process {worker.rank} is done; other processes still work on {len(records.missing)} examples")
            return 0
        subject = Subject(self.run, certificate=records)
        out.table(certificates([subject]))
        found = certificate_summary(records)
        out.value(summary=asdict(found), records=folder)
        print(
            f"clean accuracy of the vote {found.vote.value:.1%} [{found.vote.low:.1%}, {found.vote.high:.1%}]; "
            f"median certified radius {found.median_radius} pixels"
            if found.median_radius >= 0
            else f"clean accuracy of the vote {found.vote.value:.1%}; fewer than half of the votes are certified"
        )
        cost = f"{found.draws:,.0f} votes and {found.seconds:.3g} seconds for an example"
        if records.evaluation["partitions"] is None:
            print(
                f"{found.abstentions} abstentions; each certificate is wrong with probability <= {self.alpha:g}; "
                f"{cost}"
            )
        else:
            print(f"deterministic: no probability of error, no abstention; {cost}")
            if found.median_patch is not None and found.median_patch >= 0:
                print(f"median side of a square patch that cannot change the vote: {found.median_patch} pixels")
        if self.sandwich:
            self._attack(model, dataset, records, settings, device, out)
        drawn = _draw(subject, folder)
        print(f"records: {folder}" + (f"; curve: {drawn}" if drawn else ""))
        return 0

    def _attack(self, model: Any, dataset: Any, records: Any, settings: Any, device: Any, out: Output) -> None:
        """Attack some of the certified examples: what is found must be above each certificate."""
        import torch

        from menet.errors import ConfigurationError, MenetError
        from menet.evaluation.certify import fewest_pixels, public_partitions
        from menet.training.config import autocast, number_type

        if self.decision != "pairwise":
            raise ConfigurationError(f"expected pairwise votes with --sandwich, got {self.decision}")
        partitions = public_partitions(model, dataset.images.shape[2:], settings)
        rows = [row for row in records.rows if row["prediction"] == row["label"]][: self.sandwich]
        images, _ = dataset.batch(torch.tensor([row["index"] for row in rows]))
        prediction = torch.tensor([row["prediction"] for row in rows])
        # What is attacked has to be what was certified, so in its precision.
        with autocast(number_type(self.precision, device), device):
            found = fewest_pixels(model, images.to(device), prediction.to(device), partitions, seed=self.seed)
        attacked = found.tolist()
        pairs = [(row["radius"], pixels) for row, pixels in zip(rows, attacked, strict=True) if pixels]
        if any(radius >= pixels for radius, pixels in pairs):
            raise MenetError("an attack succeeded within a certified radius: the certificate is wrong")
        out.value(sandwich=[[row["radius"], pixels] for row, pixels in zip(rows, attacked, strict=True)])
        gaps = sorted(pixels - radius for radius, pixels in pairs)
        gap = f"{gaps[len(gaps) // 2]} pixels above the radius (the median)" if gaps else "none"
        print(f"l0 attacks turned {len(pairs)} of {len(rows)} correct votes, none within its radius: {gap}")


def _draw(subject: "Subject", folder: Path) -> Path | None:
    """Write the curve of certified accuracy; without matplotlib, say so and return None."""
    from menet.errors import ConfigurationError
    from menet.files import replacing
    from menet.report.curves import certified

    try:
        from menet.report import figures
    except ConfigurationError as error:
        print(f"no curve: {error}")
        return None
    curve = certified(subject)
    assert curve is not None
    with replacing(folder / "certificate.png") as temporary:
        figures.certified([curve]).savefig(temporary, format="png", dpi=160)
    return folder / "certificate.png"

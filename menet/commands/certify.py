"""`menet certify`: certified accuracy of a ME-Net against perturbed pixels."""

from dataclasses import dataclass
from pathlib import Path

from menet.commands.options import Data, Device, MaxBatch, Root, Run, Seed, Side, Split


@dataclass(frozen=True)
class Certify:
    """Certify the majority vote of a ME-Net: no perturbation of so many pixels can change it.

    The certificate bounds the number of perturbed pixels (an l0 threat model). It is strong if few pixels are
    observed (small p) and empty for p >= 0.5. Safe to interrupt: rerun the same command to resume.
    """

    run: Run

    data: Data = None

    split: Split = "test"

    root: Root = None

    side: Side = None

    p: float | None = None
    """Observation probability. Default: that of the run."""

    start: int = 0
    """First example."""

    stop: int | None = 500
    """One past the last example; a number larger than the dataset means all."""

    selection: int = 100
    """Random draws that choose the class."""

    estimation: int = 1000
    """Random draws that bound the probability of the class."""

    alpha: float = 0.001
    """Probability that a certificate is wrong."""

    batch_size: int | None = None
    """Examples between two writes: at most this many are lost if the command is killed.
    Default: 20, or fewer where fewer are asked for."""

    max_batch: MaxBatch = 512

    seed: Seed = 0

    device: Device = "cpu"

    out: Path | None = None
    """Folder for the records. Default: RUN/certificate, or RUN/certificate-P with --p."""

    def __call__(self) -> int:
        from menet.commands.options import check_model, dataset_of, default_folder, device_of, model_of
        from menet.defense import MENet
        from menet.errors import ConfigurationError
        from menet.evaluation import CertificateSettings, Worker, certify
        from menet.report.collect import Subject
        from menet.report.tables import certificates

        device = device_of(self.device)
        model, source = model_of(self.run)
        if not isinstance(model, MENet):
            raise ConfigurationError(
                f"expected a ME-Net, as certificates need one, got a {type(model).__name__} in {self.run}"
            )
        if self.p is not None:
            model = MENet(model.classifier, model.estimator, self.p, model.masks, model.channels).eval()
        dataset = dataset_of(self.data, self.run, self.split, self.root, self.side)
        check_model(model.to(device), dataset, device)
        settings = CertificateSettings(
            start=self.start,
            stop=None if self.stop is None else min(self.stop, len(dataset)),
            batch_size=self.batch_size,
            selection=self.selection,
            estimation=self.estimation,
            alpha=self.alpha,
            seed=self.seed,
            max_batch=self.max_batch,
        )
        folder = self.out or default_folder(self.run, "certificate" + ("" if self.p is None else f"-{self.p:g}"))
        worker = Worker.from_environment()
        records = certify(model, dataset, folder, settings, source=source, device=device, worker=worker)
        if records.missing:
            print(f"process {worker.rank} is done; other processes still work on {len(records.missing)} examples")
            return 0
        certificates([Subject(self.run, certificate=records)]).print()
        abstained = sum(row["radius"] < 0 for row in records.rows)
        print(f"{abstained} abstentions; each certificate is wrong with probability <= {self.alpha:g}")
        print(f"records: {folder}")
        return 0

"""`menet train`: train a network, with or without a defense, and write a run folder."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from menet.distributed import Worker
from menet.errors import ConfigurationError
from menet.training import TrainingConfig, recipes, train
from menet.training.checkpoint import BEST
from menet.training.config import Norm, Objective, Optimizer, Precision, Schedule, me_net
from menet.training.log import read_log
from menet.training.loop import Saving


@dataclass(frozen=True)
class Train:
    """Train a network, with or without a defense, and write a run folder.

    A recipe decides everything; options given beside it go before it. The same command on the same folder
    continues a run that was cut off, and ends in the same weights as if it had not been. Examples:

      menet train digits                                          a LeNet, in a minute or two
      menet train digits --defense me-net                         the same behind ME-Net, p 0.4→0.6
      menet train mnist --defense me-net --p 0.2 0.4 --objective adversarial
      menet train cifar10 --recipe paper --defense me-net --estimator usvt
      menet train cifar10 --defense me-net --estimator mask-only  the ablation
      menet train digits --defense jpeg --settings '{"quality": 50}'
      torchrun --nproc-per-node 2 --no-python menet train cifar10
    """

    dataset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATASET")]
    """digits, mnist, cifar10, svhn, tiny-imagenet, or folder:PATH."""

    out: Path | None = None
    """The run folder; runs/DATASET-DEFENSE-OBJECTIVE unless given."""

    recipe: recipes.Kind = "short"
    """`paper` is Appendix B of the paper (200 epochs); `short` is made for two cores, one cycle of the rate."""

    defense: str = "none"
    """none, me-net, or a defense it is compared with: thermometer, total-variation, pixel-defend, bit-depth,
    median, resize-pad, discretise, jpeg."""

    estimator: str | None = None
    """Of me-net: nuclear-norm (if not given), usvt, soft-impute, tensor, or mask-only for the ablation."""

    p: tuple[float, float] | None = None
    """Of me-net: observation probabilities from a to b; 0.4 0.6 if not given."""

    masks: int | None = None
    """Of me-net: into how many steps the probabilities are divided; 10 if not given."""

    channels: str | None = None
    """Of me-net: joint (one matrix [R G B], if not given) or separate."""

    gradient: str | None = None
    """How an attack's gradients pass the defense while training: bpda (if not given) or exact."""

    settings: str | None = None
    """Further settings of the defense, as a JSON object."""

    objective: Objective = "standard"
    """standard, adversarial (PGD at each step, fresh masks) or trades."""

    norm: Norm | None = None
    """Norm of the attack while training."""

    epsilon: float | None = None
    """Its size on the [0,1] scale of pixels."""

    steps: int | None = None
    """Its steps."""

    step_size: float | None = None
    """The length of one step."""

    eot: int | None = None
    """Masks behind each of its gradients."""

    beta: float | None = None
    """Weight of TRADES' robust term."""

    model: str | None = None
    """lenet, small, resnet18, wide-resnet-28-10, wide-resnet-34-10 or densenet121."""

    epochs: int | None = None
    """How often each image is seen."""

    batch: int | None = None
    """Images in a step, over all processes."""

    optimizer: Optimizer | None = None
    """sgd or adamw."""

    rate: float | None = None
    """The highest learning rate."""

    schedule: Schedule | None = None
    """step (divided by ten at the milestones) or one-cycle."""

    milestones: tuple[int, ...] | None = None
    """Epochs at which the schedule `step` divides the rate."""

    weight_decay: float | None = None
    """Decay of the weights."""

    augmentation: bool | None = None
    """Crop and mirror at random."""

    prepared: Path | None = None
    """Train on the estimates that `menet prepare` wrote to this folder, in place of fresh masks."""

    limit: int | None = None
    """Train on so many images."""

    validation: int | None = None
    """Hold out so many training images to choose the best epoch by."""

    seed: int | None = None
    """The one seed that all randomness follows from."""

    precision: Precision | None = None
    """auto is bfloat16 where the processor computes in it."""

    root: Path | None = None
    """Folder that holds the datasets; `MENET_DATA` or the user's cache folder unless given."""

    save_seconds: float = 60.0
    """Write a checkpoint at least so often; one is written after each epoch in any case."""

    save_steps: int | None = None
    """Write a checkpoint every so many steps too."""

    log_steps: int = 50
    """Steps between rows of the log."""

    def __call__(self) -> int:
        config = self.config()
        out = self.out or Path("runs") / f"{config.dataset.partition(':')[0]}-{self.defense}-{config.objective}"
        saving = Saving(self.save_seconds, self.save_steps, self.log_steps)
        folder = train(config, out, root=self.root, saving=saving)
        if Worker.from_environment().first:
            score = read_log(folder)[-1]["accuracy"]
            print(f"test accuracy after the last epoch: {score:.2%} (one mask per image)")
            print(f"model of the best epoch: {folder / BEST}")
        return 0

    def config(self) -> TrainingConfig:
        """The recipe with the given options in it."""
        given: dict[str, Any] = {}
        for name in (
            "norm", "epsilon", "steps", "step_size", "eot", "beta", "model", "epochs", "batch", "optimizer",
            "rate", "schedule", "milestones", "weight_decay", "augmentation", "limit", "validation", "seed",
            "precision",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.prepared is not None:
            given["prepared"] = str(self.prepared)
        recipe = recipes.by_name(self.dataset, self.recipe)
        if given.get("schedule") == "one-cycle":
            given.setdefault("milestones", ())
        return replace(recipe, objective=self.objective, defense=self.defense_settings(), **given)

    def defense_settings(self) -> dict[str, Any]:
        """The chosen defense as `TrainingConfig.defense` wants it."""
        return defense_settings(
            self.defense, self.estimator, self.p, self.masks, self.channels, self.gradient, self.settings
        )


def defense_settings(
    defense: str,
    estimator: str | None,
    p: tuple[float, float] | None,
    masks: int | None,
    channels: str | None,
    gradient: str | None,
    further: str | None = None,
) -> dict[str, Any]:
    """A defense's settings from options; options of ME-Net beside another defense are refused."""
    own = {"estimator": estimator, "p": p, "masks": masks, "channels": channels}
    for name, value in own.items():
        if defense != "me-net" and value is not None:
            raise ConfigurationError(
                f"{name} is {value!r}, which only `--defense me-net` has; defense is {defense!r}"
            )
    extra = _json_object(further)
    if gradient is not None:
        extra["gradient"] = gradient
    if defense == "none":
        if extra:
            raise ConfigurationError(f"{min(extra)} is given, but defense is 'none'")
        return {}
    if defense != "me-net":
        return {"name": defense, **extra}
    chosen: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    return me_net(**chosen, **extra)


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"settings is {text!r:.80}, which is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"settings is {text!r:.80}; accepted is a JSON object")
    return found

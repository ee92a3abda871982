"""`menet train`: train a network, with or without a defense, and write a run folder."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from menet.commands import Json, Output, printing
from menet.commands.options import (
    BASELINES,
    MODELS,
    Dataset,
    Device,
    Norm,
    Objective,
    Optimizer,
    Precision,
    Recipe,
    Root,
    Schedule,
    Side,
    SkipUnreadable,
)
from menet.errors import ConfigurationError

P = Annotated[
    tuple[float, ...] | None,
    tyro.conf.arg(
        metavar="P [P]",
        help="Of me-net: observation probability, or the first and last of the schedule. Default: 0.4 0.6.",
        help_behavior_hint="",
    ),
]


@dataclass(frozen=True)
class Train:
    """Train a network, with or without a defense, and write a run folder.

    A recipe sets everything. Options override the recipe. Safe to interrupt: rerun the same command to resume;
    the run ends with the same weights as one that was never interrupted. Examples:

      menet train digits                                          a LeNet, in a minute or two
      menet train digits --defense me-net                         the same behind ME-Net, p 0.4→0.6
      menet train mnist --defense me-net --p 0.2 0.4 --objective adversarial
      menet train cifar10 --recipe cores --objective n-fgsm       robust training on two cores
      menet train cifar10 --recipe paper --defense me-net --estimator usvt
      menet train cifar10 --defense me-net --estimator mask-only  the ablation
      menet train digits --defense jpeg --settings '{"quality": 50}'
      torchrun --nproc-per-node 2 --no-python menet train cifar10
    """

    dataset: Dataset

    out: Path | None = None
    """The run folder. Default: runs/DATASET-DEFENSE-OBJECTIVE."""

    recipe: Recipe = "short"
    """short: minutes on two cores; cores: robust training within 2.5 hours on two cores (mnist: 1 hour);
    paper: Appendix B of the paper (200 epochs); certificate: experts for the largest certificates, in minutes."""

    defense: Annotated[
        str,
        tyro.conf.arg(
            help=f"none, me-net, a baseline: {', '.join(BASELINES)}; or your own as package.module:Class, whose "
            "code is executed."
        ),
    ] = "none"

    estimator: str | None = None
    """Of me-net: nuclear-norm (default), usvt, soft-impute, tubal, mask-only for the ablation, or your own as
    package.module:Class, whose code is executed."""

    p: P = None

    masks: int | None = None
    """Of me-net: number of values in the schedule of p. Default: 10."""

    channels: str | None = None
    """Of me-net: joint (default; one matrix [R G B]) or separate."""

    mask: str | None = None
    """Of me-net: entries, pixels (all channels of a pixel together) or cells (of partitions, for certificates).
    Default: entries with joint channels, pixels with separate ones."""

    encoding: str | None = None
    """Of me-net: what the network sees: estimate (default), ablation (observed pixels with their complements and
    no estimate) or estimate+mask."""

    gradient: str | None = None
    """Gradient of the defense in adversarial training: bpda (default) or exact."""

    settings: str | None = None
    """Further settings of the defense, as a JSON object."""

    objective: Objective = "standard"
    """standard, adversarial (PGD at each step, fresh random draws), n-fgsm (one step, a fraction of the cost) or
    trades."""

    norm: Norm | None = None
    """Norm of the perturbation in adversarial training."""

    epsilon: Annotated[str | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Perturbation budget in adversarial training, in pixels of [0,1], such as 8/255."""

    steps: int | None = None
    """Steps of its PGD."""

    step_size: Annotated[str | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Step size of its PGD, in pixels of [0,1], such as 2/255."""

    eot: int | None = None
    """Random draws averaged in each of its gradients (EOT)."""

    noise: float | None = None
    """Noise of n-fgsm, in units of epsilon. Default: 2."""

    epsilon_warm_up: float | None = None
    """Fraction of the run in which the budget of the training attack rises from 0."""

    beta: float | None = None
    """Weight of the robust term of TRADES."""

    label_smoothing: float | None = None
    """Probability that targets spread over all classes."""

    model: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help=f"{', '.join(MODELS)}.", help_behavior_hint="")
    ] = None

    epochs: int | None = None
    """Passes over the training set."""

    batch_size: int | None = None
    """Images in a step, over all processes."""

    optimizer: Optimizer | None = None
    """sgd or adamw."""

    learning_rate: float | None = None
    """Peak learning rate."""

    schedule: Schedule | None = None
    """Learning-rate schedule: step (divided by ten at the milestones), one-cycle or cosine."""

    milestones: tuple[int, ...] | None = None
    """Epochs at which the step schedule divides the learning rate."""

    weight_decay: float | None = None
    """Weight decay."""

    clip_gradient: float | None = None
    """Largest l2 norm of the gradient over all weights."""

    ema: float | None = None
    """Decay of the moving average of the weights, which is then evaluated and saved; 0 is no averaging."""

    augmentation: bool | None = None
    """Random crops and flips."""

    prepared: Path | None = None
    """Train on the estimates that `menet prepare` wrote to this folder, instead of fresh random draws."""

    limit: int | None = None
    """Train on a random subset of this many images."""

    validation: Annotated[int | float | None, tyro.conf.arg(metavar="INT|FRACTION", help_behavior_hint="")] = None
    """Training images held out to choose the best epoch, and to detect catastrophic overfitting; a number below 1
    is the fraction of them."""

    guard: int | None = None
    """Steps between checks for catastrophic overfitting; 0 for none. Default: 200."""

    seed: int | None = None
    """Random seed."""

    precision: Precision | None = None
    """auto: bfloat16 if the processor supports it, else float32."""

    side: Side = None

    skip_unreadable: SkipUnreadable = False

    root: Root = None

    save_seconds: float = 60.0
    """Maximum seconds between checkpoints; one is also written after each epoch."""

    save_steps: int | None = None
    """Also write a checkpoint every so many steps."""

    log_steps: int = 50
    """Steps between rows of the log."""

    device: Device = "auto"

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.commands.options import device_of
        from menet.distributed import Worker
        from menet.training import train
        from menet.training.loop import Saving

        if self.device != "auto":
            device_of(self.device)
        config = self.config()
        defense = config.defense.get("name", "none")
        name = f"{config.dataset.partition(':')[0]}-{defense}-{config.objective}"
        folder = self.out or Path("runs") / name
        saving = Saving(self.save_seconds, self.save_steps, self.log_steps)
        result = train(config, folder, root=self.root, device=self.device, saving=saving)
        if Worker.from_environment().first:
            out.value(**asdict(result), weights=result.weights)
            draws = " (one draw of the defense per image)" if config.defense else ""
            print(
                f"test accuracy of the best epoch ({result.epoch} of {config.epochs}): "
                f"{result.test_accuracy:.2%}{draws}"
            )
            print(f"its weights: {result.weights}")
        return 0

    def config(self) -> Any:
        """The `TrainingConfig`: the recipe with the given options."""
        from menet.commands.options import check_dataset, epsilon_of, fraction
        from menet.training import recipes

        name = check_dataset(self.dataset, self.side, self.skip_unreadable)
        recipe = recipes.by_name(name, self.recipe, self._images(name))
        given: dict[str, Any] = {
            "norm": self.norm,
            "steps": self.steps,
            "eot": self.eot,
            "noise": self.noise,
            "epsilon_warm_up": self.epsilon_warm_up,
            "beta": self.beta,
            "label_smoothing": self.label_smoothing,
            "model": self.model,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "schedule": self.schedule,
            "milestones": self.milestones,
            "weight_decay": self.weight_decay,
            "clip_gradient": self.clip_gradient,
            "ema": self.ema,
            "augmentation": self.augmentation,
            "prepared": None if self.prepared is None else str(self.prepared),
            "limit": self.limit,
            "validation": self.validation,
            "guard": self.guard,
            "seed": self.seed,
            "precision": self.precision,
        }
        if self.epsilon is not None:
            given["epsilon"] = epsilon_of(self.epsilon, self.dataset, self.norm or recipe.norm)
        if self.step_size is not None:
            given["step_size"] = fraction(self.step_size)
            if given["step_size"] is None:
                raise ConfigurationError(f"expected step_size > 0, such as 2/255, got {self.step_size!r}")
        if self.schedule in ("one-cycle", "cosine") and self.milestones is None:
            given["milestones"] = ()
        given = {name: value for name, value in given.items() if value is not None}
        config = replace(recipe, objective=self.objective, defense=self.defense_settings(), **given)
        return config if self.epochs is not None else recipes.at_equal_time(config)

    def _images(self, name: str) -> int | None:
        """The number of training images in a folder, which its recipe depends on."""
        from menet import data

        if name.partition(":")[0] != "folder":
            return None
        count = len(data.load(name, "train", self.root))
        return count if self.limit is None else min(self.limit, count)

    def defense_settings(self) -> dict[str, Any]:
        """The chosen defense, as `TrainingConfig.defense` takes it."""
        return defense_settings(
            self.defense, self.estimator, self.p, self.masks, self.channels, self.gradient, self.settings,
            self.mask, self.encoding,
        )  # fmt: skip


def defense_settings(
    defense: str,
    estimator: str | None,
    p: tuple[float, ...] | None,
    masks: int | None,
    channels: str | None,
    gradient: str | None,
    further: str | None = None,
    mask: str | None = None,
    encoding: str | None = None,
) -> dict[str, Any]:
    """The settings of a defense from options; options of ME-Net are refused for another defense."""
    from menet.commands.options import own_name

    defense, estimator = own_name(defense, "defense"), estimator and own_name(estimator, "estimator")
    estimator = "mask-only" if encoding == "ablation" and estimator is None else estimator
    own = {"estimator": estimator, "p": _probabilities(p), "masks": masks, "channels": channels}
    own |= {"mask": mask, "encoding": encoding}
    for name, value in own.items():
        if defense != "me-net" and value is not None:
            raise ConfigurationError(
                f"--{name} only applies to --defense me-net, got --defense {defense}; add --defense me-net"
            )
    extra = json_object(further)
    if gradient is not None:
        extra["gradient"] = gradient
    if defense == "none":
        if extra:
            raise ConfigurationError(f"{min(extra)} is a setting of a defense, got defense 'none'")
        return {}
    if defense != "me-net":
        return {"name": defense, **extra}
    from menet.training.config import me_net

    chosen: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    return me_net(**chosen, **extra)


def _probabilities(p: tuple[float, ...] | None) -> float | tuple[float, float] | None:
    """One observation probability, or the two ends of a schedule."""
    if p is None:
        return None
    if len(p) == 1:
        return p[0]
    if len(p) == 2:
        return p[0], p[1]
    raise ConfigurationError(f"expected one or two probabilities for --p, such as 0.5 or 0.4 0.6, got {len(p)}")


def json_object(text: str | None) -> dict[str, Any]:
    """The settings in a JSON object on the command line; none without one."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"expected a JSON object for --settings, got {text!r:.80}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"expected a JSON object for --settings, got {text!r:.80}")
    return found

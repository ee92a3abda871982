"""What `menet demo` trains and attacks, whole and quick."""

from dataclasses import dataclass, replace

from menet.training import TrainingConfig
from menet.training.config import Objective
from menet.training.recipes import digits, me_net

EPSILON = 0.2
P, LOW_P = (0.4, 0.6), 0.1


@dataclass(frozen=True)
class Network:
    """One network of the demonstration, and what is done to it."""

    folder: str
    title: str
    epochs: int
    objective: Objective = "standard"
    p: float | tuple[float, float] | None = None
    """Observed share of pixels behind ME-Net; None for no defense."""
    tolerance: float = 1e-2
    """When the estimator stops: coarser than the library's own setting, which would double the time."""
    seed: int = 0
    """Added to that of the demonstration: a copy is the same network trained independently."""
    attacks: tuple[str, ...] = ()
    certified: bool = False

    def config(self, plan: "Plan", seed: int) -> TrainingConfig:
        """How it is trained."""
        estimator = {"name": "nuclear-norm", "tol": self.tolerance}
        defense = {} if self.p is None else {**me_net(p=self.p), "estimator": estimator}
        return replace(
            digits(),
            recipe="demo",
            model="small",
            defense=defense,
            objective=self.objective,
            epochs=self.epochs,
            rate=0.1,
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
    networks: tuple[Network, ...]
    images: int = 3000
    """Digits to train on."""
    epsilon: float = EPSILON
    training_steps: int = 4
    """Steps of the attack in adversarial training."""
    examples: int = 200
    """Digits that are attacked."""
    batch: int = 50
    masks: int = 30
    """Fresh masks behind each score."""
    pictures: int = 4
    certified: int = 100
    selection: int = 40
    estimation: int = 300

    @property
    def introduction(self) -> tuple[str, ...]:
        """What was done, for the head of the report."""
        return (
            f"Small networks were trained on {self.images:,} real digits and attacked on {self.examples} they "
            f"have not seen. An attack may change every pixel by up to {self.epsilon:g}, where black is 0 and "
            "white is 1.",
            f"ME-Net hides about half of the pixels at random (p {P[0]:g}→{P[1]:g}), estimates the image from "
            "the rest by nuclear-norm minimisation and classifies the estimate. Here it is trained without "
            "adversarial images.",
        )

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a reader must know before the numbers."""
        rough = "Trainings were very short and examples few. " if self.name == "quick" else ""
        return (
            f"{rough}The networks are small and the images are digits, so no number here stands beside one of "
            f"the paper. A certificate needs a small p: it is given for a second ME-Net, which observes "
            f"{100 * LOW_P:.0f}% of the pixels.",
        )


def _networks(
    steps: int, eot: int, sizes: tuple[float, ...], epochs: tuple[int, int], copy: bool
) -> tuple[Network, ...]:
    """The networks; `epochs` are those of ME-Nets and of the others."""
    estimated, usual = epochs
    white = tuple(f"pgd:steps={steps}{size}" for size in ("", *_epsilons(sizes)))
    # Expectation over masks costs that many times more, so it is done at the first two sizes only.
    averaged = tuple(f"pgd:steps={steps},eot={eot}{size}" for size in ("", *_epsilons(sizes[:1])))
    transferred = f"pgd:steps={steps},on=vanilla-copy"
    # The paper's adversary trains a copy of the defended network.
    own = f"pgd:steps={steps},on=me-net-copy" if copy else transferred
    return (
        Network("vanilla", "vanilla", usual, attacks=(transferred, *white)),
        Network("adversarial", "adversarial training", usual, "adversarial", attacks=(transferred, *white)),
        Network("me-net", "ME-Net", estimated, p=P, attacks=(own, *white, *averaged)),
        Network("me-net-low-p", f"ME-Net, p {LOW_P:g}", estimated, p=LOW_P, tolerance=5e-2, certified=True),
        Network("vanilla-copy", "vanilla, a copy to attack from", usual, seed=1),
        *([Network("me-net-copy", "ME-Net, a copy to attack from", estimated, p=P, seed=1)] if copy else []),
    )


def _epsilons(sizes: tuple[float, ...]) -> list[str]:
    return [f",epsilon={size:g}" for size in sizes]


FULL = Plan("full", _networks(20, 8, (0.1, 0.3), (5, 4), copy=True))
QUICK = Plan(
    "quick",
    _networks(10, 6, (), (3, 3), copy=False),
    images=1200,
    training_steps=3,
    examples=60,
    batch=20,
    masks=10,
    certified=30,
    selection=20,
    estimation=100,
)

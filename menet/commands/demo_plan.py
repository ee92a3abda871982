"""What `menet demo` trains and attacks, whole and quick."""

from dataclasses import dataclass, field, replace
from typing import Any

from menet.errors import ConfigurationError
from menet.training import TrainingConfig
from menet.training.config import Objective
from menet.training.recipes import digits, me_net

EPSILON = 0.2
P, LOW_P = (0.4, 0.6), 0.1


@dataclass(frozen=True)
class Other:
    """A defense ME-Net is compared with, and the settings that suit digits."""

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    random: bool = False
    thresholds: bool = False
    """Whether it brings the pixels of digits back to black or white."""


BESIDE = {
    "thermometer": Other("thermometer encoding"),
    "total-variation": Other("total variation", random=True),
    "pixel-defend": Other(
        "PixelDefend",
        {"epsilon": EPSILON, "levels": 16, "width": 16, "layers": 2, "steps": 200},
        thresholds=True,
    ),
    "bit-depth": Other("one-bit depth", {"bits": 1}, thresholds=True),
    "median": Other("median", {"size": 3}),
    "resize-pad": Other("resize and pad", random=True),
    "discretise": Other("two colours", {"colours": 2}, thresholds=True),
    "jpeg": Other("JPEG"),
}


@dataclass(frozen=True)
class Network:
    """One network of the demonstration, and what is done to it."""

    folder: str
    title: str
    epochs: int
    objective: Objective = "standard"
    defense: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    """Added to that of the demonstration: a copy is the same network trained independently."""
    attacks: tuple[str, ...] = ()
    certified: bool = False

    def config(self, plan: "Plan", seed: int) -> TrainingConfig:
        """How it is trained."""
        return replace(
            digits(),
            recipe="demo",
            model="small",
            defense=self.defense,
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
    steps: int = 20
    """Steps of attacks."""
    eot: int = 8
    """Masks behind each gradient where it is taken in expectation."""
    sizes: tuple[float, ...] = (0.1, 0.3)
    """Further sizes of attacks, for curves."""
    epochs: int = 4
    estimated_epochs: int = 5
    """Epochs of ME-Nets."""
    copy: bool = True
    """Whether ME-Net is attacked from a copy of itself, as the paper's adversary does, or from a vanilla one."""
    beside: tuple[str, ...] = ()
    """Other defenses, of `BESIDE`."""
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
    def networks(self) -> tuple[Network, ...]:
        """All that is trained; what they attack from comes last."""
        transferred = f"pgd:steps={self.steps},on=vanilla-copy"
        own = f"pgd:steps={self.steps},on=me-net-copy" if self.copy else transferred
        white, averaged = self._white_box(), self._averaged()
        vanilla = Network("vanilla", "vanilla", self.epochs, attacks=(transferred, *white))
        me_net = Network(
            "me-net", "ME-Net", self.estimated_epochs, defense=_me_net(P), attacks=(own, *white, *averaged)
        )
        low_p = Network("me-net-low-p", f"ME-Net, p {LOW_P:g}", self.estimated_epochs, certified=True)
        return (
            vanilla,
            replace(vanilla, folder="adversarial", title="adversarial training", objective="adversarial"),
            me_net,
            *(
                Network(
                    name,
                    BESIDE[name].title,
                    self.epochs,
                    defense={"name": name, **BESIDE[name].settings},
                    attacks=(transferred, *white, *(averaged if BESIDE[name].random else ())),
                )
                for name in self.beside
            ),
            replace(low_p, defense=_me_net(LOW_P, tolerance=5e-2)),
            *(_copy(network) for network in (vanilla, me_net)[: 1 + self.copy]),
        )

    def _white_box(self) -> tuple[str, ...]:
        return tuple(f"pgd:steps={self.steps}{size}" for size in ("", *_epsilons(self.sizes)))

    def _averaged(self) -> tuple[str, ...]:
        """Expectation over masks costs that many times more, so it is done at the first two sizes only."""
        sizes = ("", *_epsilons(self.sizes[:1]))
        return tuple(f"pgd:steps={self.steps},eot={self.eot}{size}" for size in sizes)

    @property
    def introduction(self) -> tuple[str, ...]:
        """What was done, for the head of the report."""
        others = ", ".join(BESIDE[name].title for name in self.beside)
        return (
            f"Small networks were trained on {self.images:,} real digits and attacked on {self.examples} they "
            f"have not seen. An attack may change every pixel by up to {self.epsilon:g}, where black is 0 and "
            "white is 1.",
            f"ME-Net hides about half of the pixels at random (p {P[0]:g}→{P[1]:g}), estimates the image from "
            "the rest by nuclear-norm minimisation and classifies the estimate. Here it is trained without "
            "adversarial images.",
            *(
                [f"Beside it stand other defenses, around the same network and trained alike: {others}."]
                * bool(others)
            ),
        )

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a reader must know before the numbers."""
        rough = "Trainings were very short and examples few. " if self.name == "quick" else ""
        thresholds = [BESIDE[name].title for name in self.beside if BESIDE[name].thresholds]
        return (
            f"{rough}The networks are small and the images are digits, so no number here stands beside one of "
            f"the paper. A certificate needs a small p: it is given for a second ME-Net, which observes "
            f"{100 * LOW_P:.0f}% of the pixels.",
            *(
                [
                    "Digits are nearly black and white. What brings their pixels back to either "
                    f"({', '.join(thresholds)}) owes its numbers to that, and would not have them on photographs."
                ]
                if thresholds
                else []
            ),
        )


def beside(names: tuple[str, ...]) -> tuple[str, ...]:
    """The defenses called `names`, each once; `all` are all of them."""
    for name in names:
        if name != "all" and name not in BESIDE:
            raise ConfigurationError(f"beside is {name!r}; accepted are all, {', '.join(BESIDE)}")
    return tuple(name for name in BESIDE if name in names or "all" in names)


def _copy(network: Network) -> Network:
    """The same network, trained independently, to attack from."""
    title = f"{network.title}, a copy to attack from"
    return replace(network, folder=f"{network.folder}-copy", title=title, seed=1, attacks=())


def _me_net(p: float | tuple[float, float], tolerance: float = 1e-2) -> dict[str, Any]:
    """ME-Net; its estimator stops earlier than with the library's own setting, which would double the time."""
    return {**me_net(p=p), "estimator": {"name": "nuclear-norm", "tol": tolerance}}


def _epsilons(sizes: tuple[float, ...]) -> list[str]:
    return [f",epsilon={size:g}" for size in sizes]


FULL = Plan("full")
QUICK = Plan(
    "quick",
    steps=10,
    eot=6,
    sizes=(),
    epochs=3,
    estimated_epochs=3,
    copy=False,
    images=1200,
    training_steps=3,
    examples=60,
    batch=20,
    masks=10,
    certified=30,
    selection=20,
    estimation=100,
)

"""What `menet demo` trains and attacks, in full and quick."""

from dataclasses import dataclass, field, replace
from typing import Any

from menet.commands.options import Objective
from menet.errors import ConfigurationError

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

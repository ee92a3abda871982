"""What the page shows: reconstructions, attacks step by step and certificates, as plain JSON values.

Every function works on a batch of images and returns one dictionary per image; the server asks for one image,
the exported page for all of them. Requests come from a browser: nothing in them is trusted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import menet
from menet import attacks, masks
from menet.attacks.base import Model
from menet.defense import MENet
from menet.errors import ConfigurationError
from menet.estimators import build
from menet.evaluation.certify import CertificateSettings, certificates, observation
from menet.images import Channels, to_matrix
from menet.linalg import approximate_rank
from menet.preprocessed import Gradient, Preprocessed
from menet.web.images import MAX_PIXELS, decoded, first_of_each, fitted, photographs, picture, unpacked
from menet.web.workers import MAX_UPLOAD

MAX_STEPS, MAX_DRAWS, MAX_FRAMES = 50, 100, 26
ESTIMATORS = ("nuclear-norm", "soft-impute", "usvt", "tubal", "mask-only")
TOLERANCE = 1e-2
"""Of Soft-Impute: at small p its default takes hundreds of milliseconds, which a slider must not wait for."""

Request = dict[str, Any]


@dataclass(frozen=True)
class Networks:
    """Which networks the page attacks, by their run folders; paths, so that another process can load them."""

    defended: str
    bare: str | None = None
    """The undefended network; None for the classifier behind the defense."""
    certified: str | None = None
    """A ME-Net with small p for certificates; None for `defended`."""
    dataset: str = "digits"
    root: str | None = None
    epsilon: float = 0.2
    """The budget that the page starts with."""
    note: str = ""
    """What a visitor must know about these networks."""


class Kind(NamedTuple):
    """An attack that the page offers."""

    title: str
    explanation: str
    spec: str
    gradient: Gradient | None
    """How gradients pass the defense; None attacks the bare network."""
    eot: int | None = None


ATTACKS = {
    "fgsm": Kind("FGSM", "One step along the bare network's gradient. It ignores the defense.", "fgsm", None),
    "pgd": Kind("PGD", "Many small steps on the bare network. It ignores the defense.", "pgd", None),
    "bpda": Kind(
        "BPDA",
        "PGD through the defense, taken for the identity when gradients pass it; one random draw a step.",
        "pgd",
        "bpda",
        1,
    ),
    "eot": Kind("BPDA + EOT", "The same, with each gradient averaged over ten random draws.", "pgd", "bpda", 10),
    "exact": Kind(
        "Exact gradients + EOT",
        "True derivatives of the estimator, averaged over ten random draws: an adversary who knows the defense.",
        "pgd",
        "exact",
        10,
    ),
}


class Explorer:
    """The networks and sample images of a page, and an answer to each of its requests."""

    def __init__(self, networks: Networks) -> None:
        self.networks = networks
        dataset = menet.data.load(networks.dataset, "test", networks.root)
        self.classes = [str(name) for name in dataset.classes]
        self.shape = tuple(dataset.images.shape[1:])
        loaded = _loaded(networks.defended)
        self.defended = loaded if isinstance(loaded, Preprocessed) else MENet(loaded).eval()
        self.bare = self.defended.classifier if networks.bare is None else _loaded(networks.bare)
        certified = self.defended if networks.certified is None else _loaded(networks.certified)
        self.certified = certified if isinstance(certified, MENet) else None
        self.samples = {sample.name: sample for sample in [*first_of_each(dataset), *photographs()]}
        self.actions: dict[str, Callable[[Request], Any]] = {
            "about": lambda request: self.about(),
            "upload": lambda request: {"image": picture(decoded(request["data"])[0])},
            "reconstruct": self._reconstruct,
            "attack": self._attack,
            "certificate": self._certificate,
            "paint": self._paint,
        }

    def answer(self, action: str, request: Request) -> Any:
        """The answer to one request of the page; a `MenetError` says what is wrong with the request."""
        return self.actions[action](request)

    def about(self) -> dict[str, Any]:
        """What the page needs to know before its first request."""
        return {
            "classes": self.classes,
            "epsilon": self.networks.epsilon,
            "note": self.networks.note,
            "estimators": ESTIMATORS,
            "attacks": {
                name: {"title": kind.title, "explanation": kind.explanation} for name, kind in ATTACKS.items()
            },
            "samples": [
                {"name": one.name, "title": one.title, "image": picture(one.image), "label": one.label}
                for one in self.samples.values()
            ],
            "defense": _described(self.defended),
            "certified": None if self.certified is None else _described(self.certified),
            "size": [self.shape[-1], self.shape[-2]],
            "limits": {"bytes": MAX_UPLOAD, "pixels": MAX_PIXELS},
        }

    def reconstruct(
        self,
        images: Float[Tensor, "b c h w"],
        p: float,
        estimator: str = "nuclear-norm",
        channels: Channels = "joint",
        draws: int = 1,
        seed: int = 0,
    ) -> list[dict[str, Any]]:
        """Masked and estimated images, the mean of `draws` estimates, and singular values before and after."""
        settings = {"tol": TOLERANCE} if estimator == "soft-impute" else {}
        model = MENet(nn.Identity(), build(estimator, **settings), p, channels=channels).eval()
        only = MENet(nn.Identity(), "mask-only", p, channels=channels)
        b, c, h, w = images.shape
        shape = (draws, b, c if channels == "joint" else 1, h, w)
        drawn = masks.bernoulli(shape, p, torch.Generator().manual_seed(seed))
        repeated = images.repeat(draws, 1, 1, 1)
        estimates = model.estimate(repeated, drawn.flatten(0, 1)).unflatten(0, (draws, b)).mean(0)
        masked = only.estimate(images, drawn[0])
        error = (estimates - images).square().flatten(1).mean(1)
        return [
            {
                "masked": picture(masked[i]),
                "estimate": picture(estimates[i]),
                "psnr": None if error[i] < 1e-10 else round(-10 * math.log10(float(error[i])), 1),
                "before": _spectrum(images[i]),
                "after": _spectrum(estimates[i]),
            }
            for i in range(b)
        ]

    def attack(
        self,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        name: str,
        epsilon: float,
        steps: int = 20,
        draws: int = 20,
        seed: int = 0,
        frames: int = MAX_FRAMES,
    ) -> list[dict[str, Any]]:
        """Each image under attack, at every step: what both networks predict, over fresh draws of the defense."""
        kind = ATTACKS[name]
        victim: Model = self.bare
        if kind.gradient is not None:
            victim = self.defended.with_gradient(kind.gradient)
        watched = Watched(victim, len(images))
        settings: dict[str, Any] = {} if kind.spec == "fgsm" else {"steps": steps}
        attack = attacks.build(kind.spec, epsilon=epsilon, eot=kind.eot, **settings)
        self.defended.reseed(seed)
        result = attack(watched, images, labels, generator=torch.Generator().manual_seed(seed))
        path = [images, *watched.iterates, result.images]
        path = [one for one, before in zip(path, [None, *path], strict=False) if not _same(one, before)]
        chosen = sorted({round(i * (len(path) - 1) / max(frames - 1, 1)) for i in range(frames)})
        shown = torch.stack([path[i] for i in chosen])
        self.defended.reseed(seed + 1)
        bare = _answers(self.bare, shown.flatten(0, 1), 1)
        defended = _answers(self.defended, shown.flatten(0, 1), draws)
        largest = float((shown[-1] - images).abs().amax())
        amplified = max(1, int(0.5 / largest)) if largest > 0 else 1
        b = len(images)
        return [
            {
                "label": int(labels[i]),
                "amplified": amplified,
                "largest": round(float((shown[-1, i] - images[i]).abs().amax()), 4),
                "steps": chosen,
                "frames": [
                    {
                        "image": picture(frame[i]),
                        "perturbation": picture((0.5 + amplified * (frame[i] - images[i])).clamp(0, 1)),
                        "bare": bare[number * b + i],
                        "defended": defended[number * b + i],
                    }
                    for number, frame in enumerate(shown)
                ],
            }
            for i in range(b)
        ]

    def certify(self, images: Float[Tensor, "b c h w"], seed: int = 0) -> list[dict[str, Any]]:
        """How many pixels of each image can be repainted without changing the vote, with what was measured."""
        model = self._certified_model()
        settings = CertificateSettings(selection=50, estimation=500, decision="plurality")
        found = certificates(model, images, settings, seed, seed + 1)
        p, entries = observation(model, images.shape[1])
        return [
            {
                "prediction": int(found.prediction[i]),
                "bound": round(float(found.lower_bound[i]), 4),
                "votes": int(found.votes[i]),
                "draws": int(found.draws[i]),
                "alpha": settings.alpha,
                "radius": int(found.radius[i]),
                "p": round(p, 3),
                "entries": entries,
                "image": picture(images[i]),
            }
            for i in range(len(images))
        ]

    def painted(
        self,
        images: Float[Tensor, "b c h w"],
        pixels: Sequence[tuple[int, int, float]],
        draws: int,
        seed: int = 0,
    ) -> list[dict[str, Any]]:
        """The vote over fresh draws after some pixels, (row, column, value), were repainted."""
        model = self._certified_model()
        changed = images.clone()
        for row, column, value in pixels:
            changed[:, :, row, column] = value
        model.reseed(seed + 2)
        different = (changed != images).any(1).flatten(1).sum(1)
        return [
            {"image": picture(one), "painted": int(count), **answer}
            for one, count, answer in zip(changed, different, _answers(model, changed, draws), strict=True)
        ]

    def _certified_model(self) -> MENet:
        if self.certified is None:
            raise ConfigurationError("a certificate needs a ME-Net, whose masks it counts; this network is none")
        return self.certified

    def _reconstruct(self, request: Request) -> Any:
        images, _ = self._image(request)
        return self.reconstruct(
            images,
            number(request, "p", 0, 1, 0.5),
            word(request, "estimator", ESTIMATORS),
            cast(Channels, word(request, "channels", ("joint", "separate"))),
            whole(request, "draws", 1, MAX_DRAWS // 5, 1),
            whole(request, "seed", 0, 2**31, 0),
        )[0]

    def _attack(self, request: Request) -> Any:
        images, label = self._image(request, fit=True)
        labels = torch.tensor([_answers(self.bare, images, 1)[0]["prediction"] if label is None else label])
        return self.attack(
            images,
            labels,
            word(request, "attack", tuple(ATTACKS)),
            number(request, "epsilon", 0, 1, self.networks.epsilon),
            whole(request, "steps", 1, MAX_STEPS, 20),
            whole(request, "draws", 1, MAX_DRAWS, 20),
            whole(request, "seed", 0, 2**31, 0),
        )[0]

    def _certificate(self, request: Request) -> Any:
        return self.certify(self._image(request, fit=True)[0], whole(request, "seed", 0, 2**31, 0))[0]

    def _paint(self, request: Request) -> Any:
        images, _ = self._image(request, fit=True)
        pixels = request.get("pixels", [])
        h, w = images.shape[-2:]
        if not isinstance(pixels, list) or len(pixels) > h * w:
            raise ConfigurationError(f"expected at most {h * w} painted pixels")
        for one in pixels:
            if not (isinstance(one, list) and len(one) == 3 and all(type(part) is int for part in one)):
                raise ConfigurationError("expected each painted pixel as [row, column, 0 or 1]")
            if not (0 <= one[0] < h and 0 <= one[1] < w and one[2] in (0, 1)):
                raise ConfigurationError(f"expected painted pixels inside the {w}×{h} image")
        return self.painted(
            images,
            [(row, column, float(value)) for row, column, value in pixels],
            whole(request, "draws", 1, MAX_DRAWS, MAX_DRAWS),
            whole(request, "seed", 0, 2**31, 0),
        )[0]

    def _image(self, request: Request, fit: bool = False) -> tuple[Tensor, int | None]:
        """The image of a request, by the name of a sample or as a file, and its label if it has one."""
        given = request.get("image")
        if not isinstance(given, str):
            raise ConfigurationError("expected `image`, the name of a sample or an encoded file")
        if given in self.samples:
            image, label = self.samples[given].image[None], self.samples[given].label
        else:
            image, label = decoded(unpacked(given)), None
        if fit and tuple(image.shape[1:]) != self.shape:
            image, label = fitted(image, self.shape), None
        return image, label


class Watched:
    """A model that remembers the images it is asked about: the iterates of the attack on it."""

    def __init__(self, model: Model, count: int) -> None:
        self.model, self.count = model, count
        self.iterates: list[Tensor] = []

    def __call__(self, batch: Tensor) -> Tensor:
        one = batch[: self.count].detach()
        # A gradient over several draws may take several passes over the same images.
        if len(one) == self.count and not (self.iterates and torch.equal(one, self.iterates[-1])):
            self.iterates.append(one.clone())
        return self.model(batch)


def number(request: Request, name: str, low: float, high: float, default: float) -> float:
    """A number of a request, inside its bounds."""
    value = request.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigurationError(f"expected {low:g} <= {name} <= {high:g}, got {str(value)[:40]!r}")
    return float(value)


def whole(request: Request, name: str, low: int, high: int, default: int) -> int:
    """A whole number of a request, inside its bounds."""
    value = number(request, name, low, high, default)
    if value != int(value):
        raise ConfigurationError(f"expected a whole {name}, got {value:g}")
    return int(value)


def word(request: Request, name: str, choices: Sequence[str]) -> str:
    """A word of a request, one of `choices`; the first by default."""
    value = request.get(name, choices[0])
    if not isinstance(value, str) or value not in choices:
        raise ConfigurationError(f"unknown {name} {str(value)[:40]!r}; choose from {', '.join(choices)}")
    return value


def _loaded(run: str) -> nn.Module:
    return menet.load(run).eval()


def _spectrum(image: Tensor) -> dict[str, Any]:
    """The singular values of the matrix [R G B] on the scale [0, 1], as in figure 1 of the paper."""
    matrix = (to_matrix(image, "joint") + 1) / 2
    values = torch.linalg.svdvals(matrix.double())
    return {
        "values": [round(float(one), 3) for one in values],
        "rank": int(approximate_rank(matrix[None], 0.9)[0]),
    }


@torch.no_grad()
def _answers(model: nn.Module, images: Tensor, draws: int) -> list[dict[str, Any]]:
    """The mean probabilities over draws, and how many draws predict each class."""
    parts = [model(block.repeat(draws, 1, 1, 1)).unflatten(0, (draws, -1)) for block in images.split(16)]
    logits = torch.cat(parts, 1)
    probabilities = logits.softmax(-1).mean(0)
    chosen = logits.argmax(-1)
    votes = torch.stack([(chosen == label).sum(0) for label in range(logits.shape[-1])], -1)
    return [
        {
            "prediction": int(votes[i].argmax()),
            "probabilities": [round(float(one), 4) for one in probabilities[i]],
            "votes": votes[i].tolist(),
            "draws": draws,
        }
        for i in range(len(images))
    ]


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(one, other)


def _described(model: nn.Module) -> dict[str, Any]:
    if not isinstance(model, MENet):
        return {"name": getattr(model, "name", type(model).__name__)}
    return {
        "name": "ME-Net",
        "p": round(model.mean_p, 3),
        "channels": model.channels,
        "estimator": model.settings()["estimator"]["name"],
    }


def static_answers(explorer: Explorer, grid: "Grid") -> dict[str, Any]:
    """Everything that the exported page can show, computed beforehand: answers by the key that it asks for."""
    from menet.progress import track

    photos = [one for one in explorer.samples.values() if one.label is None]
    own = [one for one in explorer.samples.values() if one.label is not None]
    answers: dict[str, Any] = {}
    work = [(p, estimator) for p in grid.p for estimator in grid.estimators]
    for p, estimator in track(work, "reconstructions"):
        for group in (own, photos):
            if group:
                made = explorer.reconstruct(torch.stack([one.image for one in group]), p, estimator)
                for one, answer in zip(group, made, strict=True):
                    answers[f"reconstruct|{one.name}|{p:g}|{estimator}"] = answer
    images = torch.stack([one.image for one in own])
    labels = torch.tensor([one.label for one in own])
    attempts = [(name, epsilon) for epsilon in grid.epsilon for name in ATTACKS]
    for name, epsilon in track(attempts, "attacks"):
        found = explorer.attack(images, labels, name, epsilon, grid.steps, grid.draws, frames=grid.frames)
        for one, answer in zip(own, found, strict=True):
            answers[f"attack|{one.name}|{name}|{epsilon:g}"] = answer
    if explorer.certified is not None:
        for one in track(own, "certificates"):
            answers[f"certificate|{one.name}"] = explorer.certify(one.image[None])[0]
            h, w = one.image.shape[-2:]
            order = torch.randperm(h * w, generator=torch.Generator().manual_seed(0)).tolist()
            for count in grid.painted:
                pixels = [(at // w, at % w, float(one.image[:, at // w, at % w].mean() < 0.5)) for at in order]
                answers[f"paint|{one.name}|{count}"] = explorer.painted(one.image[None], pixels[:count], 100)[0]
    return {"about": explorer.about(), "grid": asdict(grid), "answers": answers}


@dataclass(frozen=True)
class Grid:
    """The settings that the exported page holds answers for."""

    p: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    estimators: tuple[str, ...] = ESTIMATORS
    epsilon: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.3)
    painted: tuple[int, ...] = (0, 1, 2, 3, 5, 10, 20, 40)
    steps: int = 20
    draws: int = 20
    frames: int = 8

"""Defense-GAN (Samangouei, Kabkab & Chellappa, 2018): classify the nearest image that a generator can produce."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from menet.baselines.feature_squeezing import sample_images
from menet.baselines.wgan import Generator, train_wgan
from menet.errors import ConfigurationError
from menet.preprocessed import Gradient, Preprocessed

Method = Literal["l-bfgs", "gradient-descent"]
State = tuple[Tensor, ...]
"""Of a search: first the latent vectors to evaluate next, then what the method remembers of each."""
Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From latent vectors to their losses and the gradients of these."""

IMAGES_TO_FIT = 60_000
MOMENTUM, RATE = 0.7, 10.0
LAST_PART, LAST_RATE = 0.8, 0.1
"""As the authors' code: from 80 % of the steps on, a tenth of the learning rate."""
FIRST_RATE = 20.0
"""Of the first step of L-BFGS, which knows no curvature yet."""
MEMORY = 6
REACH = 1.0
"""The longest step of L-BFGS: what it knows of the curvature holds nearby."""
SHORTER, DECREASE = 0.3, 1e-4
"""After a step that did not decrease the loss by this fraction of what the slope promised, a shorter one."""
UNROLLED = 5
"""Steps that exact gradients pass by default. Those through the whole search are noise; through its last steps
they lead further than BPDA (docs/baselines/defense-gan.md)."""
MAX_BATCH, MAX_BATCH_ON_CPU = 2048, 128
"""Latent vectors in one pass through the generator; on a CPU as many as its cache has room for."""


def project(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    starts: Float[Tensor, "b r latent"],
    steps: int,
    method: Method = "l-bfgs",
    unrolled: int | None = None,
) -> Float[Tensor, "b latent"]:
    """The latent vector whose image is nearest to each of `images`, by `steps` gradient steps from r starts each.

    The loss is the mean of the squared differences over the pixels. All images and starts are one batch, in
    chunks of bounded size, but every vector has a search of its own: what is found for an image does not depend
    on the others. Where a step is not finite, the vector stays; a start with a loss of NaN is never chosen.

    If gradients are enabled and `images` require them, they pass through the last `unrolled` steps (all if None)
    from the best start, whose graph is kept in memory.
    """
    if steps < 1 or (unrolled is not None and unrolled < 1):
        raise ConfigurationError(f"expected steps and unrolled >= 1, got {steps} and {unrolled}")
    if method not in get_args(Method):
        raise ConfigurationError(f"unknown method {method!r}; choose from {', '.join(get_args(Method))}")
    if not len(images):
        return starts[:, 0]
    last = min(steps, unrolled or steps) if torch.is_grad_enabled() and images.requires_grad else 0
    together = MAX_BATCH_ON_CPU if starts.device.type == "cpu" else MAX_BATCH
    size = max(1, together // starts.shape[1])
    search = _Search(network, steps, method)
    with torch.inference_mode(False), torch.enable_grad():
        found = [
            search.best(some if last else some.detach().clone(), near.detach().clone(), last)
            for some, near in zip(images.split(size), starts.split(size), strict=True)
        ]
    return torch.cat(found)


@dataclass(frozen=True)
class _Search:
    network: nn.Module
    steps: int
    method: Method

    def best(self, images: Tensor, starts: Tensor, unrolled: int) -> Tensor:
        """What was found from the best start of each image; with a graph of the last `unrolled` steps."""
        count, first = starts.shape[1], self.steps - unrolled
        goal = images.detach().repeat_interleave(count, 0)
        state = self._steps(self._begin(starts.flatten(0, 1)), goal, range(first))
        latents, losses = self._end(self._steps(state, goal, range(first, self.steps)), goal)
        chosen = losses.nan_to_num(nan=torch.inf).view(-1, count).argmin(1)
        chosen += count * torch.arange(len(images), device=images.device)
        if not unrolled:
            return latents[chosen]
        state = tuple(part[chosen] for part in state)
        return self._end(self._steps(state, images, range(first, self.steps), graph=True), images)[0]

    def _begin(self, latents: Tensor) -> State:
        none = torch.zeros_like(latents)
        if self.method == "gradient-descent":
            return latents, none
        history = none[:, None].expand(-1, MEMORY, -1)
        return latents, latents, none.new_full((len(none), 1), torch.inf), none, history, history

    def _steps(self, state: State, goal: Tensor, steps: range, graph: bool = False) -> State:
        def evaluate(latents: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                leaf = latents if latents.requires_grad else latents.detach().requires_grad_()
                losses = self._losses(leaf, goal)
                (slope,) = torch.autograd.grad(losses.sum(), leaf, create_graph=graph)
            return (losses if graph else losses.detach()), slope

        with torch.set_grad_enabled(graph):
            for step in steps:
                if self.method == "l-bfgs":
                    state = _lbfgs(evaluate, *state)
                else:
                    late = step >= LAST_PART * self.steps
                    state = _descend(evaluate, LAST_RATE * RATE if late else RATE, *state)
        return state

    def _end(self, state: State, goal: Tensor) -> tuple[Tensor, Tensor]:
        """The latent vectors found, and their losses."""
        with torch.no_grad():
            losses = self._losses(state[0], goal)
        if self.method == "gradient-descent":
            return state[0], losses
        latents, before = state[1], state[2].detach()[:, 0]
        return torch.where((losses <= before)[:, None], state[0], latents), torch.fmin(losses, before)

    def _losses(self, latents: Tensor, goal: Tensor) -> Tensor:
        losses: Tensor = (self.network(latents) - goal).square().flatten(1).mean(1)
        return losses


def _descend(evaluate: Evaluate, learning_rate: float, latents: Tensor, momentum: Tensor) -> State:
    """A step of gradient descent with momentum."""
    momentum = MOMENTUM * momentum + evaluate(latents)[1]
    moved = latents - learning_rate * momentum
    return torch.where(moved.isfinite(), moved, latents.detach()), momentum


def _lbfgs(
    evaluate: Evaluate, trial: Tensor, latents: Tensor, loss: Tensor, slope: Tensor, moves: Tensor, bends: Tensor
) -> State:
    """A step of L-BFGS for each vector by itself, with backtracking; one evaluation.

    `latents` with their `loss` and `slope` are the best so far; `moves` and `bends` their last changes and those
    of the slope.
    """
    losses, slopes = evaluate(trial)
    move, bend = trial - latents, slopes - slope
    accepted = losses[:, None] <= loss + DECREASE * _dot(slope, move)
    curved = accepted & (_dot(move, bend) > 1e-10 * _dot(bend, bend))
    push = curved[..., None]
    moves = torch.where(push, torch.cat([moves[:, 1:], move[:, None]], 1), moves)
    bends = torch.where(push, torch.cat([bends[:, 1:], bend[:, None]], 1), bends)
    latents = torch.where(accepted, trial, latents)
    loss = torch.where(accepted, losses[:, None], loss)
    slope = torch.where(accepted, slopes, slope)
    newton = -_inverse_hessian(slope, moves, bends)
    direction = torch.where(_dot(newton, slope) < 0, newton, -FIRST_RATE * slope)
    length = (_dot(direction, direction) + torch.finfo(slope.dtype).tiny).sqrt()
    direction = direction * (REACH / length).clamp(max=1)
    return latents + torch.where(accepted, direction, SHORTER * move), latents, loss, slope, moves, bends


def _inverse_hessian(slope: Tensor, moves: Tensor, bends: Tensor) -> Tensor:
    """The two-loop recursion (Nocedal, 1980): the estimated inverse Hessian times `slope`."""
    pairs = []
    for move, bend in zip(moves.unbind(1), bends.unbind(1), strict=True):
        curvature = _dot(move, bend)
        known = curvature > 0
        # Division by a harmless number where there is no pair, as zero would be NaN in a gradient.
        pairs.append((move, bend, known / torch.where(known, curvature, 1)))
    weights = []
    for move, bend, weight in reversed(pairs):
        weights.append(weight * _dot(move, slope))
        slope = slope - weights[-1] * bend
    move, bend, weight = pairs[-1]
    known = weight > 0
    scale = torch.where(known, _dot(move, bend), FIRST_RATE) / torch.where(known, _dot(bend, bend), 1)
    slope = scale * slope
    for (move, bend, weight), before in zip(pairs, reversed(weights), strict=True):
        slope = slope + (before - weight * _dot(bend, slope)) * move
    return slope


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


class DefenseGAN(Preprocessed):
    """Classify the projection of each image onto the range of a generator that `fit` trains on clean images.

    The projection takes `steps` gradient steps (the authors' L) from each of `starts` random latent vectors
    (their R) and keeps the best. `method` is batched L-BFGS, which comes as near in far fewer steps as the
    gradient descent of the authors, with L = 200 and R = 10. As in their first variant, the classifier is trained
    on the images themselves: in training mode they pass unchanged, unless `train_on_projections` (their second).
    `latent`, `features` and `gan_steps` are those of the generator and of its training; the authors' are 128, 64
    and 200,000. Its weights are part of `state_dict`, and frozen while the classifier is trained.

    `gradient="exact"` differentiates the last `unrolled` steps from the best start (all if None), with memory
    proportional to them: few lead an attack further than all. `bpda` uses the identity.
    """

    name: ClassVar[str] = "defense-gan"
    fitted: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        steps: int = 40,
        starts: int = 4,
        method: Method = "l-bfgs",
        unrolled: int | None = UNROLLED,
        channels: int = 3,
        height: int = 32,
        width: int = 32,
        latent: int = 64,
        features: int = 16,
        gan_steps: int = 2000,
        train_on_projections: bool = False,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, gradient, seed)
        counts = {"steps": steps, "starts": starts, "unrolled": unrolled, "gan_steps": gan_steps}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ConfigurationError(f"expected {name} >= 1, got {value}")
        if method not in get_args(Method):
            raise ConfigurationError(f"unknown method {method!r}; choose from {', '.join(get_args(Method))}")
        self.steps, self.starts, self.gan_steps = steps, starts, gan_steps
        self.method: Method = method
        self.unrolled = unrolled
        self.train_on_projections = train_on_projections
        self.gan = Generator(channels, height, width, latent, features).requires_grad_(False)
        self.register_buffer("fitted", torch.tensor(False))

    def fit(self, images: Any, generator: torch.Generator, checkpoint: Path | None = None) -> Self:
        """Train the generator on images, as tensors on [0, 1] or bytes, and adopt their shape.

        An interrupted training resumes from `checkpoint`, if given.
        """
        chosen = sample_images(images, IMAGES_TO_FIT, generator)
        channels, height, width = chosen.shape[1:]
        network = Generator(channels, height, width, self.gan.latent, self.gan.features).to(self.fitted.device)
        train_wgan(network, chosen.float(), generator, self.gan_steps, checkpoint=checkpoint)
        self.gan = network.requires_grad_(False)
        self.fitted.fill_(True)
        return self

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        self._check(images)
        if self.training and not self.train_on_projections:
            return images
        shape = (self.starts, self.gan.latent)
        starts = self.draw(lambda count: torch.randn(count, *shape, generator=generator), len(images))
        latents = project(self.gan, images, starts.to(images), self.steps, self.method, self.unrolled)
        generated: Tensor = self.gan(latents)
        return generated.to(images.dtype)

    def settings(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "starts": self.starts,
            "method": self.method,
            "unrolled": self.unrolled,
            **self.gan.settings(),
            "gan_steps": self.gan_steps,
            "train_on_projections": self.train_on_projections,
            "gradient": self.gradient,
        }

    def _check(self, images: Tensor) -> None:
        if not bool(self.fitted):
            raise ConfigurationError("the generator has not been trained; call fit(images, generator) first")
        expected = (self.gan.channels, self.gan.height, self.gan.width)
        if tuple(images.shape[1:]) != expected:
            raise ConfigurationError(
                f"expected images of shape {expected}, as the generator's, got {tuple(images.shape[1:])}"
            )

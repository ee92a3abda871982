"""Total-variation minimization (Guo, Rana, Cissé & van der Maaten, 2018): drop pixels, then fill the gaps.

Each channel x with observed entries K is replaced by the minimizer over z of

    ‖K ∘ (z − x)‖₂  +  λ · ( Σᵢ ‖z[i,:] − z[i−1,:]‖₂  +  Σⱼ ‖z[:,j] − z[:,j−1]‖₂ )

which is Guo et al.'s objective with p = 2 and that of ART's `TotalVarMin`. The norm of the residual is not
squared, so below some λ the observed pixels stay unchanged: on 32×32 images this is so at their λ = 0.03.

The solver is Douglas–Rachford splitting (`variation_problem.py`) of a whole batch; each problem stops by itself.
The larger λ, the more neighboring rows and columns end up equal: at λ = 0.5 seven in eight of CIFAR-10's. The
splitting finds these early but makes them equal slowly; averaging over them does it at once, and more than halves
the iterations.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from menet import kernels, masks
from menet.baselines.resize_pad import Cropped
from menet.baselines.variation_problem import (
    RELAXATION,
    STEP_OF_DIFFERENCES,
    STEP_OF_RESIDUAL,
    Problem,
    basis_and_frequencies,
    gradient_of_minimizer,
)
from menet.errors import ConfigurationError
from menet.linalg import in_chunks, no_autocast
from menet.preprocessed import Gradient

SCHEDULED = 10
"""Probabilities in a schedule of p, as many as ME-Net has in the paper."""

TOLERANCE = 1e-4
MAX_ITERATIONS = 400
# CIFAR-10 takes about 30 iterations.
CHECK_EVERY = 4
CHECKS = 2  # consecutive ones that must find the objective unchanged
# The objective may stall while the state still moves towards a better one. This bounds the length of the last
# step, in units of `tol` and of the objective, on which differences have the less influence the smaller λ is.
MOVEMENT = 30.0
ELEMENTS = 256 * 32 * 32  # per chunk: enough for calls not to dominate


class TotalVariation(Cropped):
    """Classify total-variation reconstructions from a random fraction `p` of the entries.

    `p=(a, b)` is a schedule of `SCHEDULED` probabilities from which each training image draws one; evaluation
    uses its mean. The authors keep half of the entries and use λ = `weight` = 0.03 on ImageNet. They train the
    classifier on reconstructions, as training here does. `gradient="exact"` is that of the minimizer and of the
    final clipping to [0, 1]; dropped entries have gradient zero. `crop` < 1 adds their random crops at inference,
    see `Cropped`.
    """

    name: ClassVar[str] = "total-variation"

    def __init__(
        self,
        classifier: nn.Module,
        p: float | Sequence[float] = 0.5,
        weight: float = 0.03,
        crop: float = 1.0,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, crop, gradient, seed)
        low, high = (p, p) if isinstance(p, int | float) else p
        if not 0 <= low <= high <= 1:
            raise ConfigurationError(f"expected p in [0, 1], or (a, b) with 0 <= a <= b <= 1, got {p}")
        if not weight > 0:
            raise ConfigurationError(f"expected weight > 0, got {weight}")
        self.p, self.weight = p, weight
        self.schedule = torch.tensor(masks.schedule(low, high, SCHEDULED if high > low else 1))

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        shape = images.shape[1:]

        def drawn(count: int) -> Tensor:
            p = self.schedule.mean().expand(count)
            if self.training and len(self.schedule) > 1:
                p = self.schedule[torch.randint(len(self.schedule), (count,), generator=generator)]
            return masks.bernoulli((count, *shape), p, generator)

        kept = self.draw(drawn, len(images))
        return total_variation(images, kept.to(images.device), self.weight).clamp(0, 1)

    def settings(self) -> dict[str, Any]:
        p = self.p if isinstance(self.p, int | float) else list(self.p)
        return {"p": p, "weight": self.weight, "crop": self.crop, "gradient": self.gradient}


def total_variation(
    x: Float[Tensor, "*batch h w"],
    mask: Bool[Tensor, "*#batch h w"],
    weight: float = 0.03,
    tol: float = TOLERANCE,
    max_iter: int = MAX_ITERATIONS,
) -> Float[Tensor, "*batch h w"]:
    """Estimate each `(h, w)` from the entries where `mask` is True; the others may hold anything, even NaN.

    A problem stops when its objective has changed by less than the fraction `tol` in two consecutive checks, four
    iterations apart, and its state hardly moves. With the default, the objective is then within a thousandth of
    the optimum: of 17,460 problems tried (CIFAR-10, SVHN, digits; a tenth to all of the entries observed; weights
    from 0.03 to 1) three were up to 0.12 % above. Where nothing is observed the estimate is zero.

    The gradient with respect to `x` is that of the minimizer, by the implicit function theorem.
    """
    if not weight > 0:
        raise ConfigurationError(f"expected weight > 0, got {weight}")
    if max_iter < 1:
        raise ConfigurationError(f"expected max_iter >= 1, got {max_iter}")
    mask = mask.expand(x.shape)
    if not x.numel():
        return x
    work = x.flatten(0, -3) if x.ndim > 2 else x[None]
    dtype = torch.promote_types(x.dtype, torch.float32)
    estimate: Tensor = _Minimize.apply(work.to(dtype), mask.reshape(work.shape), weight, tol, max_iter)
    return estimate.reshape(x.shape).to(x.dtype)


def objective(
    z: Float[Tensor, "*batch h w"],
    x: Float[Tensor, "*batch h w"],
    mask: Bool[Tensor, "*batch h w"],
    weight: float,
) -> Float[Tensor, "*batch"]:
    """The objective that `total_variation` minimizes, for each `(h, w)`."""
    residual = torch.where(mask, z - x, torch.zeros_like(z))
    variation = z.diff(dim=-2).norm(dim=-1).sum(-1) + z.diff(dim=-1).norm(dim=-2).sum(-1)
    return residual.flatten(-2).norm(dim=-1) + weight * variation


class _Minimize(torch.autograd.Function):
    @staticmethod
    @no_autocast
    def forward(context: Any, x: Tensor, mask: Tensor, weight: float, tol: float, max_iter: int) -> Tensor:
        (estimate,) = in_chunks(
            lambda x, mask: _solve(x, mask, weight, tol, max_iter, states=False),
            [x.contiguous(), mask.contiguous()],
            ELEMENTS,
        )
        context.save_for_backward(x, mask)
        context.settings = weight, tol, max_iter
        return estimate

    @staticmethod
    @torch.autograd.function.once_differentiable
    @no_autocast
    def backward(context: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        (of_x,) = in_chunks(
            lambda *piece: (_adjoint(*piece, *context.settings),),
            [*(tensor.contiguous() for tensor in context.saved_tensors), outgoing.contiguous()],
            ELEMENTS,
        )
        return of_x, None, None, None, None


def _solve(x: Tensor, mask: Tensor, weight: float, tol: float, max_iter: int, states: bool) -> tuple[Tensor, ...]:
    """The estimates and, if asked for, the final states on the common scale.

    For small images on a CPU, `kernels/total_variation.py` takes the same steps in compiled loops.
    """
    solve = _compiled if kernels.suit(x) and x.shape[-2] <= kernels.LARGEST else _batched
    return solve(x, mask, weight, tol, max_iter, states)


def _compiled(
    x: Tensor, mask: Tensor, weight: float, tol: float, max_iter: int, states: bool
) -> tuple[Tensor, ...]:
    from menet.kernels.total_variation import minimize_each

    batch, height, width = x.shape
    basis, frequencies = (part.to(x.dtype).numpy() for part in basis_and_frequencies(width, x.device))
    kept = batch if states else 0
    shapes = ((kept, height, width), (kept, height - 1, width), (kept, height, width - 1))
    estimate, state = torch.empty_like(x), tuple(x.new_empty(shape) for shape in shapes)
    minimize_each(
        x.numpy(),
        mask.numpy(),
        basis,
        frequencies,
        (
            float(weight),
            float(tol),
            max_iter,
            STEP_OF_DIFFERENCES,
            STEP_OF_RESIDUAL,
            RELAXATION,
            CHECK_EVERY,
            _movement(weight),
        ),
        estimate.numpy(),
        tuple(part.numpy() for part in state),
    )
    return (estimate, *state) if states else (estimate,)


def _batched(
    x: Tensor, mask: Tensor, weight: float, tol: float, max_iter: int, states: bool
) -> tuple[Tensor, ...]:
    problem = Problem(_batch_last(x), _batch_last(mask), weight)
    state = problem.first()
    found = [torch.zeros_like(part) for part in ((problem.x, *state) if states else (problem.x,))]
    result = [torch.empty_like(part) for part in found]
    index = torch.arange(len(x), device=x.device)
    running = torch.ones_like(index, dtype=torch.bool)
    # A problem with flat parts may stall for a while far from its optimum, so several checks must agree.
    seen = x.new_full((CHECKS, len(x)), math.inf)
    for iteration in range(1, max_iter + 1):
        last = iteration == max_iter
        if not last and iteration % CHECK_EVERY:
            problem.advance(state)
            continue
        before = (state[0].clone(), state[1].clone(), state[2].clone())
        z, now = problem.settled(problem.advance(state))
        at_rest = problem.movement(before, state) <= _movement(weight) * tol * now
        calm = at_rest & (torch.cat([seen, now[None]]).diff(dim=0).abs() <= tol * now).all(0)
        seen = torch.cat([seen[1:], now[None]])
        done = running if last else running & calm
        if not bool(done.any()):
            continue
        found = [torch.where(done, new, old) for new, old in zip((z, *state), found, strict=False)]
        running = running & ~done
        remaining = int(running.sum())
        # Copying the chunk to drop a few problems would cost more than keeping them.
        if remaining <= 0.6 * len(running):
            found[0] *= problem.scale
            for whole, part in zip(result, found, strict=True):
                whole[..., index] = part
            if not remaining:
                break
            problem.keep(running)
            index, seen = index[running], seen[:, running]
            found = [part[..., running] for part in found]
            state = (state[0][..., running], state[1][..., running], state[2][..., running])
            running = torch.ones_like(index, dtype=torch.bool)
    return tuple(part.movedim(-1, 0).contiguous() for part in result)


def _movement(weight: float) -> float:
    return MOVEMENT * max(1.0, 0.06 / weight)


def _batch_last(t: Tensor) -> Tensor:
    return t.movedim(0, -1).contiguous()


def _adjoint(x: Tensor, mask: Tensor, outgoing: Tensor, weight: float, tol: float, max_iter: int) -> Tensor:
    """The gradient at `x`.

    It needs a more accurate state than the estimate does, so the problem is solved again with a tenth of `tol`;
    the estimate does not depend on whether gradients are asked for.
    """
    _, *state = _solve(x, mask, weight, tol / 10, max_iter, states=True)
    return gradient_of_minimizer(x, mask, state, outgoing, weight)

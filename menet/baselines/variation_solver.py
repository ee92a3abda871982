"""The images of least total variation near given pixels, for a whole batch.

Each channel x with kept entries K is replaced by the minimiser over z of

    ‖K ∘ (z − x)‖₂  +  λ · ( Σᵢ ‖z[i,:] − z[i−1,:]‖₂  +  Σⱼ ‖z[:,j] − z[:,j−1]‖₂ )

which is Guo et al.'s objective (2018) with p = 2 and that of ART's `TotalVarMin`. The norm of the residual is not
squared, so below some λ the kept pixels come back unchanged: on 32×32 images their λ = 0.03 is there.

It is found by Douglas–Rachford splitting (`variation_splitting.py`), each problem until it rests.

The larger λ, the more neighbouring rows and columns end up equal: at λ = 0.5 seven in eight of CIFAR-10's. The
splitting knows early which ones, and takes long to bring them together; averaging over them does it at once, and
more than halves the iterations.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from menet import kernels
from menet.baselines.variation_gradient import gradient_of_minimiser
from menet.baselines.variation_splitting import (
    RELAXATION,
    STEP_OF_DIFFERENCES,
    STEP_OF_RESIDUAL,
    Problem,
    cosine_basis,
)
from menet.chunks import in_chunks
from menet.errors import ConfigurationError

TOLERANCE = 1e-4
MAX_ITERATIONS = 400
# CIFAR-10 takes about 30 iterations.
CHECK_EVERY = 4
CHECKS = 2  # in a row that must find the objective at rest
# The objective may rest while the state still moves towards a better one: what a step may move it, in units of
# `tol` and of the objective, which feels differences the less the smaller λ is.
MOVEMENT = 30.0
ELEMENTS = 256 * 32 * 32  # of a chunk: enough for calls not to be what is paid for


def total_variation(
    x: Float[Tensor, "*batch h w"],
    mask: Bool[Tensor, "*#batch h w"],
    weight: float = 0.03,
    tol: float = TOLERANCE,
    max_iter: int = MAX_ITERATIONS,
) -> Float[Tensor, "*batch h w"]:
    """Each `(h, w)` re-estimated from the entries where `mask` is True; the others may hold anything, even NaN.

    A problem stops when its objective has changed by less than the share `tol` twice in a row, four iterations
    each, and its state is nearly at rest. With the default it is then within a thousandth of the optimum: of
    17,460 problems tried (CIFAR-10, SVHN, digits; a tenth to all of the entries kept; weights from 0.03 to 1)
    three were up to 0.12 % above. Where nothing was seen the estimate is zero.

    The gradient with respect to `x` is that of the minimiser, by the implicit function theorem.
    """
    if not weight > 0:
        raise ConfigurationError(f"weight is {weight}; accepted are numbers above 0")
    if max_iter < 1:
        raise ConfigurationError(f"max_iter is {max_iter}; accepted are whole numbers from 1")
    mask = mask.expand(x.shape)
    if not x.numel():
        return x
    work = x.flatten(0, -3) if x.ndim > 2 else x[None]
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(x.dtype, torch.float32)
        estimate = _Minimise.apply(work.to(dtype), mask.reshape(work.shape), weight, tol, max_iter)
    return estimate.reshape(x.shape).to(x.dtype)


def objective(
    z: Float[Tensor, "*batch h w"],
    x: Float[Tensor, "*batch h w"],
    mask: Bool[Tensor, "*batch h w"],
    weight: float,
) -> Float[Tensor, "*batch"]:
    """What `total_variation` minimises, for each `(h, w)`."""
    residual = torch.where(mask, z - x, torch.zeros_like(z))
    variation = z.diff(dim=-2).norm(dim=-1).sum(-1) + z.diff(dim=-1).norm(dim=-2).sum(-1)
    return residual.flatten(-2).norm(dim=-1) + weight * variation


class _Minimise(torch.autograd.Function):
    @staticmethod
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
    def backward(context: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        (of_x,) = in_chunks(
            lambda *piece: (_adjoint(*piece, *context.settings),),
            [*(tensor.contiguous() for tensor in context.saved_tensors), outgoing.contiguous()],
            ELEMENTS,
        )
        return of_x, None, None, None, None


def _solve(x: Tensor, mask: Tensor, weight: float, tol: float, max_iter: int, states: bool) -> tuple[Tensor, ...]:
    """The estimates and, if asked for, the states they stand for on the common scale.

    For small images on a CPU the same steps are in `kernels/variation.py`, compiled.
    """
    solve = _compiled if kernels.suit(x) and x.shape[-2] <= kernels.LARGEST else _batched
    return solve(x, mask, weight, tol, max_iter, states)


def _compiled(
    x: Tensor, mask: Tensor, weight: float, tol: float, max_iter: int, states: bool
) -> tuple[Tensor, ...]:
    from menet.kernels.variation import minimise_each

    batch, height, width = x.shape
    basis, frequencies = (part.to(x.dtype).numpy() for part in cosine_basis(width, x.device))
    kept = batch if states else 0
    shapes = ((kept, height, width), (kept, height - 1, width), (kept, height, width - 1))
    estimate, state = torch.empty_like(x), tuple(x.new_empty(shape) for shape in shapes)
    minimise_each(
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
    # A problem with flat parts may stand still for a while far from its end, so several checks must agree.
    seen = x.new_full((CHECKS, len(x)), math.inf)
    for iteration in range(1, max_iter + 1):
        last = iteration == max_iter
        if not last and iteration % CHECK_EVERY:
            problem.advance(state)
            continue
        before = (state[0].clone(), state[1].clone(), state[2].clone())
        z, now = problem.settled(problem.advance(state))
        resting = problem.movement(before, state) <= _movement(weight) * tol * now
        calm = resting & (torch.cat([seen, now[None]]).diff(dim=0).abs() <= tol * now).all(0)
        seen = torch.cat([seen[1:], now[None]])
        done = running if last else running & calm
        if not bool(done.any()):
            continue
        found = [torch.where(done, new, old) for new, old in zip((z, *state), found, strict=False)]
        running = running & ~done
        remaining = int(running.sum())
        # Copying the chunk to leave out a few would cost more than carrying them along.
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

    It needs a state closer to its end than the estimate does, so it is found again, with a tenth of `tol`; the
    estimate does not depend on whether gradients are asked for.
    """
    _, *state = _solve(x, mask, weight, tol / 10, max_iter, states=True)
    return gradient_of_minimiser(x, mask, state, outgoing, weight)

"""The images of least total variation near given pixels, for a whole batch.

Each channel x with kept entries K is replaced by the minimiser over z of

    ‖K ∘ (z − x)‖₂  +  λ · ( Σᵢ ‖z[i,:] − z[i−1,:]‖₂  +  Σⱼ ‖z[:,j] − z[:,j−1]‖₂ )

which is Guo et al.'s objective (2018) with p = 2 and that of ART's `TotalVarMin`. The norm of the residual is not
squared, so below some λ the kept pixels come back unchanged: on 32×32 images their λ = 0.03 is there.

The minimiser is found for a whole batch by Douglas–Rachford splitting (ADMM with over-relaxation): z is separated
from its residual and its differences, whose norms have proximal maps in closed form, and what joins them again is
(a + DᵀD) z = q, which the cosine transform diagonalises. One iteration is four small matrix products and a dozen
passes over memory. Problems are scaled to a common contrast, so one pair of step sizes fits all.

The larger λ, the more neighbouring rows and columns end up equal: at λ = 0.5 seven in eight of CIFAR-10's. The
splitting knows early which ones, and takes long to bring them together; averaging over them does it at once, and
more than halves the iterations.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize, pad

from menet import kernels
from menet.chunks import in_chunks
from menet.errors import ConfigurationError

TOLERANCE = 1e-4
MAX_ITERATIONS = 400
# Found on CIFAR-10, SVHN and digits with λ from 0.03 to 1; CIFAR-10 takes about 30 iterations.
STEP_OF_DIFFERENCES = 2.0  # in units of λ
STEP_OF_RESIDUAL = 0.1
RELAXATION = 1.8
CHECK_EVERY = 4
CHECKS = 2  # in a row that must find the objective at rest
# The objective may rest while the state still moves towards a better one: what a step may move it, in units of
# `tol` and of the objective, which feels differences the less the smaller λ is.
MOVEMENT = 30.0
ELEMENTS = 256 * 32 * 32  # of a chunk: enough for calls not to be what is paid for

State = tuple[Tensor, Tensor, Tensor]  # of the residual's copy of z, of row and of column differences


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


class _Problem:
    """A chunk of problems on a common scale, and one step of the splitting on it.

    Here the batch is the last dimension, `(h, w, b)`: rows, columns and their differences are then stretches of
    memory without gaps, and sums along them run over many problems at once.
    """

    def __init__(self, x: Tensor, mask: Tensor, weight: float) -> None:
        x = torch.where(mask, x, 0.0)
        self.start, self.scale = _start(x, mask)
        self.x, self.mask, self.weight = x / self.scale, mask.to(x.dtype), weight
        self.ratio = STEP_OF_RESIDUAL / (STEP_OF_DIFFERENCES * weight)
        self.bases, self.inverse = _joining_system(x, self.ratio)
        self._make_room()

    def first(self) -> State:
        """The start and its differences, longer by what the first step takes off."""
        z = self.start / self.scale
        rows, columns = z.diff(dim=0), z.diff(dim=1)
        of_rows, of_columns = normalize(rows, dim=1), normalize(columns, dim=0)
        return (
            torch.lerp(z, self.x, self.mask),
            rows + of_rows / STEP_OF_DIFFERENCES,
            columns + of_columns / STEP_OF_DIFFERENCES,
        )

    def step(self, state: State) -> tuple[Tensor, State]:
        """The estimate that `state` stands for, and the state after it.

        What the proximal map of a norm takes off is `cut`; the map itself is t − cut, its reflection t − 2·cut.
        """
        whole, rows, columns = state
        cut = _cut((whole - self.x) * self.mask, 1 / STEP_OF_RESIDUAL, (0, 1))
        of_rows, of_columns = _cut(rows, 1 / STEP_OF_DIFFERENCES, 1), _cut(columns, 1 / STEP_OF_DIFFERENCES, 0)
        right = whole - 2 * cut - _divergence(rows - 2 * of_rows, columns - 2 * of_columns) / self.ratio
        left, across = self.bases
        inside = (across @ torch.tensordot(left, right, 1)) * self.inverse
        z = torch.tensordot(left.mT, across.mT @ inside, 1)
        return z, (
            whole + RELAXATION * (z - whole + cut),
            rows + RELAXATION * (z.diff(dim=0) - rows + of_rows),
            columns + RELAXATION * (z.diff(dim=1) - columns + of_columns),
        )

    def advance(self, state: State) -> Tensor:
        """`step` without gradients: the state after it takes the place of `state`.

        Passes over memory are what an iteration costs, new memory most of all: results go where there is some,
        and the estimate stands only until the next call. What the proximal maps brought to zero is remembered:
        whether `exact`ly no residual was left, and between which rows and columns there were differences.
        """
        whole, rows, columns = state
        cut, spare, right, of_rows, of_columns = self.room
        torch.sub(whole, self.x, out=cut).mul_(self.mask)
        size = torch.mul(cut, cut, out=spare).flatten(0, 1).sum(0)
        share = _share_cut(size, 1 / STEP_OF_RESIDUAL)
        self.exact = share == 1
        cut.mul_(share)
        torch.sub(whole, cut, alpha=2, out=right)
        shares = []
        for part, dim, room in ((rows, 0, of_rows), (columns, 1, of_columns)):
            size = torch.mul(part, part, out=room).sum(1 - dim, keepdim=True)
            shares.append(_share_cut(size, 1 / STEP_OF_DIFFERENCES))
            torch.mul(part, (1 - 2 * shares[-1]) / self.ratio, out=room)
            right.narrow(dim, 1, part.shape[dim]).add_(room)
            right.narrow(dim, 0, part.shape[dim]).sub_(room)
        self.apart = [share < 1 for share in shares]
        left, across = self.bases
        lines = across.expand(len(right), -1, -1)
        torch.mm(left, right.flatten(1), out=spare.flatten(1))
        torch.bmm(lines, spare, out=right).mul_(self.inverse)
        torch.bmm(lines.mT, right, out=spare)
        torch.mm(left.mT, spare.flatten(1), out=right.flatten(1))
        whole.mul_(1 - RELAXATION).add_(right, alpha=RELAXATION).add_(cut, alpha=RELAXATION)
        for part, share, dim in ((rows, shares[0], 0), (columns, shares[1], 1)):
            part.mul_(1 - RELAXATION + RELAXATION * share)
            part.add_(right.narrow(dim, 1, part.shape[dim]), alpha=RELAXATION)
            part.sub_(right.narrow(dim, 0, part.shape[dim]), alpha=RELAXATION)
        return right

    def settled(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The best that the last step knows of, and its objective.

        Kept entries are put back where the step left no residual: there z only nears them. Rows and columns are
        joined where it left no difference, if that is better: early on it may have left too few.
        """
        apart = torch.lerp(z, self.x, self.mask * self.exact)
        joined = _joined(_joined(apart, self.apart[0], 0), self.apart[1], 1)
        objectives = self.objective(apart), self.objective(joined)
        return torch.where(objectives[1] < objectives[0], joined, apart), torch.minimum(*objectives)

    def movement(self, before: State, after: State) -> Tensor:
        """The length of a step, in the norm in which no later step is longer."""
        whole, rows, columns = ((a - b).square_().sum((0, 1)) for a, b in zip(after, before, strict=True))
        return (self.ratio * whole + rows + columns).sqrt_()

    def objective(self, z: Tensor) -> Tensor:
        """What is minimised, on the common scale."""
        rows, columns = z.diff(dim=0).square_().sum(1).sqrt_(), z.diff(dim=1).square_().sum(0).sqrt_()
        residual = (z - self.x).mul_(self.mask).square_().sum((0, 1)).sqrt_()
        return residual + self.weight * (rows.sum(0) + columns.sum(0))

    def keep(self, which: Tensor) -> None:
        """Go on with some of the problems only."""
        self.x, self.mask, self.scale = self.x[..., which], self.mask[..., which], self.scale[which]
        self._make_room()

    def _make_room(self) -> None:
        h, w, b = self.x.shape
        shapes = (*((h, w, b),) * 3, (h - 1, w, b), (h, w - 1, b))
        self.room = [self.x.new_empty(shape) for shape in shapes]


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
    basis, frequencies = (part.to(x.dtype).numpy() for part in _cosine_basis(width, x.device))
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
    problem = _Problem(_batch_last(x), _batch_last(mask), weight)
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
    """The gradient at the fixed point: the adjoint of the step's derivative, summed over all later steps.

    It needs a state closer to its end than the estimate does, so it is found again, with a tenth of `tol`: that
    costs little next to the sum, and the estimate does not depend on whether gradients are asked for.
    """
    _, *found = _solve(x, mask, weight, tol / 10, max_iter, states=True)
    with torch.enable_grad():
        problem = _Problem(_batch_last(x), _batch_last(mask), weight)
        problem.x = problem.x.detach().requires_grad_()
        state = tuple(_batch_last(part).detach().requires_grad_() for part in found)
        z, after = problem.step((state[0], state[1], state[2]))
    flow = torch.autograd.grad(
        z, [*state, problem.x], _batch_last(outgoing), retain_graph=True, materialize_grads=True
    )
    term, of_x = list(flow[:3]), flow[3]
    total = term
    for iteration in range(max_iter):
        *term, _ = torch.autograd.grad(
            after, [*state, problem.x], term, retain_graph=True, materialize_grads=True
        )
        total = [so_far + part for so_far, part in zip(total, term, strict=True)]
        if iteration % CHECK_EVERY == CHECK_EVERY - 1:
            size = max(float(part.abs().max()) for part in term)
            if size <= 1e-4 * max(float(part.abs().max()) for part in total):
                break
    *_, through = torch.autograd.grad(after, [*state, problem.x], total, materialize_grads=True)
    # z is the scaled problem's times `scale`, x the scaled problem's over it: the two cancel.
    return torch.where(mask, (of_x + through).movedim(-1, 0), torch.zeros_like(x))


def _cut(t: Tensor, level: float, dim: int | tuple[int, ...]) -> Tensor:
    """What the proximal map of `level`·‖·‖₂ takes off each group: all of a small one, `level` of a large one."""
    size = torch.linalg.vector_norm(t, dim=dim, keepdim=True)
    return t * (level / size.clamp(min=1e-12)).clamp(max=1)


def _share_cut(square: Tensor, level: float) -> Tensor:
    return square.clamp_(min=1e-24).rsqrt_().mul_(level).clamp_(max=1)


def _joined(z: Tensor, apart: Tensor, dim: int) -> Tensor:
    """`z` averaged over the rows (`dim` 0) or columns (1) between which nothing is `apart`."""
    group = pad(apart, (0,) * (2 * (2 - dim)) + (1, 0)).cumsum(dim).expand_as(z)
    sums, counts = (torch.zeros_like(z).scatter_add_(dim, group, t) for t in (z, torch.ones_like(z)))
    return (sums / counts.clamp_(min=1)).gather(dim, group)


def _divergence(rows: Tensor, columns: Tensor) -> Tensor:
    """Minus the adjoint of taking differences."""
    return _end_to_end(rows, 0) + _end_to_end(columns, 1)


def _end_to_end(differences: Tensor, dim: int) -> Tensor:
    edge = torch.zeros_like(differences.narrow(dim, 0, 1))
    return torch.cat([edge, differences, edge], dim).diff(dim=dim)


def _start(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each entry the mean of the kept ones around it, and a measure of the size of its differences."""
    kept = mask.to(x.dtype)
    mean = x.sum((0, 1)) / kept.sum((0, 1)).clamp(min=1)
    start = (_around(x) + 0.1 * mean) / (_around(kept) + 0.1)
    sizes = [start.diff(dim=0).square_().sum(1).sqrt_(), start.diff(dim=1).square_().sum(0).sqrt_()]
    return start, 1.5 * torch.cat(sizes).mean(0).clamp(min=1e-3)


def _around(x: Tensor) -> Tensor:
    """Sums over 3×3 neighbours."""
    padded = pad(x, (0, 0, 1, 1, 1, 1))
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    return rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]


def _joining_system(like: Tensor, offset: float) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The bases of rows and columns in which 1 + DᵀD/`offset` is diagonal, and its inverse there."""
    (down, of_rows), (across, of_columns) = (_cosine_basis(size, like.device) for size in like.shape[:2])
    inverse = offset / (offset + of_rows[:, None] + of_columns)
    return (down.to(like.dtype), across.to(like.dtype)), inverse[..., None].to(like.dtype)


def _cosine_basis(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The orthonormal basis in which DᵀD is diagonal, as rows, and its diagonal there."""
    order = torch.arange(size, dtype=torch.float64, device=device)
    basis = torch.cos(math.pi * order[:, None] * (order + 0.5) / size) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis, 2 - 2 * torch.cos(math.pi * order / size)

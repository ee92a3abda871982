"""The convex problem behind Soft-Impute and nuclear-norm minimization, solved once for both.

    minimize over X:   ½ ‖mask ∘ (X − A)‖²  +  λ ‖X‖_*

by a few accelerated gradient steps, which find the rank, and then Newton's method on the unobserved entries,
which needs two or three more; on a whole batch, each matrix stopping by itself. Where λ is small for the scale of
the data that is slow, and Douglas–Rachford splitting takes over, whose steps are as long as the singular values
are large, not as λ. Written by hand because general cone solvers take hundreds of times longer, and no library
has a batched, differentiable solver of this problem.

A *block* is one problem: `(c, n, m)` with n ≥ m. Matrices are blocks with c = 1; for tensors ‖X‖_* is the sum of
the nuclear norms of the c slices after an orthogonal `mixing` of the channels (see `nuclear_norm.py`).
"""

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from menet import kernels, linalg
from menet.estimators import newton, splitting
from menet.estimators.base import ConvergenceWarning
from menet.estimators.newton import size_of

# The relative residual of the adjoint's conjugate gradients.
GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-10}


class Solution(NamedTuple):
    """The estimate and, per matrix, the iterations, duality gap and rank.

    `gap` is the duality gap relative to the objective: the objective is at most that much above the optimum
    (in practice far less, as the dual point is only a scaled residual). `rank` is that of the estimate, at the
    precision of its dtype.
    """

    estimate: Tensor
    iterations: Tensor
    gap: Tensor
    rank: Tensor

    def of(self, x: Tensor, dimensions: int) -> "Solution":
        """The same in the shape and dtype of the caller's `x`, whose last `dimensions` make one problem."""
        batch = x.shape[: x.ndim - dimensions]
        return Solution(self.estimate.reshape(x.shape).to(x.dtype), *(part.reshape(batch) for part in self[1:]))


def complete(
    x: Tensor,
    mask: Tensor,
    threshold: Tensor,
    mixing: Tensor | None,
    tol: float,
    max_iter: int,
    gradient_tol: float | None = None,
    restore: bool = False,
) -> Tensor:
    """The minimizer for each block of zero-filled `x` `(b, c, n, m)`; `restore` puts observed entries back.

    A block stops when the norm of its gradient is at most `tol`·λ, which bounds its relative duality gap by about
    2·`tol` and in practice leaves the objective within `tol`² of its minimum, or when its gap is at most `tol`².
    Differentiable in `x` and in `threshold` `(b,)`, by the implicit function theorem at the minimizer; its linear
    system is solved to a relative residual of `gradient_tol`. Where no gradient is asked for, the estimate takes
    the place of `x`: fresh memory would take a tenth of the time.
    """
    if gradient_tol is None:
        gradient_tol = GRADIENT_TOLERANCE[x.dtype]
    estimate: Tensor = _Complete.apply(x, mask, threshold, mixing, tol, max_iter, gradient_tol, restore)
    return estimate


@linalg.no_autocast
def describe(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, tol: float, max_iter: int
) -> Solution:
    """Solve, with the iterations, duality gap and rank of each block."""
    turned = x.shape[-1] > x.shape[-2]

    def solve_chunk(x: Tensor, mask: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
        estimate, iterations, certified = solve(x, mask, threshold, mixing, tol, max_iter)
        gap, rank = _duality_gap(estimate, x, mask, threshold, mixing)
        return estimate, iterations, torch.minimum(gap, certified), rank

    estimate, iterations, gap, rank = linalg.in_chunks(
        solve_chunk, [linalg.tall(x).contiguous(), linalg.tall(mask).contiguous(), threshold]
    )
    warn_unconverged(iterations)
    return Solution(estimate.mT if turned else estimate, iterations.abs(), gap, rank)


def warn_unconverged(iterations: Tensor) -> None:
    """Say how many blocks reached the limit: their iterations are negative."""
    if missed := int((iterations < 0).sum()):
        warnings.warn(
            f"{missed} of {len(iterations)} matrices did not converge in {-int(iterations.min())} iterations; "
            "raise max_iter, or loosen tol",
            ConvergenceWarning,
            stacklevel=2,
        )


class _Complete(torch.autograd.Function):
    """Solve forward; differentiate the minimizer, not the iterations, backward."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        mask: Tensor,
        threshold: Tensor,
        mixing: Tensor | None,
        tol: float,
        max_iter: int,
        gradient_tol: float,
        restore: bool,
    ) -> Tensor:
        compiled = mixing is None and kernels.suit(linalg.tall(x), kernels.LARGEST_SOLVED)
        keep = any(context.needs_input_grad) and compiled
        estimate = x
        if any(context.needs_input_grad) or not x.is_contiguous():
            estimate = torch.empty_like(x, memory_format=torch.contiguous_format)
        else:
            context.mark_dirty(x)

        def chunk(x: Tensor, mask: Tensor, threshold: Tensor, out: Tensor) -> tuple[Tensor, ...]:
            if compiled and min(x.shape[-2:]) <= kernels.LARGEST:
                # The compiled solver reads matrices of both orientations and writes where the estimate goes.
                options = None, newton.FIRST_STEPS, tol, max_iter, keep
                found = _compiled(x.contiguous(), mask.contiguous(), threshold, *options, out, restore)
                assert found is not None
                left = found[1] == 0
                given = x[left]
                x, mask, out = (linalg.tall(part) for part in (x, mask, out))
                _, iterations, _, *reached = _finish(
                    x, mask, threshold, mixing, tol, max_iter, None, out, *found[1:]
                )
                if restore and len(given):
                    out[left] = torch.where(mask[left], linalg.tall(given), out[left])
                return iterations, *reached
            x, mask = (linalg.tall(part).contiguous() for part in (x, mask))
            estimate, iterations, _, *reached = solve(x, mask, threshold, mixing, tol, max_iter, keep)
            linalg.tall(out).copy_(torch.where(mask, x, estimate) if restore else estimate)
            return iterations, *reached

        elements = linalg.ELEMENTS_PER_LOOP if compiled else linalg.ELEMENTS_PER_CHUNK
        iterations, *reached = linalg.in_chunks(chunk, [x, mask, threshold, estimate], elements)
        warn_unconverged(iterations)
        context.gradient_tol, context.restore = gradient_tol, restore
        if keep:
            context.save_for_backward(mask, *reached)
        else:
            context.save_for_backward(mask, x, threshold, None if estimate is x else estimate, mixing)
        context.compiled = keep
        return estimate

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        mask, *saved = context.saved_tensors
        straight = outgoing
        if context.restore:
            outgoing = outgoing * (~mask).view(torch.uint8)
        of_x = torch.empty_like(outgoing, memory_format=torch.contiguous_format)

        def compiled(outgoing: Tensor, of_x: Tensor, mask: Tensor, *reached: Tensor) -> tuple[Tensor]:
            blocks = (linalg.tall(part).contiguous() for part in (outgoing, mask))
            found, of_threshold = _compiled_adjoint(*blocks, *reached, tol=context.gradient_tol)
            linalg.tall(of_x).copy_(found)
            return (of_threshold,)

        def batched(outgoing: Tensor, of_x: Tensor, threshold: Tensor, *parts: Tensor) -> tuple[Tensor]:
            x, mask, estimate, outgoing = (linalg.tall(part).contiguous() for part in (*parts, outgoing))
            options = {"mixing": mixing, "tol": context.gradient_tol}
            found, of_threshold = newton.implicit_gradient(x, mask, threshold, estimate, outgoing, **options)
            linalg.tall(of_x).copy_(found)
            return (of_threshold,)

        if context.compiled:
            tensors = [outgoing, of_x, mask, *saved]
            (of_threshold,) = linalg.in_chunks(compiled, tensors, linalg.ELEMENTS_PER_LOOP)
        else:
            x, threshold, estimate, mixing = saved
            (of_threshold,) = linalg.in_chunks(batched, [outgoing, of_x, threshold, x, mask, estimate])
        if context.restore:
            of_x += straight * mask.view(torch.uint8)
        return of_x, None, of_threshold, *[None] * 5


def solve(
    x: Tensor,
    mask: Tensor,
    threshold: Tensor,
    mixing: Tensor | None,
    tol: float,
    max_iter: int,
    keep: bool = False,
    start: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Solve one chunk: estimates, iterations (negative where the limit was reached) and certified gaps (or inf).

    Three methods, each for what the one before left: gradient and Newton steps in the precision of `x`; the same
    in double precision, which a small λ needs; splitting and Newton steps. With `keep` also what the compiled
    adjoint needs: the filled matrices, their singular values and right singular vectors (as rows), and λ. `start`
    is an estimate close to the minimum, as that of another λ.
    """
    attempt = _attempt(x, mask, threshold, mixing, tol, max_iter, keep, start)
    return _finish(x, mask, threshold, mixing, tol, max_iter, start, *attempt)


def _finish(
    x: Tensor,
    mask: Tensor,
    threshold: Tensor,
    mixing: Tensor | None,
    tol: float,
    max_iter: int,
    start: Tensor | None,
    estimate: Tensor,
    iterations: Tensor,
    *reached: Tensor,
) -> tuple[Tensor, ...]:
    """Solve what the attempt left, into the same tensors."""
    certified = torch.full(x.shape[:1], torch.inf, dtype=torch.float64, device=x.device)
    left = iterations == 0
    if bool(left.any()):
        rest = None if mixing is None else mixing.double()
        part = x[left].double().contiguous(), mask[left].contiguous(), threshold[left].double(), rest
        if x.dtype == torch.float64:
            found = splitting.split_blocks(*part, tol, max_iter)
        else:
            begin = None if start is None else start[left].double()
            found = solve(*part, tol, max_iter, start=begin)
        estimate[left], iterations[left], certified[left] = found[0].to(x.dtype), found[1], found[2]
        if reached:
            for whole, piece in zip(reached, _reached(*part, found[0]), strict=True):
                whole[left] = piece.to(x.dtype)
    return estimate, iterations, certified, *reached


def _reached(
    x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None, estimate: Tensor
) -> tuple[Tensor, ...]:
    """What the compiled adjoint needs, from an estimate that the compiled solver did not make."""
    problem, scale = newton.scaled(x, mask, threshold, mixing)
    filled, values, vectors = problem.decompose(problem.fill(estimate / scale))
    return filled[:, None], values, vectors.mT, problem.threshold


def _attempt(
    x: Tensor,
    mask: Tensor,
    threshold: Tensor,
    mixing: Tensor | None,
    tol: float,
    max_iter: int,
    keep: bool,
    start: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradient steps and Newton steps in turns, for a few rounds; iterations are 0 where that did not suffice.

    For matrices on a CPU the same steps are compiled in `kernels/completion.py`: in torch most of the time would
    go into calls and passes over memory.
    """

    def steps(x: Tensor, mask: Tensor, threshold: Tensor, start: Tensor | None) -> tuple[Tensor, ...]:
        count = newton.FIRST_STEPS if start is None else 0
        options = tol, max_iter
        if mixing is None:
            found = _compiled(x, mask, threshold, start, count, *options, keep)
            if found is not None:
                return found
        estimate, iterations = _batched(x, mask, threshold, mixing, start, count, *options)
        return estimate, iterations, *(_reached(x, mask, threshold, mixing, estimate) if keep else ())

    if start is not None or mixing is not None or x.shape[-1] <= kernels.LARGEST:
        return steps(x, mask, threshold, start)
    splits = x.shape[-1] >= splitting.SMALLEST
    ratio = splitting.LARGEST_RATIO if splits else newton.LOW_RANK
    low = (threshold > 0) & ((threshold >= ratio * size_of(x)) | ~newton.smooth(x, mask))
    whole: tuple[Tensor, ...] = ()

    def put(index: Tensor, found: tuple[Tensor, ...]) -> None:
        nonlocal whole
        if not whole:
            whole = tuple(part.new_empty(len(x), *part.shape[1:]) for part in found)
        for part, piece in zip(whole, found, strict=True):
            part[index] = piece

    high = ~low & splits & (threshold >= splitting.SMALLEST_RATIO * size_of(x))
    groups: list[tuple[Tensor, Tensor | None]] = [(torch.where(~low & ~high)[0], None)]
    if bool(high.any()):
        index = torch.where(high)[0]
        found = splitting.split_images(x[index], mask[index], threshold[index], tol, max_iter, keep)
        rest = found[1] == 0
        groups.append((index[rest], found[0][rest]))
        put(index, found)
    if bool(low.any()):
        index = torch.where(low)[0]
        begin, taken, _ = low_rank(x[index], mask[index], threshold[index], tol, max_iter)
        rest = torch.ones_like(taken, dtype=torch.bool) if keep else taken == 0
        groups.append((index[rest], begin[rest]))
        if not keep:
            put(index, (begin, taken))
    for index, near in groups:
        if len(index):
            put(index, steps(x[index], mask[index], threshold[index], near))
    return whole


def low_rank(
    x: Tensor, mask: Tensor, threshold: Tensor, tol: float, max_iter: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of one slice by steps in a subspace: estimates and, where these converged, iterations and rank.

    Both are 0 where not, and everywhere without the compiled loop; the estimate is then one to start at.
    """
    if not kernels.suit(x, kernels.LARGEST_SOLVED):
        none = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return newton.low_rank(x, mask, threshold), none, none
    from menet.kernels.low_rank import low_rank_each

    estimate, iterations = torch.empty_like(x), torch.empty(len(x), dtype=torch.long)
    ranks = torch.empty_like(iterations)
    settings = (
        *(newton.LOW_RANK_TOLERANCE * tol, min(newton.LOW_RANK_STEPS, max_iter), newton.START_STEPS),
        *(newton.START_LEVEL, newton.START_FALL, solvable(x.dtype, tol)),
    )
    tensors = x[:, 0], mask[:, 0], threshold, sketch(x), estimate[:, 0], iterations, ranks
    precision = torch.finfo(x.dtype)
    low_rank_each(*(part.detach().numpy() for part in tensors), settings, precision.eps, precision.tiny)
    return estimate, iterations, ranks


def sketch(x: Tensor) -> Tensor:
    """Random directions, as many as `low_rank` seeks singular vectors in at most, padded to whole registers."""
    size = x.shape[-1]
    largest = min(newton.LARGEST_SUBSPACE, size // 48 * newton.START_RANK)
    found = x.new_zeros(largest, -(-size // 16) * 16)
    random = torch.Generator().manual_seed(0)
    found[:, :size] = torch.randn(largest, size, generator=random, dtype=x.dtype)
    return found


def _compiled(
    x: Tensor,
    mask: Tensor,
    threshold: Tensor,
    start: Tensor | None,
    steps: int,
    tol: float,
    max_iter: int,
    keep: bool,
    estimate: Tensor | None = None,
    restore: bool = False,
) -> tuple[Tensor, ...] | None:
    """Blocks of one slice by the compiled solver; None where it does not apply.

    Without `start` they may also be wide. An `estimate` to write to may share its memory with `x`, of which is
    left as it was what these steps did not solve. With `restore` it has the observed entries as they were.
    """
    if not kernels.suit(linalg.tall(x), kernels.LARGEST_SOLVED):
        return None
    from menet.kernels.completion import complete_each

    anew = estimate is None
    estimate = torch.empty_like(x) if estimate is None else estimate
    iterations = torch.zeros(len(x), dtype=torch.long)
    count, rows, size = len(x) if keep else 0, max(x.shape[2:]), min(x.shape[2:])
    reached = (
        *(x.new_empty(count, 1, rows, size), x.new_empty(count, size), x.new_empty(count, size, size)),
        x.new_empty(count),
    )
    precision = torch.finfo(x.dtype)
    settings = (
        *(float(tol), max_iter, steps, newton.NEWTON_STEPS, newton.NEWTON_ITERATIONS, newton.FIRST_MOMENTUM),
        *(solvable(x.dtype, tol), newton.SMALLEST, _damping(start), *newton.DAMPING[1:], *newton.FORCING),
    )
    begin = x[:0, 0] if start is None else start[:, 0].contiguous()
    tensors = (x[:, 0], mask[:, 0], threshold, begin, estimate[:, 0], iterations)
    converged = complete_each(
        *(tensor.detach().numpy() for tensor in tensors),
        tuple(tensor.numpy() for tensor in (reached[0][:, 0], *reached[1:])),
        restore,
        settings,
        precision.eps,
        precision.tiny,
    )
    if not converged and anew:
        return None
    return estimate, iterations, *(reached if keep else ())


def _compiled_adjoint(outgoing: Tensor, mask: Tensor, *reached: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """`newton.implicit_gradient` by the compiled loop."""
    from menet.kernels.completion import adjoint_each

    of_x, of_threshold = torch.empty_like(outgoing), outgoing.new_empty(len(outgoing))
    precision = torch.finfo(outgoing.dtype)
    tensors = mask[:, 0], outgoing[:, 0], of_x[:, 0], of_threshold
    adjoint_each(
        tuple(tensor.numpy() for tensor in (reached[0][:, 0], *reached[1:])),
        *(tensor.numpy() for tensor in tensors),
        *(tol, newton.ADJOINT_ITERATIONS, precision.eps, precision.tiny),
    )
    return of_x, of_threshold


def _damping(start: Tensor | None) -> float:
    """Of the first Newton step."""
    return newton.COLD_DAMPING if start is None else newton.DAMPING[0]


def solvable(dtype: torch.dtype, tol: float) -> float:
    """The smallest λ, relative to the norm of the matrix, whose gradient this precision resolves to `tol`·λ.

    The Gram matrix gives a singular value s with an error of about eps·s₁²/s.
    """
    if dtype == torch.float64:
        return 0.0
    return min(1.0, math.sqrt(0.1 * torch.finfo(dtype).eps / max(tol, 1e-5)))


def _batched(
    x: Tensor,
    mask: Tensor,
    threshold: Tensor,
    mixing: Tensor | None,
    start: Tensor | None,
    steps: int,
    tol: float,
    max_iter: int,
) -> tuple[Tensor, Tensor]:
    problem, scale = newton.scaled(x, mask, threshold, mixing)
    result = torch.zeros_like(x)
    iterations = torch.zeros(len(x), dtype=torch.long, device=x.device)
    resolved = problem.threshold >= solvable(x.dtype, tol) * newton.whole_norm(problem)
    index = torch.where(resolved | (problem.threshold == 0))[0]
    problem = problem.of(index)
    if len(index):
        steps = min(steps, max_iter - 1)
        begin = newton.local_average(problem.x, mask[index]) if start is None else (start / scale)[index]
        filled = newton.accelerate(problem, problem.fill(begin), steps)
        limit = min(newton.NEWTON_STEPS, max_iter - steps)
        result[index], taken = newton.newton(problem, filled, tol, limit, _damping(start))
        missed = -max_iter if steps + limit >= max_iter else 0
        iterations[index] = torch.where(taken > 0, steps + taken, missed)
    return result * scale, iterations


def _duality_gap(
    estimate: Tensor, x: Tensor, mask: Tensor, threshold: Tensor, mixing: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The relative duality gap and the rank, in double precision."""
    estimate, x, threshold = estimate.double(), x.double(), threshold.double()
    mixing = None if mixing is None else mixing.double()
    residual = torch.where(mask, x - estimate, 0.0)
    values = torch.linalg.svdvals(newton.slices(estimate, mixing)).reshape(len(x), -1)
    primal = residual.square().sum((1, 2, 3)) / 2 + threshold * values.sum(1)
    # Any residual scaled to spectral norm ≤ λ is feasible for the dual problem.
    norm = torch.linalg.svdvals(newton.slices(residual, mixing)).reshape(len(x), -1).amax(1)
    scale = (threshold / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)[:, None, None, None]
    dual = (scale * residual * x - (scale * residual).square() / 2).sum((1, 2, 3))
    gap = (primal - dual).clamp(min=0) / primal.clamp(min=torch.finfo(primal.dtype).tiny)
    rank = (values > 1e-6 * values.amax(1, keepdim=True)).sum(1)
    return gap, rank

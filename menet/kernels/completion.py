"""The solver of `estimators/solver.py`, compiled; see there for the method.

Half of its time went into eigenvectors of one small matrix after another. So it works on as many matrices as
there are lanes in a register, decomposes them together, and goes through all other steps one by one.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from menet.kernels.compiling import Array, Number, compiled, inlined, local_average, padded, scale_of
from menet.kernels.eigenvectors import (
    eigh,
    eigh_together,
    lanes_for,
    put,
    scratch_for,
    take,
    together_for,
    worthwhile,
)


@compiled
def complete_each(
    x: Array,
    mask: NDArray[np.bool_],
    thresholds: Array,
    start: Array,
    estimate: Array,
    iterations: NDArray[np.int64],
    reached: tuple[Array, Array, Array, Array],
    settings: tuple[float, int, int, int, int, float, float, float, float, float, float, float, float, float],
    eps: float,
    tiny: float,
) -> bool:
    """Solve each problem, starting at `start`, or where that is empty at local averages.

    `settings` holds tol, max_iter, the number of gradient steps, of Newton steps and of conjugate gradient
    iterations in each, the initial momentum, the smallest ratio of threshold to norm that is solved here and that
    is told from zero, the initial damping and its factors after a good and a bad step, and the residual of the
    conjugate gradients far from the goal, close to it, and how far is far. Where `reached` is not
    empty, it receives the filled matrix at which the iteration ended, its singular values, its right singular
    vectors as rows, and the threshold, in units of `scale_of` the matrix. `iterations` is 0 where these steps did
    not suffice, negative where `max_iter` was reached. Returns False if an eigenvalue iteration did not converge.
    """
    tol, max_iter, first_steps, newton_steps, inner_iterations, first_momentum, solvable, smallest = settings[:8]
    first_damping, less_damping, more_damping, loose, tight, far = settings[8:]
    rows, size = x.shape[1], x.shape[2]
    width = padded(size)
    kind = x.dtype
    lanes = lanes_for(len(x), size, x.itemsize)
    each, big, small = (lanes, rows, width), (rows, width), (width, width)
    # What a matrix has to itself, in its lane, and what is needed only between its decompositions.
    a, unseen, filled = np.zeros(each, kind), np.zeros(each, kind), np.zeros(each, kind)
    last_shrunk, last_stepped = np.zeros(each, kind), np.zeros(each, kind)
    scales, levels = np.ones(lanes, kind), np.ones(lanes, kind)
    dampings, last_sizes = np.ones(lanes), np.ones(lanes)
    numbers, taken = np.full(lanes, -1), np.zeros(lanes, np.int64)
    direction, residual, image = np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind)
    shrunk, stepped = np.zeros(big, kind), np.zeros(big, kind)
    basis, core, mixed = np.zeros(small, kind), np.zeros(small, kind), np.zeros(small, kind)
    values, ratio = np.empty(size, kind), np.empty(size, kind)
    scratch, work = scratch_for(size, kind), derivative_for(rows, size, kind)
    together = together_for(lanes, size, kind)
    keep_filled, keep_values, keep_basis, keep_threshold = reached
    steps = min(first_steps, max_iter - 1)
    limit = min(newton_steps, max_iter - steps)
    waiting = 0
    while True:
        busy = 0
        for lane in range(lanes):
            # A lane whose matrix is done takes the next one.
            while numbers[lane] < 0 and waiting < len(x):
                number = waiting
                waiting += 1
                scale, norm = _begin(x[number], mask[number], a[lane], unseen[lane], tiny)
                threshold = thresholds[number] / scale
                if threshold > 0:
                    if threshold < kind.type(solvable) * norm:
                        iterations[number] = 0
                        continue
                    threshold = max(threshold, kind.type(smallest) * norm)
                if len(start):
                    for r in range(rows):
                        for k in range(size):
                            hidden = unseen[lane, r, k] * (start[number, r, k] / scale)
                            filled[lane, r, k] = a[lane, r, k] + hidden
                else:
                    local_average(a[lane], unseen[lane], size, image)
                    _fill(a[lane], unseen[lane], image, filled[lane])
                numbers[lane], scales[lane], levels[lane] = number, scale, threshold
                # The gradient steps count as step 0.
                taken[lane], dampings[lane], last_sizes[lane] = 0 if steps else 1, first_damping, np.inf
            busy += numbers[lane] >= 0
        if busy == 0:
            break
        shared = worthwhile(busy, lanes)
        if shared:
            for lane in range(lanes):
                if numbers[lane] >= 0:
                    np.dot(filled[lane].T, filled[lane], scratch[0])
                put(together, scratch[0] if numbers[lane] >= 0 else scratch[0][:0], lane, size, tiny)
            if not eigh_together(together, size, True, eps):
                return False
        for lane in range(lanes):
            number, threshold = numbers[lane], levels[lane]
            if number < 0:
                continue
            if shared:
                take(together, lane, values, basis)
                for k in range(size):
                    values[k] = math.sqrt(max(values[k], kind.type(0)))
            elif not _decompose(filled[lane], values, basis, scratch, eps, tiny):
                return False
            _shrinkage(values, basis, threshold, ratio, mixed, core, tiny)
            np.dot(filled[lane], core, shrunk)
            _fill(a[lane], unseen[lane], shrunk, stepped)
            step = taken[lane]
            taken[lane] += 1
            if step == 0:
                spare = direction, image, shrunk, stepped, scratch[0], mixed, core, values, ratio
                _accelerate(
                    a[lane], unseen[lane], filled[lane], basis, threshold, steps, first_momentum, spare, tiny
                )
                continue
            goal_size = tol * threshold
            square = _negative_gradient(stepped, filled[lane], residual)
            length = max(math.sqrt(_square(shrunk)), 1e-30)
            gradient = math.sqrt(square)
            finished = gradient <= 4 * eps * length
            worse = step > 1 and not (gradient < last_sizes[lane] or finished)
            if worse:
                # The step was too long: go on from the gradient step that it was to improve, with more damping.
                filled[lane] = last_stepped[lane]
                dampings[lane] *= more_damping
            else:
                dampings[lane] *= less_damping
                last_shrunk[lane] = shrunk
                last_stepped[lane] = stepped
            converged = not worse and (finished or gradient <= goal_size)
            if converged or step == limit:
                numbers[lane] = -1
                iterations[number] = steps + step if converged else -max_iter if steps + limit >= max_iter else 0
                for r in range(rows):
                    for k in range(size):
                        estimate[number, r, k] = last_shrunk[lane, r, k] * scales[lane]
                if len(keep_filled):
                    if not converged:
                        _fill(a[lane], unseen[lane], last_shrunk[lane], filled[lane])
                        if not _decompose(filled[lane], values, basis, scratch, eps, tiny):
                            return False
                    keep_threshold[number] = threshold
                    for k in range(size):
                        keep_values[number, k] = values[k]
                        for i in range(size):
                            keep_basis[number, k, i] = basis[k, i]
                    for r in range(rows):
                        for k in range(size):
                            keep_filled[number, r, k] = filled[lane, r, k]
            elif not worse:
                kept = _derivative(filled[lane], values, basis, threshold, ratio, mixed, work, eps, tiny)
                added = kind.type(1 + dampings[lane] * gradient / length)
                # Conjugate gradients; the residual starts as the negative gradient, the solution as zero.
                direction[:] = residual
                goal = square * kind.type(loose * loose if gradient > far * goal_size else tight * tight)
                for _ in range(inner_iterations):
                    if not square > goal:
                        break
                    apply_derivative(direction, basis, ratio, kept, work, image)
                    curvature = _hessian(direction, unseen[lane], added, image)
                    if not curvature > 0:
                        break
                    along = square / curvature
                    smaller = _advance(filled[lane], residual, direction, image, along)
                    _new_direction(direction, residual, smaller / square)
                    square = smaller
                last_sizes[lane] = gradient
    return True


@inlined
def _begin(x: Array, mask: NDArray[np.bool_], a: Array, unseen: Array, tiny: float) -> tuple[Number, Number]:
    """Put a matrix into `a`, in units of its scale; returns the scale and the norm of the whole matrix."""
    kind = x.dtype
    rows, size = x.shape
    one, total, seen = kind.type(1), kind.type(0), kind.type(0)
    scale = scale_of(x, kind.type(tiny))
    for r in range(rows):
        for k in range(size):
            entry = x[r, k] / scale
            a[r, k] = entry
            unseen[r, k] = not mask[r, k]
            total += entry * entry
            seen += one - unseen[r, k]
    return scale, kind.type(math.sqrt(total * kind.type(rows * size) / max(seen, one)))


@inlined
def _accelerate(
    a: Array,
    unseen: Array,
    filled: Array,
    basis: Array,
    threshold: float,
    steps: int,
    first_momentum: float,
    spare: Any,
    tiny: float,
) -> None:
    """As `newton.accelerate`, from its first step on, which is in `stepped`."""
    point, image, shrunk, stepped, gram, mixed, core, values, ratio = spare
    kind = filled.dtype
    point[:] = filled
    momentum: Number = first_momentum
    for step in range(steps):
        if step > 0:
            _shrink_nearby(point, basis, threshold, values, ratio, image, (gram, mixed, core), shrunk, tiny)
            _fill(a, unseen, shrunk, stepped)
        if _inner_difference(point, stepped, filled) > 0:
            momentum = 1.0
        grown = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
        _extrapolate(stepped, filled, kind.type((momentum - 1) / grown), point)
        momentum = grown
        filled[:] = stepped


@inlined
def _decompose(x: Array, values: Array, basis: Array, scratch: Any, eps: float, tiny: float) -> bool:
    """Singular values and right singular vectors (rows of `basis`) of a tall matrix."""
    np.dot(x.T, x, scratch[0])
    converged = eigh(scratch, values, basis, eps, tiny)
    for k in range(len(values)):
        values[k] = math.sqrt(max(values[k], x.dtype.type(0)))
    return converged


@inlined
def _shrinkage(
    values: Array, basis: Array, threshold: float, ratio: Array, scaled: Array, core: Array, tiny: float
) -> None:
    """The core for which x·core is the shrunk x, and the fraction of each singular value that remains."""
    size, width = len(values), basis.shape[1]
    zero, least = values.dtype.type(0), values.dtype.type(math.sqrt(tiny))
    for k in range(size):
        ratio[k] = max(values[k] - threshold, zero) / max(values[k], least)
        for j in range(width):
            scaled[k, j] = ratio[k] * basis[k, j]
    np.dot(basis.T, scaled, core)


@inlined
def _shrink_nearby(
    x: Array,
    basis: Array,
    threshold: float,
    squares: Array,
    ratio: Array,
    image: Array,
    work: Any,
    out: Array,
    tiny: float,
) -> None:
    """As `linalg.shrink_nearby`."""
    gram, mixed, core = work
    size = len(squares)
    kind = squares.dtype
    zero, half, one, close = kind.type(0), kind.type(0.5), kind.type(1), kind.type(1e-3)
    np.dot(x, basis.T, image)
    np.dot(image.T, image, gram)
    for k in range(size):
        squares[k] = max(gram[k, k], kind.type(tiny))
        value = kind.type(math.sqrt(squares[k]))
        ratio[k] = max(value - threshold, zero) / value
    for i in range(size):
        square, left = squares[i], ratio[i]
        steep = half * (one - left) / square if left > zero else zero
        for k in range(size):
            apart = square - squares[k]
            slope = (left - ratio[k]) / apart if abs(apart) > close * square else steep
            mixed[i, k] = slope * gram[i, k]
        mixed[i, i] = left
    np.dot(mixed, basis, core)
    np.dot(image, core, out)


@inlined
def derivative_for(rows: int, size: int, kind: Any) -> tuple[Array, ...]:
    """Workspace for `_derivative` and `apply_derivative`."""
    width = padded(size)
    short, long = (width, width), (width, rows)
    left, along_right, stacked_left = (
        np.zeros(long, kind),
        np.zeros(long, kind),
        np.zeros((2 * width, rows), kind),
    )
    stacked_right = np.zeros((2 * width, width), kind)
    symmetric, skew, along_left = np.zeros(short, kind), np.zeros(short, kind), np.zeros(short, kind)
    inside, crossed, mixed = np.zeros(short, kind), np.zeros(short, kind), np.zeros(short, kind)
    rest = np.zeros(width * width, kind)
    return (
        *(left, along_right, stacked_left, stacked_right, symmetric, skew, along_left, inside, crossed, mixed),
        rest,
    )


@inlined
def _derivative(
    x: Array,
    values: Array,
    basis: Array,
    threshold: float,
    ratio: Array,
    scaled: Array,
    work: Any,
    eps: float,
    tiny: float,
) -> int:
    """As in `linalg.shrink_derivative`: left singular vectors, and two coefficients for each pair of values.

    Only pairs with a value above the threshold have any; returns how many values are.
    """
    left, _, stacked_left, stacked_right, symmetric, skew, _, _, _, _, _ = work
    size, width, rows = len(values), basis.shape[1], x.shape[0]
    kind = values.dtype
    zero, half, least = kind.type(0), kind.type(0.5), kind.type(math.sqrt(tiny))
    largest = values[size - 1]
    negligible = max(kind.type(math.sqrt(eps)) * largest, least)
    close = kind.type(10 * eps) * largest + least
    kept = 0
    for k in range(size):
        kept += values[k] > threshold
        inverse = kind.type(1) / values[k] if values[k] > negligible else zero
        for i in range(width):
            scaled[k, i] = basis[k, i] * inverse
    np.dot(scaled, x.T, left)
    first = size - kept
    for i in range(kept):
        high = values[first + i]
        for k in range(size):
            low = max(values[k], threshold)
            both = close if values[k] >= threshold else zero
            slope = (abs(high - low) + both) / (abs(high - values[k]) + close)
            turn = (high - threshold + low - threshold) / max(high + values[k], least)
            symmetric[i, k] = half * (slope + turn)
            skew[i, k] = half * (slope - turn)
        for k in range(rows):
            stacked_left[i, k] = left[first + i, k]
        for k in range(width):
            stacked_right[kept + i, k] = basis[first + i, k]
    return kept


@inlined
def apply_derivative(direction: Array, basis: Array, ratio: Array, kept: int, work: Any, out: Array) -> None:
    """The derivative of the shrinkage along a direction D.

    With U₁, V₁ the vectors of kept values and U₂ the other left ones, it is U₁MVᵀ + U₂NV₁ᵀ + DV₁rV₁ᵀ, where M and
    N are made of the entries of UᵀDV with a kept row or column.
    """
    left, along_right, stacked_left, stacked_right, symmetric, skew, along_left = work[:7]
    inside, crossed, mixed, rest = work[7:]
    size, rows = len(ratio), direction.shape[0]
    first = size - kept
    if kept == 0:
        out[:] = 0
        return
    projected = along_right[:kept]
    np.dot(stacked_right[kept : 2 * kept], direction.T, projected)
    np.dot(left[first:size], direction, along_left[:kept])
    # inside[i, k] is u_iᵀDv_k, crossed[i, k] is u_kᵀDv_i, for kept i.
    np.dot(along_left[:kept], basis.T, inside[:kept])
    np.dot(projected, left.T, crossed[:kept])
    for i in range(kept):
        for k in range(size):
            mixed[i, k] = (symmetric[i, k] - ratio[k]) * inside[i, k] + skew[i, k] * crossed[i, k]
    np.dot(mixed[:kept], basis, stacked_right[:kept])
    lower = stacked_left[kept : 2 * kept]
    if first:
        others = rest[: kept * first].reshape(kept, first)
        for i in range(kept):
            fraction = ratio[first + i]
            for k in range(first):
                others[i, k] = (symmetric[i, k] - fraction) * crossed[i, k] + skew[i, k] * inside[i, k]
        np.dot(others, left[:first], lower)
        for i in range(kept):
            for k in range(rows):
                lower[i, k] += ratio[first + i] * projected[i, k]
    else:
        for i in range(kept):
            for k in range(rows):
                lower[i, k] = ratio[first + i] * projected[i, k]
    np.dot(stacked_left[: 2 * kept].T, stacked_right[: 2 * kept], out)


@compiled
def adjoint_each(
    reached: tuple[Array, Array, Array, Array],
    mask: NDArray[np.bool_],
    outgoing: Array,
    gradient: Array,
    of_threshold: Array,
    tol: float,
    max_iter: int,
    eps: float,
    tiny: float,
) -> None:
    """As `newton.implicit_gradient`, at what `complete_each` has reached.

    The conjugate gradients need not keep their solution: what becomes of it at the observed entries is enough.
    """
    keep_filled, keep_values, keep_basis, keep_threshold = reached
    rows, size = outgoing.shape[1], outgoing.shape[2]
    width = padded(size)
    kind = outgoing.dtype
    zero, one, least = kind.type(0), kind.type(1), kind.type(math.sqrt(tiny))
    steep = kind.type(100 * eps)
    big = (rows, width)
    filled, unseen, image = np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind)
    direction, residual, found = np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind)
    basis, scaled = np.zeros((width, width), kind), np.zeros((width, width), kind)
    values, ratio, work = np.empty(size, kind), np.empty(size, kind), derivative_for(rows, size, kind)
    inside = work[7]
    for number in range(len(outgoing)):
        threshold = keep_threshold[number]
        for r in range(rows):
            for k in range(size):
                filled[r, k] = keep_filled[number, r, k]
                unseen[r, k] = not mask[number, r, k]
                direction[r, k] = outgoing[number, r, k]
        for i in range(size):
            values[i] = keep_values[number, i]
            ratio[i] = max(values[i] - threshold, zero) / max(values[i], least)
            for k in range(size):
                basis[i, k] = keep_basis[number, i, k]
        kept = _derivative(filled, values, basis, threshold, ratio, scaled, work, eps, tiny)
        apply_derivative(direction, basis, ratio, kept, work, image)
        along_threshold, square = zero, zero
        for i in range(kept):
            along_threshold -= inside[i, size - kept + i]
        for r in range(rows):
            for k in range(width):
                value = unseen[r, k] * image[r, k]
                found[r, k] = image[r, k] - value
                residual[r, k] = value
                direction[r, k] = value
                square += value * value
        goal, length = square * kind.type(tol) * kind.type(tol), square
        for _ in range(max_iter):
            if not square > goal:
                break
            apply_derivative(direction, basis, ratio, kept, work, image)
            curvature = _hessian_of_unseen(direction, unseen, image)
            # A direction without curvature does not change the estimate.
            if not curvature > steep * length:
                break
            along = square / curvature
            for i in range(kept):
                along_threshold -= along * inside[i, size - kept + i]
            smaller = _advance_adjoint(residual, direction, unseen, image, found, along)
            turn = smaller / square
            _new_direction(direction, residual, turn)
            # The residual is orthogonal to the last direction, so their squares add up.
            square, length = smaller, smaller + turn * turn * length
        of_threshold[number] = along_threshold
        for r in range(rows):
            for k in range(size):
                gradient[number, r, k] = found[r, k] if unseen[r, k] < one else zero


@inlined
def _fill(a: Array, unseen: Array, estimate: Array, out: Array) -> None:
    for r in range(a.shape[0]):
        for k in range(a.shape[1]):
            out[r, k] = a[r, k] + unseen[r, k] * estimate[r, k]


@inlined
def _inner_difference(point: Array, stepped: Array, previous: Array) -> Number:
    total = point.dtype.type(0)
    for r in range(point.shape[0]):
        for k in range(point.shape[1]):
            total += (point[r, k] - stepped[r, k]) * (stepped[r, k] - previous[r, k])
    return total


@inlined
def _extrapolate(stepped: Array, previous: Array, momentum: float, out: Array) -> None:
    for r in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[r, k] = stepped[r, k] + momentum * (stepped[r, k] - previous[r, k])


@inlined
def _negative_gradient(stepped: Array, filled: Array, out: Array) -> Number:
    total = out.dtype.type(0)
    for r in range(out.shape[0]):
        for k in range(out.shape[1]):
            difference = stepped[r, k] - filled[r, k]
            out[r, k] = difference
            total += difference * difference
    return total


@inlined
def _square(x: Array) -> Number:
    total = x.dtype.type(0)
    for r in range(x.shape[0]):
        for k in range(x.shape[1]):
            total += x[r, k] * x[r, k]
    return total


@inlined
def _hessian(direction: Array, unseen: Array, added: float, image: Array) -> Number:
    """image = added·direction − unseen∘image, and its product with the direction."""
    total = image.dtype.type(0)
    for r in range(image.shape[0]):
        for k in range(image.shape[1]):
            value = added * direction[r, k] - unseen[r, k] * image[r, k]
            image[r, k] = value
            total += direction[r, k] * value
    return total


@inlined
def _hessian_of_unseen(direction: Array, unseen: Array, image: Array) -> Number:
    """The product of direction − unseen∘image with the direction."""
    total = image.dtype.type(0)
    for r in range(image.shape[0]):
        for k in range(image.shape[1]):
            total += direction[r, k] * (direction[r, k] - unseen[r, k] * image[r, k])
    return total


@inlined
def _advance_adjoint(
    residual: Array, direction: Array, unseen: Array, image: Array, found: Array, along: float
) -> Number:
    """One step of conjugate gradients, of which the image at the observed entries is added to `found`."""
    total = residual.dtype.type(0)
    for r in range(residual.shape[0]):
        for k in range(residual.shape[1]):
            hidden = unseen[r, k] * image[r, k]
            found[r, k] += along * (image[r, k] - hidden)
            value = residual[r, k] - along * (direction[r, k] - hidden)
            residual[r, k] = value
            total += value * value
    return total


@inlined
def _advance(solution: Array, residual: Array, direction: Array, image: Array, along: float) -> Number:
    """One step of conjugate gradients; returns the squared norm of the residual."""
    total = residual.dtype.type(0)
    for r in range(residual.shape[0]):
        for k in range(residual.shape[1]):
            solution[r, k] += along * direction[r, k]
            value = residual[r, k] - along * image[r, k]
            residual[r, k] = value
            total += value * value
    return total


@inlined
def _new_direction(direction: Array, residual: Array, factor: float) -> None:
    for r in range(direction.shape[0]):
        for k in range(direction.shape[1]):
            direction[r, k] = residual[r, k] + factor * direction[r, k]

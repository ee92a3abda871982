"""The solver of `estimators/solver.py`, compiled; see there for the method.

Half of its time went into eigenvectors of one small matrix after another. So it works on as many matrices as
there are lanes in a register, decomposes them together, and goes through all other steps one by one.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from menet.kernels.compiling import Array, Number, compiled, inlined, local_average, padded, scale_of, sum_of
from menet.kernels.derivative import apply_derivative, derivative_for, prepare_derivative, slopes_of_shrinkage
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
    restore: bool,
    settings: tuple[float, int, int, int, int, float, float, float, float, float, float, float, float, float],
    eps: float,
    tiny: float,
) -> bool:
    """Solve each problem, starting at `start`, or where that is empty at local averages; matrices may be wide.

    With `restore` the estimate has the observed entries as they were. It may share its memory with `x`.
    `settings` holds tol, max_iter, the number of gradient steps, of Newton steps and of conjugate gradient
    iterations in each, the initial momentum, the smallest ratio of threshold to norm that is solved here and that
    is told from zero, the initial damping and its factors after a good and a bad step, and the residual of the
    conjugate gradients far from the goal, close to it, and how far is far. Where `reached` is not
    empty, it receives the filled matrix at which the iteration ended, its singular values, its right singular
    vectors as rows, and the threshold, in units of `scale_of` the matrix. `iterations` is 0 where these steps did
    not suffice and nothing was written, negative where `max_iter` was reached. Returns False if an eigenvalue
    iteration did not converge.
    """
    tol, max_iter, first_steps, newton_steps, inner_iterations, first_momentum, solvable, smallest = settings[:8]
    first_damping, less_damping, more_damping, loose, tight, far = settings[8:]
    tall = x.shape[1] >= x.shape[2]
    rows, size = max(x.shape[1], x.shape[2]), min(x.shape[1], x.shape[2])
    width = padded(size)
    kind = x.dtype
    lanes = lanes_for(len(x), size, x.itemsize)
    each, big, small = (lanes, rows, width), (rows, width), (width, width)
    # What a matrix has to itself, in its lane, and what is needed only between its decompositions.
    a, unseen, filled = np.zeros(each, kind), np.zeros(each, kind), np.zeros(each, kind)
    last_shrunk = np.zeros(each, kind)
    scales, levels = np.ones(lanes, kind), np.ones(lanes, kind)
    dampings, last_sizes = np.ones(lanes), np.ones(lanes)
    numbers, taken = np.full(lanes, -1), np.zeros(lanes, np.int64)
    direction, residual, image = np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind)
    shrunk, stepped = np.zeros(big, kind), np.zeros(big, kind)
    basis, mixed = np.zeros(small, kind), np.zeros(small, kind)
    values, ratio = np.empty(size, kind), np.empty(size, kind)
    scratch, work = scratch_for(size, kind), derivative_for(rows, size, kind)
    core = work[2]
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
                put(together, scratch[0] if numbers[lane] >= 0 else scratch[0][:0], lane, size, True, tiny)
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
                spare = direction, image, shrunk, stepped, scratch[0], mixed, core, values, ratio, work[1]
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
                _fill(a[lane], unseen[lane], last_shrunk[lane], filled[lane])
                dampings[lane] *= more_damping
            else:
                dampings[lane] *= less_damping
                last_shrunk[lane] = shrunk
            converged = not worse and (finished or gradient <= goal_size)
            if converged or step == limit:
                numbers[lane] = -1
                iterations[number] = steps + step if converged else -max_iter if steps + limit >= max_iter else 0
                if iterations[number]:
                    for i in range(x.shape[1]):
                        for j in range(x.shape[2]):
                            r, k = (i, j) if tall else (j, i)
                            found, given = last_shrunk[lane, r, k] * scales[lane], x[number, i, j]
                            estimate[number, i, j] = given if restore and mask[number, i, j] else found
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
                kept = slopes_of_shrinkage(values, threshold, work[0], eps, tiny)
                prepare_derivative(filled[lane], basis, ratio, kept, work)
                added = kind.type(1 + dampings[lane] * gradient / length)
                # Conjugate gradients; the residual starts as the negative gradient, the solution as zero.
                direction[:] = residual
                goal = square * kind.type(loose * loose if gradient > far * goal_size else tight * tight)
                for _ in range(inner_iterations):
                    if not square > goal:
                        break
                    split = apply_derivative(direction, basis, ratio, kept, work, image, True)
                    curvature = _hessian(direction, unseen[lane], added, image, work[4], split)
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
    tall = x.shape[0] >= x.shape[1]
    one, count = kind.type(1), kind.type(x.size)
    scale = scale_of(x, kind.type(tiny))
    inverse = one / scale
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            r, k = (i, j) if tall else (j, i)
            a[r, k] = x[i, j] * inverse
            unseen[r, k] = not mask[i, j]
    seen = max(count - sum_of(unseen), one)
    return scale, kind.type(math.sqrt(_square(a) * count / seen))


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
    point, image, shrunk, stepped, gram, mixed, core, values, ratio, turned = spare
    kind = filled.dtype
    for i in range(len(turned)):
        for k in range(len(values)):
            turned[i, k] = basis[k, i]
    point[:] = filled
    momentum: Number = first_momentum
    for step in range(steps):
        if step > 0:
            _shrink_nearby(
                point, basis, threshold, values, ratio, image, (gram, mixed, core, turned), shrunk, tiny
            )
            _fill(a, unseen, shrunk, stepped)
        if _inner_difference(point, stepped, filled) > 0:
            momentum = 1.0
        grown = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
        _extrapolate(stepped, filled, kind.type((momentum - 1) / grown), point)
        momentum = grown


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
    gram, mixed, core, turned = work
    size = len(squares)
    kind = squares.dtype
    zero, half, one, close = kind.type(0), kind.type(0.5), kind.type(1), kind.type(1e-3)
    np.dot(x, turned, image)
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
    zero, one = kind.type(0), kind.type(1)
    steep = kind.type(100 * eps)
    big = (rows, width)
    filled, unseen, image = np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind)
    direction, residual, found = np.zeros(big, kind), np.zeros(big, kind), np.zeros(big, kind)
    basis, scaled = np.zeros((width, width), kind), np.zeros((width, width), kind)
    values, ratio, work = np.empty(size, kind), np.empty(size, kind), derivative_for(rows, size, kind)
    diagonal = work[-1]
    for number in range(len(outgoing)):
        threshold = keep_threshold[number]
        for r in range(rows):
            for k in range(size):
                filled[r, k] = keep_filled[number, r, k]
                unseen[r, k] = not mask[number, r, k]
                direction[r, k] = outgoing[number, r, k]
        for i in range(size):
            values[i] = keep_values[number, i]
            for k in range(size):
                basis[i, k] = keep_basis[number, i, k]
        _shrinkage(values, basis, threshold, ratio, scaled, work[2], tiny)
        kept = slopes_of_shrinkage(values, threshold, work[0], eps, tiny)
        prepare_derivative(filled, basis, ratio, kept, work)
        apply_derivative(direction, basis, ratio, kept, work, image, False)
        along_threshold, square = zero, zero
        for i in range(size - kept, size):
            along_threshold -= diagonal[i] / values[i]
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
            apply_derivative(direction, basis, ratio, kept, work, image, False)
            curvature = _hessian_of_unseen(direction, unseen, image)
            # A direction without curvature does not change the estimate.
            if not curvature > steep * length:
                break
            along = square / curvature
            for i in range(size - kept, size):
                along_threshold -= along * diagonal[i] / values[i]
            smaller = _advance_adjoint(residual, direction, unseen, image, found, along)
            turn = smaller / square
            _new_direction(direction, residual, turn)
            # The residual is orthogonal to the last direction, so their squares add up.
            square, length = smaller, smaller + turn * turn * length
        of_threshold[number] = along_threshold
        for r in range(rows):
            for k in range(size):
                gradient[number, r, k] = found[r, k] if unseen[r, k] < one else zero


# Sums over a whole matrix run over its entries in one loop: over rows, each row would end in a slow sum of lanes.


@inlined
def _flat(x: Array) -> Array:
    return x.reshape(x.size)


@inlined
def _fill(a: Array, unseen: Array, estimate: Array, out: Array) -> None:
    a, unseen, estimate, out = _flat(a), _flat(unseen), _flat(estimate), _flat(out)
    for k in range(len(out)):
        out[k] = a[k] + unseen[k] * estimate[k]


@inlined
def _inner_difference(point: Array, stepped: Array, previous: Array) -> Number:
    point, stepped, previous = _flat(point), _flat(stepped), _flat(previous)
    total = point.dtype.type(0)
    for k in range(len(point)):
        total += (point[k] - stepped[k]) * (stepped[k] - previous[k])
    return total


@inlined
def _extrapolate(stepped: Array, previous: Array, momentum: float, out: Array) -> None:
    """The point beyond `stepped`, seen from `previous`, which becomes `stepped`."""
    stepped, previous, out = _flat(stepped), _flat(previous), _flat(out)
    for k in range(len(out)):
        new = stepped[k]
        out[k] = new + momentum * (new - previous[k])
        previous[k] = new


@inlined
def _negative_gradient(stepped: Array, filled: Array, out: Array) -> Number:
    stepped, filled, out = _flat(stepped), _flat(filled), _flat(out)
    total = out.dtype.type(0)
    for k in range(len(out)):
        difference = stepped[k] - filled[k]
        out[k] = difference
        total += difference * difference
    return total


@inlined
def _square(x: Array) -> Number:
    x = _flat(x)
    total = x.dtype.type(0)
    for k in range(len(x)):
        total += x[k] * x[k]
    return total


@inlined
def _hessian(direction: Array, unseen: Array, added: float, image: Array, more: Array, split: bool) -> Number:
    """image = added·direction − unseen∘(image + more, if `split`), and its product with the direction."""
    direction, unseen, image, more = _flat(direction), _flat(unseen), _flat(image), _flat(more)
    total = image.dtype.type(0)
    if split:
        for k in range(len(image)):
            value = added * direction[k] - unseen[k] * (image[k] + more[k])
            image[k] = value
            total += direction[k] * value
        return total
    for k in range(len(image)):
        value = added * direction[k] - unseen[k] * image[k]
        image[k] = value
        total += direction[k] * value
    return total


@inlined
def _hessian_of_unseen(direction: Array, unseen: Array, image: Array) -> Number:
    """The product of direction − unseen∘image with the direction."""
    direction, unseen, image = _flat(direction), _flat(unseen), _flat(image)
    total = image.dtype.type(0)
    for k in range(len(image)):
        total += direction[k] * (direction[k] - unseen[k] * image[k])
    return total


@inlined
def _advance_adjoint(
    residual: Array, direction: Array, unseen: Array, image: Array, found: Array, along: float
) -> Number:
    """One step of conjugate gradients, of which the image at the observed entries is added to `found`."""
    residual, direction, unseen = _flat(residual), _flat(direction), _flat(unseen)
    image, found = _flat(image), _flat(found)
    total = residual.dtype.type(0)
    for k in range(len(residual)):
        hidden = unseen[k] * image[k]
        found[k] += along * (image[k] - hidden)
        value = residual[k] - along * (direction[k] - hidden)
        residual[k] = value
        total += value * value
    return total


@inlined
def _advance(solution: Array, residual: Array, direction: Array, image: Array, along: float) -> Number:
    """One step of conjugate gradients; returns the squared norm of the residual."""
    solution, residual, direction, image = _flat(solution), _flat(residual), _flat(direction), _flat(image)
    total = residual.dtype.type(0)
    for k in range(len(residual)):
        solution[k] += along * direction[k]
        value = residual[k] - along * image[k]
        residual[k] = value
        total += value * value
    return total


@inlined
def _new_direction(direction: Array, residual: Array, factor: float) -> None:
    direction, residual = _flat(direction), _flat(residual)
    for k in range(len(direction)):
        direction[k] = residual[k] + factor * direction[k]

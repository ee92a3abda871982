"""Batched spectral functions of many small matrices, and their derivatives.

They work on tall matrices (rows ≥ columns) over `(..., n, m)`, by the eigenvectors of the smaller Gram matrix:
`tall` transposes wide ones. One `eigh` of the m×m matrix xᵀx costs about a third of an SVD, and products with it
are fastest in this layout. The price: in float32, singular values below about 3e-4 of the largest are not told
from zero.

Three parts: how a batch is computed (outside autocast, in chunks); the functions and their derivatives; and the
eigenvectors of small symmetric matrices, compiled for a CPU.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from menet import kernels
from menet.errors import ConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])

ELEMENTS_PER_CHUNK = 32 * 96 * 256
"""Small enough for a solver's buffers to stay in the cache, large enough for calls not to dominate."""
ELEMENTS_PER_LOOP = 32 * 96 * 128
"""The same for compiled loops, whose buffers do not grow with the chunk."""

_lock = Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def no_autocast(function: Function) -> Function:
    """Run `function`, and the backward pass through it, outside autocast.

    Autocast would round matrix products to the 8 bits of bfloat16. A backward pass runs inside the autocast of
    whoever calls `backward()` or `grad()`, so leaving it in the forward pass alone is not enough. For functions
    that return one tensor, also for `forward` and `backward` of autograd functions. Gradients reach tensors that
    are positional arguments, and can be taken once (no second derivatives).
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return _NoAutocast.apply(functools.partial(function, **options), *args)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **options)

    return wrapped  # type: ignore[return-value]


def has_bfloat16(device: torch.device) -> bool:
    """Whether `device` has instructions for bfloat16; one without them emulates it, slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class _NoAutocast(torch.autograd.Function):
    """A differentiable function whose graph is kept aside, so that its backward pass is ours to start."""

    @staticmethod
    def forward(context: Any, function: Callable[..., Tensor], *args: Any) -> Tensor:
        needed = context.needs_input_grad[1:]
        # A parameter is used by the function itself, not by way of its argument, so it must stay the same tensor.
        args = tuple(
            arg.detach().requires_grad_() if wanted and not isinstance(arg, nn.Parameter) else arg
            for arg, wanted in zip(args, needed, strict=True)
        )
        with torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            result = function(*args)
        if not result.requires_grad:
            context.mark_non_differentiable(result)
            return result
        context.result, context.needed = result, needed
        context.leaves = [arg for arg, wanted in zip(args, needed, strict=True) if wanted]
        return result.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            found = iter(
                torch.autograd.grad(
                    context.result, context.leaves, outgoing, retain_graph=True, allow_unused=True
                )
            )
        return None, *(next(found) if wanted else None for wanted in context.needed)


def in_chunks(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    elements: int = ELEMENTS_PER_CHUNK,
) -> tuple[Tensor, ...]:
    """Apply `function` to chunks of `tensors` along their first dimension and concatenate what it returns.

    In threads on a CPU, with bounded memory everywhere: batched decompositions (`eigh`, `cholesky`) in torch use
    one core, and element-wise passes over a large batch fall out of the cache; whole solvers that run on chunks,
    each on a core of its own, avoid both. The first tensor decides the size of a chunk. `function` must treat
    the entries of the batch independently and return tensors with the same first dimension, or write into one of
    `tensors`, which saves the concatenation; it runs without gradients.
    """
    batch = len(tensors[0])
    threads = torch.get_num_threads() if tensors[0].device.type == "cpu" else 1
    size = max(1, elements // max(1, tensors[0][:1].numel()))
    if threads > 1 and batch > 1:
        # At least one chunk per thread, and a number of chunks that keeps all threads busy to the end.
        chunks = threads * max(1, round(batch / (size * threads)))
        size = min(size, -(-batch // chunks))
    elif tensors[0].device.type != "cpu":
        # An accelerator is fastest with its whole batch at once; memory is the only limit.
        size *= 64
    if size >= batch:
        with torch.no_grad():
            return function(*tensors)
    chunks_of_each = [tensor.split(size) for tensor in tensors]
    if threads == 1:
        with torch.no_grad():
            results = [function(*chunk) for chunk in zip(*chunks_of_each, strict=True)]
    else:
        workers = pool(threads)
        try:
            # Torch's thread count is per thread, but MKL's is per process: otherwise each decomposition would try
            # to use all cores from every thread.
            torch.set_num_threads(1)
            futures: list[Future[tuple[Tensor, ...]]] = [
                workers.submit(_without_gradients, function, chunk) for chunk in zip(*chunks_of_each, strict=True)
            ]
            results = [future.result() for future in futures]
        finally:
            torch.set_num_threads(threads)
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def _without_gradients(
    function: Callable[..., tuple[Tensor, ...]], chunk: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return function(*chunk)


class Fill(torch.autograd.Function):
    """`x` with zeros where `mask` is False, and the sum of each entry of the batch, which tells NaN.

    In chunks, because torch's own threads, once woken by a large product, keep spinning on the cores that the
    threads of the estimator behind it need.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        filled = torch.empty_like(x, memory_format=torch.contiguous_format)

        def chunk(x: Tensor, mask: Tensor, out: Tensor) -> tuple[Tensor]:
            # Bytes multiply three times as fast as truth values, and `where` takes four times as long as these.
            return (torch.mul(x, mask.view(torch.uint8), out=out).flatten(1).sum(1),)

        (totals,) = in_chunks(chunk, [x, mask, filled])
        context.save_for_backward(mask)
        context.mark_non_differentiable(totals)
        return filled, totals

    @staticmethod
    def backward(context: Any, outgoing: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (mask,) = context.saved_tensors
        return Fill.apply(outgoing, mask)[0], None


def pool(threads: int) -> ThreadPoolExecutor:
    """Threads that are kept for the life of the process, each with one thread of torch's own."""
    # Keyed by process, because threads do not survive a fork.
    key = (os.getpid(), threads)
    with _lock:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(
                threads, thread_name_prefix="menet", initializer=torch.set_num_threads, initargs=(1,)
            )
    return _pools[key]


def tall(x: Tensor) -> Tensor:
    """`x` itself, or its transpose where it has more columns than rows."""
    return x.mT if x.shape[-1] > x.shape[-2] else x


def power_of_two(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    """A power of two close to the largest entry along `dim`: division by it is exact, squares are then safe."""
    largest = x.detach().abs().amax(dim, keepdim=True)
    exponent = torch.frexp(largest).exponent.clamp(min=round(math.log2(torch.finfo(x.dtype).tiny))) - 1
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1)


@functools.cache
def cosine_transform(size: int) -> Tensor:
    """The orthonormal matrix of the discrete cosine transform (type II) of `size` values."""
    order = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi * order[:, None] * (order + 0.5) / size) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


class Decomposition(NamedTuple):
    """Tall matrices with their singular values (ascending) and right singular vectors (columns)."""

    x: Float[Tensor, "batch n m"]
    values: Float[Tensor, "batch m"]
    vectors: Float[Tensor, "batch m m"]

    def of(self, chosen: Tensor) -> "Decomposition":
        return Decomposition(*(part[chosen] for part in self))


def decompose(x: Float[Tensor, "batch n m"]) -> Decomposition:
    """Decompose tall matrices; no gradients."""
    squares, vectors = eigh(x.mT @ x)
    return Decomposition(x, squares.clamp(min=0).sqrt(), vectors)


def shrink(found: Decomposition, threshold: Float[Tensor, " batch"]) -> Float[Tensor, "batch n m"]:
    """Soft-threshold the singular values: the proximal map of the nuclear norm."""
    x, values, vectors = found
    return x @ ((vectors * _shrunk_fraction(values, threshold)[..., None, :]) @ vectors.mT)


def shrink_nearby(
    x: Float[Tensor, "batch n m"], vectors: Float[Tensor, "batch m m"], threshold: Float[Tensor, " batch"]
) -> Float[Tensor, "batch n m"]:
    """As `shrink`, given the right singular vectors of a matrix close to x; exact to first order in the distance.

    In the basis of these vectors xᵀx is nearly diagonal. The fraction that is left of each singular value is that
    of the diagonal; an entry beside it counts by the divided difference of its two. No decomposition is needed.
    """
    image = x @ vectors
    gram = image.mT @ image
    squares = gram.diagonal(dim1=-2, dim2=-1).clamp(min=_tiny(x))
    values = squares.sqrt()
    ratio = (values - threshold[:, None]).clamp(min=0) / values
    apart = squares[:, :, None] - squares[:, None, :]
    steep = torch.where(ratio > 0, (1 - ratio) / (2 * squares), 0)[:, :, None]
    far = apart.abs() > 1e-3 * squares[:, :, None]
    slope = torch.where(far, (ratio[:, :, None] - ratio[:, None, :]) / torch.where(far, apart, 1), steep)
    mixed = slope * gram
    mixed.diagonal(dim1=-2, dim2=-1).copy_(ratio)
    return (image @ mixed) @ vectors.mT


def _shrunk_fraction(values: Tensor, threshold: Tensor) -> Tensor:
    """The fraction of each singular value that is left."""
    threshold = threshold[..., None]
    return 1 - threshold / torch.maximum(values, threshold).clamp(min=_tiny(values))


def _capped_slope(values: Tensor, capped: Tensor) -> Tensor:
    """Divided differences of s ↦ max(s, λ) for all pairs of values: 1 for two kept ones, also where equal."""
    small = 10 * torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True) + _tiny(values)
    above = (capped <= values).to(values.dtype)
    apart = (values[..., :, None] - values[..., None, :]).abs_().add_(small[..., None])
    slope = (capped[..., :, None] - capped[..., None, :]).abs_()
    return slope.addcmul_((small * above)[..., :, None], above[..., None, :]).div_(apart)


@no_autocast
def largest_singular_value(x: Float[Tensor, "batch n m"]) -> Float[Tensor, " batch"]:
    """The spectral norm, also differentiable where the largest value is repeated (a subgradient)."""
    if not x.requires_grad:
        return in_chunks(lambda x: (spectral_norm(x),), [tall(x)])[0]
    left, right = in_chunks(_leading_vectors, [tall(x).detach()])
    return torch.einsum("bn,bnm,bm->b", left, tall(x), right)


def spectral_norm(x: Tensor) -> Tensor:
    """The largest singular value of each tall matrix of one chunk; no gradients."""
    scale = power_of_two(x, (1, 2))
    x = x / scale
    return eigvalsh(x.mT @ x)[..., -1].clamp(min=0).sqrt() * scale[:, 0, 0]


def _leading_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x / power_of_two(x, (1, 2))
    right = decompose(x).vectors[..., -1]
    left = torch.einsum("bnm,bm->bn", x, right)
    return left / left.norm(dim=-1, keepdim=True).clamp(min=_tiny(x)), right


def approximate_rank(x: Float[Tensor, "*batch m n"], energy: float = 0.9) -> Int[Tensor, "*batch"]:
    """The fewest singular values whose squares sum to the fraction `energy` of all (Figure 1 of the paper).

    A zero matrix has rank 0.
    """
    if not 0 < energy <= 1:
        raise ConfigurationError(f"expected energy in (0, 1], got {energy}")
    flat = tall(x).reshape(-1, *tall(x).shape[-2:])

    def squares(matrices: Tensor) -> tuple[Tensor]:
        # Double precision costs little here and avoids false ties with the total.
        matrices = matrices.double()
        return (eigvalsh(matrices.mT @ matrices),)

    cumulative = in_chunks(squares, [flat])[0].clamp(min=0).flip(-1).cumsum(-1)
    total = cumulative[..., -1:]
    rank = (cumulative < energy * total * (1 - 1e-12)).sum(-1) + 1
    return torch.where(total[..., 0] > 0, rank, 0).reshape(x.shape[:-2])


class SpectralDerivative(NamedTuple):
    """The derivative at x = L diag(s) Vᵀ of x ↦ L diag(f(s)) Vᵀ, a self-adjoint linear map.

    Written with divided differences of f, which stay bounded for a soft threshold however close singular values
    are; differentiating L and V themselves would divide by their differences.
    """

    left: Float[Tensor, "batch n m"]
    right: Float[Tensor, "batch m m"]
    same: Float[Tensor, "batch m m"]
    crossed: Float[Tensor, "batch m m"]
    outside: Float[Tensor, "batch m m"]
    kept: Bool[Tensor, "batch m"]

    def __call__(self, direction: Float[Tensor, "batch n m"]) -> Float[Tensor, "batch n m"]:
        inside = (self.left.mT @ direction) @ self.right
        mixed = (self.same * inside).addcmul_(self.crossed, inside.mT)
        return torch.baddbmm(direction @ self.outside, self.left, mixed @ self.right.mT)


def shrink_derivative(found: Decomposition, threshold: Float[Tensor, " batch"]) -> SpectralDerivative:
    """The derivative of `shrink` with respect to its matrix."""
    values, threshold = found.values, threshold[..., None]
    capped = torch.maximum(values, threshold)
    shrunk = capped - threshold
    total = (values[..., :, None] + values[..., None, :]).clamp_(min=_tiny(values))
    skew = (shrunk[..., :, None] + shrunk[..., None, :]).div_(total)
    ratio = shrunk / values.clamp(min=_tiny(values))
    return _derivative(found, _capped_slope(values, capped), skew, ratio, values > threshold)


def truncate_derivative(found: Decomposition, kept: Bool[Tensor, "batch m"]) -> SpectralDerivative:
    """The derivative of keeping only the singular values marked in `kept`.

    Truncation jumps where a kept and a dropped value meet; there the derivative is bounded by treating the two as
    no closer than the rounding error of the values.
    """
    values, ratio = found.values, kept.to(found.values.dtype)
    retained = values * ratio
    difference = values[..., :, None] - values[..., None, :]
    far = torch.where(difference < 0, -1.0, 1.0) * difference.abs().clamp(min=_negligible(values)[..., None])
    alike = kept[..., :, None] == kept[..., None, :]
    symmetric = torch.where(alike, ratio[..., :, None], (retained[..., :, None] - retained[..., None, :]) / far)
    total = (values[..., :, None] + values[..., None, :]).clamp(min=_tiny(values))
    skew = torch.where(alike, ratio[..., :, None], (retained[..., :, None] + retained[..., None, :]) / total)
    return _derivative(found, symmetric, skew, ratio, kept)


def _derivative(
    found: Decomposition, symmetric: Tensor, skew: Tensor, ratio: Tensor, kept: Tensor
) -> SpectralDerivative:
    x, values, vectors = found
    # The left singular vector of a vanishing value is undefined and not needed: both coefficients of its pairs
    # equal that of the orthogonal complement of the left vectors, so it can be counted there.
    defined = values > _negligible(values)
    left = x @ (vectors * (defined / values.clamp(min=_tiny(x)))[..., None, :])
    same = (symmetric + skew) / 2 - ratio[..., None, :]
    crossed = (symmetric - skew) / 2
    outside = (vectors * ratio[..., None, :]) @ vectors.mT
    return SpectralDerivative(left, vectors, same, crossed, outside, kept)


def _negligible(values: Tensor) -> Tensor:
    # The Gram matrix gives singular values up to the square root of the rounding error.
    return (torch.finfo(values.dtype).eps ** 0.5 * values[..., -1:]).clamp(min=_tiny(values))


def _tiny(x: Tensor) -> float:
    # Only prevents 0/0 = NaN; its square must not underflow.
    return torch.finfo(x.dtype).tiny ** 0.5


def eigh(
    matrices: Float[Tensor, "batch m m"],
) -> tuple[Float[Tensor, "batch m"], Float[Tensor, "batch m m"]]:
    """Eigenvalues in ascending order and eigenvectors as columns; no gradients.

    On a CPU three times as fast as LAPACK called on each matrix, and in batches twice as fast again: LAPACK is
    made for large matrices, and at 32×32, the size of a CIFAR-10 image's Gram matrix, most of its time is
    overhead. No library has a batched solver for a CPU, so this is the textbook's method (Householder reduction,
    then implicit QL; Golub & Van Loan, §8.3) compiled by numba, for several matrices at a time where it pays. For
    large matrices and on other devices torch's own `eigh` does the work.
    """
    found = _compiled_eigh(matrices, vectors=True)
    return torch.linalg.eigh(matrices) if found is None else (found[0], found[1].mT)


def eigvalsh(matrices: Float[Tensor, "batch m m"]) -> Float[Tensor, "batch m"]:
    """Eigenvalues in ascending order; no gradients."""
    found = _compiled_eigh(matrices, vectors=False)
    return torch.linalg.eigvalsh(matrices) if found is None else found[0]


def _compiled_eigh(matrices: Tensor, *, vectors: bool) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues and eigenvectors (as rows) by the compiled solver; None where it does not apply."""
    if not kernels.suit(matrices):
        return None
    from menet.kernels.eigenvectors import eigh_of_each

    matrices = matrices.detach().contiguous()
    wanted = matrices.shape[-1] if vectors else 0
    values, rows = matrices.new_empty(matrices.shape[:-1]), matrices.new_empty(*matrices.shape[:-1], wanted)
    precision = torch.finfo(matrices.dtype)
    converged = eigh_of_each(matrices.numpy(), values.numpy(), rows.numpy(), precision.eps, precision.tiny)
    return (values, rows) if converged else None

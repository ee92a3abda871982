"""Batched spectral kernels and their derivatives, by the eigenvectors of the smaller Gram matrix.

The kernels work on tall matrices (rows ≥ columns) over `(..., n, m)`: `tall` turns wide ones over. One `eigh` of
the m×m Gram matrix xᵀx costs about a third of an SVD, and products with it run fastest in this layout. The price:
in float32, singular values below about 3e-4 of the largest are not told from zero.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from menet.chunks import in_chunks
from menet.eigen import eigh, eigvalsh


def tall(x: Tensor) -> Tensor:
    """`x` itself, or its transpose where it has more columns than rows."""
    return x.mT if x.shape[-1] > x.shape[-2] else x


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
    return x @ ((vectors * _shrunk_share(values, threshold)[..., None, :]) @ vectors.mT)


def _shrunk_share(values: Tensor, threshold: Tensor) -> Tensor:
    """What share of each singular value is left."""
    level = threshold[..., None]
    return 1 - level / torch.maximum(values, level).clamp(min=_tiny(values))


def _capped_slope(values: Tensor, capped: Tensor) -> Tensor:
    """Divided differences of s ↦ max(s, λ) between all pairs of values: 1 for two kept ones, also if equal."""
    small = 10 * torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True) + _tiny(values)
    above = (capped <= values).to(values.dtype)
    apart = (values[..., :, None] - values[..., None, :]).abs_().add_(small[..., None])
    slope = (capped[..., :, None] - capped[..., None, :]).abs_()
    return slope.addcmul_((small * above)[..., :, None], above[..., None, :]).div_(apart)


def largest_singular_value(x: Float[Tensor, "batch n m"]) -> Float[Tensor, " batch"]:
    """The spectral norm, differentiable also where the largest value is repeated (one subgradient)."""
    if not x.requires_grad:
        return in_chunks(lambda x: (eigvalsh(x.mT @ x)[..., -1].clamp(min=0).sqrt(),), [tall(x)])[0]
    left, right = in_chunks(_leading_vectors, [tall(x).detach()])
    return torch.einsum("bn,bnm,bm->b", left, tall(x), right)


def _leading_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    right = decompose(x).vectors[..., -1]
    left = torch.einsum("bnm,bm->bn", x, right)
    return left / left.norm(dim=-1, keepdim=True).clamp(min=_tiny(x)), right


def approximate_rank(x: Float[Tensor, "*batch m n"], energy: float = 0.9) -> Int[Tensor, "*batch"]:
    """The fewest singular values whose squares hold the share `energy` of all (Figure 1 of the paper).

    A zero matrix has rank 0.
    """
    if not 0 < energy <= 1:
        raise ValueError(f"energy is {energy}; accepted is a share above 0 and up to 1")
    flat = tall(x).reshape(-1, *tall(x).shape[-2:])

    def squares(matrices: Tensor) -> tuple[Tensor]:
        # Energies are compared with their sum, so double precision costs little and spares false ties.
        matrices = matrices.double()
        return (eigvalsh(matrices.mT @ matrices),)

    share = in_chunks(squares, [flat])[0].clamp(min=0).flip(-1).cumsum(-1)
    total = share[..., -1:]
    rank = (share < energy * total * (1 - 1e-12)).sum(-1) + 1
    return torch.where(total[..., 0] > 0, rank, 0).reshape(x.shape[:-2])


class SpectralDerivative(NamedTuple):
    """The derivative at x = L diag(s) Vᵀ of x ↦ L diag(f(s)) Vᵀ, a self-adjoint linear map.

    Written with divided differences of f, which stay bounded for a soft threshold however close singular
    values come, where differentiating L and V themselves would divide by their differences.
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
    values, level = found.values, threshold[..., None]
    capped = torch.maximum(values, level)
    shrunk = capped - level
    total = (values[..., :, None] + values[..., None, :]).clamp_(min=_tiny(values))
    skew = (shrunk[..., :, None] + shrunk[..., None, :]).div_(total)
    ratio = shrunk / values.clamp(min=_tiny(values))
    return _derivative(found, _capped_slope(values, capped), skew, ratio, values > level)


def truncate_derivative(found: Decomposition, kept: Bool[Tensor, "batch m"]) -> SpectralDerivative:
    """The derivative of keeping only the singular values marked in `kept`.

    Truncation jumps where a kept and a dropped value meet; near such a place the derivative is bounded, by
    treating them as no closer than the rounding of the values.
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
    # A left singular vector of a vanishing value is not defined, and need not be: both coefficients of its
    # pairs then equal the one of the space outside all left vectors, so it may be counted there.
    defined = values > _negligible(values)
    left = x @ (vectors * (defined / values.clamp(min=_tiny(x)))[..., None, :])
    same = (symmetric + skew) / 2 - ratio[..., None, :]
    crossed = (symmetric - skew) / 2
    outside = (vectors * ratio[..., None, :]) @ vectors.mT
    return SpectralDerivative(left, vectors, same, crossed, outside, kept)


def _negligible(values: Tensor) -> Tensor:
    # Through the Gram matrix, singular values are known to the square root of the rounding error.
    return (torch.finfo(values.dtype).eps ** 0.5 * values[..., -1:]).clamp(min=_tiny(values))


def _tiny(x: Tensor) -> float:
    # Only keeps 0/0 from becoming NaN; its square must not vanish.
    return torch.finfo(x.dtype).tiny ** 0.5

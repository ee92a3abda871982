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


def tall(x: Tensor) -> Tensor:
    """`x` itself, or its transpose where it has more columns than rows."""
    return x.mT if x.shape[-1] > x.shape[-2] else x


def eigh_of_gram(
    x: Float[Tensor, "*batch n m"],
) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch m m"]]:
    """Singular values (ascending) and right singular vectors of tall matrices."""
    values, vectors = torch.linalg.eigh(x.mT @ x)
    return values.clamp(min=0).sqrt(), vectors


def shrink(
    x: Float[Tensor, "*batch n m"], threshold: Float[Tensor, "*batch"]
) -> tuple[Float[Tensor, "*batch n m"], Float[Tensor, "*batch m m"]]:
    """Soft-threshold the singular values, the proximal map of the nuclear norm; also the right vectors."""
    values, vectors = eigh_of_gram(x)
    kept = 1 - threshold[..., None] / torch.maximum(values, threshold[..., None]).clamp(min=_tiny(x))
    return x @ ((vectors * kept[..., None, :]) @ vectors.mT), vectors.contiguous()


def shrink_near(
    x: Float[Tensor, "*batch n m"], threshold: Float[Tensor, "*batch"], basis: Float[Tensor, "*batch m m"]
) -> tuple[Float[Tensor, "*batch n m"], Float[Tensor, "*batch m m"]]:
    """`shrink`, nearly, for a matrix close to one whose right vectors are `basis`; also the turned basis.

    An iteration that moves a little at each step need not decompose anew: one `eigh` costs as much as a hundred
    products of its matrices. The basis is turned towards the new eigenvectors, and what is left off the diagonal
    enters to first order, by the divided differences of 1 − threshold/√g. The error is of second order in the
    move; it does not add up as long as an exact `shrink` follows now and then.
    """
    gram = x.mT @ x
    basis = _turn(gram, basis)
    turned = basis.mT @ (gram @ basis)
    level = threshold[..., None]
    values = turned.diagonal(dim1=-2, dim2=-1).clamp(min=_tiny(x)).sqrt()
    capped = torch.maximum(values, level).clamp(min=_tiny(x))
    # The divided difference of 1 − λ/√g between g = a² and b² is λ/(a′b′)·(a′ − b′)/((a − b)(a + b)) with
    # a′ = max(a, λ).
    slopes = _capped_slope(values, capped).mul_((level / capped)[..., :, None] / capped[..., None, :])
    turned.mul_(slopes.div_(values[..., :, None] + values[..., None, :]))
    turned.diagonal(dim1=-2, dim2=-1).copy_(1 - level / capped)
    return x @ (basis @ turned @ basis.mT.contiguous()), basis


def _capped_slope(values: Tensor, capped: Tensor) -> Tensor:
    """Divided differences of s ↦ max(s, λ) between all pairs of values: 1 for two kept ones, also if equal."""
    small = 10 * torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True) + _tiny(values)
    above = (capped <= values).to(values.dtype)
    apart = (values[..., :, None] - values[..., None, :]).abs_().add_(small[..., None])
    slope = (capped[..., :, None] - capped[..., None, :]).abs_()
    return slope.addcmul_((small * above)[..., :, None], above[..., None, :]).div_(apart)


def _turn(gram: Tensor, basis: Tensor) -> Tensor:
    """Turn an orthonormal basis towards the eigenvectors of `gram`, by one simultaneous Jacobi rotation."""
    turned = basis.mT @ (gram @ basis)
    diagonal = turned.diagonal(dim1=-2, dim2=-1)
    apart = diagonal[..., None, :] - diagonal[..., :, None]
    # turned/apart where eigenvalues are well apart, at most a quarter and towards zero where they are not:
    # directions of equal eigenvalues need no turning.
    rotation = turned * apart
    rotation = rotation.div_(apart.square_().add_(turned.square_(), alpha=4).add_(_tiny(gram)))
    size = torch.linalg.matrix_norm(rotation, keepdim=True).clamp(min=0.5)
    basis = basis + basis @ rotation.mul_(0.5 / size)
    for _ in range(2):
        # Newton and Schulz: back to an orthonormal basis, whatever rounding has done to it.
        basis = 1.5 * basis - basis @ (basis.mT @ basis).mul_(0.5)
    return basis


def largest_singular_value(x: Float[Tensor, "batch n m"]) -> Float[Tensor, " batch"]:
    """The spectral norm, differentiable also where the largest value is repeated (one subgradient)."""
    left, right = in_chunks(_leading_vectors, [tall(x).detach()])
    return torch.einsum("bn,bnm,bm->b", left, tall(x), right)


def _leading_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    _, vectors = eigh_of_gram(x)
    right = vectors[..., -1]
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
        return (torch.linalg.eigvalsh(matrices.mT @ matrices),)

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


def shrink_derivative(x: Float[Tensor, "batch n m"], threshold: Float[Tensor, " batch"]) -> SpectralDerivative:
    """The derivative of `shrink` with respect to its matrix."""
    values, vectors = eigh_of_gram(x)
    level = threshold[..., None]
    capped = torch.maximum(values, level)
    shrunk = capped - level
    total = (values[..., :, None] + values[..., None, :]).clamp_(min=_tiny(x))
    skew = (shrunk[..., :, None] + shrunk[..., None, :]).div_(total)
    ratio = shrunk / values.clamp(min=_tiny(x))
    return _derivative(x, values, vectors, _capped_slope(values, capped), skew, ratio, values > level)


def truncate_derivative(
    x: Float[Tensor, "batch n m"],
    values: Float[Tensor, "batch m"],
    vectors: Float[Tensor, "batch m m"],
    kept: Bool[Tensor, "batch m"],
) -> SpectralDerivative:
    """The derivative of keeping only the singular values marked in `kept`.

    Truncation jumps where a kept and a dropped value meet; near such a place the derivative is bounded, by
    treating them as no closer than the rounding of the values.
    """
    ratio = kept.to(x.dtype)
    retained = values * ratio
    difference = values[..., :, None] - values[..., None, :]
    far = torch.where(difference < 0, -1.0, 1.0) * difference.abs().clamp(min=_negligible(values)[..., None])
    alike = kept[..., :, None] == kept[..., None, :]
    symmetric = torch.where(alike, ratio[..., :, None], (retained[..., :, None] - retained[..., None, :]) / far)
    total = (values[..., :, None] + values[..., None, :]).clamp(min=_tiny(x))
    skew = torch.where(alike, ratio[..., :, None], (retained[..., :, None] + retained[..., None, :]) / total)
    return _derivative(x, values, vectors, symmetric, skew, ratio, kept)


def _derivative(
    x: Tensor, values: Tensor, vectors: Tensor, symmetric: Tensor, skew: Tensor, ratio: Tensor, kept: Tensor
) -> SpectralDerivative:
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

"""Universal singular value thresholding (Chatterjee, 2015), by the published rule and by the original one."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from menet import kernels, linalg
from menet.chunks import in_chunks
from menet.estimators.checks import Gradient, estimator

ETA = 0.01


@estimator(dimensions=2)
def usvt(x: Tensor, mask: Tensor, keep: float | Literal["universal"] = 0.8, *, eta: float = ETA) -> Tensor:
    """Estimate `(..., m, n)` by dropping small singular values of the zero-filled matrix over the observed share.

    `keep` is the share of singular values that stay, int(keep · min(m, n)) and at least one: the published
    code's rule. `keep="universal"` is Chatterjee's: those of at least (2 + eta)·√(max(m, n)·p̂) stay, with p̂ the
    observed share and entries on the scale [-1, 1]; on small images that leaves very few. Where nothing is
    observed the estimate is zero. The estimate jumps where a kept and a dropped singular value meet; the exact
    gradient is bounded there.
    """
    _check(keep, eta)
    share = mask.to(x.dtype).mean((-2, -1))
    # Where nothing is observed the matrix is zero, and so is the estimate whatever it is divided by.
    share = torch.where(share > 0, share, torch.ones_like(share))
    turned = x.shape[-1] > x.shape[-2]
    estimate = _Truncate.apply(linalg.tall(x).contiguous(), share, keep, eta)
    return estimate.mT if turned else estimate


@dataclass(frozen=True)
class USVT:
    """`usvt` with its parameters."""

    dimensions: ClassVar[int] = 2
    keep: float | Literal["universal"] = 0.8
    eta: float = ETA
    gradient: Gradient = "exact"

    def __post_init__(self) -> None:
        _check(self.keep, self.eta)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return usvt(x, mask, self.keep, eta=self.eta, gradient=self.gradient)


class _Truncate(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, share: Tensor, keep: float | Literal["universal"], eta: float) -> Tensor:
        keep_decomposition = context.needs_input_grad[0]
        size = x.shape[-1]
        count = 0 if keep == "universal" else max(1, int(keep * size))
        level = (2 + eta) * (x.shape[-2] * share).sqrt()

        def truncate(x: Tensor, share: Tensor, level: Tensor) -> tuple[Tensor, ...]:
            if not keep_decomposition and (estimate := _compiled(x, share, level, count)) is not None:
                return (estimate,)
            # The singular values at the cut are small ones, and close: in single precision the Gram matrix would
            # not tell their vectors apart well enough.
            _, values, vectors = (part.to(x.dtype) for part in linalg.decompose(x.double()))
            if count:
                kept = (torch.arange(size, device=x.device) >= size - count).expand_as(values)
            else:
                kept = values >= level[:, None]
            scale = kept / share[:, None]
            estimate = x @ ((vectors * scale[:, None, :]) @ vectors.mT)
            return (estimate, values, vectors, kept) if keep_decomposition else (estimate,)

        estimate, *decomposition = in_chunks(truncate, [x, share, level])
        context.save_for_backward(x, share, *decomposition)
        return estimate

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        x, share, *decomposition = context.saved_tensors
        (of_x,) = in_chunks(
            lambda outgoing, x, values, vectors, kept: (
                linalg.truncate_derivative(linalg.Decomposition(x, values, vectors), kept)(outgoing),
            ),
            [outgoing / share[:, None, None], x, *decomposition],
        )
        return of_x, None, None, None


def _compiled(x: Tensor, share: Tensor, level: Tensor, count: int) -> Tensor | None:
    """The estimate by the compiled loop, or nothing where it is not for these matrices."""
    if not kernels.suit(x):
        return None
    from menet.kernels.truncation import truncate_each

    estimate, precision = torch.empty_like(x), torch.finfo(torch.float64)
    tensors = (x.numpy(), level.numpy(), count, share.numpy(), estimate.numpy())
    return estimate if truncate_each(*tensors, precision.eps, precision.tiny) else None


def _check(keep: float | str, eta: float) -> None:
    if keep != "universal" and not (isinstance(keep, (int, float)) and 0 < keep <= 1):
        raise ValueError(f"keep is {keep!r}; accepted are a share above 0 and up to 1, or 'universal'")
    if not eta >= 0:
        raise ValueError(f"eta is {eta}; accepted are numbers from 0")

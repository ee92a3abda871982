"""Universal singular value thresholding (Chatterjee, 2015), by the published rule and by the original one."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from menet import kernels, linalg
from menet.errors import ConfigurationError
from menet.estimators.base import estimator, register

ETA = 0.01


@estimator(dimensions=2)
def usvt(x: Tensor, mask: Tensor, keep: float | Literal["universal"] = 0.8, *, eta: float = ETA) -> Tensor:
    """Estimate `(..., m, n)`: truncate the singular values of the zero-filled matrix, then divide by p̂.

    p̂ is the observed fraction. `keep` is the fraction of singular values kept, int(keep · min(m, n)) and at
    least one: the published code's rule. `keep="universal"` is Chatterjee's: those of at least (2 +
    eta)·√(max(m, n)·p̂) are kept, for entries on the scale [-1, 1]; on small images that leaves very few. Where
    nothing is observed the estimate is zero. The estimate jumps where a kept and a dropped singular value meet;
    its gradient is bounded there.
    """
    _check(keep, eta)
    estimate: Tensor = _Truncate.apply(x, mask, keep, eta)
    return estimate


@register("usvt")
@dataclass(frozen=True)
class USVT:
    """`usvt` with its parameters."""

    dimensions: ClassVar[int] = 2
    keep: float | Literal["universal"] = 0.8
    eta: float = ETA

    def __post_init__(self) -> None:
        _check(self.keep, self.eta)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return usvt(x, mask, self.keep, eta=self.eta)


class _Truncate(torch.autograd.Function):
    """Keep the largest singular values and divide by the observed fraction."""

    @staticmethod
    def forward(context: Any, x: Tensor, mask: Tensor, keep: float | Literal["universal"], eta: float) -> Tensor:
        keep_decomposition = context.needs_input_grad[0]
        size = min(x.shape[-2:])
        count = 0 if keep == "universal" else max(1, int(keep * size))
        # The zero-filled copy is nobody's, so the estimate may take its place.
        estimate = torch.empty_like(x, memory_format=torch.contiguous_format) if keep_decomposition else x
        if estimate is x:
            context.mark_dirty(x)

        room = len(x) if keep_decomposition else 0
        fractions, dropped = x.new_empty(len(x)), torch.empty(room, dtype=torch.long, device=x.device)
        saved = fractions, x.new_empty(room, size), x.new_empty(room, size, size), dropped

        def chunk(x: Tensor, mask: Tensor, out: Tensor, fraction: Tensor, *reached: Tensor) -> tuple[()]:
            # Where nothing is observed the matrix is zero, and so is the estimate whatever it is divided by.
            fraction.copy_(mask.count_nonzero((-2, -1)).clamp(min=1).to(x.dtype) / mask[0].numel())
            cutoff = (2 + eta) * (max(x.shape[-2:]) * fraction).sqrt()
            done = _compiled(x, fraction, cutoff, out, count, reached)
            if done < len(x):
                rest = linalg.tall(x[done:]).contiguous()
                estimate, *decomposition = truncate(rest, fraction[done:], cutoff[done:])
                linalg.tall(out[done:]).copy_(estimate)
                for whole, part in zip(reached, decomposition, strict=True):
                    whole[done:] = part
            return ()

        def truncate(x: Tensor, fraction: Tensor, cutoff: Tensor) -> tuple[Tensor, ...]:
            # The singular values at the cutoff are small and close together: the Gram matrix in single precision
            # would not separate their vectors well enough.
            scale = linalg.power_of_two(x, (1, 2)).double()
            found_in_double = linalg.decompose(x.double() / scale)
            values, vectors = found_in_double.values, found_in_double.vectors.to(x.dtype)
            if count:
                kept = (torch.arange(size, device=x.device) >= size - count).expand_as(values)
            else:
                kept = values >= cutoff[:, None] / scale[:, 0]
            weights = kept / fraction[:, None]
            estimate = x @ ((vectors * weights[:, None, :]) @ vectors.mT)
            if not keep_decomposition:
                return (estimate,)
            return estimate, values.to(x.dtype), vectors.mT, size - kept.sum(-1)

        compiled = kernels.suit(linalg.tall(x))
        elements = linalg.ELEMENTS_PER_LOOP if compiled else linalg.ELEMENTS_PER_CHUNK
        linalg.in_chunks(chunk, [x, mask, estimate, *(saved if keep_decomposition else saved[:1])], elements)
        context.save_for_backward(x, *saved)
        return estimate

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        compiled = kernels.suit(linalg.tall(outgoing))
        of_x = torch.empty_like(outgoing, memory_format=torch.contiguous_format)

        def chunk(outgoing: Tensor, x: Tensor, of_x: Tensor, *saved: Tensor) -> tuple[()]:
            if compiled:
                _compiled_adjoint(outgoing.contiguous(), x.contiguous(), of_x, *saved)
            else:
                found = _adjoint(linalg.tall(outgoing).contiguous(), linalg.tall(x).contiguous(), *saved)
                linalg.tall(of_x).copy_(found)
            return ()

        x, *saved = context.saved_tensors
        elements = linalg.ELEMENTS_PER_LOOP if compiled else linalg.ELEMENTS_PER_CHUNK
        linalg.in_chunks(chunk, [outgoing, x, of_x, *saved], elements)
        return of_x, None, None, None


def _adjoint(
    outgoing: Tensor, x: Tensor, fraction: Tensor, values: Tensor, rows: Tensor, dropped: Tensor
) -> Tensor:
    """The derivative of the truncation, which is self-adjoint."""
    found = linalg.Decomposition(x / linalg.power_of_two(x, (1, 2)), values, rows.mT)
    kept = torch.arange(x.shape[-1], device=x.device) >= dropped[:, None]
    return linalg.truncate_derivative(found, kept)(outgoing / fraction[:, None, None])


def _compiled_adjoint(
    outgoing: Tensor, x: Tensor, of_x: Tensor, fraction: Tensor, values: Tensor, rows: Tensor, dropped: Tensor
) -> None:
    """Write what `_adjoint` returns, by the compiled loop."""
    from menet.kernels.truncation import truncate_adjoint_each

    precision = torch.finfo(x.dtype)
    reached = values.numpy(), rows.contiguous().numpy(), dropped.numpy()
    tensors = x.numpy(), fraction.numpy(), reached, outgoing.numpy(), of_x.numpy()
    truncate_adjoint_each(*tensors, precision.eps, precision.tiny)


def _compiled(
    x: Tensor, fraction: Tensor, cutoff: Tensor, out: Tensor, count: int, reached: tuple[Tensor, ...]
) -> int:
    """Write estimates by the compiled loop, and their decompositions where wanted; returns how many."""
    if not kernels.suit(linalg.tall(x)):
        return 0
    from menet.kernels.truncation import truncate_each

    precision = torch.finfo(x.dtype)
    reached = reached or (x.new_empty(0, 0), x.new_empty(0, 0, 0), torch.empty(0, dtype=torch.long))
    tensors = x.detach().contiguous().numpy(), cutoff.numpy(), count, fraction.numpy(), out.numpy()
    kept = tuple(part.numpy() for part in reached)
    return int(truncate_each(*tensors, kept, precision.eps, precision.tiny))


def _check(keep: float | str, eta: float) -> None:
    if keep != "universal" and not (isinstance(keep, (int, float)) and 0 < keep <= 1):
        raise ConfigurationError(f"expected keep in (0, 1] or 'universal', got {keep!r}")
    if not eta >= 0:
        raise ConfigurationError(f"expected eta >= 0, got {eta}")

"""The contract of matrix estimators, their names, and the simplest one: `mask_only`, which estimates nothing.

An estimator is a differentiable function `f(x, mask, …)` and a frozen dataclass that holds its parameters and is
called as `(x, mask)`. To add one: write both in a file of this folder, with the decorators `estimator` and
`register`, and import it in `__init__.py`.
"""

import difflib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from menet import linalg
from menet.errors import ConfigurationError
from menet.linalg import no_autocast


@runtime_checkable
class Estimator(Protocol):
    """What the defense calls: a differentiable estimate of `x` from the entries where `mask` is True.

    With the class attribute `dimensions = 3` it is given `(..., channels, rows, columns)`, otherwise matrices.
    """

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor: ...


ESTIMATORS: dict[str, type] = {}
"""Estimator classes by the name that `build`, checkpoints and the command line use."""
FRACTION_OF_LARGEST = 1 / 50
"""The published code's λ, as a fraction of the largest singular value of the zero-filled matrix."""
Effects = Literal["none", "rows", "columns", "both"]

Class = TypeVar("Class", bound=type)


class ConvergenceWarning(UserWarning):
    """Some matrices reached `max_iter` before `tol`."""


def register(name: str) -> Callable[[Class], Class]:
    """Make an estimator class known by `name`, so that checkpoints of a defense that uses it can be loaded."""

    def decorate(cls: Class) -> Class:
        ESTIMATORS[name] = cls
        return cls

    return decorate


def build(name: str, **parameters: object) -> Estimator:
    """The estimator of that name, with its default parameters or those given."""
    if name not in ESTIMATORS:
        close = difflib.get_close_matches(name, ESTIMATORS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(f"unknown estimator {name!r}; choose from {', '.join(ESTIMATORS)}{hint}")
    estimator: Estimator = ESTIMATORS[name](**parameters)
    return estimator


def name_of(estimator: Estimator) -> str:
    """The name that `build` knows the estimator by."""
    for name, kind in ESTIMATORS.items():
        if type(estimator) is kind:
            return name
    raise ConfigurationError(
        f"expected a registered estimator, got {estimator!r}; "
        "a checkpoint rebuilds it by name: decorate its class with @menet.estimators.register('name')"
    )


def estimator(dimensions: int) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Give a function of checked, zero-filled `(b, …)` tensors the contract that all estimators share.

    The function receives `x` in at least float32 with zeros at unobserved entries and one batch dimension, and a
    `mask` of the same shape. Its callers may pass any leading dimensions, a mask that broadcasts, NaN at
    unobserved entries, half precision (computed in float32, returned as given) and empty batches, inside or
    outside autocast.
    """

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def wrapped(x: Tensor, mask: Tensor, *args: object, **options: object) -> Tensor:
            filled, observed = checked(x, mask, dimensions)
            if not x.numel():
                return filled.to(x.dtype)
            flat = filled.reshape(-1, *x.shape[-dimensions:])
            return function(flat, observed.reshape(flat.shape), *args, **options).reshape(x.shape).to(x.dtype)

        return no_autocast(wrapped)

    return decorate


def checked(x: Tensor, mask: Tensor, dimensions: int) -> tuple[Tensor, Tensor]:
    """`x` in at least float32 with zeros at unobserved entries, and `mask` expanded to its shape."""
    for name, value in (("x", x), ("mask", mask)):
        if not isinstance(value, Tensor):
            raise TypeError(f"expected {name} to be a torch.Tensor, got a {type(value).__name__}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"expected a floating-point x, got {x.dtype}; convert images of bytes by x / 255")
    if mask.dtype != torch.bool:
        raise TypeError(f"expected a mask of torch.bool (True where observed), got {mask.dtype}")
    if x.ndim < dimensions or 0 in x.shape[-dimensions:]:
        names = ", ".join(("channels", "rows", "columns")[-dimensions:])
        raise ConfigurationError(f"expected x of shape (..., {names}), each at least 1, got {tuple(x.shape)}")
    try:
        mask = mask.expand(x.shape)
    except RuntimeError:
        raise ConfigurationError(
            f"expected a mask that broadcasts to the shape {tuple(x.shape)} of x, got {tuple(mask.shape)}"
        ) from None
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    batch = (-1, *x.shape[x.ndim - dimensions :])
    # A product is right wherever it is finite.
    filled, totals = linalg.Fill.apply(x.reshape(batch), mask.reshape(batch))
    filled = filled.reshape(x.shape)
    if not bool(totals.sum().isfinite()):
        filled = torch.where(mask, x, torch.zeros_like(x))
        if not bool(filled.isfinite().all()):
            raise ConfigurationError("expected finite values where mask is True, got NaN or infinity")
    return filled, mask


def check_nonnegative(name: str, value: float) -> float:
    """`value` as a finite number of at least 0."""
    if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigurationError(f"expected a finite {name} >= 0, got {value}")
    return float(value)


def check_stopping(tol: float, max_iter: int, gradient_tol: float | None) -> None:
    """Refuse a stopping rule that makes no sense."""
    check_nonnegative("tol", tol)
    if gradient_tol is not None:
        check_nonnegative("gradient_tol", gradient_tol)
    if max_iter < 1:
        raise ConfigurationError(f"expected max_iter >= 1, got {max_iter}")


def check_effects(effects: str) -> None:
    """Refuse an unknown kind of effects."""
    if effects not in ("none", "rows", "columns", "both"):
        raise ConfigurationError(f"unknown effects {effects!r}; choose from none, rows, columns, both")


@estimator(dimensions=2)
def mask_only(x: Tensor, mask: Tensor) -> Tensor:
    """`(..., m, n)` with zeros at unobserved entries (mid-gray on the scale [-1, 1])."""
    return x


@register("mask-only")
@dataclass(frozen=True)
class MaskOnly:
    """`mask_only`: the ablation, to separate the effect of masking from that of estimation."""

    dimensions: ClassVar[int] = 2

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return mask_only(x, mask)

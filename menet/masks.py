"""Which entries are seen: Bernoulli masks, the paper's observation schedules, and banks of fixed masks."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor


def bernoulli(
    shape: Sequence[int],
    p: float | Tensor,
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "..."]:
    """A mask of `shape` whose entries are True (seen) independently with probability `p`.

    `p` is a number or a tensor of one probability per leading entry of `shape` (per image). The mask is drawn
    on the generator's device and moved to `device` (the generator's own by default), so that a generator on
    the CPU gives the same masks whatever the images are on.
    """
    device = torch.device(device) if device is not None else generator.device
    probability = torch.as_tensor(p, dtype=torch.float32, device=generator.device)
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError(f"p is {_show(p)}; accepted are probabilities from 0 to 1")
    if probability.ndim:
        if probability.shape != tuple(shape[: probability.ndim]):
            raise ValueError(
                f"p has shape {tuple(probability.shape)}; "
                f"accepted are a number or one probability per leading entry of {tuple(shape)}"
            )
        probability = probability.reshape(*probability.shape, *[1] * (len(shape) - probability.ndim))
    uniform = torch.rand(tuple(shape), generator=generator, device=generator.device)
    return (uniform < probability).to(device)


def schedule(a: float, b: float, n: int = 10) -> tuple[float, ...]:
    """The paper's `p: a→b` with n masks: n probabilities from `a` at equal steps of (b − a)/n.

    `schedule(0.6, 0.8, 10)` is 0.60, 0.62, …, 0.78 (Appendix B of the paper).
    """
    if not (0 <= a <= b <= 1):
        raise ValueError(f"the schedule is {a}→{b}; accepted is a→b with 0 ≤ a ≤ b ≤ 1")
    if n < 1:
        raise ValueError(f"n is {n}; accepted are whole numbers from 1")
    return tuple(a + (b - a) * step / n for step in range(n))


def bank(
    count: int,
    shape: Sequence[int],
    p: float | Sequence[float],
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "count ..."]:
    """`count` fixed masks of `shape`; with several probabilities they are used in turn."""
    if count < 1:
        raise ValueError(f"count is {count}; accepted are whole numbers from 1")
    values = [float(p)] if isinstance(p, (int, float)) else [float(value) for value in p]
    if not values:
        raise ValueError("p is empty; accepted are a probability or several")
    per_mask = torch.tensor((values * math.ceil(count / len(values)))[:count], device=generator.device)
    return bernoulli((count, *shape), per_mask, generator, device)


def _show(p: float | Tensor) -> str:
    if isinstance(p, Tensor) and p.numel() > 1:
        return f"from {float(p.min()):g} to {float(p.max()):g}"
    return f"{float(p):g}"

"""Which entries are observed: Bernoulli masks, the paper's schedules, and banks of fixed masks."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from menet.errors import ConfigurationError


def bernoulli(
    shape: Sequence[int],
    p: float | Tensor,
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "..."]:
    """A mask of `shape` whose entries are True (observed) independently with probability `p`.

    `p` is a number or a tensor of one probability per leading entry of `shape` (per image). The mask is drawn on
    the generator's device and moved to `device` (by default the generator's), so that a generator on the CPU
    gives the same masks for images on any device.
    """
    device = torch.device(device) if device is not None else generator.device
    probability = torch.as_tensor(p, dtype=torch.float32, device=generator.device)
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ConfigurationError(f"expected 0 <= p <= 1, got {_show(p)}")
    if probability.ndim:
        if probability.shape != tuple(shape[: probability.ndim]):
            raise ConfigurationError(
                f"expected p to be a number or one probability per leading entry of {tuple(shape)}, "
                f"got shape {tuple(probability.shape)}"
            )
        probability = probability.reshape(*probability.shape, *[1] * (len(shape) - probability.ndim))
    uniform = torch.rand(tuple(shape), generator=generator, device=generator.device)
    return (uniform < probability).to(device)


def schedule(a: float, b: float, n: int = 10) -> tuple[float, ...]:
    """The paper's `p: a→b` with n masks: n probabilities from `a` in equal steps of (b − a)/n.

    `schedule(0.6, 0.8, 10)` is 0.60, 0.62, …, 0.78 (Appendix B of the paper).
    """
    if not (0 <= a <= b <= 1):
        raise ConfigurationError(f"expected a schedule a→b with 0 <= a <= b <= 1, got {a}→{b}")
    if n < 1:
        raise ConfigurationError(f"expected n >= 1, got {n}")
    return tuple(a + (b - a) * step / n for step in range(n))


def bank(
    count: int,
    shape: Sequence[int],
    p: float | Sequence[float],
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "count ..."]:
    """`count` fixed masks of `shape`; several probabilities are used in turn."""
    if count < 1:
        raise ConfigurationError(f"expected count >= 1, got {count}")
    values = [float(p)] if isinstance(p, (int, float)) else [float(value) for value in p]
    if not values:
        raise ConfigurationError("expected one or more probabilities, got none")
    per_mask = torch.tensor((values * math.ceil(count / len(values)))[:count], device=generator.device)
    return bernoulli((count, *shape), per_mask, generator, device)


def of_examples(
    examples: Int[Tensor, " b"],
    numbers: Int[Tensor, " b"],
    p: Float[Tensor, " b"],
    shape: Sequence[int],
    seed: int = 0,
) -> Bool[Tensor, "b ..."]:
    """Mask `numbers[i]` of example `examples[i]` among the fixed masks of its own, with probability `p[i]`.

    The same whenever and wherever it is asked for, without being stored: SplitMix64 of seed, example, number
    and entry.
    """
    key = _mixed(_mixed(examples + GAMMA * seed) + GAMMA * (numbers + 1))
    entries = torch.arange(1, math.prod(shape) + 1, device=examples.device)
    uniform = ((_mixed(key[:, None] + GAMMA * entries) >> 40) & 0xFFFFFF) / 2**24
    return (uniform < p[:, None]).unflatten(1, tuple(shape))


GAMMA = 0x9E3779B97F4A7C15 - 2**64


def _mixed(state: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The output function of SplitMix64 (Steele, Lea & Flood 2014); 64-bit integers of torch wrap around."""
    state = (state ^ ((state >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    state = (state ^ ((state >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return state ^ ((state >> 31) & (2**33 - 1))


def _show(p: float | Tensor) -> str:
    if isinstance(p, Tensor) and p.numel() > 1:
        return f"values from {float(p.min()):g} to {float(p.max()):g}"
    return f"{float(p):g}"

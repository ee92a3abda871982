"""Which numbers a network computes in."""

import torch

from menet.training.config import Precision


def number_type(precision: Precision, device: torch.device) -> torch.dtype:
    """The type for `precision` on `device`.

    `auto` is bfloat16 only where the processor has instructions for it: a CPU without them emulates it, which
    is slower than float32.
    """
    if precision == "auto":
        return torch.bfloat16 if _computes_bfloat16(device) else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def autocast(kind: torch.dtype, device: torch.device) -> torch.autocast:
    """A context in which layers compute in `kind`; weights and estimators stay in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=kind == torch.bfloat16)


def _computes_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

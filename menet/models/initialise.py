"""Initial weights drawn from an explicit generator."""

import math

import torch
from torch import nn


def initialise(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw every weight of `module` anew, in place, and reset its batch statistics.

    Convolutions without bias (those beside batch normalisation) are drawn as He et al. (2015) do, normal by
    the number of outputs; all other layers as torch does, uniform within ±1/√inputs. Without a generator
    torch's global one is used, as by any `nn.Module`.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            if isinstance(layer, nn.Conv2d) and layer.bias is None:
                nn.init.kaiming_normal_(layer.weight, 0, "fan_out", "relu", generator=generator)
                continue
            bound = 1 / math.sqrt(layer.weight[0].numel())
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            if layer.bias is not None:
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()
        elif list(layer.parameters(recurse=False)):
            # Left alone it would hold whatever was in memory: networks are built empty and then drawn.
            raise TypeError(f"initialise: no rule for layer {name!r} ({type(layer).__name__})")

"""The usual objective: cross-entropy on the images as they are."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from menet.preprocessed import Preprocessed

Outcome = tuple[Float[Tensor, ""], Float[Tensor, "b classes"]]
"""The loss of a batch, and the logits by which its accuracy is told."""


@dataclass(frozen=True)
class Standard:
    """Cross-entropy. Images of a prepared set are estimates already, and go to the classifier alone."""

    prepared: bool = False

    def __call__(
        self,
        model: nn.Module,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        generator: torch.Generator,
    ) -> Outcome:
        if self.prepared and isinstance(model, Preprocessed):
            model = model.classifier
        logits = model(images)
        return functional.cross_entropy(logits, labels), logits

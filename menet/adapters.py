"""ME-Net inside other robustness libraries.

A `MENet` is an `nn.Module` from images in [0, 1] to logits, so foolbox's `PyTorchModel(model, bounds=(0, 1))`,
pyautoattack's attacks and ART's `PyTorchClassifier(model, …, clip_values=(0, 1))` take it as it is. Only ART's
`preprocessing_defences`, which put a defense in front of an ART classifier, need an adapter.
"""

from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

from menet.defense import MENet
from menet.errors import ConfigurationError, require
from menet.estimators import Estimator
from menet.images import Channels
from menet.preprocessed import Gradient

if TYPE_CHECKING:
    from art.defences.preprocessor.preprocessor import Preprocessor


def art_preprocessor(
    estimator: Estimator,
    p: float | tuple[float, float],
    *,
    seed: int = 0,
    channels: Channels = "joint",
    gradient: Gradient = "bpda",
    apply_fit: bool = True,
    apply_predict: bool = True,
    device: torch.device | str = "cpu",
) -> "Preprocessor":
    """An ART preprocessor that masks and reconstructs images (N, C, H, W) in [0, 1], as `MENet` does.

    Pass it to ART's estimators in `preprocessing_defences`. Each call draws new masks. `estimate_gradient` passes
    gradients unchanged ("bpda") or through the estimator under the masks of the last call ("exact"). Needs ART:
    `pip install 'menet[art]'`.
    """
    base: Any = require("art.defences.preprocessor.preprocessor", extra="art").Preprocessor
    # The defense without a classifier decides how masks are drawn and images are laid out.
    defense = MENet(nn.Identity(), estimator, p, channels=channels, gradient=gradient, seed=seed).eval()

    class MatrixEstimation(base):
        """Mask and reconstruct."""

        def __init__(self) -> None:
            super().__init__(is_fitted=True, apply_fit=apply_fit, apply_predict=apply_predict)
            self.defense = defense
            self.mask: Tensor | None = None

        def __call__(self, x: Any, y: Any = None) -> tuple[Any, Any]:
            pixels = torch.as_tensor(x, dtype=torch.float32, device=device)
            self.mask = defense.sample_mask(pixels, defense.generator)
            with torch.no_grad():
                return defense.estimate(pixels, self.mask).cpu().numpy().astype(x.dtype), y

        def estimate_gradient(self, x: Any, grad: Any) -> Any:
            if gradient == "bpda":
                return grad
            if self.mask is None or len(self.mask) != len(x):
                raise ConfigurationError(
                    f"expected the images of the last call, got {len(x)} others: "
                    "exact gradients are those under its masks"
                )
            pixels = torch.as_tensor(x, dtype=torch.float32, device=device).requires_grad_()
            with torch.enable_grad():
                estimate = defense.estimate(pixels, self.mask)
                outgoing = torch.as_tensor(grad, dtype=torch.float32, device=device)
                (gradient_of_x,) = torch.autograd.grad(estimate, pixels, outgoing)
            return gradient_of_x.cpu().numpy().astype(numpy.asarray(grad).dtype)

    return MatrixEstimation()

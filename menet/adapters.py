"""ME-Net inside other robustness libraries.

A `MENet` is an `nn.Module` of images in [0,1] → logits, so foolbox's `PyTorchModel(model, bounds=(0, 1))`,
pyautoattack's attacks and ART's `PyTorchClassifier(model, …, clip_values=(0, 1))` take it as it is. What needs an
adapter is the other way round: ART's own attacks on a classifier of the user's, with the estimator put before it.
"""

from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

from menet.defense import MENet
from menet.errors import ConfigurationError
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
    """An ART preprocessor that masks images (N,C,H,W) in [0,1] and estimates them back, as `MENet` does.

    Give it to ART's estimators as `preprocessing_defences`. Each call draws new masks. `estimate_gradient` passes
    gradients unchanged ("bpda") or through the estimator with the masks of the last call ("exact"); the latter
    needs an estimator that is itself differentiable. Needs ART: `pip install menet[art]`.
    """
    try:
        from art.defences.preprocessor.preprocessor import Preprocessor
    except ImportError as error:
        raise ConfigurationError(
            "the ART preprocessor needs ART; install it with `pip install menet[art]`"
        ) from error

    # The defense without a classifier: where masks are drawn and images are laid out is decided there.
    defense = MENet(nn.Identity(), estimator, p, channels=channels, gradient=gradient, seed=seed).eval()

    class MatrixEstimation(Preprocessor):
        """Mask, estimate, hand on."""

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
                    "gradients through the estimator belong to the masks of the last call, "
                    f"and that was not about these {len(x)} images"
                )
            pixels = torch.as_tensor(x, dtype=torch.float32, device=device).requires_grad_()
            with torch.enable_grad():
                estimate = defense.estimate(pixels, self.mask)
                slope = torch.as_tensor(grad, dtype=torch.float32, device=device)
                (through,) = torch.autograd.grad(estimate, pixels, slope)
            return through.cpu().numpy().astype(numpy.asarray(grad).dtype)

    return MatrixEstimation()

"""ME-Net inside other robustness libraries.

A `MENet` is an `nn.Module` of images in [0,1] → logits, so foolbox's `PyTorchModel(model, bounds=(0, 1))`,
pyautoattack's attacks and ART's `PyTorchClassifier(model, …, clip_values=(0, 1))` take it as it is. What needs an
adapter is the other way round: ART's own attacks on a classifier of the user's, with the estimator put before it.
"""

from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from menet import images as layout
from menet.errors import ConfigurationError
from menet.estimators import Estimator, Gradient
from menet.masks import bernoulli

if TYPE_CHECKING:
    from art.defences.preprocessor.preprocessor import Preprocessor


def art_preprocessor(
    estimator: Estimator,
    p: float,
    *,
    seed: int = 0,
    channels: layout.Channels = "joint",
    gradient: Gradient = "bpda",
    apply_fit: bool = True,
    apply_predict: bool = True,
    device: torch.device | str = "cpu",
) -> "Preprocessor":
    """An ART preprocessor that masks images (N,C,H,W) in [0,1] with probability `p` and estimates them back.

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

    generator = torch.Generator().manual_seed(seed)

    class MatrixEstimation(Preprocessor):
        """Mask, estimate, hand on."""

        params = ("estimator", "p", "channels", "gradient")

        def __init__(self) -> None:
            super().__init__(is_fitted=True, apply_fit=apply_fit, apply_predict=apply_predict)
            self.estimator, self.p, self.channels, self.gradient = estimator, p, channels, gradient
            self.mask: Tensor | None = None

        def __call__(self, x: Any, y: Any = None) -> tuple[Any, Any]:
            pixels = torch.as_tensor(x, dtype=torch.float32, device=device)
            shape = layout.to_matrix(pixels, self.channels).shape
            if self.channels == "separate":
                # One mask for all channels of an image, as in the paper.
                self.mask = bernoulli((shape[0], 1, *shape[2:]), self.p, generator, device).expand(shape)
            else:
                self.mask = bernoulli(shape, self.p, generator, device)
            with torch.no_grad():
                return self._estimate(pixels, self.mask).cpu().numpy().astype(x.dtype), y

        def estimate_gradient(self, x: Any, grad: Any) -> Any:
            if self.gradient == "bpda":
                return grad
            if self.mask is None or len(self.mask) != len(x):
                raise ConfigurationError(
                    "gradients through the estimator belong to the masks of the last call, "
                    f"and that was not about these {len(x)} images"
                )
            pixels = torch.as_tensor(x, dtype=torch.float32, device=device).requires_grad_()
            with torch.enable_grad():
                estimate = self._estimate(pixels, self.mask)
                slope = torch.as_tensor(grad, dtype=torch.float32, device=device)
                (through,) = torch.autograd.grad(estimate, pixels, slope)
            return through.cpu().numpy().astype(numpy.asarray(grad).dtype)

        def _estimate(self, pixels: Tensor, mask: Tensor) -> Tensor:
            matrices = self.estimator(layout.to_matrix(pixels, self.channels), mask)
            return layout.to_image(matrices, pixels.shape, self.channels)

    return MatrixEstimation()

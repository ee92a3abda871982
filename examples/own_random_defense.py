"""A random defense of your own: say how it preprocesses, and training, voting, attacks and audit work with it."""

from typing import Any, ClassVar

import torch
from torch import Tensor

import menet
from examples.own_attack import trained
from menet.attacks import PGD


class GaussianNoise(menet.Preprocessed):
    """Add Gaussian noise of `sigma`, as randomized smoothing does."""

    name: ClassVar[str] = "gaussian-noise"

    def __init__(self, classifier: torch.nn.Module, sigma: float = 0.3, seed: int = 0) -> None:
        super().__init__(classifier, gradient="exact", seed=seed)
        self.sigma = sigma

    def preprocess(self, images: Tensor, generator: torch.Generator) -> Tensor:
        # Randomness comes from the generator alone, drawn on the CPU: a seed then means the same on every device.
        noise = torch.randn(images.shape, generator=generator).to(images.device, images.dtype)
        return images + self.sigma * noise

    def settings(self) -> dict[str, Any]:
        return {"sigma": self.sigma}


def main() -> None:
    images, labels = menet.data.load("digits", "test").batch(slice(0, 100))
    model = GaussianNoise(trained(menet.data.load("digits", "train"))).eval()
    print(f"clean accuracy, vote over 20 draws      {accuracy(model, images, labels):.0%}")
    for draws in (1, 10):
        attack = PGD(threat=menet.ThreatModel("linf", 0.1), steps=20, eot=draws)
        found = attack(model, images, labels, generator=torch.Generator().manual_seed(0))
        print(f"robust accuracy, PGD over {draws:2} draws a step {accuracy(model, found.images, labels):.0%}")


def accuracy(model: menet.Preprocessed, images: Tensor, labels: Tensor) -> float:
    """Accuracy of the vote over fresh draws."""
    return (model.vote(images, draws=20) == labels).float().mean().item()


if __name__ == "__main__":
    main()

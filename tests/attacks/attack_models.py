"""Small networks and threat models that the tests of attacks share."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from menet.attacks import ThreatModel

EPSILON = 0.3
LINF = ThreatModel("linf", EPSILON)


class RandomMasks(nn.Module):
    """Drops pixels with a generator of its own, then classifies: random like ME-Net, but no estimator."""

    def __init__(self, classifier: nn.Module, p: float = 0.5) -> None:
        super().__init__()
        self.classifier, self.p = classifier, p
        self.reseed(0)

    def reseed(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, images: Tensor) -> Tensor:
        mask = torch.rand(images.shape, generator=self.generator) < self.p
        return self.classifier(images * mask)


class Frozen:
    """A random model that answers every call with the same draw."""

    def __init__(self, model: RandomMasks, seed: int = 0) -> None:
        self.model, self.seed = model, seed

    def __call__(self, images: Tensor) -> Tensor:
        self.model.reseed(self.seed)
        return self.model(images)


def network(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 49, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, seed: int = 0) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(images), generator=order).split(100):
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(images[index]), labels[index]).backward()
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model.eval()


def accuracy(model, images: Tensor, labels: Tensor, draws: int = 1) -> float:
    with torch.no_grad():
        return sum((model(images).argmax(1) == labels).float().mean().item() for _ in range(draws)) / draws


def seeded(seed: int, make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()

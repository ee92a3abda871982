"""Defend a classifier of your own: wrap it, train it, attack it, and report robust accuracy on fresh draws.

Replace `Classifier` and the digits by yours. Images are (batch, channels, height, width) in [0, 1], and whatever
normalization the network needs is part of the network.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import menet
from menet import attacks


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 10),
        )


def main() -> None:
    torch.manual_seed(0)
    training, testing = menet.data.load("digits", "train"), menet.data.load("digits", "test")
    model = menet.MENet(Classifier(), menet.NuclearNorm(), p=(0.4, 0.6))

    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(2):
        for index in torch.randperm(len(training)).split(100):
            images, labels = training.batch(index)
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

    # BPDA with one draw per step, the paper's attack, and exact gradients in expectation over ten draws.
    model.eval()
    images, labels = testing.batch(slice(0, 100))
    accuracy = {"clean": (model.vote(images) == labels).float().mean()}
    for gradient, draws in (("bpda", 1), ("exact", 10)):
        attack = attacks.build("pgd", epsilon=0.1, steps=20, eot=draws)
        found = attack(model.with_gradient(gradient), images, labels, generator=torch.Generator().manual_seed(0))
        # The vote draws new masks: a defense is never scored on the draws that the attack saw.
        accuracy[f"PGD-20, {gradient}, {draws} draws"] = (model.vote(found.images) == labels).float().mean()
    for name, value in accuracy.items():
        print(f"{name:24} {value:.0%}")


if __name__ == "__main__":
    main()

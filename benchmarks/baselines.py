"""Baselines against plain or published implementations: the same inputs and objectives, in processor time.

Total-variation minimization against ART's `TotalVarMin`: the target is 20 times the speed per image of ART with
its default of 10 iterations. ART starts from the image itself, dropped pixels included, and its L-BFGS stops
early at the kink there; the gap of each to the optimum is printed with the times.

Image quilting against quilting patch by patch in numpy. The projection of Defense-GAN against one L-BFGS-B over
all latent vectors of the batch, the method of ART until it dropped the defense, with which an image's answer
depends on the others.
"""

import itertools
import time

import numpy as np
import scipy.optimize
import torch
from art.defences.preprocessor import TotalVarMin
from torch import Tensor

from menet.baselines import ImageQuilting, project
from menet.baselines.image_quilting import places
from menet.baselines.total_variation import objective, total_variation
from menet.baselines.wgan import Generator, train_wgan
from menet.data import load
from menet.errors import DataError
from menet.masks import bernoulli

TARGET = 20
IMAGES = 512
IMAGES_OF_ART = 32
REPEATS = 5
PATCHES = 20_000
QUILTED_PLAINLY = 4
PROJECTED = 32
GAN_STEPS, ITERATIONS = 150, 40


def main() -> None:
    """Print the time per image of both and their relative gaps to the optimum, for two weights."""
    images, what = _images()
    compare_quilting(images, what)
    compare_projection()
    kept = bernoulli(images.shape, 0.5, torch.Generator().manual_seed(0))
    print(
        f"baselines: total variation of {what}, half of the entries observed, {torch.get_num_threads()} thread(s)"
    )
    few = slice(0, IMAGES_OF_ART)
    for weight in (0.03, 0.5):
        mine, theirs = [], []
        for _ in range(REPEATS):
            seconds, estimate = _timed(lambda: total_variation(images, kept, weight))  # noqa: B023
            mine.append(seconds / len(images))
            seconds, other = _timed(lambda: _by_art(images[few], kept[few], weight))  # noqa: B023
            theirs.append(seconds / IMAGES_OF_ART)
        exact = images[few].double()
        best = objective(
            total_variation(exact, kept[few], weight, tol=1e-12, max_iter=4000), exact, kept[few], weight
        )
        gaps = [
            float((objective(z.double(), exact, kept[few], weight) / best - 1).mean())
            for z in (estimate[few], other)
        ]
        ratio = min(theirs) / min(mine)
        print(
            f"  weight {weight:<5g} {min(mine) * 1e3:7.3f} ms, {gaps[0]:.1e} above the optimum;  "
            f"ART {min(theirs) * 1e3:7.2f} ms, {gaps[1]:.1e} above;  {ratio:5.1f} × (target {TARGET} ×)"
        )


def compare_quilting(images: Tensor, what: str) -> None:
    """Print the time per image of quilting in batches and of quilting patch by patch."""
    module = ImageQuilting(torch.nn.Identity(), patches=PATCHES).eval()
    module.fit(images, torch.Generator().manual_seed(0))
    module.reconstruct(images[:2])
    few, bank = images[:QUILTED_PLAINLY].numpy(), module.bank.numpy()
    mine, theirs = [], []
    for _ in range(REPEATS):
        seconds, _ = _timed(lambda: module.reconstruct(images[:64]))
        mine.append(seconds / 64)
        random = np.random.default_rng(0)
        seconds, _ = _timed(lambda: [_quilted_plainly(one, bank, module, random) for one in few])  # noqa: B023
        theirs.append(seconds / len(few))
    print(f"baselines: image quilting of {what}, a bank of {PATCHES:,} patches")
    ratio = min(theirs) / min(mine)
    print(f"  {min(mine) * 1e3:7.2f} ms;  patch by patch {min(theirs) * 1e3:7.1f} ms;  {ratio:5.1f} ×")


def _quilted_plainly(image: np.ndarray, bank: np.ndarray, module: ImageQuilting, random) -> np.ndarray:
    side, flat = module.patch, bank.reshape(len(bank), -1) / np.float32(255)
    canvas = np.zeros(image.shape, np.int64)
    tops, lefts = (places(length, side, module.overlap) for length in image.shape[1:])
    for (row, top), (column, left) in itertools.product(enumerate(tops), enumerate(lefts)):
        query = image[:, top : top + side, left : left + side].ravel()
        near = np.argpartition(((flat - query) ** 2).sum(1), module.neighbors)[: module.neighbors]
        patch = bank[random.choice(near)].astype(np.int64)
        there = canvas[:, top : top + side, left : left + side]
        errors = ((there - patch) ** 2).sum(0)
        fresh = np.ones((side, side), bool)
        if column:
            fresh &= _beyond(errors[:, : lefts[column - 1] + side - left], side)
        if row:
            fresh &= _beyond(errors[: tops[row - 1] + side - top].T, side).T
        there[:, fresh] = patch[:, fresh]
    return canvas


def _beyond(errors: np.ndarray, side: int) -> np.ndarray:
    """Where the new patch is used: at and beyond the cut in each line."""
    cost = errors.copy()
    for line in range(1, len(cost)):
        for entry in range(cost.shape[1]):
            cost[line, entry] += cost[line - 1, max(entry - 1, 0) : entry + 2].min()
    fresh, low, high = np.ones((side, side), bool), 0, cost.shape[1]
    for line in range(len(cost) - 1, -1, -1):
        cut = low + int(cost[line, low:high].argmin())
        fresh[line, :cut] = False
        low, high = max(cut - 1, 0), cut + 2
    return fresh


def compare_projection() -> None:
    """Print the time per image of our projection and of ART's, at an error no larger than ART's, one start."""
    random = torch.Generator().manual_seed(0)
    network = Generator(1, 28, 28, latent=32, features=8)
    train_wgan(network, load("digits", "train").batch(slice(0, 2000))[0], random, GAN_STEPS)
    network.requires_grad_(False)
    images = load("digits", "test").batch(slice(0, PROJECTED))[0]
    starts = torch.randn(PROJECTED, 1, 32, generator=random)

    def measured(call) -> tuple[float, float]:
        seconds, latents = min((_timed(call) for _ in range(REPEATS)), key=lambda one: one[0])
        return seconds / PROJECTED, float((network(latents) - images).square().mean())

    print(f"baselines: projection of {PROJECTED} digits onto the range of a small generator, one start")
    theirs, error = measured(lambda: _by_lbfgs(network, images, starts[:, 0], ITERATIONS))
    print(f"  ART's method, one L-BFGS-B of {ITERATIONS} iterations: {theirs * 1e3:6.2f} ms, error {error:.5f}")
    for method in ("l-bfgs", "gradient-descent"):
        for steps in (20, 30, 40, 80, 160, 320):
            mine, reached = measured(lambda: project(network, images, starts, steps, method))  # noqa: B023
            if reached <= error:
                break
        print(f"  {method}, {steps} steps: {mine * 1e3:6.2f} ms, error {reached:.5f};  {theirs / mine:5.2f} ×")


def _by_lbfgs(network: Generator, images: Tensor, start: Tensor, steps: int) -> Tensor:
    def loss_and_slope(flat: np.ndarray) -> tuple[float, np.ndarray]:
        latents = torch.from_numpy(flat).float().view(start.shape).requires_grad_()
        loss = (network(latents) - images).square().flatten(1).mean(1).sum()
        (slope,) = torch.autograd.grad(loss, latents)
        return float(loss.detach()), slope.double().numpy().ravel()

    found = scipy.optimize.minimize(
        loss_and_slope, start.double().numpy().ravel(), jac=True, method="L-BFGS-B", options={"maxiter": steps}
    )
    return torch.from_numpy(found.x).float().view(start.shape)


def _by_art(images: Tensor, kept: Tensor, weight: float) -> Tensor:
    solver = TotalVarMin(norm=2, lamb=weight)
    solved = [
        # Its public call draws the mask itself and then does only this.
        solver._minimize(image, mask)
        for image, mask in zip(
            images.permute(0, 2, 3, 1).numpy(), kept.permute(0, 2, 3, 1).numpy().astype("int"), strict=True
        )
    ]
    return torch.from_numpy(np.stack(solved)).permute(0, 3, 1, 2)


def _timed(call) -> tuple[float, Tensor]:
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def _images() -> tuple[Tensor, str]:
    try:
        return load("cifar10", "test").batch(slice(0, IMAGES))[0], f"{IMAGES} CIFAR-10 images"
    except DataError:
        from sklearn.datasets import load_sample_images

        photographs = np.stack(load_sample_images().images)[:, :416, :608]
        tiles = torch.from_numpy(photographs).unfold(1, 32, 32).unfold(2, 32, 32)
        return tiles.flatten(0, 2)[:IMAGES].float() / 255, "32×32 pieces of two photographs"


if __name__ == "__main__":
    main()

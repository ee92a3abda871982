"""The real datasets: counts, class balance, means and standard deviations."""

import warnings
from pathlib import Path

import pytest
import torch

from menet.cli import main
from menet.data import SOURCES, Dataset, DataWarning, load

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
WHOLE = {
    ("mnist", "train"): MNIST_TRAIN,
    ("mnist", "test"): MNIST_TEST,
    ("cifar10", "train"): [5000] * 10,
    ("cifar10", "test"): [1000] * 10,
}


def here(real_data: Path, name: str) -> None:
    if not (real_data / name).is_dir():
        pytest.skip(f"needs {name}: `menet data fetch {name}`")


def statistics(dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel over all pixels, in double precision."""
    channels = dataset.images.shape[1]
    total, squares, count = torch.zeros(channels).double(), torch.zeros(channels).double(), 0
    for start in range(0, len(dataset), 5_000):
        pixels = dataset.images[start : start + 5_000].transpose(0, 1).flatten(1).double() / 255
        total, squares, count = (
            total + pixels.sum(1),
            squares + pixels.square().sum(1),
            count + pixels.shape[1],
        )
    mean = total / count
    return mean, (squares / count - mean.square()).sqrt()


@pytest.mark.parametrize("name, split", WHOLE)
def test_counts_and_balance(real_data: Path, name: str, split: str) -> None:
    here(real_data, name)
    dataset = load(name, split, real_data)
    assert dataset.labels.bincount().tolist() == WHOLE[name, split]
    assert len(dataset) == SOURCES[name].images[split == "test"]


@pytest.mark.parametrize(
    "name, mean, std",
    [
        ("mnist", [0.1307], [0.3081]),
        ("cifar10", [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    ],
)
def test_means_and_standard_deviations(real_data: Path, name: str, mean: list[float], std: list[float]) -> None:
    here(real_data, name)
    dataset = load(name, "train", real_data)
    assert dataset.mean == tuple(mean)
    assert dataset.std == tuple(std)
    measured = statistics(dataset)
    assert torch.allclose(measured[0], torch.tensor(mean).double(), atol=5.1e-5)
    assert torch.allclose(measured[1], torch.tensor(std).double(), atol=5.1e-5)


@pytest.mark.parametrize("name, tolerance", [("svhn", 0.01), ("tiny-imagenet", 0.06)])
def test_datasets_that_may_be_subsets(real_data: Path, name: str, tolerance: float) -> None:
    here(real_data, name)
    for split in ("train", "test"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataWarning)
            dataset = load(name, split, real_data)
        published = SOURCES[name].images[split == "test"]
        assert 0 < len(dataset) <= published
        counts = dataset.labels.bincount(minlength=len(dataset.classes))
        if name == "tiny-imagenet":
            assert counts.unique().numel() == 1, "every class has equally many"
        else:
            # House numbers begin with small digits: ones are the most frequent by far.
            assert counts.argmax() == 1
            assert counts.min() > len(dataset) / 20
    train = load(name, "train", real_data)
    mean, std = statistics(train)
    assert (mean - torch.tensor(train.mean)).abs().max() < tolerance
    assert (std - torch.tensor(train.std)).abs().max() < tolerance


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_whole_datasets_are_verified_and_load_in_silence(
    real_data: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here(real_data, name)
    assert main(["data", "verify", name, "--root", str(real_data)]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(name, "test", real_data)


def test_digits_are_training_images_of_mnist(real_data: Path) -> None:
    here(real_data, "mnist")
    whole = load("mnist", "train", real_data)
    known = {image.numpy().tobytes(): int(label) for image, label in zip(whole.images, whole.labels, strict=True)}
    for split in ("train", "test"):
        dataset = load("digits", split)
        for image, label in zip(dataset.images, dataset.labels.tolist(), strict=True):
            assert known[image.numpy().tobytes()] == label

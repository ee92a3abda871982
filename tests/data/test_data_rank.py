"""`menet data rank`: numbers against plain SVDs, and a picture."""

import json
from pathlib import Path

import made_files
import numpy as np
import pytest
import torch
from PIL import Image

from menet.cli import main
from menet.data import Dataset, load
from menet.experiments.measures import ranks_of


def plain_rank(image: np.ndarray) -> int:
    """One SVD of `[R G B]` in [0,1], and a count."""
    singular = np.linalg.svd(np.concatenate(list(image / 255), axis=1), compute_uv=False)
    fraction = np.cumsum(singular**2) / np.sum(singular**2)
    return int(np.searchsorted(fraction, 0.9 - 1e-12) + 1)


def test_ranks_are_those_of_plain_svds() -> None:
    dataset = load("digits", "test")
    ours = ranks_of(dataset, 100)
    assert ours.tolist() == [plain_rank(image) for image in dataset.images[:100].numpy()]


def test_colors_are_laid_side_by_side(generator: torch.Generator) -> None:
    images = torch.randint(0, 256, (20, 3, 16, 16), generator=generator).to(torch.uint8)
    # Three channels of rank one with the same left vector stay of rank one only side by side.
    images[0] = torch.tensor([1, 2, 3])[:, None, None] * torch.arange(16)[:, None]
    dataset = Dataset("made", "test", images, torch.zeros(20, dtype=torch.int64), ("a",), (0.5,) * 3, (0.5,) * 3)
    ours = ranks_of(dataset, 20)
    assert ours[0] == 1
    assert ours.tolist() == [plain_rank(image) for image in images.numpy()]


def test_picture_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "rank", "digits", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "digits-test.json").read_text())
    assert numbers["images"] == sum(numbers["histogram"]) == 1_000
    assert numbers["cumulative"][-1] == 1
    assert numbers["matrix"] == [28, 28]
    # The paper: the vast majority of MNIST has a rank below 5.
    assert numbers["cumulative"][4] > 0.8
    picture = np.asarray(Image.open(tmp_path / "digits-test.png").convert("RGB")).astype(int)
    assert min(picture.shape[:2]) > 500
    red = (picture[..., 0] - picture[..., 2] > 80).mean()
    blue = (picture[..., 2] - picture[..., 0] > 80).mean()
    assert red > 0.05
    assert blue > 0.005
    assert "median" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--energy", "0"], ["--limit", "0"], ["--split", "x"]])
def test_bad_options_are_one_line(option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "rank", "digits", "--out", str(tmp_path), *option]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_subset_is_said_in_one_line_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_files.svhn(tmp_path)
    assert main(["data", "rank", "svhn", "--root", str(tmp_path), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("menet data rank: svhn in ")

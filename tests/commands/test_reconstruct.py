"""`menet reconstruct`: a picture of masked and estimated images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from menet.cli import main
from menet.commands.reconstruct import reconstructions


@pytest.fixture
def photograph(tmp_path: Path) -> Path:
    rows, columns = np.mgrid[0:40, 0:30]
    pixels = np.stack([rows * 6, columns * 8, 255 - rows * 3], axis=-1).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photograph.png")
    return tmp_path / "photograph.png"


@pytest.mark.parametrize("channels", ["joint", "separate"])
def test_it_draws_every_method(photograph: Path, tmp_path: Path, channels: str) -> None:
    out = tmp_path / "out" / "picture.png"
    arguments = ["reconstruct", str(photograph), "--estimator", "all", "--channels", channels, "--out", str(out)]
    assert main(arguments) == 0
    picture = Image.open(out)
    # Six images in two rows of three, each enlarged to about 192 pixels.
    assert 500 < picture.width < 700
    assert 450 < picture.height < 800
    assert not list(out.parent.glob(".*"))


@pytest.mark.parametrize("channels", ["joint", "separate"])
def test_everything_kept_is_the_image_itself(photographs: torch.Tensor, channels: str) -> None:
    masked, estimates = reconstructions(photographs[:2], ["soft-impute"], 1.0, channels)
    assert torch.allclose(masked, photographs[:2], atol=1e-6)
    assert (estimates["soft-impute"] - photographs[:2]).abs().max() <= 1 / 255


def test_estimates_are_closer_than_masked_images(photographs: torch.Tensor) -> None:
    masked, estimates = reconstructions(photographs[:2], ["nuclear-norm", "tubal"], 0.5)
    lost = (masked - photographs[:2]).square().mean()
    for name, estimate in estimates.items():
        assert (estimate - photographs[:2]).square().mean() < lost / 4, name


def test_several_images_make_a_row_each(photograph: Path, tmp_path: Path) -> None:
    Image.new("L", (5, 90), 120).save(tmp_path / "thin.png")
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    assert main(["reconstruct", str(photograph), "--out", str(one)]) == 0
    assert main(["reconstruct", str(photograph), str(tmp_path / "thin.png"), "--out", str(two)]) == 0
    assert Image.open(two).height > Image.open(one).height
    assert Image.open(two).width == Image.open(one).width


def test_a_photograph_makes_a_picture_of_sensible_size(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 1000, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "photograph.png")
    out = tmp_path / "picture.png"
    arguments = ["reconstruct", str(tmp_path / "photograph.png"), "--estimator", "usvt", "--out", str(out)]
    assert main(arguments) == 0
    width, height = Image.open(out).size
    assert 1500 < width <= 2000
    assert height < 700


def test_the_quality_is_told(photograph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "picture.png"
    assert main(["reconstruct", str(photograph), "--estimator", "all", "--out", str(out)]) == 0
    *told, last = capsys.readouterr().out.splitlines()
    assert last == f"wrote {out}"
    # Ordered by quality, which differs little between the first two.
    assert {line.partition(", PSNR ")[0] for line in told} == {
        f"{photograph}: {name}" for name in ("nuclear norm", "soft impute", "tubal", "usvt")
    }


def test_bad_files_are_one_line(tmp_path: Path, photograph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(photograph.read_bytes()[:-40])
    text = tmp_path / "text.png"
    text.write_text("not an image")
    huge = tmp_path / "huge.png"
    Image.new("1", (2049, 4)).save(huge)
    bomb = tmp_path / "bomb.png"
    header = photograph.read_bytes()
    bomb.write_bytes(header[:16] + b"\x00\x01\x00\x00" * 2 + header[24:])
    for path in (broken, text, huge, bomb, tmp_path / "absent.png", tmp_path):
        assert main(["reconstruct", str(path), "--out", str(tmp_path / "never.png")]) == 2
        complaint = capsys.readouterr().err
        assert complaint.count("\n") == 1
        assert path.name in complaint
        assert "Traceback" not in complaint
    assert not (tmp_path / "never.png").exists()


@pytest.mark.parametrize("arguments", [["--p", "1.5"], ["--p", "-0.1"], ["--p", "nan"]])
def test_bad_options_are_one_line(
    photograph: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reconstruct", str(photograph), *arguments]) == 2
    assert "expected 0 <= p <= 1, got" in capsys.readouterr().err


def test_an_unwritable_place_is_one_line(photograph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reconstruct", str(photograph), "--out", str(photograph / "below" / "a.png")]) == 2
    assert "cannot write" in capsys.readouterr().err

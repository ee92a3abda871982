"""`menet reconstruct` and the command line around it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from menet.cli import COMMANDS, main


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
    assert picture.width > 6 * 30 * 4
    assert picture.height > 40 * 4
    assert not list(out.parent.glob(".*"))


def test_everything_kept_is_the_image_itself(photograph: Path, tmp_path: Path) -> None:
    out = tmp_path / "picture.png"
    assert (
        main(["reconstruct", str(photograph), "--p", "1", "--estimator", "soft-impute", "--out", str(out)]) == 0
    )
    picture, tile = np.asarray(Image.open(out)), 30 * 4
    original, estimated = picture[34 : 34 + 160, 8 : 8 + tile], picture[34 : 34 + 160, -8 - tile : -8]
    assert np.abs(original.astype(int) - estimated).max() <= 1


def test_greyscale_and_several_sizes(photograph: Path, tmp_path: Path) -> None:
    Image.new("L", (5, 90), 120).save(tmp_path / "thin.png")
    out = tmp_path / "picture.png"
    assert main(["reconstruct", str(photograph), str(tmp_path / "thin.png"), "--out", str(out)]) == 0


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
    assert "--p is" in capsys.readouterr().err


def test_an_unwritable_place_is_one_line(photograph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reconstruct", str(photograph), "--out", str(photograph / "below" / "a.png")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_a_mistyped_command_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reconstuct"]) == 2
    assert "did you mean `menet reconstruct`?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    assert "usage" in capsys.readouterr().out.lower()

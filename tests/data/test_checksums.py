"""The publisher's exact content is told from anything else, said once, and not computed twice."""

import gzip
import json
import warnings
from dataclasses import replace
from pathlib import Path

import made_files
import pytest

from menet import data
from menet.cli import main
from menet.data import DataWarning, load
from menet.data.published import RECORD, Checksums, Published, content_md5
from menet.experiments import cost_model


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small MNIST that is exactly what "its publisher" offers."""
    folder = made_files.mnist(tmp_path)
    files = tuple(
        replace(file, md5=content_md5(folder / file.path)) for file in data.SOURCES["mnist"].versions[0]
    )
    monkeypatch.setitem(data.SOURCES, "mnist", replace(data.SOURCES["mnist"], versions=(files,)))
    return folder


def notices(root: Path, name: str = "mnist", split: str = "test") -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(name, split, root)
    return [str(warning.message) for warning in caught if warning.category is DataWarning]


def test_exact_content_is_loaded_in_silence(published: Path) -> None:
    assert notices(published.parent) == []


def test_recompressed_or_plain_content_is_still_exact(published: Path) -> None:
    path = published / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 1))
    assert notices(published.parent) == []
    (published / "t10k-images-idx3-ubyte").write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()
    assert notices(published.parent) == []


def test_what_is_checked_is_what_is_read(published: Path) -> None:
    (published / "t10k-images-idx3-ubyte").write_bytes(made_files.idx(made_files.pixels(9, 12, 28, 28)))
    assert notices(published.parent) == []
    images = load("mnist", "test", published.parent).images
    assert (images[:, 0].numpy() == made_files.pixels(1, 12, 28, 28)).all()


def test_bytes_behind_the_content_are_a_difference(published: Path) -> None:
    path = published / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes() + b"x")
    assert not Checksums(published).is_exact(data.SOURCES["mnist"].versions[0][3])


def test_one_changed_pixel_is_said_once(published: Path) -> None:
    path = published / "t10k-images-idx3-ubyte.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[500] ^= 1
    path.write_bytes(gzip.compress(bytes(content)))
    (notice,) = notices(published.parent)
    assert "differs from what was published (t10k-images-idx3-ubyte.gz)" in notice
    assert notices(published.parent) == []
    assert notices(published.parent, split="train") == []


def test_the_answer_is_remembered_until_a_file_changes(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notices(published.parent) == []
    read = []
    monkeypatch.setattr(
        "menet.data.published.content_md5", lambda path: read.append(path.name) or content_md5(path)
    )
    assert notices(published.parent) == []
    assert read == []
    path = published / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00" * 2)
    load("mnist", "train", published.parent)
    Checksums(published).is_exact(Published(path.name, "x"))
    assert path.name in read
    read.clear()
    Checksums(published, remember=False).is_exact(Published(path.name, "x"))
    assert read == [path.name], "verify reads the bytes again"


def test_data_that_cannot_be_written_beside_is_remembered_in_the_cache(published: Path, own_cache: Path) -> None:
    (published / RECORD).mkdir()
    assert notices(published.parent) == []
    (kept,) = own_cache.rglob("*.json")
    assert "t10k-images-idx3-ubyte.gz" in json.loads(kept.read_text())


@pytest.mark.parametrize("content", ["", "[]", "{", '{"t10k-images-idx3-ubyte.gz": 3}', "null", "\xff"])
def test_a_damaged_record_is_made_anew(published: Path, content: str) -> None:
    (published / RECORD).write_text(content, "latin-1")
    assert notices(published.parent) == []


def test_a_subset_of_svhn_and_of_tiny_imagenet_is_allowed_and_said(tmp_path: Path) -> None:
    made_files.svhn(tmp_path)
    made_files.tiny_imagenet(tmp_path)
    assert len(notices(tmp_path, "svhn")) == 1
    assert len(notices(tmp_path, "tiny-imagenet")) == 1
    assert notices(tmp_path, "digits") == []


def test_published_checksums_are_whole() -> None:
    for source in data.SOURCES.values():
        digests = [file.md5 for files in source.versions for file in files]
        digests += [archive.md5 for archive in source.archives]
        assert all(len(digest) == 32 and int(digest, 16) for digest in digests)
        assert all(archive.size > 1000 and archive.addresses for archive in source.archives)


def test_a_plan_counts_the_images_that_are_at_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_model, "speed_of_a_core", lambda: 3e10)

    def planned(root: Path) -> tuple[str, dict[str, float]]:
        command = ["reproduce", "table21", "table22", "--scale", "laptop", "--dry-run", "--root", str(root)]
        assert main([*command, "--out", str(tmp_path / "runs")]) == 0
        rows = json.loads((tmp_path / "runs" / "plans" / "laptop.json").read_text("utf-8"))
        return capsys.readouterr().out, {
            row["key"]: row["core_seconds"] for row in rows if row["kind"] != "evaluate"
        }

    shown, published = planned(tmp_path / "nothing")
    assert "at hand" not in shown
    made_files.tiny_imagenet(tmp_path)
    shown, few = planned(tmp_path)
    assert "Tiny-ImageNet as it is at hand: 12 training images, 12 test images" in shown
    assert few.keys() == published.keys(), "the jobs are the same"
    assert all(few[key] < published[key] / 100 for key in few)

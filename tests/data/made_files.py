"""Small datasets in their publishers' formats, written by other people's writers where there is one."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

COUNT = 12


def pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labels(count: int = COUNT) -> np.ndarray:
    return np.arange(count, dtype=np.uint8) % 10


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist(root: Path, compressed: bool = True) -> Path:
    folder = root / "mnist"
    folder.mkdir(parents=True)
    for seed, prefix in enumerate(("train", "t10k")):
        for name, array in (("images-idx3", pixels(seed, COUNT, 28, 28)), ("labels-idx1", labels())):
            content = idx(array)
            path = folder / f"{prefix}-{name}-ubyte{'.gz' if compressed else ''}"
            path.write_bytes(gzip.compress(content) if compressed else content)
    return folder


def cifar10(root: Path) -> Path:
    folder = root / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        rows = np.concatenate([labels()[:, None], pixels(seed, COUNT, 3072)], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return folder.parent


def cifar10_python(root: Path, protocol: int = 2) -> Path:
    folder = root / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        batch = {b"batch_label": b"x", b"labels": labels().tolist(), b"data": pixels(seed, COUNT, 3072)}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    return folder.parent


def svhn(root: Path, compressed: bool = True) -> Path:
    folder = root / "svhn"
    folder.mkdir(parents=True)
    for seed, split in enumerate(("train", "test")):
        digits = np.where(labels() == 0, 10, labels())[:, None]
        content = {"X": pixels(seed, 32, 32, 3, COUNT), "y": digits}
        savemat(folder / f"{split}_32x32.mat", content, do_compression=compressed)
    return folder


def tiny_imagenet(root: Path) -> Path:
    base = root / "tiny-imagenet" / "tiny-imagenet-200"
    wnids = ["n01443537", "n02002724"]
    (base / "val" / "images").mkdir(parents=True)
    (base / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (base / "words.txt").write_text("n01443537\tgoldfish, Carassius auratus\nn02002724\tblack stork\n")
    annotations = []
    for number, wnid in enumerate(wnids):
        (base / "train" / wnid / "images").mkdir(parents=True)
        for count in range(COUNT // 2):
            # Every third one is grayscale, as some of the publisher's are.
            shape = (64, 64) if count % 3 == 0 else (64, 64, 3)
            image = Image.fromarray(pixels(100 * number + count, *shape))
            image.save(base / "train" / wnid / "images" / f"{wnid}_{count}.JPEG")
            name = f"val_{number}_{count}.JPEG"
            Image.fromarray(pixels(900 + count, *shape)).save(base / "val" / "images" / name)
            annotations.append(f"{name}\t{wnid}\t0\t0\t62\t62")
    (base / "val" / "val_annotations.txt").write_text("\n".join(annotations) + "\n")
    return base.parent


def folder(root: Path) -> Path:
    base = root / "folder"
    for seed, split in enumerate(("train", "test")):
        for name in ("cat", "dog"):
            (base / split / name).mkdir(parents=True)
            for count in range(COUNT // 2):
                image = Image.fromarray(pixels(10 * seed + count, 20, 24, 3))
                image.save(base / split / name / f"{count}.png")
    return base


def digits(root: Path) -> Path:
    return root

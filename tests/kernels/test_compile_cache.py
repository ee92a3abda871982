"""A damaged, unwritable or full cache costs a compilation and a warning, never an error or a wrong result."""

import errno
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import menet
from menet.kernels import compiling
from menet.kernels.compiling import compiled

PACKAGE = Path(menet.__file__).parent


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache, in a process that has not announced or warned yet."""
    monkeypatch.setattr(compiling, "folder", lambda: tmp_path / "compiled")
    compiling._announce.cache_clear()
    compiling._warn_unwritable.cache_clear()
    yield tmp_path / "compiled"
    compiling._announce.cache_clear()
    compiling._warn_unwritable.cache_clear()


def fresh():
    """A small loop as a new process would see it."""

    def small_loop(count):
        total = 0.0
        for k in range(count):
            total += 1 / (k + 1)
        return total

    return compiled(small_loop)


def expect(loop, *, loaded: bool) -> None:
    assert loop(4) == pytest.approx(25 / 12)
    assert sum(loop.stats.cache_hits.values()) == loaded


def test_compiles_once_says_so_and_then_loads(folder, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect(fresh(), loaded=False)
        assert capsys.readouterr().err == "compiling the estimators' loops (once, about a minute)…\n"
        expect(fresh(), loaded=True)
        assert capsys.readouterr().err == ""
    assert len(list(folder.iterdir())) == 1


class Bomb:
    def __reduce__(self):
        return os.mkdir, (f"{os.environ['BOMB']}",)


DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "only a digest": lambda content: content[:32],
    "shorter than a digest": lambda content: content[:7],
    "random bytes": lambda content: os.urandom(len(content)),
    "one bit": lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
    "a pickle that runs code": lambda content: pickle.dumps(Bomb()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_neither_trusted_nor_fatal(damage, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    expect(fresh(), loaded=False)
    (file,) = folder.iterdir()
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.warns(RuntimeWarning, match="damaged; compiling it again"):
        expect(fresh(), loaded=False)
    expect(fresh(), loaded=True)
    assert not (tmp_path / "exploded").exists()


def test_an_empty_file_is_compiled_again(folder):
    expect(fresh(), loaded=False)
    (file,) = folder.iterdir()
    file.write_bytes(b"")
    expect(fresh(), loaded=False)
    expect(fresh(), loaded=True)


def test_a_full_disk_leaves_code_in_memory_with_one_warning(folder, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(compiling, "write_atomically", full)
    with pytest.warns(RuntimeWarning, match=r"cannot store compiled loops.*No space left"):
        expect(fresh(), loaded=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect(fresh(), loaded=False)


def test_an_unwritable_folder_leaves_code_in_memory_and_the_package_alone(folder):
    before = sorted(PACKAGE.rglob("*.nb?"))
    folder.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="cannot store compiled loops"):
        expect(fresh(), loaded=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect(fresh(), loaded=False)
    assert sorted(PACKAGE.rglob("*.nb?")) == before


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(sys.platform != "linux", reason="moves the cache by XDG_CACHE_HOME")
def test_an_estimator_works_without_any_cache(tmp_path):
    (tmp_path / "file").touch()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file"), "PYTHONPATH": str(PACKAGE.parent)}
    script = "import torch, menet; x = torch.ones(1, 4, 4); print(menet.usvt(x, x > 0).isfinite().all().item())"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True"]
    assert done.stderr.count("cannot store compiled loops") == 1

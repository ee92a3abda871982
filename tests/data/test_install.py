"""`menet data fetch`, `import`, `verify` and `list`, as a user calls them."""

import hashlib
import io
import shutil
import tarfile
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import made_files
import pytest
from local_server import Server

from menet import data
from menet.cli import main
from menet.data import Archive, load
from menet.data.published import content_md5

pytestmark = pytest.mark.filterwarnings("ignore::menet.data.DataWarning")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "place"
    monkeypatch.setenv("MENET_DATA", str(folder))
    return folder


def publish(
    monkeypatch: pytest.MonkeyPatch, name: str, made: Path, archives: dict[str, bytes], address: str
) -> None:
    """Let `made` be what the publisher of a dataset offers, in these archives at this address."""
    source = data.SOURCES[name]
    md5 = {archive: hashlib.md5(content).hexdigest() for archive, content in archives.items()}
    versions = tuple(
        tuple(
            replace(file, md5=next(iter(md5.values())) if file.is_folder else content_md5(made / file.path))
            for file in files
        )
        for files in source.versions
    )
    offered = tuple(
        Archive(archive, (f"{address}/{archive}",), md5[archive], len(content))
        for archive, content in archives.items()
    )
    monkeypatch.setitem(data.SOURCES, name, replace(source, versions=versions, archives=offered))


def tar_of(folder: Path, *extra: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
        for info, content in extra:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def zip_of(folder: Path) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
        archive.writestr("../outside.txt", "x")
        archive.writestr("tiny-imagenet-200/../../outside.txt", "x")
    return stream.getvalue()


def contents(name: str, made: Path) -> dict[str, bytes]:
    if name == "cifar10":
        outside = tarfile.TarInfo("cifar-10-batches-bin/../../outside.txt")
        link = tarfile.TarInfo("cifar-10-batches-bin/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        return {"cifar-10-binary.tar.gz": tar_of(made, (outside, b"x"), (link, b""))}
    if name == "tiny-imagenet":
        return {"tiny-imagenet-200.zip": zip_of(made)}
    return {path.name: path.read_bytes() for path in sorted(made.iterdir())}


MAKERS = {
    "mnist": made_files.mnist,
    "cifar10": made_files.cifar10,
    "svhn": made_files.svhn,
    "tiny-imagenet": made_files.tiny_imagenet,
}


@pytest.mark.parametrize("name", MAKERS)
def test_fetch_then_verify_then_load(
    name: str,
    tmp_path: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = MAKERS[name](tmp_path / "made")
    archives = contents(name, made)
    with Server({f"/{archive}": content for archive, content in archives.items()}) as server:
        publish(monkeypatch, name, made, archives, server.address)
        assert main(["data", "fetch", name]) == 0
    assert main(["data", "verify", name]) == 0
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(name, "test")) == made_files.COUNT
    assert [path.name for path in place.iterdir()] == [name]
    assert not list(tmp_path.rglob("outside.txt"))
    assert not [path for path in place.rglob("*") if path.is_symlink()]
    assert main(["data", "fetch", name]) == 2
    assert "--replace" in capsys.readouterr().err

    damaged = next(
        path for path in sorted((place / name).rglob("*")) if path.suffix in (".gz", ".bin", ".mat", ".JPEG")
    )
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x00\x01")
    assert main(["data", "verify", name]) == 1


@pytest.mark.parametrize("name", MAKERS)
def test_a_tampered_download_never_becomes_a_dataset(
    name: str,
    tmp_path: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = MAKERS[name](tmp_path / "made")
    archives = contents(name, made)
    last = list(archives)[-1]
    served = {**archives, last: archives[last][:-1] + bytes([archives[last][-1] ^ 1])}
    with Server({f"/{archive}": content for archive, content in served.items()}) as server:
        publish(monkeypatch, name, made, archives, server.address)
        assert main(["data", "fetch", name]) == 2
        error = capsys.readouterr().err
        assert "wrong checksum" in error
        assert not (place / name).exists()
        server.files = {f"/{archive}": content for archive, content in archives.items()}
        server.requests.clear()
        assert main(["data", "fetch", name]) == 0
    assert len(load(name, "train")) >= made_files.COUNT


def test_without_a_network_one_line_says_how_to_import(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = data.SOURCES["mnist"]
    nowhere = tuple(replace(archive, addresses=("http://127.0.0.1:9/x",)) for archive in source.archives)
    monkeypatch.setitem(data.SOURCES, "mnist", replace(source, archives=nowhere))
    assert main(["data", "fetch", "mnist"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "menet data import mnist FOLDER" in printed.err
    assert not (place / "mnist").exists()


@pytest.mark.parametrize("name", [*MAKERS, "folder"])
def test_import_from_a_folder(name: str, tmp_path: Path, place: Path) -> None:
    made = {**MAKERS, "folder": made_files.folder}[name](tmp_path / "made" / "somewhere" / "deep")
    above = made if name == "folder" else tmp_path / "made"
    assert main(["data", "import", name, str(above)]) == 0
    assert len(load(name, "test")) == made_files.COUNT
    if name != "folder":
        assert main(["data", "verify", name]) == 1
    assert made.exists(), "import copies"


def test_import_of_the_python_version(tmp_path: Path, place: Path) -> None:
    made_files.cifar10_python(tmp_path / "made")
    assert main(["data", "import", "cifar10", str(tmp_path / "made")]) == 0
    assert len(load("cifar10", "train")) == 5 * made_files.COUNT


def test_import_of_the_archive_itself(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_files.tiny_imagenet(tmp_path / "made")
    archives = contents("tiny-imagenet", made)
    publish(monkeypatch, "tiny-imagenet", made, archives, "http://127.0.0.1:9")
    path = tmp_path / "tiny-imagenet-200.zip"
    path.write_bytes(archives[path.name] + b"x")
    assert main(["data", "import", "tiny-imagenet", str(path)]) == 2
    assert "wrong checksum" in capsys.readouterr().err
    path.write_bytes(archives[path.name])
    assert main(["data", "import", "tiny-imagenet", str(path)]) == 0
    assert main(["data", "verify", "tiny-imagenet"]) == 0


def test_import_of_what_cannot_be_read_leaves_what_was_there(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_files.mnist(tmp_path / "made")
    assert main(["data", "import", "mnist", str(made)]) == 0
    (made / "t10k-labels-idx1-ubyte.gz").write_bytes(b"not gzip")
    assert main(["data", "import", "mnist", str(made), "--replace"]) == 2
    assert len(load("mnist", "test")) == made_files.COUNT
    (made / "t10k-labels-idx1-ubyte.gz").unlink()
    assert main(["data", "import", "mnist", str(made), "--replace"]) == 2
    assert "expected t10k-labels-idx1-ubyte.gz of mnist" in capsys.readouterr().err
    shutil.rmtree(made)
    assert main(["data", "import", "mnist", str(made), "--replace"]) == 2
    assert len(load("mnist", "test")) == made_files.COUNT
    fresh = made_files.mnist(tmp_path / "fresh", compressed=False)
    assert main(["data", "import", "mnist", str(fresh), "--replace"]) == 0
    assert sorted(path.name for path in place.iterdir()) == ["mnist"]


def test_nothing_to_fetch_import_or_verify(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["fetch", "digits"],
        ["import", "digits", str(tmp_path)],
        ["verify", "digits"],
        ["fetch", "x"],
    ):
        assert main(["data", *command]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "empty").mkdir()
    assert main(["data", "import", "svhn", str(tmp_path / "empty")]) == 2
    assert "expected the files of svhn in" in capsys.readouterr().err
    assert main(["data", "verify", "svhn"]) == 2
    assert not list(tmp_path.rglob(".svhn*"))


def test_list_says_what_is_here(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made_files.mnist(place)
    assert main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[:7]}
    assert "yes" in rows["mnist"].split()
    assert "no" in rows["svhn"].split()
    assert "non-commercial only" in rows["svhn"]
    assert "ImageNet's terms" in rows["tiny-imagenet"]
    assert "built in" in rows["digits"]
    assert str(place) in "".join(lines)

"""Putting a dataset in its place: from the publisher's addresses, or from files one already has.

Everything is gathered and read once in a folder beside its place, and renamed into it when whole.
"""

import contextlib
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from menet.data.catalog import Archive, Source
from menet.data.checksums import Published, file_md5, keep_origin
from menet.data.dataset import SPLITS
from menet.data.download import download
from menet.data.places import data_folder
from menet.errors import DataError

MAXIMUM_MEMBER_BYTES = 64 << 20


def fetch(source: Source, root: str | os.PathLike[str] | None = None, replace: bool = False) -> Path:
    """Download a dataset from its publisher; a broken-off download is continued."""
    if not source.archives:
        raise DataError(f"{source.name} needs no download; `menet data list` says where each dataset is")
    with _building(source, root, replace) as (building, final):
        kept = final.parent / ".downloads" / source.name
        for archive in source.archives:
            try:
                download(archive.addresses, kept / archive.name, archive.md5, archive.size)
            except DataError as error:
                names = ", ".join(archive.name for archive in source.archives)
                raise DataError(
                    f"{error}; with no network, get {names} in another way "
                    f"and run `menet data import {source.name} FOLDER`"
                ) from error
        _gather(source, kept, building)
    shutil.rmtree(kept)
    with contextlib.suppress(OSError):
        # Not empty while another dataset is being fetched.
        kept.parent.rmdir()
    return final


def take(source: Source, path: Path, root: str | os.PathLike[str] | None = None, replace: bool = False) -> Path:
    """Copy a dataset from a folder that has its files somewhere inside, or from the publisher's archive."""
    if source.embedded:
        raise DataError(f"{source.name} is built in and needs no import")
    if not path.exists():
        raise DataError(f"{path} does not exist; give a folder with the files of {source.name}")
    with _building(source, root, replace) as (building, final):
        if source.versions:
            _gather(source, path, building)
        else:
            shutil.copytree(path, building, dirs_exist_ok=True)
    return final


@contextmanager
def _building(source: Source, root: str | os.PathLike[str] | None, replace: bool) -> Iterator[tuple[Path, Path]]:
    final = data_folder(root) / source.name
    if final.exists() and not replace:
        raise DataError(f"{final} is there already; `--replace` puts the new files in its place")
    building = final.parent / f".{source.name}.{os.getpid()}.building"
    former = final.parent / f".{source.name}.{os.getpid()}.former"
    try:
        try:
            building.mkdir(parents=True)
            yield building, final
            for split in SPLITS:
                # Read before it counts as a dataset; one image is decoded where each is a file.
                source.read(building, split).batch(slice(0, 1))
            if final.exists():
                final.rename(former)
            building.rename(final)
        except OSError as error:
            raise DataError(f"{source.name} cannot be put in {final}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def _gather(source: Source, path: Path, building: Path) -> None:
    for archive in source.archives:
        found = path if path.name == archive.name else next(_named(path, archive.name), None)
        if found and found.is_file() and archive.name.endswith((".zip", ".tar.gz")):
            return _unpack(source, archive, found, building)
    if path.is_file():
        names = " and ".join(archive.name for archive in source.archives)
        raise DataError(f"{path} alone is not {source.name}; give a folder with {names}, or with its files")
    for files in source.versions:
        found_files = [(file, _find(path, file)) for file in files]
        if any(found for _, found in found_files):
            for file, found in found_files:
                if found is None:
                    raise DataError(f"{path} has no {file.path}, which {source.name} needs")
                _copy(found, building / file.path, found.name)
            return None
    wanted = " or ".join(files[0].path for files in source.versions)
    raise DataError(f"{path} holds nothing of {source.name} (such as {wanted})")


def _find(path: Path, file: Published) -> Path | None:
    name = PurePosixPath(file.path).name
    if path.name == name:
        return path
    names = [name, name.removesuffix(".gz")]
    return next((found for wanted in names for found in _named(path, wanted)), None)


def _named(path: Path, name: str) -> Iterator[Path]:
    yield from sorted(path.rglob(name), key=lambda found: (len(found.parts), found))


def _copy(found: Path, to: Path, name: str) -> None:
    if found.is_dir():
        shutil.copytree(found, to)
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, to.with_name(name))


def _unpack(source: Source, archive: Archive, path: Path, building: Path) -> None:
    if file_md5(path) != archive.md5:
        raise DataError(
            f"{path} is not the archive its publisher offers (wrong checksum); "
            f"if you trust it, unpack it and import the folder"
        )
    wanted = {PurePosixPath(file.path).parts[0] for files in source.versions for file in files}
    try:
        for name, stream in _members(path):
            parts = PurePosixPath(name).parts
            if parts and parts[0] in wanted and ".." not in parts:
                to = building.joinpath(*parts)
                to.parent.mkdir(parents=True, exist_ok=True)
                with stream, to.open("wb") as out:
                    shutil.copyfileobj(stream, out)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from error
    for file in source.versions[0]:
        if file.is_folder:
            keep_origin(building, file, archive.md5)


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and entry.file_size <= MAXIMUM_MEMBER_BYTES:
                    yield entry.filename, archive.open(entry)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() else None
            if stream and member.size <= MAXIMUM_MEMBER_BYTES:
                yield member.name, stream

"""Installing a dataset: from the publisher's addresses, or from files the user has.

Everything is collected and read once in a temporary folder, and renamed into place when complete. Until its MD5
is right, a download has another name (`.NAME.….partial`), so an incomplete one is never taken for the file.
"""

import contextlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from menet import __version__
from menet.data import Archive, Source, folder
from menet.data.dataset import SPLITS, data_folder
from menet.data.published import Published, file_md5, keep_origin, unpack
from menet.errors import DataError
from menet.files import replacing
from menet.progress import reporting

TIMEOUT_SECONDS = 30.0
ATTEMPTS_PER_ADDRESS = 3
CHUNK = 1 << 16
MEGABYTE = 1e6
PARTIAL_CONTENT, RANGE_NOT_SATISFIABLE = 206, 416


def fetch(source: Source, root: str | os.PathLike[str] | None = None, replace: bool = False) -> Path:
    """Download a dataset from its publisher; an interrupted download is resumed."""
    if not source.archives:
        raise DataError(f"{source.name} needs no download; see `menet data list`")
    with _building(source, root, replace) as (building, final):
        kept = final.parent / ".downloads" / source.name
        for archive in source.archives:
            try:
                download(archive.addresses, kept / archive.name, archive.md5, archive.size)
            except DataError as error:
                names = ", ".join(archive.name for archive in source.archives)
                raise DataError(
                    f"{error}; without a network, get {names} by other means "
                    f"and run `menet data import {source.name} FOLDER`"
                ) from error
        _gather(source, kept, building)
    shutil.rmtree(kept)
    with contextlib.suppress(OSError):
        # Not empty while another dataset is being fetched.
        kept.parent.rmdir()
    return final


def take(source: Source, path: Path, root: str | os.PathLike[str] | None = None, replace: bool = False) -> Path:
    """Copy a dataset from a folder that has its files somewhere inside, or from the publisher's archive.

    Only regular files are copied: a link that leads out of the folder, a link to a folder, a pipe or a device is
    an error that names it.
    """
    if source.embedded:
        raise DataError(f"{source.name} is built in and needs no import")
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a folder with the files of {source.name}")
    with _building(source, root, replace) as (building, final):
        if source.versions:
            _gather(source, path, building)
        elif path.is_dir():
            for split in SPLITS:
                # Before copying, so that errors name the user's files; at any side, since sizes may differ.
                folder.read(path, split, side=8)
            _copy_tree(path, building)
        else:
            raise DataError(f"expected a folder of images, got {path}")
    return final


def download(addresses: Sequence[str], to: Path, md5: str, size: int) -> Path:
    """Fetch `to` from the first address that gives exactly the content with this MD5 and size.

    A `DataError` says for each address what went wrong. An interrupted download is kept and resumed by the next
    call; one with the wrong checksum is deleted.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.parent / f".{to.name}.{md5[:8]}.partial"
    troubles = []
    for address in addresses:
        try:
            continued = _length(partial) > 0
            _receive_whole(address, partial, size)
            if file_md5(partial) != md5 and continued:
                # The part left by an earlier call may be damaged; try this address from the start.
                partial.unlink()
                _receive_whole(address, partial, size)
        except (OSError, http.client.HTTPException, ValueError) as error:
            troubles.append(f"{urlsplit(address).hostname}: {_reason(error)}")
            continue
        if file_md5(partial) == md5:
            with replacing(to) as temporary:
                partial.replace(temporary)
            return to
        partial.unlink()
        troubles.append(f"{urlsplit(address).hostname}: wrong checksum")
    raise DataError(f"{to.name} could not be downloaded ({'; '.join(troubles)})")


def _receive_whole(address: str, partial: Path, size: int) -> None:
    for attempt in range(1, ATTEMPTS_PER_ADDRESS + 1):
        before = _length(partial)
        try:
            _receive(address, partial, size)
        except urllib.error.HTTPError as error:
            if error.code != RANGE_NOT_SATISFIABLE:
                raise
            partial.unlink(missing_ok=True)
        except (TimeoutError, ConnectionError, http.client.IncompleteRead):
            # A broken connection is retried as long as it makes progress.
            if attempt == ATTEMPTS_PER_ADDRESS and _length(partial) == before:
                raise
        if _length(partial) == size:
            return
    raise ConnectionError(f"interrupted after {_length(partial)} of {size} bytes")


def _receive(address: str, partial: Path, size: int) -> None:
    start = _length(partial)
    if start == size:
        return
    if start > size:
        partial.unlink()
        start = 0
    headers = {"User-Agent": f"menet/{__version__}", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(address, headers=headers)
    with contextlib.closing(urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)) as response:
        continued = response.status == PARTIAL_CONTENT
        if continued and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise ValueError("the server resumed at the wrong offset")
        start = start if continued else 0
        offered = int(response.headers.get("Content-Length") or size - start)
        if start + offered != size:
            raise ValueError(f"expected {size} bytes, the server offers {start + offered}")
        with (
            partial.open("ab" if continued else "wb") as out,
            reporting(f"{urlsplit(address).path.rpartition('/')[2]} (MB)", size / MEGABYTE) as reporter,
        ):
            reporter.skip(start / MEGABYTE)
            # One byte beyond the known size is read, so that a longer file is noticed.
            while piece := response.read(min(CHUNK, size + 1 - start)):
                out.write(piece)
                start += len(piece)
                reporter.advance(len(piece) / MEGABYTE)
    if start > size:
        partial.unlink()
        raise ValueError(f"expected {size} bytes, the server sends more")


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code} {error.reason}"
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason) or type(error).__name__


@contextmanager
def _building(source: Source, root: str | os.PathLike[str] | None, replace: bool) -> Iterator[tuple[Path, Path]]:
    final = data_folder(root) / source.name
    if final.exists() and not replace:
        raise DataError(f"{final} exists already; replace it with `--replace`")
    building = final.parent / f".{source.name}.{os.getpid()}.building"
    former = final.parent / f".{source.name}.{os.getpid()}.former"
    try:
        try:
            building.mkdir(parents=True)
            yield building, final
            if source.versions:
                for split in SPLITS:
                    # Read before it is in place; where images are single files, one is decoded.
                    source.read(building, split).batch(slice(0, 1))
            if final.exists():
                final.rename(former)
            building.rename(final)
        except OSError as error:
            raise DataError(f"cannot write {source.name} to {final}: {error}") from error
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
        raise DataError(f"expected a folder with {names}, or with the files of {source.name}, got {path}")
    for files in source.versions:
        found_files = [(file, _find(path, file)) for file in files]
        if any(found for _, found in found_files):
            for file, found in found_files:
                if found is None:
                    raise DataError(f"expected {file.path} of {source.name} in {path}, got none")
                _copy(found, building / file.path, path)
            return None
    wanted = " or ".join(files[0].path for files in source.versions)
    raise DataError(f"expected the files of {source.name} in {path} (such as {wanted}), got none")


def _find(path: Path, file: Published) -> Path | None:
    name = PurePosixPath(file.path).name
    if path.name == name:
        return path
    names = [name, name.removesuffix(".gz")]
    return next((found for wanted in names for found in _named(path, wanted)), None)


def _named(path: Path, name: str) -> Iterator[Path]:
    yield from sorted(path.rglob(name), key=lambda found: (len(found.parts), found))


def _copy(found: Path, to: Path, root: Path) -> None:
    if found.is_dir():
        _copy_tree(found, to)
    else:
        _copy_file(found, to.with_name(found.name), root.resolve())


def _copy_tree(root: Path, to: Path) -> None:
    root = root.resolve()
    for place, folders, names in os.walk(root):
        for name in folders:
            if (Path(place) / name).is_symlink():
                raise _refused(Path(place) / name, "a link to a folder")
        for name in names:
            path = Path(place) / name
            _copy_file(path, to / path.relative_to(root), root)


def _copy_file(path: Path, to: Path, root: Path) -> None:
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        raise _refused(path, "a broken link") from error
    if not real.is_relative_to(root):
        raise _refused(path, f"a link out of {root}")
    if not real.is_file():
        raise _refused(path, "something else")
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(real, to)


def _refused(path: Path, what: str) -> DataError:
    return DataError(f"expected only regular files to import, got {path}, {what}; copy or remove it")


def _unpack(source: Source, archive: Archive, path: Path, building: Path) -> None:
    if file_md5(path) != archive.md5:
        raise DataError(
            f"{path} is not the published archive (wrong checksum); "
            f"if you trust it, unpack it and import the folder"
        )
    unpack(path, building, {PurePosixPath(file.path).parts[0] for files in source.versions for file in files})
    for file in source.versions[0]:
        if file.is_folder:
            keep_origin(building, file, archive.md5)

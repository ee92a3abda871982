"""Files as published: decompression that never produces more than asked for, and the publisher's checksums.

A file's MD5 is kept with its size and modification time in `.menet-checksums.json` beside the data, or in the
user's cache where the data is read-only, so that loading does not read hundreds of megabytes twice.
"""

import hashlib
import json
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from menet.data.dataset import cache_folder, encoded
from menet.errors import DataError
from menet.files import write_atomically

# Deflate cannot do better than 1032 to 1, so a claim beyond that is false without looking further.
MAX_DEFLATE_RATIO = 1032
ZLIB, GZIP = zlib.MAX_WBITS, zlib.MAX_WBITS | 16
CHUNK = 1 << 18
MAX_MEMBER_BYTES = 64 << 20
RECORD = ".menet-checksums.json"
ORIGIN = ".menet-origin.json"
MAX_INFLATED = 2 << 30


class Inflater:
    """A compressed stream read in pieces of known size, as `read(n)` of a file would."""

    def __init__(self, compressed: memoryview, path: Path, wrapper: int) -> None:
        self._input, self._path, self._wrapper = compressed, path, wrapper
        self._taken = 0
        self._decoder = zlib.decompressobj(wrapper)
        self._left = b""
        self.size = len(compressed)

    def can_hold(self, count: int) -> bool:
        """Whether the whole stream could expand to `count` bytes at all."""
        return count <= MAX_DEFLATE_RATIO * (self.size + 64)

    def read(self, count: int) -> bytearray:
        """Exactly `count` bytes, or a `DataError`; memory grows only with bytes that were really there."""
        if not self.can_hold(count):
            raise DataError(f"{self._path} is damaged: its header claims {count} bytes, more than it can hold")
        out = bytearray()
        while len(out) < count:
            piece = self.some(count - len(out))
            if not piece:
                raise DataError(f"{self._path} is truncated: expected {count} bytes, got {len(out)}")
            out += piece
        return out

    def at_end(self) -> bool:
        """Whether nothing is left, in the stream or after it; reaching the end verifies its checksum."""
        if self.some(1) or not self._decoder.eof:
            return False
        return self._taken == self.size and not self._decoder.unused_data

    def some(self, limit: int) -> bytes:
        """At most `limit` further bytes; none at the end."""
        try:
            while not self._decoder.eof:
                if not self._left:
                    self._left = bytes(self._input[self._taken : self._taken + CHUNK])
                    self._taken += len(self._left)
                if not self._left:
                    return b""
                piece = self._decoder.decompress(self._left, min(limit, CHUNK))
                self._left = self._decoder.unconsumed_tail
                if piece:
                    return piece
        except zlib.error as error:
            raise DataError(f"{self._path} is damaged: {error}") from error
        return b""


def gzip_pieces(path: Path, limit: int) -> Iterator[bytes]:
    """The content of a gzip file in pieces; a `DataError` beyond `limit` bytes."""
    inflater = Inflater(memoryview(path.read_bytes()), path, GZIP)
    total = 0
    while piece := inflater.some(CHUNK):
        total += len(piece)
        if total > limit:
            raise DataError(f"expected at most {limit} bytes in {path}, got more")
        yield piece
    if not inflater.at_end():
        raise DataError(f"{path} is damaged: not one complete gzip stream")


def unpack(path: Path, to: Path, wanted: Collection[str]) -> None:
    """Extract the regular files below the top-level folders `wanted` of a zip or tar archive into `to`.

    Links, files above 64 MiB and names that lead out of `to` are left out.
    """
    try:
        for name, stream in _members(path):
            parts = PurePosixPath(name).parts
            if parts and parts[0] in wanted and ".." not in parts:
                target = to.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with stream, target.open("wb") as out:
                    shutil.copyfileobj(stream, out)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise DataError(f"cannot unpack {path}: {error}") from error


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and entry.file_size <= MAX_MEMBER_BYTES:
                    yield entry.filename, archive.open(entry)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() else None
            if stream and member.size <= MAX_MEMBER_BYTES:
                yield member.name, stream


@dataclass(frozen=True)
class Published:
    """A file, or a folder of files, as its publisher made it; `path` is relative to the dataset's folder.

    The MD5 is of a file's content: of a `.gz` it is that of the uncompressed content, since the same images are
    found compressed in different ways. A folder has the MD5 of its archive: when menet unpacks the archive, it
    keeps a digest of all files, and the folder is compared with that.
    """

    path: str
    md5: str
    split: str | None = None
    is_folder: bool = False


@dataclass
class Checksums:
    """Checksums of the files in one dataset's folder; `remember=False` reads every byte again."""

    folder: Path
    remember: bool = True
    _known: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.remember:
            record = next(filter(None, map(_read_json, self._records())), {})
            self._known = {name: known for name, known in record.items() if isinstance(known, dict)}

    def is_exact(self, published: Published) -> bool:
        """Whether the files are byte for byte as published; False where they are missing."""
        path = self.folder / published.path
        if not path.exists():
            path = path.with_suffix("") if path.suffix == ".gz" else path
            if not path.exists():
                return False
        if not published.is_folder:
            return self._digest(path) == published.md5
        origin = _read_json(self.folder / ORIGIN)
        return origin.get("archive_md5") == published.md5 and origin.get("content") == self._digest(path)

    def _digest(self, path: Path) -> str:
        name, state = str(path.relative_to(self.folder)), _state(path)
        known = self._known.get(name, {})
        if known.get("state") != state:
            known = {"state": state, "digest": folder_digest(path) if path.is_dir() else content_md5(path)}
            self._known[name] = known
            self._save()
        return known["digest"]

    def _records(self) -> tuple[Path, Path]:
        place = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:24]
        return self.folder / RECORD, cache_folder() / "checksums" / f"{place}.json"

    def _save(self) -> None:
        content = json.dumps(self._known, indent=1)
        for record in self._records():
            try:
                write_atomically(record, content)
            except OSError:
                # Data on a read-only disk; where neither can be written, the digest is computed again next time.
                continue
            return


def file_md5(path: Path) -> str:
    """The MD5 of a file's own bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def content_md5(path: Path) -> str:
    """The MD5 of a file's content; of a gzip file, of its uncompressed content."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        if not compressed:
            return file_md5(path)
        digest = hashlib.md5(usedforsecurity=False)
        for piece in gzip_pieces(path, MAX_INFLATED):
            digest.update(piece)
        return digest.hexdigest()
    except (OSError, DataError) as error:
        return f"unreadable: {error}"


def folder_digest(folder: Path) -> str:
    """A SHA-256 over the names and contents of all files in a folder."""
    digest = hashlib.sha256()
    for path in _files(folder):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(encoded(f"{path.relative_to(folder).as_posix()} {content}\n"))
    return digest.hexdigest()


def keep_origin(folder: Path, published: Published, archive_md5: str) -> None:
    """Record beside an unpacked folder which archive it came from, and a digest of its files."""
    content = {"archive_md5": archive_md5, "content": folder_digest(folder / published.path)}
    write_atomically(folder / ORIGIN, json.dumps(content, indent=1))


def _state(path: Path) -> str:
    if path.is_dir():
        digest = hashlib.sha256()
        for file in _files(path):
            state = file.stat()
            digest.update(encoded(f"{file.relative_to(path)} {state.st_size} {state.st_mtime_ns}\n"))
        return digest.hexdigest()
    state = path.stat()
    return f"{state.st_size} {state.st_mtime_ns}"


def _files(folder: Path) -> Iterable[Path]:
    found = [Path(place) / name for place, _, names in os.walk(folder) for name in names]
    # Regular files only: a pipe would wait forever, and a device may never end.
    return sorted(path for path in found if not path.name.startswith(".menet-") and path.is_file())


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}

"""Comparing files with their publisher's checksums, and caching the result.

A file's MD5 is kept with its size and modification time in `.menet-checksums.json` beside the data, or in the
user's cache where the data is read-only, so that loading does not read hundreds of megabytes twice.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from menet.data.archives import gzip_pieces
from menet.data.dataset import cache_folder, encoded
from menet.errors import DataError
from menet.files import write_atomically

RECORD = ".menet-checksums.json"
ORIGIN = ".menet-origin.json"
MAX_INFLATED = 2 << 30


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
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

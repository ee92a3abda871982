"""Atomic writes, locks and checksums of files, and a remote store of folders."""

import glob
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from menet.errors import ConfigurationError, MenetError, require

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

UPLOAD_INTERVAL = 60.0
"""Seconds between two uploads of a running job's new files."""
PART = ".part"
ABANDONED = 3600.0
"""Seconds after which the temporary file of a killed process is removed by the next write of the same file."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed to `path`.

    On any error the temporary file is removed and `path` is left as it was.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final)
    handle, name = tempfile.mkstemp(dir=final.parent, prefix=f".{final.name}.", suffix=PART)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes private files; the final one follows the user's umask like any other.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(final)
        _sync_folder(final.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` to `path`, entirely or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raise `OSError` unless a file can be written beside `path`."""
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=PART) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Lock a folder inside a `with` block; an error if another process has locked it.

    The lock ends with the process, however it ends. Systems without file locks (Windows) lock nothing.
    """
    path = Path(folder) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if not lock(file.fileno()):
            raise MenetError(
                f"{folder} is locked by another process; wait until it ends, or choose another folder"
            )
        yield


def lock(handle: int) -> bool:
    """Lock an open file until it is closed; False if another process has locked it."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # some network file systems refuse locks; the user must then keep processes apart
    return True


def sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 checksum of a file, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_abandoned(final: Path) -> None:
    """Remove temporary files of `final` that a killed process left long ago."""
    for path in final.parent.glob(f".{glob.escape(final.name)}.*{PART}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()


def _sync_folder(folder: Path) -> None:
    # Without this a rename may be lost in a power cut. Windows cannot open folders.
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Store:
    """Folders below an address that fsspec supports: `s3://bucket/menet`, `gs://…`, `sftp://…` or a plain path.

    The local folder is then a cache of what this machine needs. What a job writes is uploaded while it runs, so
    that another machine can resume it; what it needs is downloaded when it starts. Files are transferred under a
    temporary name and renamed when they are complete, and the marker that a job is done is transferred last.
    """

    def __init__(self, address: str) -> None:
        fsspec = require("fsspec", extra="store")
        try:
            self.files, self.root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(
                f"expected a store address that fsspec can open, got {address!r}: {error}"
            ) from error

    def read(self, name: str) -> bytes | None:
        """The content of one file, or None if it does not exist."""
        try:
            content: bytes = self.files.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def download(self, name: str, folder: Path, last: str) -> None:
        """Copy the remote folder `name` to `folder`, the file `last` at the end."""
        root = self._path(name)
        self.files.invalidate_cache()
        for path in sorted(self.files.find(root), key=lambda path: path.endswith(f"/{last}")):
            if not path.endswith(PART):
                with replacing(folder / path[len(root) + 1 :]) as temporary:
                    self.files.get_file(path, str(temporary))

    def upload(
        self, name: str, folder: Path, uploaded: dict[str, tuple[int, int]], *, skip: str | None = None
    ) -> None:
        """Copy new and changed files of `folder`, except `skip`, to the remote folder `name`.

        `uploaded` records the time and size of what was uploaded before, and is updated.
        """
        for path in sorted(folder.rglob("*")):
            inner = path.relative_to(folder).as_posix()
            if inner == skip or path.name.endswith(PART):
                continue
            # A file may be replaced while we look; the next upload then takes it.
            with suppress(FileNotFoundError):
                state = path.stat()
                stamp = (state.st_mtime_ns, state.st_size)
                if not path.is_file() or uploaded.get(inner) == stamp:
                    continue
                remote = f"{self._path(name)}/{inner}"
                self.files.makedirs(remote.rpartition("/")[0], exist_ok=True)
                self.files.put_file(str(path), remote + PART)
                self.files.mv(remote + PART, remote)
                uploaded[inner] = stamp

    @contextmanager
    def mirroring(self, name: str, folder: Path, last: str, interval: float = UPLOAD_INTERVAL) -> Iterator[None]:
        """Upload what appears in `folder` while the block runs and once after it; `last` at the very end."""
        uploaded: dict[str, tuple[int, int]] = {}
        over = threading.Event()

        def watch() -> None:
            while not over.wait(interval):
                # A network failure must not end a training run; the last upload below does raise.
                with suppress(OSError):
                    self.upload(name, folder, uploaded, skip=last)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            self.upload(name, folder, uploaded, skip=last)
            self.upload(name, folder, uploaded)

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

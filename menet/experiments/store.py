"""A remote store of job folders: any address that fsspec supports.

The local folder is then a cache of what this machine needs. What a job writes is uploaded while it runs, so that
another machine can resume it; what it needs is downloaded when it starts. Files are transferred under a temporary
name and renamed when they are complete, and the marker that a job is done is transferred last.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from menet.errors import ConfigurationError, require
from menet.files import replacing

UPLOAD_INTERVAL = 60.0
"""Seconds between two uploads of a running job's new files."""
PART = ".part"


class Store:
    """Folders below an address such as `s3://bucket/menet`, `gs://…`, `sftp://…` or a plain path."""

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

"""A place beyond this machine where job folders are kept as well: any address that fsspec knows.

The folder of a run is then a copy of what this machine needs. What a job writes is sent while it runs, so that
another machine can go on with it; what it needs is brought when it starts. Files travel under another name and
are renamed when they are whole, and the marker that a job is done travels last.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from menet.errors import ConfigurationError
from menet.files import replacing

EVERY = 60.0
"""Seconds between two times that a running job's new files are sent."""
PART = ".part"


class Store:
    """Folders below an address such as `s3://bucket/menet`, `gs://…`, `sftp://…` or a plain path."""

    def __init__(self, address: str) -> None:
        import fsspec

        try:
            self.files, self.root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"store is {address!r}, which fsspec cannot open: {error}") from error

    def read(self, name: str) -> bytes | None:
        """The content of one file, or nothing if it is not there."""
        try:
            content: bytes = self.files.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def bring(self, name: str, folder: Path, last: str) -> None:
        """Copy all of the folder `name` here, the file `last` at the end."""
        root = self._path(name)
        self.files.invalidate_cache()
        for path in sorted(self.files.find(root), key=lambda path: path.endswith(f"/{last}")):
            if not path.endswith(PART):
                with replacing(folder / path[len(root) + 1 :]) as temporary:
                    self.files.get_file(path, str(temporary))

    def send(
        self, name: str, folder: Path, sent: dict[str, tuple[int, int]], *, besides: str | None = None
    ) -> None:
        """Copy what is new in `folder` there; `sent` remembers what was, and `besides` stays behind."""
        for path in sorted(folder.rglob("*")):
            inner = path.relative_to(folder).as_posix()
            if inner == besides or path.name.endswith(PART):
                continue
            # A file may be replaced while we look; then the next round sends it.
            with suppress(FileNotFoundError):
                state = path.stat()
                stamp = (state.st_mtime_ns, state.st_size)
                if not path.is_file() or sent.get(inner) == stamp:
                    continue
                remote = f"{self._path(name)}/{inner}"
                self.files.makedirs(remote.rpartition("/")[0], exist_ok=True)
                self.files.put_file(str(path), remote + PART)
                self.files.mv(remote + PART, remote)
                sent[inner] = stamp

    @contextmanager
    def mirroring(self, name: str, folder: Path, last: str, every: float = EVERY) -> Iterator[None]:
        """Send what appears in `folder` while the block runs and after it; `last` at the very end."""
        sent: dict[str, tuple[int, int]] = {}
        over = threading.Event()

        def watch() -> None:
            while not over.wait(every):
                # A network that fails for a while must not end a training; the last time is not forgiven.
                with suppress(OSError):
                    self.send(name, folder, sent, besides=last)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            self.send(name, folder, sent, besides=last)
            self.send(name, folder, sent)

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

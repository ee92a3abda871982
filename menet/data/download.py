"""Downloading one file: resumed where it was broken off, tried at several addresses, checked, then renamed.

Until its MD5 is right a file has another name (`.NAME.….partial`), so nothing broken is ever taken for it.
"""

import contextlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from menet import __version__
from menet.data.checksums import file_md5
from menet.errors import DataError
from menet.files import replacing
from menet.progress import reporting

TIMEOUT_SECONDS = 30.0
ATTEMPTS_PER_ADDRESS = 3
CHUNK = 1 << 16
MEGABYTE = 1e6
PARTIAL_CONTENT, RANGE_NOT_SATISFIABLE = 206, 416


def download(addresses: Sequence[str], to: Path, md5: str, size: int) -> Path:
    """Fetch `to` from the first address that gives exactly the content with this MD5 and size.

    A `DataError` says for each address what went wrong. What was received of a broken-off download is kept
    and continued by the next call; what has the wrong checksum is thrown away.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.parent / f".{to.name}.{md5[:8]}.partial"
    troubles = []
    for address in addresses:
        try:
            continued = _length(partial) > 0
            _receive_whole(address, partial, size)
            if file_md5(partial) != md5 and continued:
                # What an earlier call left may have been at fault; this address deserves a try of its own.
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
        troubles.append(f"{urlsplit(address).hostname}: what came is not what was published (wrong checksum)")
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
            # A connection that broke is tried again as long as it brings something.
            if attempt == ATTEMPTS_PER_ADDRESS and _length(partial) == before:
                raise
        if _length(partial) == size:
            return
    raise ConnectionError(f"broke off after {_length(partial)} of {size} bytes")


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
            raise ValueError("the server continued at the wrong place")
        start = start if continued else 0
        offered = int(response.headers.get("Content-Length") or size - start)
        if start + offered != size:
            raise ValueError(f"offers {start + offered} bytes, not the {size} that were published")
        with (
            partial.open("ab" if continued else "wb") as out,
            reporting(f"{urlsplit(address).path.rpartition('/')[2]} (MB)", size / MEGABYTE) as reporter,
        ):
            reporter.advance(start / MEGABYTE)
            # One byte beyond the known size is read, so that a longer file is noticed and no longer one kept.
            while piece := response.read(min(CHUNK, size + 1 - start)):
                out.write(piece)
                start += len(piece)
                reporter.advance(len(piece) / MEGABYTE)
    if start > size:
        partial.unlink()
        raise ValueError(f"sends more than the {size} bytes that were published")


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"answers {error.code} {error.reason}"
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason) or type(error).__name__

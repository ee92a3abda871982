"""Fixtures of the data tests: a private cache, and a limit on memory."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from menet.data.dataset import warn_once


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and warnings that were not given yet."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    warn_once.cache_clear()
    return folder


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Makes reserving more than 512 MiB beyond what is in use fail, as a MemoryError in the test."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs Linux to limit memory")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)

"""Shared fixtures. Shapes written in annotations are checked at run time for everything under `menet`."""

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from jaxtyping import config, install_import_hook
from torch import Tensor

# Installed before any test imports the package, so that a wrong shape inside it fails a test.
install_import_hook("menet", "runtime_types.check")


class _CompiledLoops:
    """Finds the modules of `menet.kernels` past the hook: numba must see the functions themselves."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path) if name.startswith("menet.kernels.") else None


sys.meta_path.insert(0, _CompiledLoops)


# The same examples in every run: a test fails because of a change, never by chance. To look for others, run
# `pytest --hypothesis-profile=search`.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000, database=None)
hypothesis.settings.load_profile("repeatable")


def _write_settings_of_art() -> None:
    """On a new machine, processes that import ART at once race for its file of settings, and one fails."""
    home = Path.home() if os.access(Path.home(), os.W_OK) else Path("/tmp")
    file, own = home / ".art" / "config.json", home / ".art" / f"config.{os.getpid()}.json"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        own.write_text(json.dumps({"ART_DATA_PATH": str(home / ".art" / "data")}))
        own.replace(file)


_write_settings_of_art()

SLOW_LIST = Path(__file__).with_name("slow.txt")
SLOW_SECONDS = 1.0
"""Processor time beyond which a test is left to `make test`, so that `make check` stays under two minutes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--list-slow", action="store_true", help=f"write {SLOW_LIST.name} anew; run with -n 0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the list names, in addition to what is marked where it is written.

    Of several processes none may be left alone with a long file in the end, so each begins with the longest.
    """
    listed = {} if config.getoption("list_slow") else _slow()
    seconds: dict[Path, dict[str, float]] = {}
    for item in items:
        name = _function(item)
        if name in listed:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):
            # One that is marked but not listed yet is taken for a long one.
            seconds.setdefault(item.path, {})[name] = listed.get(name, 10.0)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -sum(seconds.get(item.path, {}).values()))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began = _processor_time()
    yield
    if item.config.getoption("list_slow"):
        _spent.setdefault(_function(item), []).append(_processor_time() - began)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("list_slow") and _spent:
        slow = sorted(name for name, seconds in _spent.items() if max(seconds) > SLOW_SECONDS)
        SLOW_LIST.write_text("".join(f"{sum(_spent[name]):6.1f} {name}\n" for name in slow))


_spent: dict[str, list[float]] = {}
"""The processor time of each test function, by its parameters."""


def _slow() -> dict[str, float]:
    lines = (line.split() for line in SLOW_LIST.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _processor_time() -> float:
    used = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A job in the background of a shell ignores interrupts, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _no_curves() -> Iterator[None]:
    """Drawing `curves.png` takes most of the time of a run of a few steps; what is about it asks for `curves`."""
    with pytest.MonkeyPatch.context() as patch:
        if "menet.training.loop" in sys.modules:
            patch.setattr("menet.training.loop.draw_curves", lambda folder: True)
        yield


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw their curves."""
    from menet.training.monitoring import draw_curves

    monkeypatch.setattr("menet.training.loop.draw_curves", draw_curves)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real datasets; skips with the remedy where there is none."""
    folder = os.environ.get("MENET_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs the real datasets: set MENET_DATA to a folder that `menet data fetch` filled")
    return Path(folder)


@pytest.fixture(scope="session")
def photographs() -> Tensor:
    """Eight 32×32 color crops of the photographs inside scikit-learn, on [0, 1]."""
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn: pip install 'menet[demo]'")
    crops = []
    for photograph in datasets.load_sample_images().images:
        for top, left in ((20, 40), (150, 260), (220, 420), (330, 120)):
            crops.append(photograph[top : top + 64 : 2, left : left + 64 : 2])
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float() / 255


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def without_annotation_checks() -> Iterator[None]:
    """For tests of what the package itself refuses, and of tools that cannot look through the checks."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)

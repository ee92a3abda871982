"""Shared fixtures. Shapes written in annotations are checked at run time for everything under `menet`."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import config, install_import_hook
from torch import Tensor

# Installed before any test imports the package, so that a wrong shape inside it fails a test.
install_import_hook("menet", "runtime_types.check")

# All but the compiled loops: numba must see the functions themselves, so these modules are loaded past the hook.
for _name in ("compiling", "eigenvectors", "completion", "truncation", "variation"):
    _path = Path(__file__).parents[1] / "menet" / "kernels" / f"{_name}.py"
    _spec = importlib.util.spec_from_file_location(f"menet.kernels.{_name}", _path)
    sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real datasets; skips with the remedy where there is none."""
    folder = os.environ.get("MENET_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs the real datasets: set MENET_DATA to a folder that `menet data fetch` filled")
    return Path(folder)


@pytest.fixture(scope="session")
def photographs() -> Tensor:
    """Eight 32×32 colour crops of the photographs inside scikit-learn, on [0, 1]."""
    from sklearn.datasets import load_sample_images

    crops = []
    for photograph in load_sample_images().images:
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

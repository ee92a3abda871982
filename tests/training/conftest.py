"""What keeps the tests of training quick."""

import functools

import pytest
import torch

from menet.data import digits


@pytest.fixture(autouse=True, scope="session")
def _digits_read_once():
    """A run reads the embedded digits twice; all runs here share one reading."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "_table", functools.cache(digits._table))
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    # Other work may run beside these tests; waiting for a second thread is then what takes the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

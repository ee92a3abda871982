"""What keeps the tests of training quick."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    # Other work may run beside these tests; waiting for a second thread is then what takes the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

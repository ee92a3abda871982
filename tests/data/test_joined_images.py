"""Images in several parts against their concatenation."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from menet.data.dataset import Joined, positions_of


@given(st.data())
def test_parts_read_as_one(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    whole = np.arange(sum(sizes) * 13, dtype=np.int64).astype(np.uint8).reshape(-1, 13)
    parts = np.split(whole, np.cumsum(sizes)[:-1])
    # One byte in front of each row, as CIFAR-10 keeps its labels.
    joined = Joined([part[:, 1:] for part in parts], (3, 2, 2))
    expected = torch.from_numpy(whole[:, 1:].copy()).unflatten(1, (3, 2, 2))
    count = len(whole)
    positions = torch.tensor(data.draw(st.lists(st.integers(-count, count - 1))), dtype=torch.int64)
    assert joined.shape == tuple(expected.shape)
    assert torch.equal(joined[positions], expected[positions])
    # torch has no slices that go backwards, so they are compared with Python's.
    chosen = data.draw(st.slices(count))
    assert torch.equal(joined[chosen], expected[list(range(count))[chosen]])


@given(st.integers(0, 12), st.data())
def test_slices_mean_what_they_mean_in_python(length: int, data: st.DataObject) -> None:
    bound = st.none() | st.integers(-15, 15)
    step = st.none() | st.integers(-4, 4).filter(bool)
    chosen = slice(data.draw(bound), data.draw(bound), data.draw(step))
    assert positions_of(chosen, length).tolist() == list(range(length))[chosen]

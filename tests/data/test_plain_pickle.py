"""Pickles that try something are refused, and nothing they name is called."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import made_files
import numpy as np
import pytest

from menet.data import cifar10
from menet.data.plain_pickle import read_plain_pickle
from menet.errors import DataError


class Runs:
    """Pickles to a call of `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, protocol: int) -> None:
    made_files.cifar10_python(tmp_path)
    marker = tmp_path / "ran"
    path = tmp_path / "cifar10/cifar-10-batches-py/test_batch"
    attack = pickle.dumps({b"data": Runs(os.system, f"touch {marker}")}, protocol=protocol)
    path.write_bytes(attack)
    with pytest.raises(DataError, match=r"refused to read .*test_batch: it asks for .*system"):
        cifar10.read(tmp_path / "cifar10", "test")
    assert not marker.exists()
    pickle.loads(attack)
    assert marker.exists(), "the pickle must be one that really runs code"


def _nine_times(number: int) -> bytes:
    """A list that holds the list kept as `number` nine times, kept as the next number."""
    return b"](" + bytes([ord("h"), number]) * 9 + b"eq" + bytes([number + 1])


HOSTILE = {
    "eval": pickle.dumps(Runs(eval, "1")),
    "getattr": pickle.dumps(Runs(getattr, "a", "upper")),
    "numpy object": pickle.dumps({"data": np.array([{}, []], dtype=object)}, protocol=2),
    "numpy records": pickle.dumps({"data": np.zeros(3, dtype=[("a", "u1")])}, protocol=2),
    "numpy text": pickle.dumps({"data": np.array(["ab"])}, protocol=2),
    "numpy zeros": pickle.dumps(Runs(np.zeros, 1 << 40)),
    "numpy load": pickle.dumps(Runs(np.load, "x")),
    "numpy memmap": pickle.dumps(Runs(np.memmap, "x")),
    "bytearray": pickle.dumps(Runs(bytearray, 1 << 40)),
    "other encoding": pickle.dumps(Runs(__import__("_codecs").encode, "a", "rot13")),
    "persistent": b"\x80\x02U\x01aQ.",
    "extension": b"\x80\x02\x82\x01.",
    "instance": b"(ios\nsystem\n.",
    "object": b"(cos\nsystem\nS'true'\no.",
    "new object": b"\x80\x02cbuiltins\nlist\n)\x81.",
    "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0dcore.os.system\x93.",
    "bare name": b"cnumpy\nndarray\n.",
    "memo far away": b"\x80\x02]r\xff\xff\xff\xffX\xff\xff\xff\xff.",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
    "long number": b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"1.",
    "negative length": b"\x80\x02\x8b" + struct.pack("<i", -5) + b"1.",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "laughs": b"\x80\x02]q\x00" + b"".join(map(_nine_times, range(18))) + b".",
    "empty": b"",
    "no stop": b"\x80\x02]",
    "nothing to take": b"\x80\x02a.",
    "no mark": b"\x80\x02e.",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_anything_but_plain_data_is_refused(name: str, tmp_path: Path, little_memory: None) -> None:
    path = tmp_path / "batch"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(DataError, match=r"refused|damaged"):
        read_plain_pickle(path)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", ["u1", "i8", "f4", ">i4", "bool"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_plain_data_comes_back_as_pickle_would_give_it(
    tmp_path: Path, protocol: int, kind: str, order: str
) -> None:
    array = np.asarray(made_files.pixels(0, 3, 4).astype(kind), order=order)
    value = {"a": array, "b": [1, -5, 1 << 70, 2.5, None, True, ("x", "é")], "c": {"d": b"\x00\xff"}}
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    ours = read_plain_pickle(path)
    assert isinstance(ours, dict)
    assert (ours["a"] == array).all()
    assert ours["a"].dtype == array.dtype
    assert ours["b"] == value["b"]
    assert ours["c"] == value["c"]


def test_the_opcodes_of_the_publishers_own_files(tmp_path: Path) -> None:
    """Python 2 and the numpy of 2009 wrote text and bytes alike, as strings."""
    raw = made_files.pixels(0, 2, 3072)
    content = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04"
        b"K\x00\x85U\x01b\x87Rq\x05(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", raw.size)
        + raw.tobytes()
        + b"tbU\x06labelsq\x08]q\x09(K\x03K\x05eu."
    )
    path = tmp_path / "batch"
    path.write_bytes(content)
    ours = read_plain_pickle(path)
    assert isinstance(ours, dict)
    assert (ours["data"] == raw).all()
    assert ours["labels"] == [3, 5]
    theirs = pickle.loads(content, encoding="bytes")
    assert (theirs[b"data"] == raw).all(), "the pickle must be one that pickle reads"


def test_a_shape_that_does_not_fit_its_bytes_is_refused(tmp_path: Path, little_memory: None) -> None:
    content = pickle.dumps({"data": made_files.pixels(0, 7, 3072)}, protocol=2)
    # 7 and 3072 as BININT1 and BININT2; the second becomes 65535.
    assert content.count(b"K\x07M\x00\x0c") == 1
    path = tmp_path / "batch"
    path.write_bytes(content.replace(b"K\x07M\x00\x0c", b"K\x07M\xff\xff"))
    with pytest.raises(DataError, match="damaged"):
        read_plain_pickle(path)

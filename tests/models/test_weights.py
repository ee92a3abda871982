"""Weights files: what goes in comes out, and what is wrong is refused in a sentence."""

import io
import json
import os
import pickle
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import menet
from menet.errors import CheckpointError
from menet.models import build, weights
from menet.training import load_model

RECIPE = {"dataset": "digits", "defense": {}, "training": {"epochs": 3}, "note": "é"}


@pytest.fixture(scope="module")
def network():
    generator = torch.Generator().manual_seed(0)
    made = build("small", channels=1, side=28, mean=(0.1307,), std=(0.3081,), generator=generator)
    made(torch.rand(4, 1, 28, 28, generator=generator))  # moves the batch statistics
    return made.eval()


@pytest.fixture(scope="module")
def stored(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    weights.save(path, network, RECIPE)
    return path


def same(left, right):
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


def write(path, header, body=b""):
    """A file with the frame of safetensors around any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def test_round_trip_with_open_header(network, stored):
    state, header = weights.load(stored)
    assert same(state, network.state_dict())
    assert header == {
        **RECIPE,
        "version": menet.__version__,
        "architecture": {
            "name": "small", "channels": 1, "side": 28, "classes": 10, "mean": [0.1307], "std": [0.3081]
        },
    }  # fmt: skip


@torch.no_grad()
def test_loading_needs_the_file_alone(network, stored):
    before = torch.get_rng_state()
    again = load_model(stored)
    assert torch.equal(torch.get_rng_state(), before)
    assert again.architecture == network.architecture
    images = torch.rand(3, 1, 28, 28)
    assert torch.equal(again(images), network(images))


def test_architecture_in_and_describe_are_inverse(network):
    header = json.loads(json.dumps({"architecture": weights.describe(network)}))
    assert weights.architecture_in(header) == network.architecture


def test_describe_tells_the_normalization_that_was_loaded(stored):
    other = build("small", channels=1, side=28, mean=(0.5,), std=(0.5,))
    other.load_state_dict(weights.load(stored)[0])
    assert weights.describe(other)["mean"] == pytest.approx([0.1307])
    assert weights.describe(other)["std"] == pytest.approx([0.3081])


def test_channels_last_and_shared_tensors_survive(tmp_path, generator):
    module = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Linear(6, 6), nn.Linear(6, 6))
    module[2].weight = module[1].weight
    module = module.to(memory_format=torch.channels_last)
    assert not module[0].weight.is_contiguous()
    expected = {key: value.clone() for key, value in module.state_dict().items()}
    weights.save(tmp_path / "w.safetensors", module, {})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.load_state_dict(weights.load(tmp_path / "w.safetensors")[0])
    assert same(module.state_dict(), expected)
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert module[1].weight.data_ptr() == module[2].weight.data_ptr()
    rows = torch.rand(4, 6, generator=generator)
    views = {"all": rows, "part": rows[1:3], "turned": rows.T, "one": torch.tensor(7), "none": rows[:0]}
    weights.save(tmp_path / "v.safetensors", views, {})
    assert same(weights.load(tmp_path / "v.safetensors")[0], views)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_kinds_of_numbers_survive(tmp_path, dtype):
    state = {"x": torch.arange(6).view(2, 3).to(dtype)}
    weights.save(tmp_path / "w", state, {})
    assert same(weights.load(tmp_path / "w")[0], state)


def test_loaded_tensors_do_not_depend_on_the_file(network, tmp_path):
    path = tmp_path / "w.safetensors"
    weights.save(path, network, {})
    state, _ = weights.load(path)
    with path.open("r+b") as file:
        file.truncate(10)
    assert same(state, network.state_dict())


class Stateful(nn.Module):
    def get_extra_state(self):
        return {"counter": 1}


def test_a_failed_save_leaves_the_old_file(network, tmp_path):
    path = tmp_path / "w.safetensors"
    weights.save(path, network, {"dataset": "old"})
    for bad in ({"x": object()}, {"x": float("nan")}):
        with pytest.raises(CheckpointError, match="the header cannot be written as JSON"):
            weights.save(path, network, bad)
    with pytest.raises(CheckpointError, match="expected tensors only, got '_extra_state' as dict"):
        weights.save(path, Stateful(), {})
    assert weights.load(path)[1]["dataset"] == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"name": "lenet"},
            r"do not fit the model: missing 'body\.first\.bias'",
        ),
        ({"channels": 3, "mean": [0.0] * 3, "std": [1.0] * 3}, r"'normalize\.mean' of shape 3×1×1, got 1×1×1"),
        ({"classes": 100}, r"expected 'head\.weight' of shape 100×128, got 10×128"),
    ],
)
def test_what_does_not_fit_the_header_is_named(network, tmp_path, change, words):
    text = json.dumps({"architecture": {**weights.describe(network), **change}})
    save_file(network.state_dict(), tmp_path / "w", metadata={"menet": text})
    with pytest.raises(CheckpointError, match=f"cannot load .*{words}"):
        load_model(tmp_path / "w")


def test_tensors_that_do_not_fit_are_named(network, tmp_path):
    header = {"architecture": weights.describe(network)}
    state = network.state_dict()
    for changed, words in (
        ({"surplus": torch.zeros(1)}, "unknown 'surplus'"),
        ({"head.bias": torch.zeros(10).int()}, r"expected 'head\.bias' as torch\.float32, got torch\.int32"),
        ({"head.bias": torch.zeros(())}, r"expected 'head\.bias' of shape 10, got scalar"),
    ):
        weights.save(tmp_path / "w", {**state, **changed}, header)
        with pytest.raises(CheckpointError, match=words):
            load_model(tmp_path / "w")


@pytest.mark.timeout(20)
def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        weights.load(tmp_path / "w.safetensors")


class Payload:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".safetensors", ""])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5, "torch", "old torch"])
def test_pickles_are_refused_and_do_not_run(tmp_path, suffix, protocol):
    planted = tmp_path / "ran"
    if isinstance(protocol, int):
        content = pickle.dumps(Payload(planted), protocol)
    else:
        buffer = io.BytesIO()
        torch.save({"x": Payload(planted)}, buffer, _use_new_zipfile_serialization=protocol == "torch")
        content = buffer.getvalue()
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    # The oldest protocol is plain text without a mark: only its usual names tell it from any other file.
    words = "pickle" if protocol != 0 or suffix in (".pt", ".pth", ".pkl") else "not a safetensors file"
    for attempt in (weights.load, load_model):
        with pytest.raises(CheckpointError, match=words):
            attempt(path)
    assert not planted.exists()
    pickle.loads(pickle.dumps(Payload(planted))).close()
    assert planted.exists(), "the payload is harmless, so the test shows nothing"


def test_what_is_not_a_weights_file_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(CheckpointError, match=r"cannot read .*: No such file"):
        weights.load(path)
    with pytest.raises(CheckpointError, match=r"cannot read .*: Is a directory"):
        weights.load(tmp_path)
    for content in (b"", b"short", b"hello, this is a text file", b"\x00" * 100):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a safetensors file"):
            weights.load(path)
    path.write_bytes(struct.pack("<Q", 2**60) + b"{" * 50)
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        weights.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="no 'menet' header"):
        weights.load(path)
    for text, words in (("{", "not JSON"), ("[]", "not a JSON object"), ("[" * 10**5, "not JSON")):
        save_file({"x": torch.zeros(1)}, path, metadata={"menet": text})
        with pytest.raises(CheckpointError, match=words):
            weights.load(path)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "X99", "shape": [1], "data_offsets": [0, 4]},
    ],
)
def test_absurd_sizes_are_refused_before_allocating(tmp_path, tensor):
    path = write(tmp_path / "w", {"__metadata__": {"menet": "{}"}, "x": tensor}, b"\x00" * 4)
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        weights.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "resnet1800"}, {"name": 3}, {"name": ["small"]},
        {"channels": 2**80}, {"channels": 1.0}, {"channels": True}, {"channels": None},
        {"side": 10**6}, {"side": 1}, {"classes": "10"}, {"classes": 10**12}, {"classes": 65_536},
        {"name": "lenet", "side": 60_000}, {"name": "lenet", "side": 8_000},
        {"mean": []}, {"mean": [0.1, 0.2]}, {"mean": "0"}, {"mean": [10**400]}, {"mean": [float("inf")]},
        {"std": [0]}, {"std": [float("nan")]}, {"std": [None]}, {"surprise": 1},
    ],
)  # fmt: skip
def test_a_hostile_header_asks_in_vain(network, tmp_path, change):
    architecture = {**weights.describe(network), **change}
    text = json.dumps({"architecture": architecture})
    save_file(network.state_dict(), tmp_path / "w", metadata={"menet": text})
    with pytest.raises(CheckpointError):
        load_model(tmp_path / "w")


def test_a_header_without_an_architecture_cannot_be_loaded(tmp_path):
    weights.save(tmp_path / "w", nn.Linear(2, 2), {"dataset": "digits"})
    with pytest.raises(CheckpointError, match="holds the weights of a network whose code is yours"):
        load_model(tmp_path / "w")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """A file small enough to damage everywhere, its content and its shapes."""
    path = tmp_path_factory.mktemp("fuzz") / "w.safetensors"
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 3))
    weights.save(path, module, RECIPE)
    return path, path.read_bytes()


def attempt(path, content):
    """Load damaged content: the project's own error, or tensors that hold as many bytes as the file says."""
    path.write_bytes(content)
    message = ""
    try:
        state, header = weights.load(path)
    except CheckpointError as error:
        message = str(error)
    if message:
        assert "\n" not in message
        assert len(message) < 600
        return False
    assert isinstance(header, dict)
    length = 8 + struct.unpack("<Q", content[:8])[0]
    assert sum(tensor.nbytes for tensor in state.values()) == len(content) - length
    return True


def test_every_truncation_is_refused(fuzzed):
    path, content = fuzzed
    for length in range(len(content)):
        assert not attempt(path, content[:length]), length
    assert not attempt(path, content + b"\x00")


@settings(max_examples=500)
@given(data=st.data())
def test_byte_flips_end_in_the_projects_error_or_in_the_right_bytes(fuzzed, data):
    path, content = fuzzed
    damaged = bytearray(content)
    positions = st.integers(0, len(content) - 1)
    for position in data.draw(st.lists(positions, min_size=1, max_size=4)):
        damaged[position] = data.draw(st.integers(0, 255))
    attempt(path, bytes(damaged))


def test_every_byte_of_the_frame_and_header_flipped(fuzzed):
    path, content = fuzzed
    end = 8 + struct.unpack("<Q", content[:8])[0]
    loaded = 0
    for position in range(end):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        loaded += attempt(path, bytes(damaged))
    assert 0 < loaded < end

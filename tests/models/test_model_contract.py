"""What every network promises, whatever its name."""

from types import SimpleNamespace

import pytest
import torch

from menet.models import NETWORKS, Architecture, Network, build, outline

every_network = pytest.mark.parametrize("name", NETWORKS)


# The code of the deeper one is that of the other, and its weights take seconds to draw.
every_built_network = pytest.mark.parametrize("name", [name for name in NETWORKS if name != "wide-resnet-34-10"])


class Built(dict):
    def __missing__(self, name):
        self[name] = build(name, generator=torch.Generator().manual_seed(0)).eval()
        return self[name]


def images(count=2, channels=3, side=32):
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def networks():
    """One network of each name for 3×32×32, in evaluation mode; tests leave them as they are."""
    return Built()


@every_network
@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (3, 64), (48, 19)])
def test_shapes_for_any_channels_and_side(name, channels, side):
    # On the meta device every shape is computed and no number, so that the widest networks cost nothing.
    ones = (1.0,) * channels
    network = outline(Architecture(name, channels, side, 7, mean=ones, std=ones)).to("meta")
    batch = torch.empty(2, channels, side, side, device="meta")
    assert network.features(batch).shape == (2, network.body.width)
    assert network(batch).shape == (2, 7)


@pytest.mark.parametrize("name", ["lenet", "resnet18", "compact", "small"])
@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 64), (48, 19)])
@torch.no_grad()
def test_any_channels_and_side_compute(name, channels, side):
    logits = build(name, channels=channels, side=side)(images(2, channels, side))
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()


@every_built_network
@torch.no_grad()
def test_logits_are_the_head_of_the_features(name, networks):
    network = networks[name]
    logits = network(images())
    torch.testing.assert_close(network.head(network.features(images())), logits, rtol=0, atol=0)
    assert logits.isfinite().all()
    assert logits.std() > 0


@every_built_network
def test_gradients_reach_the_image_and_every_weight(name, networks):
    network = networks[name]
    batch = images().requires_grad_()
    network(batch).logsumexp(1).sum().backward()
    assert batch.grad is not None
    assert (batch.grad != 0).float().mean() > 0.9
    assert all(parameter.grad is not None for parameter in network.parameters())
    network.zero_grad()


@every_built_network
@torch.no_grad()
def test_channels_last_computes_the_same(name, networks):
    batch = images()
    expected = networks[name](batch)
    network = build(name)
    network.load_state_dict(networks[name].state_dict())
    network = network.eval().to(memory_format=torch.channels_last)
    actual = network(batch.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@every_built_network
@torch.no_grad()
def test_bfloat16_autocast_is_near(name, networks):
    expected = networks[name](images())
    with torch.autocast("cpu", torch.bfloat16):
        actual = networks[name](images())
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() < 0.1 * expected.norm()


@every_built_network
@torch.no_grad()
def test_state_dict_round_trip(name, networks):
    copy = build(name, generator=torch.Generator().manual_seed(5)).eval()
    assert not torch.equal(copy(images()), networks[name](images()))
    copy.load_state_dict(networks[name].state_dict())
    torch.testing.assert_close(copy(images()), networks[name](images()), rtol=0, atol=0)


@every_built_network
def test_weights_come_from_the_generator_alone(name, networks):
    before = torch.get_rng_state()
    again = build(name, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in again.state_dict().items():
        assert torch.equal(value, networks[name].state_dict()[key]), key


@pytest.mark.parametrize("name", ["lenet", "resnet18", "small"])
def test_without_a_generator_torchs_own_seed_decides(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = build(name)
        second = build(name)
        torch.manual_seed(3)
        third = build(name)
    assert torch.equal(first.head.weight, third.head.weight)
    assert not torch.equal(first.head.weight, second.head.weight)


@every_built_network
@torch.no_grad()
def test_normalization_is_the_first_layer(name, networks):
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    network = build(name, mean=mean, std=std)
    state = networks[name].state_dict()
    network.load_state_dict({k: v for k, v in state.items() if not k.startswith("normalize")}, strict=False)
    by_hand = (images() - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    torch.testing.assert_close(network.eval()(images()), networks[name](by_hand))


@every_built_network
def test_built_like_a_dataset(name):
    dataset = SimpleNamespace(
        images=SimpleNamespace(shape=(10, 1, 28, 28)), classes=("a", "b", "c"), mean=(0.1307,), std=(0.3081,)
    )
    network = build(name, like=dataset)
    assert isinstance(network, Network)
    assert network.architecture.channels == 1
    assert network.architecture.side == 28
    assert network.architecture.classes == network.head.out_features == 3
    assert network.architecture.mean == (0.1307,)
    torch.testing.assert_close(network.normalize.std.flatten(), torch.tensor([0.3081]))


@torch.no_grad()
def test_compact_costs_at_most_a_quarter_of_a_gigaflop():
    """Multiplications and additions of its convolutions and head, for 32×32 and, with a larger stride, 64×64."""
    operations = []

    def count(layer, inputs, output):
        positions = output[0, 0].numel() if output.ndim == 4 else 1
        operations.append(2 * layer.weight.numel() * positions)

    for side in (32, 64):
        operations.clear()
        network = build("compact", side=side).eval()
        for layer in network.modules():
            if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
                layer.register_forward_hook(count)
        network(images(1, side=side))
        assert 0.05e9 < sum(operations) < 0.25e9

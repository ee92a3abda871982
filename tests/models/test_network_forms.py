"""Published sizes of the networks, what build refuses, and that the small network learns."""

from contextlib import nullcontext

import pytest
import torch

from menet.errors import ConfigurationError
from menet.models import NETWORKS, Architecture, Normalize, build, initialize, outline
from menet.models.networks import WideResNet
from menet.preprocessed import evaluation_mode


def count(name, channels=3, side=32, classes=10):
    architecture = Architecture(name, channels, side, classes, (0.0,) * channels, (1.0,) * channels)
    return sum(parameter.numel() for parameter in outline(architecture).parameters())


@pytest.mark.parametrize(
    ("published", "arguments"),
    [
        # Madry et al.'s MNIST network: "Total size of variables: 3274634" as TensorFlow prints it.
        (3_274_634, ("lenet", 1, 28)),
        # The public CIFAR collection that the paper's release builds on.
        (11_173_962, ("resnet18",)),
        (6_956_298, ("densenet121",)),
        # Zagoruyko and Komodakis: "36.5M"; the exact numbers are tables of later papers on robustness.
        (36_479_194, ("wide-resnet-28-10",)),
        (46_160_474, ("wide-resnet-34-10",)),
        # With 100 classes: 90 more rows of 640 weights and a bias.
        (36_536_884, ("wide-resnet-28-10", 3, 32, 100)),
    ],
)
def test_parameter_counts_are_the_published_ones(published, arguments):
    assert count(*arguments) == published


def test_densenet_has_the_blocks_of_the_imagenet_form():
    # ImageNet's DenseNet-121: 7,978,856 weights, of them 1,025,000 in the classifier of 1000 classes; its
    # stem is 7×7 and has a batch normalization of its own (2·64), where this form has 3×3 and none.
    assert count("densenet121", side=64, classes=1000) + 3 * 64 * (49 - 9) + 2 * 64 == 7_978_856
    assert count("densenet121", side=64, classes=200) == 6_946_048 + 1025 * 200


@pytest.mark.parametrize(("depth", "factor", "published"), [(16, 10, 17_116_634), (22, 10, 26_797_914)])
def test_other_wide_resnets_have_their_published_counts(depth, factor, published):
    with torch.device("meta"):
        body = WideResNet(3, depth, factor)
    assert sum(parameter.numel() for parameter in body.parameters()) + 641 * 10 == published
    with pytest.raises(ConfigurationError, match="got 30"):
        WideResNet(3, 30)


def test_small_is_small():
    assert 100_000 < count("small") < 350_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "resnet19"}, "unknown network 'resnet19'; choose from lenet, resnet18"),
        ({"channels": 0}, "expected channels between 1 and 65536, got 0"),
        ({"channels": 10**15}, "got 1000000000000000"),
        ({"side": 7}, "expected side between 8 and 65536, got 7"),
        ({"classes": -1}, "expected classes between 1 and 65536, got -1"),
        ({"mean": (0.5,)}, "expected mean with 3 values, one per channel, got 1"),
        ({"std": (1.0, 0.0, 1.0)}, r"expected std > 0, got \(1.0, 0.0, 1.0\)"),
        ({"mean": (0.0, float("nan"), 0.0)}, "expected a finite mean"),
        ({"name": "lenet", "side": 60_000}, "expected at most 1,000,000,000 weights"),
    ],
)
def test_what_cannot_be_built_is_named(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        build(**{"name": "small", **arguments})


def test_arguments_override_the_dataset_and_other_channels_are_not_normalized():
    class Dataset:
        images = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
        classes = ("cat", "dog")
        mean = (0.4, 0.4, 0.4)
        std = (0.2, 0.2, 0.2)

    assert build("small", Dataset(), classes=5).architecture == Architecture(
        "small", 3, 64, 5, (0.4,) * 3, (0.2,) * 3
    )
    wide = build("small", Dataset(), channels=48)
    assert wide.architecture.mean == (0.0,) * 48
    assert wide.architecture.std == (1.0,) * 48
    Dataset.images = torch.zeros(1, 3, 64, 32, dtype=torch.uint8)
    with pytest.raises(ConfigurationError, match=r"expected square images .* got \(1, 3, 64, 32\)"):
        build("small", Dataset())


def test_one_channel_does_not_broadcast_over_three():
    with pytest.raises(ConfigurationError, match="expected images of 3 channels, got 1"):
        build("small")(torch.rand(2, 1, 32, 32))


def test_normalize_matches_the_datasets_statistics(generator):
    pixels = torch.rand(64, 3, 8, 8, generator=generator) * torch.tensor([0.2, 0.5, 1.0]).view(3, 1, 1)
    layer = Normalize(pixels.mean((0, 2, 3)).tolist(), pixels.std((0, 2, 3)).tolist())
    normalized = layer(pixels)
    torch.testing.assert_close(normalized.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normalized.std((0, 2, 3)), torch.ones(3), atol=1e-5, rtol=0)


def test_initial_weights_have_torchs_and_hes_spread(generator):
    layers = torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.Conv2d(64, 96, 3, bias=False))
    reference = layers[0].weight.std()
    initialize(layers, generator)
    linear, convolution = layers
    assert linear.weight.abs().max() <= 1 / 20
    assert linear.bias.abs().max() <= 1 / 20
    torch.testing.assert_close(linear.weight.std(), reference, rtol=0.02, atol=0)
    torch.testing.assert_close(convolution.weight.std().item(), (2 / (9 * 96)) ** 0.5, rtol=0.02, atol=0)


def test_a_layer_without_a_rule_is_not_left_uninitialized():
    with pytest.raises(TypeError, match="no rule for layer '0' \\(PReLU\\)"):
        initialize(torch.nn.Sequential(torch.nn.PReLU()))


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "wide-resnet-34-10"])
def test_nothing_is_left_as_it_was_in_memory(name, monkeypatch):
    # Networks are built empty; here "empty" is full of NaN, which any forgotten tensor would keep.
    kept = torch.nn.Module.to_empty

    def spoiled(module, **arguments):
        kept(module, **arguments)
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        return module

    monkeypatch.setattr(torch.nn.Module, "to_empty", spoiled)
    state = build(name).state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert all(tensor == 0 for key, tensor in state.items() if key.endswith("num_batches_tracked"))


def test_small_learns_real_digits_in_one_pass(generator):
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn: pip install 'menet[demo]'")
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div(16).view(-1, 1, 8, 8)
    images = torch.nn.functional.interpolate(images, size=28, mode="bilinear")
    targets = torch.from_numpy(labels).long()
    train, test = torch.randperm(len(images), generator=generator).split([1400, len(images) - 1400])
    network = build("small", channels=1, side=28, mean=(0.3,), std=(0.37,), generator=generator)
    network = network.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    batches = train.split(20)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(batches))
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images[batch]), targets[batch]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        accuracy = (network.eval()(images[test]).argmax(1) == targets[test]).float().mean()
    assert accuracy > 0.9


@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_mode_lays_convolutions_out_and_leaves_everything_as_it_was(fails):
    network = build("lenet", channels=1, side=28, generator=torch.Generator().manual_seed(0)).train()
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    kernels = [layer.weight for layer in network.modules() if isinstance(layer, torch.nn.Conv2d)]
    before = [(kernel.clone(), kernel.stride()) for kernel in kernels]
    with pytest.raises(KeyError) if fails else nullcontext(), evaluation_mode(network):
        assert not network.training
        assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
        inside = network(images)
        if fails:
            raise KeyError
    assert network.training
    for kernel, (value, stride) in zip(kernels, before, strict=True):
        assert torch.equal(kernel, value)
        assert kernel.stride() == stride
    torch.testing.assert_close(inside, network.eval()(images))

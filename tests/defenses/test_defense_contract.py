"""What every preprocessing defense promises; a new one joins by adding one line to DEFENSES."""

import copy
import pickle
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from menet import baselines, models
from menet.defense import MENet
from menet.errors import ConfigurationError
from menet.estimators import USVT, MaskOnly, NuclearNorm, SoftImpute, TubalNuclearNorm
from menet.preprocessed import Preprocessed, describe, rebuild

DEFENSES: dict[str, Callable[[nn.Module], Preprocessed]] = {
    "nuclear norm": lambda network: MENet(network, NuclearNorm()),
    "nuclear norm, separate channels": lambda network: MENet(network, NuclearNorm(), channels="separate"),
    "usvt": lambda network: MENet(network, USVT(), p=(0.8, 1.0)),
    "soft-impute": lambda network: MENet(network, SoftImpute(), p=0.5),
    "tubal": lambda network: MENet(network, TubalNuclearNorm(), masks=3),
    "mask only": lambda network: MENet(network, MaskOnly()),
    "pixel masks": lambda network: MENet(network, USVT(), mask="pixels"),
    "ablation": lambda network: MENet(network, mask="pixels", encoding="ablation"),
    "estimate and mask": lambda network: MENet(network, USVT(), mask="cells", encoding="estimate+mask"),
    "thermometer": lambda network: baselines.Thermometer(network, levels=5),
    "total variation": lambda network: baselines.TotalVariation(network),
    "pixel defend": lambda network: fitted(baselines.PixelDefend(network, levels=8, width=2, layers=0, steps=2)),
    "image quilting": lambda network: fitted(baselines.ImageQuilting(network, patches=2000)),
    "image quilting, cropped": lambda network: fitted(baselines.ImageQuilting(network, patches=2000, crop=0.5)),
    "defense-gan": lambda network: fitted(
        baselines.DefenseGAN(network, steps=2, starts=2, latent=4, features=2, gan_steps=1)
    ),
    "bit depth": lambda network: baselines.BitDepth(network, bits=2),
    "median": lambda network: baselines.MedianSmoothing(network),
    "resize and pad": lambda network: baselines.ResizePad(network, smallest=0.5),
    "discretize": lambda network: fitted(baselines.Discretize(network, colors=6)),
    "jpeg": lambda network: baselines.JPEG(network),
}
RANDOM = set(DEFENSES) - {"thermometer", "pixel defend", "bit depth", "median", "discretize", "jpeg"}
"""Those whose answers differ from call to call; a deterministic defense is left out here."""


class Little(nn.Module):
    """A classifier whose every answer depends on every pixel, without batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3 * 16 * 16, 12)
        self.head = nn.Linear(12, 4)

    def features(self, images: Tensor) -> Tensor:
        # Codes of several channels for each of the image's are weighed by their place.
        codes = images.unflatten(1, (3, -1))
        weights = torch.linspace(1, 2, codes.shape[2], dtype=images.dtype)
        return torch.tanh(self.hidden(torch.einsum("bckhw,k->bchw", codes, weights).flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def fitted(model: Preprocessed) -> Preprocessed:
    generator = torch.Generator().manual_seed(0)
    return model.fit(torch.rand(8, 3, 16, 16, generator=generator), generator)


@pytest.fixture(params=DEFENSES, ids=lambda name: name.replace(" ", "-"))
def name(request) -> str:
    return request.param


@cache
def made(name: str) -> Preprocessed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DEFENSES[name](Little()).eval()


@pytest.fixture
def model(name: str) -> Preprocessed:
    return copy.deepcopy(made(name))


@pytest.fixture
def images() -> Tensor:
    # Smooth, like photographs: what is low in rank is what the estimators are for.
    coarse = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    return nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear").clamp(0, 1)


def logits_of(model: nn.Module, images: Tensor, seed: int = 1) -> Tensor:
    model.reseed(seed)
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_estimates_are_images_and_logits_are_logits(model, images, mode):
    model.train(mode)
    seen = model.reconstruct(images)
    assert seen.shape == (5, model.classifier_channels(3, model.settings()), 16, 16)
    assert seen.dtype == images.dtype
    assert float(seen.min()) >= 0
    assert float(seen.max()) <= 1
    assert model(images).shape == (5, 4)
    assert model.features(images).shape == (5, 12)
    assert model(images[:0]).shape == (0, 4)


def test_input_is_left_as_it_was(model, images):
    before = images.clone()
    model(images)
    assert torch.equal(images, before)


def test_seed_decides_the_draws_and_nothing_global_does(name, model, images):
    before = torch.get_rng_state()
    first = logits_of(model, images)
    torch.manual_seed(99)
    assert torch.equal(logits_of(model, images), first)
    torch.set_rng_state(before)
    logits_of(model, images)
    assert torch.equal(torch.get_rng_state(), before)
    if name in RANDOM:
        assert not torch.equal(logits_of(model, images, 2), first)
        with torch.no_grad():
            assert not torch.equal(model(images), model(images))


def test_each_image_has_draws_of_its_own(name, model, images):
    if name not in RANDOM:
        pytest.skip("draws nothing")
    one = images[:1].expand(6, -1, -1, -1)
    seen = model.reconstruct(one)
    assert not torch.equal(seen[0], seen[1])


def test_bpda_takes_the_step_for_the_identity(model, images):
    view = model.with_gradient("bpda")
    model.reseed(4)
    leaf = images.clone().requires_grad_()
    seen = view.reconstruct(leaf)
    weight = torch.randn(seen.shape, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad((seen * weight).sum(), leaf)
    # A defense may say what the step is taken for; then it is that map's gradient.
    other = images.clone().requires_grad_()
    (expected,) = torch.autograd.grad((view.surrogate(other) * weight).sum(), other)
    torch.testing.assert_close(gradient, expected)
    model.reseed(4)
    torch.testing.assert_close(seen, model.reconstruct(images), rtol=0, atol=1e-6)


def test_gradient_is_one_of_two_names(model, without_annotation_checks):
    for gradient in ("exact", "bpda"):
        assert model.with_gradient(gradient).gradient == gradient
    with pytest.raises(ConfigurationError, match="unknown gradient 'magic'; choose from exact, bpda"):
        model.with_gradient("magic")


def test_a_view_with_another_gradient_shares_weights_and_randomness(name, model, images):
    view = model.with_gradient("exact")
    assert view.classifier is model.classifier
    assert view.generator is model.generator
    if name in RANDOM:
        model.reseed(0)
        with torch.no_grad():
            first, second = model(images), view(images)
        assert not torch.equal(first, second), "the view replays the masks of the original"


def test_state_dict_carries_weights_and_no_randomness(name, model, images):
    assert not any("extra_state" in key for key in model.state_dict())
    other = DEFENSES[name](Little()).eval()
    other.reseed(5)
    state = other.generator.get_state()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(other.generator.get_state(), state), "loading weights changed the generator"
    assert torch.equal(logits_of(other, images), logits_of(model, images))


def test_without_a_seed_no_two_modules_share_draws(name, model, images):
    if name not in RANDOM:
        pytest.skip("draws nothing")
    twins = [rebuild(model.classifier, describe(model), seed=None).eval() for _ in range(2)]
    for twin in twins:
        twin.load_state_dict(model.state_dict())
    assert not torch.equal(twins[0].reconstruct(images), twins[1].reconstruct(images))
    assert torch.equal(logits_of(twins[0], images), logits_of(twins[1], images))


def test_settings_are_json_and_rebuild_the_defense(model, images, tmp_path):
    described = describe(model)
    path = tmp_path / "model.safetensors"
    models.weights.save(path, model, {"defense": described})
    state, header = models.weights.load(path)
    other = rebuild(Little(), header["defense"]).eval()
    other.load_state_dict(state)
    assert type(other) is type(model)
    assert describe(other) == described
    assert torch.equal(logits_of(other, images), logits_of(model, images))


def test_unknown_settings_are_refused_by_name(model):
    with pytest.raises(ConfigurationError, match="unknown setting 'color'"):
        rebuild(Little(), {**describe(model), "color": "red"})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_go_on_alike_and_apart(model, images, copied):
    model.reseed(8)
    twin = copied(model)
    first = model(images)
    assert torch.equal(twin(images), first)
    twin.classifier.head.bias.data.add_(1)
    model.reseed(8)
    assert torch.equal(model(images), first)


def test_data_parallel_wraps_it(model, images):
    expected = logits_of(model, images, 3)
    model.reseed(3)
    assert torch.equal(nn.DataParallel(model)(images), expected)
    # What DataParallel does on several devices: replicas without copies of the parameters.
    assert model._replicate_for_data_parallel().generator is model.generator


def test_moves_and_changes_type_like_any_module(model, images):
    double = copy.deepcopy(model).double()
    assert double(images.double()).dtype == torch.float64
    assert model.to("cpu") is model
    assert copy.deepcopy(model).to("meta").classifier.head.weight.device.type == "meta"


def test_autocast_touches_the_classifier_alone(model, images):
    model.reseed(2)
    expected = model.reconstruct(images)
    model.reseed(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.reconstruct(images), expected)
        assert model(images).dtype == torch.bfloat16


@pytest.mark.parametrize("gradient", ["exact", "bpda"])
def test_gradients_under_autocast_are_those_of_float32(model, images, gradient):
    view = model.with_gradient(gradient)
    found = []
    for enabled in (False, True):
        model.reseed(2)
        leaf = images.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            seen = view.reconstruct(leaf)
            weight = torch.linspace(-1, 1, seen.numel()).reshape(seen.shape)
            if seen.requires_grad:
                found.append((seen.detach(), *torch.autograd.grad(seen, leaf, weight, allow_unused=True)))
            else:
                found.append((seen,))
    for plain, cast in zip(*found, strict=True):
        assert (plain is None and cast is None) or torch.equal(cast, plain)


def test_gradients_reach_what_a_preprocessing_learns(images):
    class Scaled(Preprocessed):
        def __init__(self):
            super().__init__(nn.Flatten(), gradient="exact")
            self.mix = nn.Linear(16, 16)

        def preprocess(self, images, generator):
            return self.mix(images)

    model, leaf = Scaled(), images.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(leaf).square().sum().backward()
    found = [leaf.grad, model.mix.weight.grad, model.mix.bias.grad]
    model.zero_grad()
    plain = images.clone().requires_grad_()
    model.mix(plain).square().sum().backward()
    for one, other in zip(found, [plain.grad, model.mix.weight.grad, model.mix.bias.grad], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_half_precision_is_computed_in_single(model, images):
    low = images.to(torch.bfloat16)
    model.reseed(2)
    seen = model.reconstruct(low)
    assert seen.dtype == torch.bfloat16
    model.reseed(2)
    assert torch.equal(seen, model.reconstruct(low.float()).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda images: images[0], r"got shape \(3, 16, 16\); add a batch dimension: images\[None\]"),
        (
            lambda images: images[0, 0],
            r"expected images \(batch, channels, height, width\), got shape \(16, 16\)",
        ),
        (lambda images: (images * 255).to(torch.uint8), r"got torch.uint8; divide by 255"),
        (lambda images: images.numpy(), r"expected images as a tensor, got a ndarray; use torch.as_tensor"),
        (lambda images: images * 2 - 1, r"expected pixels in \[0, 1\], .* normalization inside the classifier"),
        (
            lambda images: images / images.max() + 0.001,
            r"expected pixels in \[0, 1\], got values from .* to 1.001",
        ),
        (lambda images: torch.where(images > 0.5, torch.nan, images), r"expected pixels in \[0, 1\], got .* nan"),
    ],
)
def test_what_is_no_batch_of_images_is_refused(images, wrong, words, without_annotation_checks):
    with pytest.raises(ConfigurationError, match=words):
        MENet(nn.Flatten(), MaskOnly())(wrong(images))


def test_the_range_allows_for_rounding_and_for_tensors_without_values(images):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = MENet(nn.Flatten(), MaskOnly()).eval()
    assert model(images / images.max() * (1 + 1e-5)).shape == (5, 3 * 16 * 16)
    model._check_images(images.to("meta"))
    with FakeTensorMode() as mode:
        model._check_images(mode.from_tensor(images))


def test_vote_is_the_most_frequent_answer(model, images):
    model.reseed(6)
    answers = torch.stack([model(images).argmax(1) for _ in range(5)])
    model.reseed(6)
    votes = model.votes(images, 5)
    assert torch.equal(votes.sum(1), torch.full((5,), 5))
    for example in range(5):
        assert torch.equal(votes[example], torch.bincount(answers[:, example], minlength=4))
    model.reseed(6)
    assert torch.equal(model.vote(images, 5), votes.argmax(1))
    with pytest.raises(ConfigurationError, match="expected draws >= 1, got 0"):
        model.vote(images, 0)


def test_average_is_over_logits_or_probabilities(model, images, without_annotation_checks):
    model.reseed(6)
    draws = model.sample(images, 4)
    model.reseed(6)
    torch.testing.assert_close(model.average(images, 4), draws.mean(0))
    model.reseed(6)
    probabilities = model.average(images, 4, of="probabilities").exp()
    torch.testing.assert_close(probabilities, draws.softmax(-1).mean(0))
    with pytest.raises(ConfigurationError, match="unknown average of 'votes'"):
        model.average(images, 4, of="votes")


def test_training_reaches_every_weight(model, images):
    model.train()
    nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 3, 0])).backward()
    for parameter in model.classifier.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


def test_parts_of_a_batch_see_what_the_whole_would(model, images):
    model.train()
    four = images[:4]
    model.reseed(9)
    whole = model.reconstruct(four)
    parts = []
    for part in range(2):
        model.shard = (part, 2)
        model.reseed(9)
        parts.append(model.reconstruct(four[2 * part : 2 * part + 2]))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-5)

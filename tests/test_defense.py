"""ME-Net itself: Algorithm 1, its schedule, explicit masks, fixed banks, and torch's own tools around it."""

import pytest
import torch
from torch import Tensor, nn

import menet
from menet import FixedMasks, MENet, NuclearNorm, masks, models
from menet import images as pictures
from menet.errors import CheckpointError, ConfigurationError, MenetError
from menet.estimators import USVT, MaskOnly, SoftImpute, TubalNuclearNorm
from menet.preprocessed import rebuild


@pytest.fixture
def photographs() -> Tensor:
    coarse = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)


def network() -> nn.Module:
    return models.build("small", generator=torch.Generator().manual_seed(0)).eval()


def test_forward_is_algorithm_1_written_out(photographs):
    classifier = network()
    model = MENet(classifier, NuclearNorm(), p=(0.4, 0.6)).eval().reseed(3)
    # mask, estimate, classify: by hand, with a generator of the same seed.
    matrices = torch.cat(list((2 * photographs - 1).unbind(1)), dim=-1)
    seen = torch.rand(matrices.shape, generator=torch.Generator().manual_seed(3)) < 0.49
    estimate = NuclearNorm()(matrices, seen)
    images = torch.stack(estimate.split(32, dim=-1), 1).add(1).div(2).clamp(0, 1)
    torch.testing.assert_close(model(photographs), classifier(images))


def test_p_follows_the_schedule_while_training_and_its_mean_in_evaluation():
    model = MENet(nn.Flatten(), MaskOnly(), p=(0.2, 0.8), masks=3)
    images = torch.rand(300, 1, 40, 40, generator=torch.Generator().manual_seed(0))
    assert model.schedule == pytest.approx((0.2, 0.4, 0.6))
    fractions = model.sample_mask(images, model.generator).flatten(1).float().mean(1)
    nearest = (fractions[:, None] - torch.tensor(model.schedule)).abs()
    assert float(nearest.min(1).values.max()) < 0.07
    counts = torch.bincount(nearest.argmin(1), minlength=3)
    assert int(counts.min()) > 60
    fractions = model.eval().sample_mask(images, model.generator).flatten(1).float().mean(1)
    assert float((fractions - 0.4).abs().max()) < 0.07
    assert float(fractions.mean()) == pytest.approx(0.4, abs=0.005)


def test_one_number_is_a_constant_probability():
    model = MENet(nn.Flatten(), p=0.7)
    assert set(model.schedule) == {0.7}
    assert model.mean_p == pytest.approx(0.7)


def test_an_estimator_may_be_a_name_and_p_a_list():
    model = MENet(nn.Flatten(), "usvt", p=[0.4, 0.6])
    assert model.estimator == USVT()
    assert model.p == (0.4, 0.6)
    assert model.schedule == MENet(nn.Flatten(), p=(0.4, 0.6)).schedule


@pytest.mark.parametrize("gradient", ["exact", "bpda"])
@pytest.mark.parametrize(
    "estimator",
    [USVT(), SoftImpute(), NuclearNorm(), TubalNuclearNorm(), MaskOnly()],
    ids=lambda e: type(e).__name__,
)
def test_a_backward_pass_inside_autocast_is_that_of_float32(photographs, estimator, gradient):
    # Training on a processor with bfloat16 instructions runs whole steps, backward passes included, in autocast.
    model = MENet(nn.Flatten(), estimator, gradient=gradient).eval()
    outgoing = torch.randn(2, 3 * 32 * 32, generator=torch.Generator().manual_seed(0))
    gradients = []
    for enabled in (False, True):
        model.reseed(0)
        leaf = photographs[:2].clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            gradients += torch.autograd.grad(model(leaf), leaf, outgoing)
    assert torch.equal(*gradients)


def test_a_mask_may_have_the_layout_of_the_images(photographs):
    model = MENet(nn.Flatten(), NuclearNorm()).eval()
    mask = masks.bernoulli(photographs.shape, 0.5, torch.Generator().manual_seed(1))
    assert torch.equal(model(photographs, mask), model(photographs, pictures.join_channels(mask)))


def test_explicit_masks_decide_the_answer(photographs):
    model = MENet(network(), NuclearNorm()).eval()
    one = masks.bernoulli(model.mask_shape(photographs), 0.5, torch.Generator().manual_seed(1))
    each = masks.bernoulli((6, *model.mask_shape(photographs)), 0.5, torch.Generator().manual_seed(2))
    before = model.generator.get_state()
    assert torch.equal(model(photographs, one), model(photographs, one))
    assert torch.equal(model.generator.get_state(), before), "an explicit mask must not draw"
    torch.testing.assert_close(model(photographs, one), model(photographs, one.expand(6, -1, -1)))
    assert not torch.allclose(model(photographs, one), model(photographs, each))
    everything = torch.ones(model.mask_shape(photographs), dtype=torch.bool)
    plain = MENet(model.classifier, MaskOnly()).eval()
    torch.testing.assert_close(plain(photographs, everything), model.classifier(photographs))


def test_explicit_masks_pass_gradients_as_the_module_says(photographs):
    mask = masks.bernoulli((32, 96), 0.5, torch.Generator().manual_seed(1))
    for gradient, reached in (("bpda", True), ("exact", False)):
        model = MENet(nn.Flatten(), MaskOnly(), gradient=gradient).eval()
        leaf = photographs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(leaf, mask).sum(), leaf)
        unseen = ~pictures.to_image(mask[None].double() * 2 - 1, (1, 3, 32, 32)).bool()[0]
        assert bool((slope[:, unseen] != 0).all()) == reached


@pytest.mark.parametrize(
    ("estimator", "channels", "shape"),
    [
        (NuclearNorm(), "joint", (32, 96)),
        (NuclearNorm(), "separate", (1, 32, 32)),
        (TubalNuclearNorm(), "joint", (3, 32, 32)),
        (TubalNuclearNorm(), "separate", (1, 32, 32)),
    ],
)
def test_what_a_mask_covers(photographs, estimator, channels, shape):
    model = MENet(nn.Flatten(), estimator, channels=channels)
    assert model.mask_shape(photographs) == shape
    assert model.sample_mask(photographs, model.generator).shape == (6, *shape)


def test_fixed_masks_are_public_deterministic_and_shared_by_all_images(photographs):
    model = MENet(network(), NuclearNorm()).eval()
    fixed = model.fixed(4, seed=5)
    assert isinstance(fixed, FixedMasks)
    first = fixed(photographs)
    model.reseed(123)
    assert torch.equal(fixed(photographs), first)
    torch.testing.assert_close(fixed(photographs[:2]), first[:2], rtol=1e-4, atol=1e-5)
    bank = masks.bank(4, (32, 96), 0.49, torch.Generator().manual_seed(5))
    assert torch.equal(fixed.bank(photographs), bank)
    expected = torch.stack([model(photographs, mask) for mask in bank]).mean(0)
    torch.testing.assert_close(first, expected)
    assert not torch.allclose(model.fixed(4, seed=6)(photographs), first)
    leaf = photographs.clone().requires_grad_()
    assert torch.autograd.grad(fixed(leaf).sum(), leaf)[0].abs().sum() > 0


def test_a_compiled_model_gives_the_same_logits(photographs, without_annotation_checks):
    model = MENet(network(), USVT()).eval()
    compiled = torch.compile(model, backend="eager")
    expected = [model.reseed(2)(photographs), model(photographs)]
    model.reseed(2)
    got = [compiled(photographs), compiled(photographs)]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(got[0], got[1]), "compiling must not freeze the masks"
    leaf = photographs.clone().requires_grad_()
    assert torch.autograd.grad(compiled(leaf).sum(), leaf)[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"p": (0.6, 0.4)}, r"expected p in .*, got \(0.6, 0.4\)"),
        ({"p": (-0.1, 0.4)}, r"expected p in .*, got \(-0.1, 0.4\)"),
        ({"p": [0.4, 0.5, 0.6]}, r"expected p in .*, got \[0.4, 0.5, 0.6\]"),
        ({"p": "half"}, "expected p in .*, got half"),
        ({"p": 1.5}, "expected p in .*, got 1.5"),
        ({"masks": 0}, "expected 1 <= masks <= 10,000, got 0"),
        ({"masks": 10**12}, "expected 1 <= masks <= 10,000, got 1000000000000"),
        ({"channels": "mixed"}, "unknown channels 'mixed'; choose from joint, separate"),
        ({"gradient": "none"}, "unknown gradient 'none'; choose from exact, bpda"),
        ({"estimator": "nuclear"}, "unknown estimator 'nuclear'; .*did you mean 'nuclear-norm'"),
        ({"estimator": NuclearNorm}, r"got the class NuclearNorm; create one: NuclearNorm\(\)"),
        ({"estimator": 3}, "expected an estimator or its name, got 3"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings, words, without_annotation_checks):
    with pytest.raises(ConfigurationError, match=words):
        MENet(nn.Flatten(), **settings)


@pytest.mark.parametrize(
    "estimator", [{"name": "guess"}, {"name": "usvt", "keep": 3}, {"name": "usvt", "speed": 1}, {}, {"mu": 1}]
)
def test_estimators_that_cannot_be_built_are_refused(estimator):
    with pytest.raises(ConfigurationError, match="estimator"):
        rebuild(nn.Flatten(), {"name": "me-net", "estimator": estimator})


def test_unknown_defense_is_refused_and_none_is_the_bare_network():
    bare = nn.Flatten()
    assert rebuild(bare, {}) is bare
    with pytest.raises(ConfigurationError, match=r"unknown defense 'wishful thinking'; choose from .*me-net"):
        rebuild(bare, {"name": "wishful thinking"})


@pytest.mark.parametrize("estimator", [USVT(), TubalNuclearNorm(), MaskOnly()], ids=lambda e: type(e).__name__)
def test_pixel_masks_hide_all_channels_of_a_pixel_in_the_joint_layout(photographs, estimator):
    model = MENet(nn.Flatten(), estimator, p=0.3, mask="pixels").eval()
    mask = model.sample_mask(photographs, model.generator)
    assert mask.shape == (6, 1, 32, 32)
    together = model.estimate(photographs, mask)
    entries = MENet(nn.Flatten(), estimator, p=0.3).eval()
    assert torch.equal(together, entries.estimate(photographs, mask.expand(-1, 3, -1, -1)))
    shared = model.estimate(photographs, mask[0])
    assert torch.equal(shared[:1], together[:1])
    bank = model.fixed(2)
    assert bank.bank(photographs).shape == (2, 1, 32, 32)
    assert bank(photographs).shape == (6, 3 * 32 * 32)
    with pytest.raises(ConfigurationError, match=r"expected a mask .*\(32, 96\)"):
        model.estimate(photographs, torch.ones(32, 96, dtype=torch.bool))


@pytest.mark.parametrize("mask", ["entries", "pixels", "cells"])
@pytest.mark.parametrize("channels", ["joint", "separate"])
def test_an_ablation_tells_absent_from_black(photographs, channels, mask):
    model = MENet(nn.Flatten(), p=0.2, channels=channels, mask=mask, encoding="ablation", gradient="exact").eval()
    black = torch.zeros_like(photographs)
    for images in (photographs, black):
        seen, complement = model.reseed(1).reconstruct(images).chunk(2, 1)
        observed = seen + complement
        assert set(observed.unique().tolist()) <= {0.0, 1.0} or torch.allclose(observed, observed.round())
        assert float(observed.mean()) == pytest.approx(0.2, abs=0.03)
        torch.testing.assert_close(seen, images * observed.round())
    visible = model.visible(model.reconstruct(photographs))
    assert visible.shape == photographs.shape
    leaf = photographs.clone().requires_grad_()
    first, second = model.reseed(2).reconstruct(leaf).chunk(2, 1)
    (gradient,) = torch.autograd.grad((first - second).sum(), leaf)
    torch.testing.assert_close(gradient, 2 * (first + second).detach().round())


def test_an_estimate_with_its_mask_is_both(photographs):
    model = MENet(nn.Flatten(), USVT(), p=0.5, encoding="estimate+mask").eval()
    mask = model.sample_mask(photographs, model.generator)
    seen = model.reconstruct(photographs, mask=mask)
    assert torch.equal(seen[:, :3], model.estimate(photographs, mask))
    assert torch.equal(seen[:, 3:], pictures.split_channels(mask, 3).float())
    assert torch.equal(model.visible(seen), seen[:, :3])
    assert model.classifier_channels(3, model.settings()) == 6


def test_settings_older_than_mask_and_encoding_mean_what_they_meant():
    for channels, mask in (("joint", "entries"), ("separate", "pixels")):
        settings = MENet(nn.Flatten(), channels=channels).settings()
        assert "mask" not in settings
        assert "encoding" not in settings
        assert MENet.from_settings(nn.Flatten(), settings).mask == mask
    model = MENet(nn.Flatten(), mask="pixels", encoding="ablation")
    again = rebuild(nn.Flatten(), {"name": "me-net", **model.settings()})
    assert (again.mask, again.encoding, again.estimator) == ("pixels", "ablation", MaskOnly())


def test_masks_and_encodings_that_do_not_exist_are_refused(without_annotation_checks):
    with pytest.raises(ConfigurationError, match="unknown mask 'rows'; choose from entries, pixels, cells"):
        MENet(nn.Flatten(), mask="rows")
    with pytest.raises(ConfigurationError, match="unknown encoding 'both'; choose from estimate, ablation"):
        MENet(nn.Flatten(), encoding="both")
    with pytest.raises(ConfigurationError, match=r"expected no estimator with .*'ablation'.* leave it out"):
        MENet(nn.Flatten(), USVT(), encoding="ablation")
    with pytest.raises(ConfigurationError, match="expected p > 0 with mask 'cells'"):
        MENet(nn.Flatten(), p=0, mask="cells")


def test_weights_of_another_defense_are_refused_or_warned_about(tmp_path, recwarn):
    trained = MENet(nn.Linear(4, 2), p=0.5)
    trained.save(tmp_path / "own.safetensors")
    same = MENet(nn.Linear(4, 2), p=0.5, gradient="exact").load(tmp_path / "own.safetensors")
    assert torch.equal(same.classifier.weight, trained.classifier.weight)
    same.load_state_dict(trained.state_dict())
    assert not recwarn.list
    MENet(network(), p=0.5).save(tmp_path / "built.safetensors")
    assert menet.load(tmp_path / "built.safetensors").p == 0.5
    other = MENet(nn.Linear(4, 2), USVT(), p=0.9)
    with pytest.raises(CheckpointError, match=r"another defense: expected estimator .*nuclear-norm.* got .*usvt"):
        other.load(tmp_path / "own.safetensors")
    torch.save(trained.state_dict(), tmp_path / "state.pt")
    for state in (trained.state_dict(), torch.load(tmp_path / "state.pt", weights_only=True)):
        with pytest.warns(UserWarning, match="trained behind another defense: expected estimator"):
            other.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"does not fit the classifier: unknown 'classifier\.bias'"):
        MENet(nn.Linear(4, 2, bias=False), p=0.5).load(tmp_path / "own.safetensors")
    with pytest.raises(CheckpointError, match="does not fit the classifier"):
        MENet(nn.Linear(5, 2), p=0.5).load(tmp_path / "own.safetensors")


@pytest.mark.parametrize("ask", ["vote", "votes", "sample", "average"])
def test_asking_a_model_in_training_mode_moves_nothing(ask):
    """Batch normalization keeps its statistics, and every module its mode; the answer is that of evaluation."""
    norm = nn.BatchNorm2d(1)
    model = MENet(nn.Sequential(norm, nn.Flatten(), nn.Linear(64, 3)), USVT(), p=(0.2, 0.9)).train()
    model.classifier[1].eval()
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = getattr(model.reseed(3), ask)(images, draws=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in (model, model.classifier, norm, model.classifier[1])] == [
        True, True, True, False
    ]  # fmt: skip
    assert torch.equal(found, getattr(model.eval().reseed(3), ask)(images, draws=2))


def test_a_vote_on_nan_logits_is_an_error_and_not_class_0():
    class Broken(nn.Module):
        def forward(self, images):
            logits = images.flatten(1)[:, :3].clone()
            logits[1, 2] = torch.nan
            return logits

    model = MENet(Broken(), USVT(), p=0.5).eval()
    for ask in (model.vote, model.votes):
        with pytest.raises(MenetError, match="NaN logits for image 1"):
            ask(torch.rand(3, 1, 8, 8), draws=2)


def test_a_flipped_bit_in_a_file_of_model_save_is_found(tmp_path):
    def build():
        return MENet(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), USVT(), p=0.5)

    file = tmp_path / "own.safetensors"
    build().save(file)
    build().load(file)
    content = bytearray(file.read_bytes())
    content[-50] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its digest"):
        build().load(file)


def test_weights_of_a_foreign_classifier_say_how_to_load_them(tmp_path):
    file = tmp_path / "own.safetensors"
    MENet(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), USVT(), p=0.5).save(file)
    with pytest.raises(
        CheckpointError, match=r"whose code is yours: build it behind its defense and call `model\.load"
    ):
        menet.load(file)

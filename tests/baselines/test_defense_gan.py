"""Defense-GAN: its projection against known answers, its training, and the attack on its manifold."""

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

from menet import attacks
from menet.baselines import DefenseGAN, Generator, project, train_wgan
from menet.baselines import wgan as wgan_module
from menet.errors import ConfigurationError
from menet.evaluation.attack_spec import parse_attack


class Plane(nn.Module):
    """A generator of 2×2 images that is linear, so that projections are known."""

    def __init__(self) -> None:
        super().__init__()
        self.basis = torch.eye(4, dtype=torch.float64)[:2]

    def forward(self, latents: Tensor) -> Tensor:
        return (0.5 + 0.1 * latents @ self.basis.to(latents)).view(-1, 1, 2, 2)


def tiny(**settings) -> DefenseGAN:
    sizes = {"latent": 3, "features": 1, "gan_steps": 2, "steps": 4, "starts": 2}
    return DefenseGAN(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), **{**sizes, **settings}).eval()


@pytest.fixture
def fitted(generator) -> DefenseGAN:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny()
    return model.fit(torch.rand(20, 1, 8, 8, generator=generator), generator)


@pytest.mark.parametrize(("method", "steps"), [("l-bfgs", 30), ("gradient-descent", 800)])
def test_projection_finds_the_nearest_image(method, steps, generator):
    images = torch.rand(5, 1, 2, 2, generator=generator, dtype=torch.float64)
    starts = torch.randn(5, 3, 2, generator=generator, dtype=torch.float64)
    latents = project(Plane(), images, starts, steps, method)
    torch.testing.assert_close(latents, (images.flatten(1)[:, :2] - 0.5) / 0.1, rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", ["l-bfgs", "gradient-descent"])
def test_unrolled_gradient_is_that_of_finite_differences(method, generator):
    network = Generator(1, 8, 8, latent=3, features=4).double().requires_grad_(False)
    wgan_module.reset(network, generator)
    images = torch.rand(2, 1, 8, 8, generator=generator, dtype=torch.float64)
    starts = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)

    def total(images: Tensor, unrolled: int | None = None) -> Tensor:
        return network(project(network, images, starts, 4, method, unrolled)).square().sum()

    leaf = images.clone().requires_grad_()
    (slope,) = torch.autograd.grad(total(leaf), leaf)
    assert slope.abs().sum() > 0
    direction = torch.randn(images.shape, generator=generator, dtype=torch.float64)
    small = 1e-6
    measured = (total(images + small * direction) - total(images - small * direction)) / (2 * small)
    assert float((slope * direction).sum()) == pytest.approx(float(measured), rel=1e-4)
    # Fewer steps in the graph: the same value, another gradient.
    torch.testing.assert_close(total(leaf, 1), total(leaf))
    (truncated,) = torch.autograd.grad(total(leaf, 1), leaf)
    assert truncated.isfinite().all()
    assert not torch.allclose(truncated, slope)


def test_lbfgs_comes_nearer_than_gradient_descent_and_never_moves_away(generator):
    network = Generator(1, 12, 12, latent=6, features=4).requires_grad_(False)
    wgan_module.reset(network, generator)
    images = network(torch.randn(8, 6, generator=generator))
    starts = torch.randn(8, 1, 6, generator=generator)

    def errors(latents: Tensor) -> Tensor:
        return (network(latents) - images).square().flatten(1).mean(1)

    before, descended = errors(starts[:, 0]), errors(project(network, images, starts, 40, "gradient-descent"))
    found = project(network, images, starts, 40)
    assert bool((errors(found) < before).all())
    # Two of the starts lie near other minima.
    assert errors(found).median() < 1e-6 * descended.median()
    # The answer for an image does not depend on the others in its batch.
    torch.testing.assert_close(project(network, images[:1], starts[:1], 40), found[:1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["l-bfgs", "gradient-descent"])
def test_starts_that_diverge_are_not_chosen(method):
    class Cliff(nn.Module):
        def forward(self, latents: Tensor) -> Tensor:
            return latents.log().view(-1, 1, 1, 1)

    images = torch.zeros(1, 1, 1, 1)
    starts = torch.tensor([[[-1.0], [1.02]]])
    latents = project(Cliff(), images, starts, 50, "l-bfgs")
    assert latents.item() == pytest.approx(1, abs=0.05)
    assert project(Cliff(), images, starts[:, :1], 3, method).isfinite().all()
    leaf = images.clone().requires_grad_()
    project(Cliff(), leaf, starts, 3, method).sum().backward()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(("height", "width"), [(28, 28), (8, 12), (1, 3)])
def test_generated_images_have_the_size_asked_for(height, width, generator):
    network = Generator(2, height, width, latent=3, features=1)
    images = network(torch.randn(4, 3, generator=generator))
    assert images.shape == (4, 2, height, width)
    assert 0 <= float(images.detach().min()) <= float(images.detach().max()) <= 1


def test_interrupted_training_resumes_to_the_same_weights(tmp_path, monkeypatch, generator):
    images = torch.rand(16, 1, 8, 8, generator=generator)
    monkeypatch.setattr(wgan_module, "SAVE_EVERY", 2)
    step = wgan_module._Training.step
    path, taken = tmp_path / "gan.pt", []

    def trained(checkpoint=None) -> list[Tensor]:
        network = Generator(1, 8, 8, latent=3, features=1)
        random = torch.Generator().manual_seed(1)
        train_wgan(network, images, random, steps=5, batch_size=4, checkpoint=checkpoint)
        return list(network.parameters())

    def interrupted(self, *arguments) -> float:
        taken.append(1)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return step(self, *arguments)

    whole = trained()
    monkeypatch.setattr(wgan_module._Training, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(path)
    assert path.is_file()
    for mine, theirs in zip(trained(path), whole, strict=True):
        assert torch.equal(mine, theirs)
    assert len(taken) == 4 + 3
    assert not path.exists()


def test_fitting_adopts_the_shape_and_freezes_the_generator(fitted):
    settings = fitted.settings()
    assert (settings["channels"], settings["height"], settings["width"]) == (1, 8, 8)
    assert not any(parameter.requires_grad for parameter in fitted.gan.parameters())
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(fitted.train().reconstruct(images), images)
    seen = fitted.eval().reconstruct(images)
    assert not torch.equal(seen, images)
    with torch.inference_mode():
        assert fitted(images).isfinite().all()
    constant = tiny().fit(torch.full((4, 1, 8, 8), 0.5), torch.Generator().manual_seed(0))
    assert constant(torch.full((2, 1, 8, 8), 0.5)).isfinite().all()


def test_exact_and_bpda_gradients_differ(fitted):
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for gradient in ("exact", "bpda"):
        leaf = images.clone().requires_grad_()
        fitted.reseed(0)
        fitted.with_gradient(gradient)(leaf).square().sum().backward()
        found.append(leaf.grad)
    assert all(bool(one.isfinite().all()) for one in found)
    assert not torch.allclose(*found)


def test_on_manifold_stays_in_the_ball_and_finds_what_the_generator_can_make():
    # The class is the sign of the first pixel; the plane contains images on both sides.
    def classifier(images: Tensor) -> Tensor:
        first = 20 * (images[:, 0, 0, 0] - 0.5)
        return torch.stack([-first, first], 1)

    plane = Plane()

    def defended(images: Tensor) -> Tensor:
        return classifier(plane(project(plane, images, torch.zeros(len(images), 1, 2), 20)))

    images = torch.full((4, 1, 2, 2), 0.5)
    images[:, 0, 0, 0] = torch.tensor([0.45, 0.48, 0.55, 0.1])
    labels = torch.tensor([0, 0, 1, 0])
    attack = attacks.build(
        "on-manifold", generate=plane, classifier=classifier, latent=2, epsilon=0.1, starts=2, steps=60
    )
    result = attack(defended, images, labels, generator=torch.Generator().manual_seed(0))
    assert (defended(result.images).argmax(1) != labels).tolist() == [True, True, True, False]
    assert bool((result.queries > 0).all())


def test_on_manifold_is_built_from_a_spec(fitted):
    images, labels = torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2])
    run = parse_attack("on-manifold:steps=2,starts=1,eot=1", fitted, epsilon=0.1)
    found = run.attack(run.model, images, labels, generator=torch.Generator().manual_seed(0))
    assert float((found.images - images).abs().max()) <= 0.1 + 1e-6
    with pytest.raises(ConfigurationError, match="expected a model with a generator"):
        parse_attack("on-manifold", fitted.classifier)


def test_what_does_not_fit_is_refused(fitted, generator):
    with pytest.raises(ConfigurationError, match="call fit"):
        tiny()(torch.rand(1, 3, 32, 32))
    with pytest.raises(ConfigurationError, match=r"expected images of shape \(1, 8, 8\), as the generator's"):
        fitted(torch.rand(1, 1, 9, 8))
    with pytest.raises(ConfigurationError, match=r"expected images of shape \(1, 8, 8\), as generated"):
        train_wgan(Generator(1, 8, 8, 3, 1), torch.rand(2, 1, 4, 4), generator, steps=1)
    with pytest.raises(ConfigurationError, match="expected starts >= 1, got 0"):
        tiny(starts=0)
    with pytest.raises(ConfigurationError, match="expected unrolled >= 1, got 0"):
        tiny(unrolled=0)
    with pytest.raises((ConfigurationError, TypeCheckError), match="method"):
        tiny(method="newton")
    with pytest.raises(ConfigurationError, match="expected latent from 1 to 4096, got 0"):
        Generator(latent=0)

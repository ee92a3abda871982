"""What every estimator promises. A new estimator is one line in ESTIMATORS."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from jaxtyping import TypeCheckError
from torch import Tensor

from menet import estimators, kernels, linalg, masks
from menet.errors import ConfigurationError

# A call in double precision tight enough to compare, and how many trailing dimensions make one problem.
TIGHT = {"tol": 1e-10, "max_iter": 2_000}
ESTIMATORS = {
    "usvt": (estimators.USVT(), 2),
    "usvt-universal": (estimators.USVT(keep="universal"), 2),
    "soft-impute": (estimators.SoftImpute(**TIGHT), 2),
    "soft-impute-unrestored": (estimators.SoftImpute(restore_observed=False, **TIGHT), 2),
    "soft-impute-fixed": (estimators.SoftImpute(shrinkage=0.3, **TIGHT), 2),
    "nuclear-norm": (estimators.NuclearNorm(**TIGHT), 2),
    "tubal": (estimators.TubalNuclearNorm(**TIGHT), 3),
    "mask-only": (estimators.MaskOnly(), 2),
}

every = pytest.mark.parametrize("name", ESTIMATORS)


def problem(dimensions: int, *batch: int, seed: int = 0, p: float = 0.75, side: int = 6) -> tuple[Tensor, Tensor]:
    """Noisy matrices of rank 2, well enough observed for their estimates to be unique."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, *((3,) if dimensions == 3 else ()), side, side + 3)
    left = torch.rand(*shape[:-1], 2, generator=generator, dtype=torch.float64) - 0.5
    right = torch.rand(*shape[:-2], 2, shape[-1], generator=generator, dtype=torch.float64) - 0.5
    noise = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return 2 * left @ right + 0.5 * noise, masks.bernoulli(shape, p, generator)


@every
@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3), (0,), (3, 0)])
def test_any_leading_dimensions(name: str, batch: tuple[int, ...]) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, *batch)
    estimate = estimator(x, mask)
    assert estimate.shape == x.shape
    assert estimate.dtype == x.dtype
    assert estimate.isfinite().all()


@every
def test_batching_changes_nothing(name: str) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 40)
    together = estimator(x, mask)
    alone = torch.stack([estimator(x[i], mask[i]) for i in (0, 17, 39)])
    torch.testing.assert_close(together[[0, 17, 39]], alone, rtol=0, atol=1e-8)


@every
def test_threads_and_chunks_change_nothing(name: str) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 12)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        many = estimator(x, mask)
        assert torch.get_num_threads() == 3
        torch.set_num_threads(1)
        one = estimator(x, mask)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(many, one, rtol=0, atol=1e-8)


@every
@given(seed=st.integers(0, 2**32 - 1), p=st.floats(0.8, 1.0))
@settings(max_examples=8)
def test_permuting_rows_commutes(name: str, seed: int, p: float) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, seed=seed, p=p)
    order = torch.randperm(x.shape[-2], generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        estimator(x, mask)[..., order, :], estimator(x[..., order, :], mask[..., order, :]), rtol=0, atol=1e-6
    )


@every
def test_transposing_commutes(name: str) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 4)
    torch.testing.assert_close(estimator(x, mask).mT, estimator(x.mT, mask.mT), rtol=0, atol=1e-7)


@every
def test_unobserved_entries_do_not_matter(name: str) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 3)
    expected = estimator(x, mask)
    for junk in (float("nan"), float("inf"), 1e30):
        torch.testing.assert_close(estimator(torch.where(mask, x, junk), mask), expected, rtol=0, atol=0)


@every
def test_strides_do_not_matter(name: str) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 4)
    strided = torch.stack([x, -x], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    torch.testing.assert_close(estimator(strided, mask), estimator(x, mask), rtol=0, atol=1e-10)


@every
def test_a_mask_broadcasts(name: str) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 4)
    torch.testing.assert_close(estimator(x, mask[0]), estimator(x, mask[:1].expand_as(x)))


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 8)
    # The universal threshold keeps or drops by comparison; it is tested where rounding does not decide.
    low = x.to(dtype)
    estimate = estimator(low, mask)
    assert estimate.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(estimate.double(), estimator(low.double(), mask), rtol=0, atol=tolerance)


@every
@pytest.mark.parametrize("case", ["nothing", "row", "column", "everything", "constant", "zero"])
def test_degenerate_inputs(name: str, case: str) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 2)
    match case:
        case "nothing":
            mask = torch.zeros_like(mask)
        case "row":
            mask[..., 0, :] = False
        case "column":
            mask[..., :, 0] = False
        case "everything":
            mask = torch.ones_like(mask)
        case "constant":
            x = torch.full_like(x, 0.5)
        case "zero":
            x = torch.zeros_like(x)
    x.requires_grad_()
    estimate = estimator(x, mask)
    (gradient,) = torch.autograd.grad(estimate.sum(), x)
    assert estimate.isfinite().all()
    assert gradient.isfinite().all()
    if case in ("nothing", "zero"):
        assert (estimate == 0).all()


@every
@pytest.mark.parametrize("m, n", [(1, 1), (1, 7), (7, 1), (2, 2)])
def test_thin_matrices(name: str, m: int, n: int) -> None:
    estimator, dimensions = ESTIMATORS[name]
    generator = torch.Generator().manual_seed(m * 10 + n)
    shape = (*((4, 3) if dimensions == 3 else (4,)), m, n)
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    mask = masks.bernoulli(shape, 0.7, generator)
    assert estimator(x, mask).isfinite().all()


@every
def test_exact_gradient(name: str) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 3)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: estimator(x, mask), x, atol=1e-5, fast_mode=True)


@every
def test_gradient_does_not_reach_unobserved_entries(name: str) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 2)
    x.requires_grad_()
    estimate = estimator(x, mask)
    (gradient,) = torch.autograd.grad(estimate.square().sum(), x)
    assert (gradient[~mask] == 0).all()
    # Chatterjee's threshold drops every singular value of matrices this small.
    assert (gradient[mask] != 0).any() == (estimate != 0).any()


@every
def test_how_gradients_pass_is_not_an_estimators_choice(name: str) -> None:
    estimator, _ = ESTIMATORS[name]
    assert not hasattr(estimator, "gradient")
    with pytest.raises(TypeError, match="gradient"):
        type(estimator)(gradient="bpda")


@every
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_autocast_changes_nothing_forward_or_backward(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "_available", lambda: False)
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 3, side=12)
    x = 2 * x.float()
    outgoing = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    found = []
    for enabled in (False, True):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            without = estimator(x, mask)
            estimate = estimator(leaf, mask)
            (gradient,) = torch.autograd.grad(estimate, leaf, outgoing)
        found.append((without, estimate.detach(), gradient))
    for plain, cast in zip(*found, strict=True):
        assert cast.dtype == torch.float32
        assert torch.equal(cast, plain)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision_are_computed_in_single(name: str, dtype: torch.dtype) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 2)
    low = x.to(dtype)
    gradients = []
    for leaf in (low.clone().requires_grad_(), low.float().requires_grad_()):
        outgoing = torch.linspace(-1, 1, leaf.numel()).to(dtype).reshape(leaf.shape).to(leaf.dtype)
        (gradient,) = torch.autograd.grad(estimator(leaf, mask), leaf, outgoing)
        assert gradient.dtype == leaf.dtype
        gradients.append(gradient)
    assert torch.equal(gradients[0], gradients[1].to(dtype))


def test_the_spectral_norm_is_outside_autocast_too() -> None:
    x, _ = problem(2, 4)
    found = []
    for enabled in (False, True):
        leaf = x.float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value = linalg.largest_singular_value(leaf)
            found.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    for plain, cast in zip(*found, strict=True):
        assert torch.equal(cast, plain)


@every
def test_bad_input_is_named(name: str) -> None:
    estimator, dimensions = ESTIMATORS[name]
    x, mask = problem(dimensions, 2)
    with pytest.raises(TypeError, match=r"expected a floating-point x, got torch.int64"):
        estimator(x.long(), mask)
    with pytest.raises(TypeError, match=r"expected a mask of torch.bool .*, got torch.float64"):
        estimator(x, mask.double())
    with pytest.raises(ValueError, match=r"expected a mask that broadcasts .*, got \(5,\)"):
        estimator(x, mask.flatten()[:5])
    with pytest.raises(ValueError, match=r"expected x of shape .*, got \(3,\)"):
        estimator(torch.ones(3), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="expected x of shape"):
        estimator(x[..., :0], mask[..., :0])
    for bad in (float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="expected finite values where mask is True, got NaN or infinity"):
            estimator(torch.where(mask, bad, x), mask)
    with pytest.raises((TypeError, TypeCheckError)):
        estimator(x.tolist(), mask)


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: estimators.NuclearNorm(mu=-1.0), "expected a finite mu >= 0, got -1.0"),
        (lambda: estimators.TubalNuclearNorm(mu=float("nan")), "expected a finite mu >= 0, got nan"),
        (lambda: estimators.SoftImpute(shrinkage=-0.1), "expected a finite shrinkage >= 0, got -0.1"),
        (lambda: estimators.NuclearNorm(tol=-1.0), "expected a finite tol >= 0, got -1.0"),
        (lambda: estimators.SoftImpute(max_iter=0), "expected max_iter >= 1, got 0"),
        (lambda: estimators.USVT(keep=0.0), r"expected keep in .*, got 0.0"),
        (lambda: estimators.USVT(keep=1.5), r"expected keep in .*, got 1.5"),
        (lambda: estimators.USVT(eta=-1.0), "expected eta >= 0, got -1.0"),
        (lambda: estimators.build("nuclear"), "unknown estimator 'nuclear'; .*did you mean 'nuclear-norm'"),
        (lambda: estimators.name_of(lambda x, mask: x), "expected a registered estimator"),
    ],
)
def test_bad_parameters_are_named(make: object, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()  # type: ignore[operator]


def test_every_public_name_builds() -> None:
    assert set(estimators.ESTIMATORS) <= set(ESTIMATORS)
    for name in estimators.ESTIMATORS:
        assert type(estimators.build(name)) is estimators.ESTIMATORS[name]

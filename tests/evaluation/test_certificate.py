"""Certificates against enumeration of all masks and votes, against attacks inside them, and planted errors."""

import itertools
import math

import pytest
import torch
from evaluation_models import trained
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from menet.defense import MENet
from menet.errors import ConfigurationError, RecordError
from menet.estimators import USVT, MaskOnly, NuclearNorm, SoftImpute, TubalNuclearNorm
from menet.evaluation import CertificateSettings, Worker, certified_accuracies, certified_radius, certify
from menet.evaluation.accuracy import lower_bound
from menet.evaluation.certify import (
    PartitionVote,
    certificate_summary,
    certificates,
    fewest_pixels,
    observation,
    partition_certificates,
)
from menet.evaluation.certify.partitions import leads, partition_radius, patch_side
from menet.evaluation.certify.sandwich import _turned
from menet.evaluation.certify.votes import Bounds, count_votes, first_choices, pairwise_winner, rivals, tally
from menet.evaluation.records import read, shards
from menet.masks import lattices, partitions
from menet.models import build

ESTIMATORS = [USVT(), SoftImpute(), NuclearNorm(), MaskOnly(), TubalNuclearNorm()]


class Tiny(nn.Module):
    """A random network of two layers for images of a few pixels."""

    def __init__(self, entries: int, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.first = torch.randn(entries, 12, generator=random)
        self.second = torch.randn(12, 3, generator=random)

    def forward(self, images: Tensor) -> Tensor:
        return ((images - 0.5).flatten(1) @ self.first * 2).relu() @ self.second


def tiny(estimator, p: float, channels: str, shape: tuple[int, int, int], seed: int = 0, mask=None):
    return MENet(Tiny(math.prod(shape), seed), estimator, p=p, channels=channels, mask=mask).eval()


def exact_fractions(model, images: Tensor) -> Tensor:
    """Each class's fraction of the vote over all masks, by going through every one of them."""
    shape = model.mask_shape(images)
    size = math.prod(shape)
    every = torch.tensor(list(itertools.product([False, True], repeat=size))).view(-1, *shape)
    seen = every.flatten(1).sum(1).double()
    weights = model.mean_p**seen * (1 - model.mean_p) ** (size - seen)
    fractions = torch.zeros(len(images), 3, dtype=torch.float64)
    with torch.no_grad():
        for number, image in enumerate(images):
            chosen = model(image.expand(len(every), *image.shape), every).argmax(1)
            fractions[number].index_add_(0, chosen, weights)
    return fractions


SETTINGS = [
    ("joint", (1, 2, 3), 0.15, 1, None),
    ("joint", (2, 2, 2), 0.08, 2, None),
    ("separate", (2, 2, 3), 0.15, 1, None),
    ("joint", (2, 2, 3), 0.15, 1, "pixels"),
    ("separate", (2, 2, 2), 0.08, 2, "entries"),
]


@pytest.mark.parametrize("channels, shape, p, entries, mask", SETTINGS)
@pytest.mark.parametrize("estimator", [USVT(), MaskOnly()], ids=["usvt", "mask-only"])
def test_no_change_within_the_exact_radius_turns_the_vote(estimator, channels, shape, p, entries, mask):
    """Every set of pixels, every corner of the cube they can move in, and random values besides."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(6, *shape, generator=random)
    attacked = 0
    for seed in range(3):
        model = tiny(estimator, p, channels, shape, seed, mask)
        assert observation(model, shape[0]) == (pytest.approx(p), entries)
        for image, fractions in zip(images, exact_fractions(model, images), strict=True):
            (first, second), (winner, _) = fractions.clamp(max=1).topk(2)
            radius = certified_radius(first.item(), p, entries, shape[1] * shape[2], second.item())
            half = certified_radius(first.item(), p, entries, shape[1] * shape[2])
            assert half is None or half <= radius, "the runner-up bound is never the smaller one"
            for changed in range(1, (radius or 0) + 1):
                attempts = [
                    (places, values)
                    for places in itertools.combinations(range(shape[1] * shape[2]), changed)
                    for values in (
                        torch.zeros(shape[0], changed),
                        torch.ones(shape[0], changed),
                        torch.rand(shape[0], changed, generator=random),
                    )
                ]
                batch = image.flatten(1).repeat(len(attempts), 1, 1)
                for number, (places, values) in enumerate(attempts):
                    batch[number, :, list(places)] = values
                every = exact_fractions(model, batch.view(-1, *shape))
                after = every[:, winner]
                assert (every.argmax(1) == winner).all()
                assert (after >= first - (1 - (1 - p) ** (entries * changed)) - 1e-9).all()
                attacked += len(attempts)
    assert attacked > 50


@pytest.mark.parametrize("looks", [1, 3])
@pytest.mark.parametrize("channels, shape, p, entries, mask", SETTINGS[1:4])
def test_bounds_from_draws_hold_for_the_exact_fractions(channels, shape, p, entries, mask, looks):
    images = torch.rand(100, *shape, generator=torch.Generator().manual_seed(1))
    model = tiny(MaskOnly(), p, channels, shape, mask=mask)
    settings = CertificateSettings(selection=50, estimation=800, looks=looks, alpha=0.01, decision="plurality")
    found = certificates(model, images, settings)
    exact = exact_fractions(model, images)
    own = exact.gather(1, found.prediction[:, None])[:, 0]
    others = exact.scatter(1, found.prediction[:, None], 0).amax(1)
    wrong = (found.lower_bound > own + 1e-9) | (found.runner_up < others - 1e-9)
    assert wrong.double().mean() <= 0.03
    certified = found.radius >= 0
    assert certified.any()
    assert (exact.argmax(1) == found.prediction)[certified].double().mean() >= 0.97
    for low, high, radius in zip(
        found.lower_bound.tolist(), found.runner_up.tolist(), found.radius.tolist(), strict=True
    ):
        expected = certified_radius(low, p, entries, shape[1] * shape[2], high)
        assert radius == (-1 if expected is None else expected)
    if looks == 1:
        assert set(found.draws.tolist()) == {800}
        sole = found.runner_up == 1 - found.lower_bound
        for low, votes in zip(found.lower_bound[sole].tolist(), found.votes[sole].tolist(), strict=True):
            assert low in [lower_bound(votes, 800, 0.01 / parts) for parts in (1, 2, 3)]
    else:
        spent = set(found.draws.tolist())
        assert len(spent) > 1, "some stop early, some do not"
        assert spent <= {50, 200, 800}


def test_looks_share_alpha_and_the_last_takes_half():
    looks = CertificateSettings(estimation=10_000, looks=4, alpha=0.002).schedule()
    assert [draws for draws, _ in looks] == [156, 625, 2500, 10_000]
    assert sum(alpha for _, alpha in looks) == pytest.approx(0.002)
    assert looks[-1][1] == pytest.approx(0.001)
    assert CertificateSettings(estimation=60, alpha=0.01).schedule() == [(60, 0.01)]
    assert CertificateSettings(estimation=10_000, looks=1).schedule() == [(10_000, 0.001)]


def test_rivals_are_few_groups_and_the_runner_up_stands_alone():
    assert rivals([90, 0, 0, 0], 0) == []
    assert rivals([70, 20, 6, 4, 0], 0) == [[1], [2, 3, 4]]
    assert rivals([5, 40, 30, 25, 0], 1) == [[2], [3, 0, 4]]
    assert rivals([40, 20, 20, 20], 0) == [[1], [2], [3]]
    assert rivals([8, 2], 0) == [[1]]
    assert sorted(itertools.chain(*rivals([3, 50, 7, 9, 1, 0, 30], 1))) == [0, 2, 3, 4, 5, 6]


def test_bounds_of_a_group_are_those_of_its_sum_at_its_part_of_alpha():
    from menet.evaluation.accuracy import upper_bound

    found = Bounds([[1], [2, 3]]).tightened([70, 20, 6, 4], 0, 0.003)
    assert found.lower == lower_bound(70, 100, 0.001)
    assert found.upper == upper_bound(20, 100, 0.001)
    assert found.tightened([7, 2, 1, 0], 0, 0.003) == found, "a later, looser look loosens nothing"
    assert Bounds([]).tightened([100, 0], 0, 0.01).upper == 1 - lower_bound(100, 100, 0.01)


class AnyChange(nn.Module):
    """Class 1 as soon as any pixel is not gray: the worst case that the certificate must allow for."""

    def forward(self, images: Tensor) -> Tensor:
        changed = (images != 0.5).flatten(1).any(1).float()
        return torch.stack([1 - changed, changed], 1)


@pytest.mark.parametrize(
    "channels, mask, entries", [("joint", None, 3), ("separate", None, 1), ("joint", "pixels", 1)]
)
def test_the_radius_is_the_largest_that_holds_in_the_worst_case(channels, mask, entries):
    p = 0.2 if entries == 3 else 0.15
    model = MENet(AnyChange(), MaskOnly(), p=p, channels=channels, mask=mask).eval()
    gray = torch.full((1, 3, 4, 4), 0.5)
    assert (model.votes(gray, 20) == torch.tensor([20, 0])).all()
    radius = certified_radius(1.0, p, entries)
    assert radius == {3: 1, 1: 4}[entries]
    for changed, kept in ((radius, True), (radius + 1, False)):
        attacked = gray.clone().flatten(2)
        attacked[:, :, :changed] = 1
        votes = model.votes(attacked.view_as(gray).repeat(4000, 1, 1, 1), 1)[:, 0].double().mean()
        assert votes.item() == pytest.approx((1 - p) ** (entries * changed), abs=0.03)
        assert ((1 - p) ** (entries * changed) > 0.5) == kept


@pytest.mark.parametrize("mask", ["entries", "pixels", "cells"])
@pytest.mark.parametrize("channels", ["joint", "separate"])
@pytest.mark.parametrize("encoding", ["estimate", "ablation", "estimate+mask"])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda one: type(one).__name__)
def test_what_the_classifier_sees_depends_on_observed_entries_alone(estimator, encoding, channels, mask):
    """What the certificate rests on: bit for bit, whatever stands in the entries that are not shown."""
    if encoding == "ablation" and estimator != MaskOnly():
        pytest.skip("an ablation estimates nothing")
    random = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 8, 8, generator=random)
    model = MENet(nn.Identity(), estimator, p=0.4, channels=channels, mask=mask, encoding=encoding).eval()
    drawn = model.sample_mask(images, random)
    other = torch.rand(images.shape, generator=random)
    shown = drawn.expand_as(images) if drawn.ndim == 4 else drawn.unflatten(2, (3, 8)).transpose(1, 2)
    if mask != "entries":
        assert (shown == shown[:, :1]).all(), "channels are shown together"
    changed = torch.where(shown, images, other)
    assert not torch.equal(changed, images)
    seen = [model.preprocess(one, random, drawn) for one in (images, changed)]
    assert torch.equal(*seen)


@given(st.floats(0, 1), st.floats(0.001, 1), st.integers(1, 4))
def test_the_radius_is_the_largest_that_the_inequality_allows(probability, p, entries):
    radius = certified_radius(probability, p, entries)
    if radius is None:
        assert probability <= 0.5
    else:
        assert radius == 0 or (1 - p) ** (entries * radius) > 1.5 - probability
        assert not (1 - p) ** (entries * (radius + 1)) > 1.5 - probability


def worst_case_holds(radius_of, entries: int = 1) -> bool:
    """Whether `radius_of(p_A, p, entries, p_B)` is right against the classifier for which the bound is tight.

    It votes A whenever one of s special pixels is seen, and B as soon as a perturbed pixel is; otherwise the vote
    is that of another pixel: B where seen, else A. Perturbing the s pixels turns all masks that show one of them.
    All probabilities follow from p and s.
    """
    for p in (0.01, 0.03, 0.057, 0.1, 0.2):
        for special in range(1, 40):
            shown = 1 - (1 - p) ** (entries * special)
            before = (shown + (1 - shown) * (1 - p), (1 - shown) * p)
            after = ((1 - shown) * (1 - p), shown + (1 - shown) * p)
            radius = radius_of(before[0], p, entries, before[1])
            if radius is not None and radius >= special and not after[0] > after[1]:
                return False
    return True


def test_planted_errors_in_the_radius_are_caught_by_the_worst_case():
    def right(winner, p, entries, second):
        return certified_radius(winner, p, entries, runner_up=second)

    def off_by_one(winner, p, entries, second):
        found = right(winner, p, entries, second)
        return found if found is None else found + 1

    def entries_as_pixels(winner, p, entries, second):
        return right(winner, p, 1, second)

    def one_delta(winner, p, entries, second):
        """p_A − p_B > Δ in place of 2Δ."""
        gap = winner - second
        return max((rho for rho in range(200) if gap > 1 - (1 - p) ** (entries * rho)), default=None)

    for entries in (1, 3):
        assert worst_case_holds(right, entries)
        assert not worst_case_holds(off_by_one, entries)
        assert not worst_case_holds(one_delta, entries)
    assert not worst_case_holds(entries_as_pixels, 3)


class Table(nn.Module):
    """A class for each of the 512 masks of a 3×3 image, by a random table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randint(10, (512,), generator=torch.Generator().manual_seed(0))

    def forward(self, images: Tensor) -> Tensor:
        seen = images.flatten(2).sum(1) > 0
        return nn.functional.one_hot(self.table[(seen * 2 ** torch.arange(9)).sum(1)], 10).float()


@pytest.mark.parametrize("planted", [False, True])
def test_draws_that_select_must_not_estimate(planted, monkeypatch):
    """Ten classes of nearly equal probability: the one that happens to lead looks better than it is."""
    model = MENet(Table(), p=0.5, encoding="ablation").eval()
    exact = torch.bincount(model.classifier.table, minlength=10) / 512
    if planted:
        reseed = model.reseed
        monkeypatch.setattr(model, "reseed", lambda seed: reseed(0))
    settings = CertificateSettings(selection=100, estimation=100, looks=1, alpha=0.3, decision="plurality")
    found = certificates(model, torch.full((600, 1, 3, 3), 0.5), settings)
    wrong = (found.lower_bound > exact[found.prediction]).double().mean().item()
    assert (wrong > 0.1) == planted


def test_known_radii():
    kept = 45 / 784
    for winner, second, half, both in ((0.75, 0.1, 4, 6), (0.6, 0.15, 1, 4), (0.45, 0.2, None, 2)):
        assert certified_radius(winner, kept) == half
        assert certified_radius(winner, kept, runner_up=second) == both
    assert certified_radius(1.0, 75 / 1024) == 9
    assert certified_radius(1.0, 75 / 1024, entries=3) == 3
    assert certified_radius(0.99, 0.05) == 13
    assert certified_radius(0.99, 0.05, entries=3) == 4
    assert certified_radius(1.0, 0.5) == 0
    assert certified_radius(0.5, 0.1) is None
    assert certified_radius(0.9, 0.0, pixels=16) == 16
    assert certified_radius(1.0, 0.001, pixels=16) == 16
    with pytest.raises(ConfigurationError, match="expected `pixels`"):
        certified_radius(0.9, 0.0)
    with pytest.raises(ConfigurationError, match=r"got 0\.9 and p 1\.5"):
        certified_radius(0.9, 1.5)


RANKINGS = torch.tensor(list(itertools.permutations([2.0, 1.0, 0.0])))
"""Logits of the six rankings of three classes."""


def winner_of(logits: Tensor, decision: str) -> Tensor:
    """The answer to each of a batch of votes (b, cells, 3); -1 where a tie leaves none."""
    votes = tally(logits)
    counts = first_choices(votes)
    if decision == "plurality":
        first, second = counts.topk(2).values.T
        return torch.where(first > second, counts.argmax(1), -1)
    winner = pairwise_winner(votes)
    own = votes[torch.arange(len(votes)), winner].scatter(1, winner[:, None], logits.shape[1])
    return torch.where((2 * own > logits.shape[1]).all(1), winner, -1)


def turned(logits: Tensor, layout: Tensor, decision: str, changed: int) -> bool:
    """Whether some `changed` pixels can take the vote: every set of them, every vote of the cells they reach."""
    winner = winner_of(logits[None], decision)
    cells = int(layout.max()) + 1
    for places in itertools.combinations(range(layout[0].numel()), changed):
        reached = sorted(
            {r * cells + int(row[place]) for r, row in enumerate(layout.flatten(1)) for place in places}
        )
        every = torch.tensor(list(itertools.product(range(6), repeat=len(reached))))
        attacked = logits.repeat(len(every), 1, 1)
        attacked[:, reached] = RANKINGS[every]
        if (winner_of(attacked, decision) != winner).any():
            return True
    return False


def radius_of(logits: Tensor, layout: Tensor, decision: str) -> int:
    """The certified radius of one image from the logits of its cells; 0 where no class wins."""
    prediction = winner_of(logits[None], decision)
    if prediction < 0:
        return 0
    lead, harm = leads(logits[None], prediction, decision)
    return int(partition_radius(lead, harm.unflatten(1, (len(layout), -1)), layout)[0])


def drawn_votes(count: int):
    """Votes on tiny images that mostly prefer class 0, with their partitions."""
    random = torch.Generator().manual_seed(3)
    for number in range(count):
        layout = partitions(1 + number % 2, 4 + number % 3, (2, 3), random)
        logits = torch.randn(len(layout) * (int(layout.max()) + 1), 3, generator=random)
        logits[:, 0] += 2
        yield logits.argsort(-1).argsort(-1).float(), layout


def partition_violations(found, decision: str):
    """Of each certificate for 1 and 2 pixels among tiny images, whether it does not hold."""
    for logits, layout in drawn_votes(40):
        for changed in range(1, min(found(logits, layout, decision), 2) + 1):
            yield turned(logits, layout, decision, changed)


@pytest.mark.parametrize("decision", ["plurality", "pairwise"])
def test_partition_certificates_hold_for_all_changes_of_one_and_two_pixels_and_all_rankings(decision):
    wrong = list(partition_violations(radius_of, decision))
    assert len(wrong) > 30
    assert not any(wrong)


@pytest.mark.parametrize("decision", ["plurality", "pairwise"])
def test_planted_errors_in_the_partition_bound_are_caught(decision):
    def ties_for_us(logits, layout, decision):
        winner = winner_of(logits[None], decision)
        lead, harm = leads(logits[None], winner, decision)
        return (
            int(partition_radius(lead + 1, harm.unflatten(1, (len(layout), -1)), layout)[0]) if winner >= 0 else 0
        )

    def off_by_one(logits, layout, decision):
        return radius_of(logits, layout, decision) + 1

    def one_vote_each(logits, layout, decision):
        """A perturbed cell takes one vote from the winner, and gives none to its rival."""
        winner = winner_of(logits[None], decision)
        lead, harm = leads(logits[None], winner, decision)
        halved = harm.clamp(max=1).unflatten(1, (len(layout), -1))
        return int(partition_radius(lead, halved, layout)[0]) if winner >= 0 else 0

    def one_partition_each(logits, layout, decision):
        """A pixel reaches one cell, whatever the number of partitions."""
        winner = winner_of(logits[None], decision)
        lead, harm = leads(logits[None], winner, decision)
        only = harm.unflatten(1, (len(layout), -1)) * torch.tensor([1, 0])[: len(layout), None, None]
        return int(partition_radius(lead, only, layout)[0]) if winner >= 0 else 0

    for planted in (ties_for_us, off_by_one, one_vote_each, one_partition_each):
        assert any(partition_violations(planted, decision)), planted.__name__


@pytest.mark.parametrize("decision", ["plurality", "pairwise"])
def test_the_partition_bound_is_tight_for_one_partition_and_never_below_the_plain_one(decision):
    random = torch.Generator().manual_seed(5)
    layout = partitions(8, 10, (4, 5), random)
    logits = torch.randn(60, 80, 3, generator=random) + torch.tensor([1.0, 0, 0])
    prediction = winner_of(logits, decision)
    logits, prediction = logits[prediction >= 0], prediction[prediction >= 0]
    lead, harm = leads(logits, prediction, decision)
    plain = (lead.amin(1) - 1) // (2 * 8)
    found = partition_radius(lead, harm.unflatten(1, (8, 10)), layout)
    assert (found >= plain).all()
    assert (found > plain).any()
    tight = 0
    for logits, layout in drawn_votes(30):
        found = radius_of(logits, layout, decision)
        if len(layout) == 1 and found < 2 and winner_of(logits[None], decision) >= 0:
            assert turned(logits, layout, decision, found + 1)
            tight += 1
    assert tight > 5


def test_a_pairwise_winner_beats_every_other_class():
    # Second choices decide: 4 votes 0 1 2, 3 votes 1 2 0, 4 votes 2 1 0.
    logits = torch.tensor([[2.0, 1, 0]] * 4 + [[0.0, 2, 1]] * 3 + [[0.0, 1, 2]] * 4)[None]
    votes = tally(logits)
    assert first_choices(votes).tolist() == [[4, 3, 4]]
    assert votes[0, 1].tolist() == [7, 3, 7]
    assert pairwise_winner(votes).tolist() == [1]
    lead, harm = leads(logits, torch.tensor([1]), "pairwise")
    assert lead.tolist() == [[3, 3]]
    assert harm.sum(1).tolist() == [[14, 14]]
    # A circle: nobody beats all, and the narrowest majority decides.
    circle = torch.tensor([[2.0, 1, 0]] * 4 + [[0.0, 2, 1]] * 3 + [[1.0, 0, 2]] * 2)[None]
    assert pairwise_winner(tally(circle)).tolist() == [0]
    assert winner_of(circle, "pairwise").tolist() == [-1], "0 is above 1 in 6 of 9, but above 2 in 4"
    level = torch.zeros(1, 5, 3)
    assert tally(level)[0].tolist() == [[5, 0, 0], [0, 0, 0], [0, 0, 0]], "equal logits rank nobody above"
    assert winner_of(level, "pairwise").tolist() == [-1]


def test_patches_are_all_places_of_a_square():
    random = torch.Generator().manual_seed(5)
    columns = torch.arange(6).expand(1, 6, 6)
    layouts = [columns, partitions(2, 7, (6, 6), random), lattices(1, 9, (6, 6))]
    larger = 0
    for layout in layouts:
        cells = len(layout) * (int(layout.max()) + 1)
        logits = torch.randn(40, cells, 3, generator=random) + torch.tensor([2.5, 0, 0])
        prediction = pairwise_winner(tally(logits))
        lead, harm = leads(logits, prediction, "pairwise")
        harm = harm.unflatten(1, (len(layout), -1))
        found, radius = patch_side(lead, harm, layout), partition_radius(lead, harm, layout)
        per_partition = int(layout.max()) + 1
        for number in range(len(logits)):
            for side in range(1, 7):
                worst = max(
                    int((harm[number].flatten(0, 1)[sorted(reached)].sum(0) - lead[number]).max())
                    for top in range(7 - side)
                    for left in range(7 - side)
                    for reached in [
                        {
                            r * per_partition + int(cell)
                            for r, row in enumerate(layout)
                            for cell in row[top : top + side, left : left + side].flatten()
                        }
                    ]
                )
                assert (worst < 0) == (side <= found[number])
        # A patch is one set of side² pixels, so the radius for any pixels is never the better bound.
        assert (found**2 + 2 * found + 1 > radius).all()
        larger += int((found**2 > radius).sum())
    assert larger > 0


def exact_rankings(model, images: Tensor) -> Tensor:
    """The probability that a mask ranks class i above class j, by going through every mask."""
    shape = model.mask_shape(images)
    size = math.prod(shape)
    every = torch.tensor(list(itertools.product([False, True], repeat=size))).view(-1, *shape)
    seen = every.flatten(1).sum(1).double()
    weights = model.mean_p**seen * (1 - model.mean_p) ** (size - seen)
    found = []
    with torch.no_grad():
        for image in images:
            logits = model(image.expand(len(every), *image.shape), every)
            found.append(((logits[:, :, None] > logits[:, None]) * weights[:, None, None]).sum(0))
    return torch.stack(found)


def test_pairwise_bounds_from_draws_hold_and_no_change_within_them_turns_the_winner():
    """Bounds against the exact probabilities; then all pixels, to black, white and random values."""
    shape, p = (1, 2, 3), 0.12
    random = torch.Generator().manual_seed(1)
    images = torch.rand(60, *shape, generator=random)
    # Of an ablation: an image of which nothing is seen has logits too, and they are not all equal.
    model = MENet(Tiny(2 * math.prod(shape)), p=p, encoding="ablation").eval()
    found = certificates(model, images, CertificateSettings(selection=50, estimation=800, looks=2, alpha=0.01))
    exact = exact_rankings(model, images)
    rows = torch.arange(len(images))
    narrowest = exact[rows, found.prediction].scatter(1, found.prediction[:, None], 1).amin(1)
    assert (found.lower_bound > narrowest + 1e-9).double().mean() <= 0.03
    certified = found.radius >= 1
    assert certified.sum() > 5
    assert (found.beaten[rows, found.prediction] == 0).all()
    for image, winner, radius in zip(
        images[certified], found.prediction[certified].tolist(), found.radius[certified].tolist(), strict=True
    ):
        for changed in range(1, radius + 1):
            for places in itertools.combinations(range(6), changed):
                values = torch.stack(
                    [torch.zeros(changed), torch.ones(changed), torch.rand(changed, generator=random)]
                )
                batch = image.flatten(1).repeat(3, 1, 1)
                batch[:, 0, list(places)] = values
                after = exact_rankings(model, batch.view(-1, *shape))[:, winner]
                after[:, winner] = 1
                assert (after > 0.5).all()


def test_planted_errors_in_the_pairwise_bound_are_caught_by_the_worst_case():
    """A network that ranks A above B whenever a special pixel is seen, and otherwise with probability 1 − p."""

    def holds(radius_of, entries: int) -> bool:
        for p in (0.01, 0.03, 0.057, 0.1, 0.2):
            for special in range(1, 40):
                shown = 1 - (1 - p) ** (entries * special)
                before, after = shown + (1 - shown) * (1 - p), (1 - shown) * (1 - p)
                radius = radius_of(before, p, entries)
                if radius is not None and radius >= special and not after > 0.5:
                    return False
        return True

    def right(above, p, entries):
        return certified_radius(above, p, entries)

    assert holds(right, 1)
    assert holds(right, 3)
    assert not holds(lambda above, p, entries: (right(above, p, entries) or 0) + 1, 1)
    assert not holds(lambda above, p, entries: right(above, p, 1), 3)


def test_pairwise_bounds_share_alpha_among_the_rivals():
    found = Bounds([]).tightened_pairwise([90, 70, 80], 100, 0.003)
    assert found.lower == lower_bound(70, 100, 0.001)
    assert found.upper == 1 - found.lower
    assert found.tightened_pairwise([7, 9, 9], 10, 0.003) == found, "a later, looser look loosens nothing"


def test_partition_certificates_of_a_network_hold_for_every_value_on_a_grid():
    """A real forward pass: all changes of one pixel, and of two, to black, gray or white."""
    random = torch.Generator().manual_seed(0)
    layout = partitions(2, 6, (2, 3), random)
    attacked = 0
    for seed in range(6):
        model = MENet(Tiny(2 * 6, seed), p=1 / 6, mask="cells", encoding="ablation").eval()
        images = torch.rand(5, 1, 2, 3, generator=random)
        found = partition_certificates(model, images, layout, max_batch=7)
        again = partition_certificates(model, images, layout)
        assert torch.equal(found.counts, again.counts)
        assert (found.counts.sum(1) == 12).all()
        for image, prediction, radius in zip(images, found.prediction, found.radius.tolist(), strict=True):
            for changed in range(1, min(radius, 2) + 1):
                for places in itertools.combinations(range(6), changed):
                    values = torch.tensor(list(itertools.product([0.0, 0.5, 1.0], repeat=changed)))
                    batch = image.flatten(1).repeat(len(values), 1, 1)
                    batch[:, 0, list(places)] = values
                    after = partition_certificates(model, batch.view(-1, 1, 2, 3), layout).prediction
                    assert (after == prediction).all()
                    attacked += len(values)
    assert attacked > 100


def timeless(records) -> list[dict]:
    """The rows without what depends on the machine's speed."""
    return [{name: row[name] for name in row if not name.endswith("seconds")} for row in records.rows]


@pytest.fixture(scope="module")
def sparse():
    """A ME-Net that sees one pixel in ten."""
    return trained(p=0.1, epochs=3)


@pytest.mark.slow
def test_no_attack_within_a_certified_radius_succeeds(sparse, digits):
    """Pixels chosen by the gradient's size, by chance, and as a block, all set to the farther extreme."""
    images, _ = digits.batch(slice(0, 40))
    found = certificates(sparse, images, CertificateSettings(selection=50, estimation=400))
    held = found.radius >= 1
    assert held.sum() >= 5
    images, predictions, radii = images[held], found.prediction[held], found.radius[held]
    leaf = images.clone().requires_grad_()
    sparse.reseed(5)
    loss = nn.functional.cross_entropy(sum(sparse(leaf) for _ in range(20)), predictions, reduction="sum")
    (slope,) = torch.autograd.grad(loss, leaf)
    random = torch.Generator().manual_seed(0)
    rankings = [slope.abs(), *(torch.rand(images.shape, generator=random) for _ in range(2))]
    rankings.append(-(images - images.roll((1, 1), (2, 3))).abs())
    sparse.reseed(6)
    for ranking in rankings:
        attacked = images.clone().flatten(1)
        for row, places in enumerate(ranking.flatten(1).argsort(1, descending=True)):
            changed = places[: int(radii[row])]
            attacked[row, changed] = (attacked[row, changed] < 0.5).float()
        assert ((attacked.view_as(images) != images).flatten(1).sum(1) == radii).all()
        assert torch.equal(sparse.vote(attacked.view_as(images), draws=150), predictions)


def test_certificates_of_a_dataset_are_rows_that_continue_and_merge(sparse, digits, tmp_path):
    settings = CertificateSettings(stop=12, batch_size=5, selection=10, estimation=60, alpha=0.01, seed=1)
    alone = certify(sparse, digits, tmp_path / "alone", settings)
    for rank in (0, 1):
        certify(sparse, digits, tmp_path / "two", settings, worker=Worker(rank, 2))
    both = read(*shards(tmp_path / "two", "certificate"))
    assert timeless(both) == timeless(alone)
    assert len(alone.rows) == 12
    assert len({seed for row in alone.rows for seed in row["seeds"].values()}) == 6
    accuracies = certified_accuracies(alone)
    values = [one.value for one in accuracies.values()]
    assert values == sorted(values, reverse=True)
    assert values[-1] == 0
    right = [row for row in alone.rows if row["prediction"] == row["label"] and row["radius"] >= 0]
    assert values[0] == len(right) / 12
    assert certified_accuracies(alone, [100])[100].value == 0
    summary = certificate_summary(alone)
    assert summary.vote.value == sum(row["prediction"] == row["label"] for row in alone.rows) / 12
    assert accuracies[max(0, summary.median_radius)].value >= 0.5 or summary.median_radius == -1
    assert certified_accuracies(alone, [summary.median_radius + 1])[summary.median_radius + 1].value < 0.5
    assert summary.draws == 70


def test_certificates_by_partitions_are_rows_too(sparse, digits, tmp_path):
    settings = CertificateSettings(stop=7, batch_size=4, partitions=2)
    alone = certify(sparse, digits, tmp_path / "alone", settings)
    for rank in (0, 1):
        certify(sparse, digits, tmp_path / "two", settings, worker=Worker(rank, 2))
    both = read(*shards(tmp_path / "two", "certificate"))
    assert timeless(both) == timeless(alone)
    assert alone.evaluation["cells"] == 10
    assert all(sum(row["counts"]) == 20 and row["radius"] >= 0 for row in alone.rows)
    assert certificate_summary(alone).draws == 20
    assert certificate_summary(alone).abstentions == 0


def test_experts_are_certified_by_their_own_partitions(digits, tmp_path):
    network = build("experts-1x25", like=digits, generator=torch.Generator().manual_seed(0)).eval()
    found = certify(network, digits, tmp_path / "own", CertificateSettings(stop=6))
    assert (found.evaluation["partitions"], found.evaluation["cells"]) == (1, 25)
    assert found.evaluation["decision"] == "pairwise"
    assert found.evaluation["p"] == 1 / 25
    images, _ = digits.batch(slice(0, 6))
    votes = tally(network.cell_logits(images).detach())
    assert [row["prediction"] for row in found.rows] == pairwise_winner(votes).tolist()
    assert [row["counts"] for row in found.rows] == first_choices(votes).tolist()
    for row, one in zip(found.rows, votes.tolist(), strict=True):
        beaten = [count for rival, count in enumerate(one[row["prediction"]]) if rival != row["prediction"]]
        assert row["radius"] == max(0, min(beaten) - 25 // 2 - 1), "one partition: each pixel takes one vote"
        assert row["lower_bound"] == pytest.approx(min(beaten) / 25)
        assert row["patch"] ** 2 <= max(row["radius"], 1) or row["patch"] <= 5
    with pytest.raises(ConfigurationError, match="expected partitions 1, those of the experts, got 4"):
        certify(network, digits, tmp_path / "other", CertificateSettings(stop=6, partitions=4))
    with pytest.raises(ConfigurationError, match="draws fresh masks, or a network of experts"):
        certify(build("lenet", like=digits), digits, tmp_path / "none", CertificateSettings(stop=6))


def test_the_precision_of_the_votes_is_recorded_and_another_is_refused(digits, tmp_path):
    """Votes in bfloat16 are those of another classifier; float32 goes without saying, as in older records."""
    network = build("experts-1x25", like=digits, generator=torch.Generator().manual_seed(0)).eval()
    seen = []
    network.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    found = certify(network, digits, tmp_path, CertificateSettings(stop=6, precision="bfloat16"))
    assert found.evaluation["precision"] == "bfloat16"
    assert set(seen) == {torch.bfloat16}
    with pytest.raises(RecordError, match="expected precision 'bfloat16', got None"):
        certify(network, digits, tmp_path, CertificateSettings(stop=6))
    plain = certify(network, digits, tmp_path / "plain", CertificateSettings(stop=6))
    assert "precision" not in plain.evaluation
    assert seen[-1] == torch.float32


def test_a_model_in_training_mode_is_certified_and_left_as_it_was(sparse, digits, tmp_path):
    settings = CertificateSettings(stop=3, selection=5, estimation=20)
    expected = certify(sparse, digits, tmp_path / "eval", settings)
    assert expected.evaluation["batch_size"] == 3, "no more is certified than was asked for"
    sparse.train()
    found = certify(sparse, digits, tmp_path / "train", settings)
    assert all(module.training for module in sparse.modules())
    sparse.eval()
    assert timeless(found) == timeless(expected)


def test_models_without_fresh_masks_are_refused(sparse, some):
    images, _ = some
    for model in (sparse.classifier, sparse.fixed(3)):
        with pytest.raises(ConfigurationError, match="draws fresh masks"):
            observation(model, 1)
    cells = MENet(sparse.classifier, sparse.estimator, p=0.1, mask="cells")
    with pytest.raises(ConfigurationError, match="got mask 'cells'; set `partitions`"):
        certificates(cells, images)
    with pytest.raises(ConfigurationError, match="two different seeds"):
        certificates(sparse, images, selection_seed=1, estimation_seed=1)
    with pytest.raises(ConfigurationError, match=r"alpha < 0\.5, got 0\.7"):
        CertificateSettings(alpha=0.7)


def test_no_attack_turns_what_is_certified():
    random = torch.Generator().manual_seed(3)
    layout = partitions(4, 12, (5, 5), random)
    model = MENet(Tiny(2 * 25, seed=1), p=1 / 12, mask="cells", encoding="ablation").eval()
    images = torch.rand(24, 1, 5, 5, generator=random)
    found = partition_certificates(model, images, layout)
    scores = PartitionVote(model, layout)(images)
    certified = found.radius
    assert ((scores.amax(1) > 0) | (certified == 0)).all()
    assert (scores.argmax(1) == found.prediction)[scores.amax(1) > 0].all()
    attacked = fewest_pixels(model, images, found.prediction, layout, proposals=40)
    turned = attacked > 0
    assert turned.float().mean() > 0.8, "an attack that finds nothing shows nothing"
    assert (certified < attacked)[turned].all()
    assert (certified > 0).any()
    # The gap is small enough that a certificate one or two pixels too large would be caught.
    assert (certified + 2 >= attacked)[turned].any()


class Brightness(nn.Module):
    """Of ablated images: whether the pixels it is shown are rather bright or dark."""

    def forward(self, images: Tensor) -> Tensor:
        return images.sum((2, 3))


def test_no_attack_turns_what_random_masks_certify():
    model = MENet(Brightness(), "mask-only", p=0.1, mask="pixels", encoding="ablation").eval()
    images = torch.full((6, 1, 5, 5), 0.9)
    for number, image in enumerate(images):
        image.view(-1)[:number] = 0
    found = certificates(model, images, CertificateSettings(selection=50, estimation=2000))
    attacked = fewest_pixels(model, images, found.prediction, proposals=20)
    assert (found.prediction == 0).all()
    assert (found.radius < attacked).all()
    # Of 25 pixels, with one and a quarter dark for each bright one the vote is lost.
    assert (attacked <= 16).all()
    assert found.radius[0] == 4
    assert found.radius[-1] < found.radius[0]


def test_a_vote_has_turned_only_if_fresh_draws_prove_it(sparse, digits):
    """What is predicted from clean images has not; a class that no mask prefers has."""
    images, _ = digits.batch(slice(0, 12))
    sparse.reseed(0)  # tests that came before have drawn from it
    votes = count_votes(sparse, images, 1000)
    first = pairwise_winner(votes)
    least = first_choices(votes).argmin(1)
    assert not _turned(sparse, images, first, seed=1).any()
    assert _turned(sparse, images, least, seed=1).all()

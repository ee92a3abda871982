"""What single attacks promise beyond the contract."""

from collections.abc import Callable

import pytest
import torch
from attack_models import LINF, Frozen, accuracy, network, train
from torch import Tensor, nn

from menet.attacks import (
    APGD,
    CWL2,
    DLR,
    FGSM,
    PGD,
    SPSA,
    ApproximateInput,
    AutoAttack,
    Boundary,
    ClassifierOnly,
    CoordinateSearch,
    CrossEntropy,
    HopSkipJump,
    Margin,
    MultiTargeted,
    ProjectedBPDA,
    SmallestPGD,
    ThreatModel,
    Transfer,
    WorstCase,
)
from menet.baselines import BitDepth
from menet.errors import AttackError, ConfigurationError

SMALL = ThreatModel("linf", 0.1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_spsa_brings_an_undefended_network_to_near_zero(plain, some):
    images, labels = some[0][:20], some[1][:20]
    attack = SPSA(threat=LINF, steps=40, samples=256, learning_rate=0.02, stop=0.0)
    result = attack(plain, images, labels, generator=generator())
    assert accuracy(plain, result.images, labels) <= 0.05
    assert result.queries.min() < result.queries.max() <= 41 * 256


def test_spsa_estimates_the_gradient(plain, some):
    from menet.attacks.base import Queries, Task
    from menet.attacks.losses import ExpectedLoss
    from menet.attacks.score_based import FiniteDifferences

    images, labels = some[0][:3] * 0.8 + 0.1, some[1][:3]
    task = Task(Queries(plain, labels), images, labels, None, generator(), loss_history=False)
    _, estimate = FiniteDifferences(SPSA(samples=8192, delta=0.001), task).gradient(images)
    _, exact = ExpectedLoss(task.model, Margin(), labels).gradient(images)
    similarity = torch.cosine_similarity(estimate.flatten(1), exact.flatten(1))
    # 4096 random directions among 784 dimensions: 1 / sqrt(1 + 784/4096) = 0.916 is what they can give.
    assert (similarity > 0.88).all()
    torch.testing.assert_close((estimate * exact).sum((1, 2, 3)), exact.square().sum((1, 2, 3)), rtol=0.1, atol=0)


@pytest.mark.slow
def test_boundary_and_hop_skip_jump_bring_an_undefended_network_to_near_zero(plain, some):
    images, labels = some[0][:20], some[1][:20]
    for attack in (Boundary(threat=LINF, steps=1000), HopSkipJump(threat=LINF, steps=5)):
        result = attack(plain, images, labels, generator=generator())
        assert accuracy(plain, result.unprojected, labels) == 0
        assert accuracy(plain, result.images, labels) <= 0.15
        assert not result.failed.any()


def test_hop_skip_jump_normalizes_each_example_by_itself(plain, some):
    import eagerpy

    images, labels = some[0][:8], some[1][:8]
    attack = HopSkipJump(threat=ThreatModel("l2", 1.0)).foolbox_attack()

    def is_wrong(rows):
        return eagerpy.astensor(plain(rows.raw).argmax(1) != labels)

    with torch.random.fork_rng(devices=[]):
        shown = eagerpy.astensor(torch.rand(images.shape, generator=generator()))
        gradients = attack.approximate_gradients(is_wrong, shown, 5, eagerpy.astensor(torch.full((8,), 0.1))).raw
    torch.testing.assert_close(gradients.flatten(1).norm(dim=1), torch.ones(8))


@pytest.mark.parametrize("kind", [Boundary, HopSkipJump])
def test_an_example_without_a_starting_point_does_not_stop_the_others(kind, plain, some):
    images, labels = some[0][:6], plain(some[0][:6]).argmax(1)

    def model(rows: Tensor) -> Tensor:
        # Whatever is shown in the third place is called what its label says.
        logits = plain(rows).clone()
        if len(rows) == 6:
            logits[2] = torch.nn.functional.one_hot(labels[2], 10).float() * 100
        return logits

    attack = kind(threat=LINF, steps=3, tries=4)
    result = attack(model, images, labels, generator=generator())
    assert result.failed.tolist() == [False, False, True, False, False, False]
    assert torch.equal(result.images[2], images[2])
    moved = (result.unprojected != images).flatten(1).any(1)
    assert moved.tolist() == [True, True, False, True, True, True]
    assert torch.isfinite(result.images).all()


def test_given_starting_points_are_used(plain, some):
    images, labels = some[0][:1], plain(some[0][:1]).argmax(1)
    other = some[0][(plain(some[0]).argmax(1) != labels)][:1]
    seen = []

    def model(rows: Tensor) -> Tensor:
        seen.append(rows)
        return plain(rows)

    Boundary(threat=LINF, steps=1, starts=other)(model, images, labels, generator=generator())
    assert torch.equal(seen[2], other)


def test_decision_attacks_work_on_frozen_masks(masked, some):
    images, labels = some[0][:10], some[1][:10]
    model = Frozen(masked)
    result = Boundary(threat=LINF, steps=50)(model, images, labels, generator=generator())
    assert accuracy(model, result.unprojected, labels) == 0


def test_cw_l2_returns_the_image_where_its_confidence_is_out_of_reach(plain, some):
    images, labels = some[0][:4], some[1][:4]
    result = CWL2(steps=5, binary_search_steps=2, confidence=1e4)(plain, images, labels, generator=generator())
    assert result.failed.all()
    assert torch.equal(result.images, images)


def test_cw_l2_wins_by_the_confidence_asked_for(plain, some):
    images, labels = some[0][:8], some[1][:8]
    attack = CWL2(steps=60, binary_search_steps=3, step_size=0.1, initial_const=5.0, confidence=3.0)
    result = attack(plain, images, labels, generator=generator())
    assert not result.failed.any()
    assert (Margin()(plain(result.images), labels) >= 3.0 - 1e-3).all()


def test_restarts_give_the_hard_and_the_expected_criterion(masked, some):
    images, labels = some[0][:50], some[1][:50]
    result = PGD(threat=SMALL, steps=5, restarts=4)(
        masked, images, labels, generator=generator(), loss_history=True
    )
    assert result.restarts.shape == (4, *images.shape)
    assert result.loss_history.shape == (6, 50)
    with torch.no_grad():
        fooled = torch.stack([masked(one).argmax(1) != labels for one in result.candidates])
    assert fooled.any(0).float().mean() > fooled.float().mean()
    # Each image that is returned is that of one of the restarts.
    assert (result.restarts == result.images).flatten(2).all(2).any(0).all()


def test_restarts_keep_the_highest_loss(plain, some):
    images, labels = some[0][:30], some[1][:30]
    result = PGD(threat=SMALL, steps=2, restarts=3, loss=Margin())(plain, images, labels, generator=generator())
    losses = torch.stack([Margin()(plain(one), labels) for one in result.restarts])
    torch.testing.assert_close(Margin()(plain(result.images), labels), losses.amax(0))


def test_the_best_iterate_has_the_highest_loss_of_the_history(plain, some):
    attack = PGD(threat=SMALL, steps=8, step_size=0.15, loss=Margin())
    result = attack(plain, *some, generator=generator(), loss_history=True)
    torch.testing.assert_close(Margin()(plain(result.images), some[1]), result.loss_history.amax(0))
    assert (result.loss_history[-1] < result.loss_history.amax(0)).any()


def test_targets_are_reached(plain, some):
    images, labels = some[0][:50], some[1][:50]
    targets = (labels + 3) % 10
    for loss in (Margin(), CrossEntropy()):
        attack = APGD(threat=LINF, steps=20, loss=loss)
        result = attack(plain, images, labels, generator=generator(), targets=targets)
        assert accuracy(plain, result.images, targets) > 0.9
    # The targeted DLR loss asks only that the target beats the label, as in AutoAttack.
    attack = APGD(threat=LINF, steps=20, loss=DLR())
    logits = plain(attack(plain, images, labels, generator=generator(), targets=targets).images)
    assert (logits.gather(1, targets[:, None]) > logits.gather(1, labels[:, None])).float().mean() > 0.9
    with pytest.raises(ConfigurationError, match="expected no targets, got some: AutoAttack"):
        AutoAttack(threat=LINF)(plain, images, labels, generator=generator(), targets=targets)


def test_dlr_says_how_many_classes_it_needs(some):
    def two_classes(rows: Tensor) -> Tensor:
        return rows.flatten(1)[:, 400:402]

    images, labels = some[0][:4], some[1][:4] % 2
    with pytest.raises(ConfigurationError, match="at least 3 classes for the DLR loss, got 2"):
        PGD(threat=LINF, loss=DLR())(two_classes, images, labels, generator=generator())
    with pytest.raises(ConfigurationError, match="at least 4 classes"):
        AutoAttack(threat=LINF)(two_classes, images, labels, generator=generator())


def test_multi_targeted_tries_all_classes_of_a_small_model(plain, some):
    def three_classes(rows: Tensor) -> Tensor:
        return plain(rows)[:, :3]

    images, labels = some[0][:4], some[1][:4] % 3
    result = MultiTargeted(PGD(threat=SMALL, steps=1))(three_classes, images, labels, generator=generator())
    assert len(result.candidates) == 2


def test_worst_case_takes_each_example_from_the_attack_that_fools_most(plain, some):
    images, labels = some[0][:50], some[1][:50]
    weak, strong = FGSM(threat=SMALL), APGD(threat=SMALL, steps=20, loss=Margin())
    result = WorstCase((weak, strong))(plain, images, labels, generator=generator())
    margins = torch.stack([Margin()(plain(one), labels) for one in result.candidates])
    torch.testing.assert_close(Margin()(plain(result.images), labels), margins.amax(0))
    with pytest.raises(ConfigurationError, match="the same threat model, got"):
        WorstCase((weak, FGSM(threat=LINF)))


def test_transfer_attacks_are_crafted_on_their_source(plain, digits, some):
    images, labels = digits
    torch.manual_seed(5)
    surrogate = train(network(8), images[:2000], labels[:2000], epochs=1)
    attack = PGD(threat=LINF, steps=5)
    on_surrogate = attack(surrogate, *some, generator=generator())
    result = Transfer(attack, surrogate)(plain, *some, generator=generator())
    assert torch.equal(result.images, on_surrogate.images)
    assert (result.queries == 0).all()
    assert accuracy(plain, on_surrogate.images, some[1]) < 0.5


def test_transfer_moves_its_source_to_the_device_of_the_images(plain, some):
    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.moves = plain, []

        def to(self, device: torch.device) -> "Recording":
            self.moves.append(device)
            return self

        def forward(self, images: Tensor) -> Tensor:
            assert self.moves
            return self.inner(images)

    source = Recording()
    Transfer(FGSM(threat=SMALL), source)(plain, some[0][:2], some[1][:2])
    assert source.moves == [some[0].device]


def test_projected_bpda_moves_along_the_images_own_structure(plain, some):
    images, labels = some[0][:5], some[1][:5]
    ball = ThreatModel("l2", 0.5)
    # Away from the range of pixels, so that clipping changes nothing.
    images = images * 0.4 + 0.3
    attack = ProjectedBPDA(threat=ball, steps=3, random_start=False, keep="last", rank=4)
    change = attack(plain, images, labels).images - images
    left, _, right = torch.linalg.svd(2 * images[:, 0] - 1)
    inside = left[..., :4] @ left[..., :4].mT @ change[:, 0] @ right[:, :4].mT @ right[:, :4]
    torch.testing.assert_close(inside, change[:, 0], rtol=0, atol=1e-6)
    assert change.flatten(1).norm(dim=1).min() > 0.1


def test_projected_bpda_with_all_vectors_is_pgd(plain, some):
    images, labels = some[0][:5], some[1][:5]
    ball = ThreatModel("l2", 0.5)
    whole = ProjectedBPDA(threat=ball, steps=3, rank=28)(plain, images, labels, generator=generator())
    plainly = PGD(threat=ball, steps=3)(plain, images, labels, generator=generator())
    torch.testing.assert_close(whole.images, plainly.images, rtol=0, atol=1e-5)


def test_displaced_attacks_add_their_perturbation_to_the_image(plain, some):
    images, labels = some[0][:5], some[1][:5]
    base = (images * 0.5 + 0.2).clamp(0, 1)
    settings = {"threat": SMALL, "steps": 4, "reconstruct": lambda _: base}
    at_base = PGD(threat=SMALL, steps=4)(plain, base, labels, generator=generator()).images - base
    expected = (images + at_base).clamp(0, 1)
    for attack in (ApproximateInput(**settings), ClassifierOnly(**settings, classifier=plain)):
        found = attack(plain, images, labels, generator=generator()).images
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    with pytest.raises(ConfigurationError, match="expected reconstruct to return shape"):
        ApproximateInput(threat=SMALL, reconstruct=lambda rows: rows[:, :, 1:])(
            plain, images, labels, generator=generator()
        )


class TestSmallestBudget:
    def test_finds_the_distance_of_a_linear_boundary(self):
        """That of a linear model is known: its margin over the dual norm of the difference of its weights."""
        weights = torch.randn(2, 12, generator=generator(3), dtype=torch.float64)
        images = torch.full((5, 1, 3, 4), 0.5, dtype=torch.float64)
        images += 0.1 * torch.rand(images.shape, generator=generator(4), dtype=torch.float64)
        scores = images.flatten(1) @ weights.T
        labels, difference = scores.argmax(1), weights[0] - weights[1]
        margin = (scores[:, 0] - scores[:, 1]).abs()
        for norm, dual in (("linf", 1), ("l2", 2)):
            exact = margin / difference.norm(dual)
            attack = SmallestPGD(threat=ThreatModel(norm, float(2 * exact.max())), rounds=12)
            result = attack(lambda rows: rows.flatten(1) @ weights.T, images, labels)
            found = attack.threat.distance(result.images, images)
            assert (found >= exact).all()
            torch.testing.assert_close(found, exact, rtol=0, atol=float(exact.max()) / 1000)

    def test_perturbs_a_network_just_enough(self, plain, some):
        images, labels = some
        threat = ThreatModel("linf", 0.3)
        found = SmallestPGD(threat=threat)(plain, images, labels).images
        with torch.no_grad():
            right = plain(images).argmax(1) == labels
            fooled = plain(found).argmax(1) != labels
            nearly = plain(images + 0.9 * (found - images)).argmax(1) != labels
        assert fooled.all(), "a network without defense has a perturbation within 0.3 for every image"
        assert (found == images).flatten(1).all(1).equal(~right)
        assert threat.distance(found, images).median() < 0.15
        assert nearly[right].double().mean() < 0.1

    def test_what_fools_one_draw_by_a_hair_does_not_fool_the_next(self, masked, some):
        """So it is no measure of a random defense: at the same epsilon PGD leaves much less."""
        images, labels = some
        threat = ThreatModel("linf", 0.2)
        left = []
        for attack in (SmallestPGD(threat=threat, steps=20), PGD(threat=threat, steps=20, eot=1)):
            found = attack(masked, images, labels, generator=generator()).images
            with torch.no_grad():
                left.append(float((masked(found).argmax(1) == labels).double().mean()))
        assert left[0] > left[1] + 0.2

    def test_takes_no_pixels(self):
        with pytest.raises(ConfigurationError, match="expected norm linf or l2 for PGD within"):
            SmallestPGD(threat=ThreatModel("l0", 4))


class TestCoordinateSearch:
    """On models that round to one bit, where brute force over the values that can flip is exact."""

    GRAY = (1, 4, 7, 9, 10)
    """The values of twelve that a budget of 0.3 brings across 0.5."""

    @pytest.fixture
    def images(self) -> Tensor:
        images = torch.tensor([0.0, 0.4, 1.0, 0.0, 0.7, 0.1, 1.0, 0.3, 0.9, 0.6, 0.45, 0.0])
        return images.view(1, 1, 3, 4)

    @staticmethod
    def rounded(score: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Logits of two classes, the first of which wins where the score of the rounded values is positive."""

        def model(rows: Tensor) -> Tensor:
            scores = score((rows.flatten(1) >= 0.5).double()).to(rows.dtype)
            return torch.stack([scores, torch.zeros_like(scores)], 1)

        return model

    def attacked(self, model, images, **settings) -> Tensor:
        attack = CoordinateSearch(threat=ThreatModel("linf", 0.3), **settings)
        return attack(model, images, torch.zeros(1, dtype=torch.int64)).images

    @pytest.mark.parametrize("seed", range(20))
    def test_finds_what_brute_force_finds_of_a_linear_score(self, images, seed):
        weights = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        start = (images.flatten() >= 0.5).double()
        states = start.repeat(32, 1)
        for bit, position in enumerate(self.GRAY):
            states[:, position] = (torch.arange(32) >> bit & 1).double()
        # The score that is positive by a bit at the start, less what the best flips take away, or nearly that.
        for slack, fooled in ((-0.01, True), (0.01, False)):
            bias = slack - float((states @ weights).min())
            if float(start @ weights) + bias <= 0:
                continue
            model = self.rounded(lambda bits, bias=bias: bits @ weights + bias)
            found = self.attacked(model, images)
            assert bool(model(found).argmax(1)) == fooled

    def test_moves_a_pair_where_no_single_move_helps(self, images):
        start = (images.flatten() >= 0.5).double()

        def score(bits: Tensor) -> Tensor:
            moved = (bits != start).double()
            # Each flip alone raises the score; the second and the fifth gray value together turn it.
            return 1 + moved.sum(1) - 4 * moved[:, 4] * moved[:, 10]

        model = self.rounded(score)
        assert model(self.attacked(model, images)).argmax(1) == 1
        assert model(self.attacked(model, images, max_queries=30)).argmax(1) == 0, "too few for pairs"

    def test_fools_a_network_behind_one_bit_within_its_queries(self, plain, digits):
        images, labels = digits[0][4000:4004], digits[1][4000:4004]
        model = BitDepth(plain, bits=1)
        attack = CoordinateSearch(threat=ThreatModel("linf", 0.4), max_queries=2500)
        result = attack(model, images, labels)
        # Two more ask whether the model is deterministic.
        assert result.queries.max() <= 2502
        with torch.no_grad():
            assert (model(images).argmax(1) == labels).all()
            assert (model(result.images).argmax(1) != labels).any()
        again = attack(model, images[:1], labels[:1])
        torch.testing.assert_close(again.images, result.images[:1])

    def test_asks_for_a_deterministic_model(self, masked, digits):
        with pytest.raises(AttackError, match="coordinate search needs a deterministic model"):
            CoordinateSearch()(masked, digits[0][:2], digits[1][:2])

"""What every attack must keep, whatever it does: one entry each, all through the same tests."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from attack_models import Frozen
from hypothesis import given, settings, strategies
from torch import Tensor, nn
from user_attacks import Brighter

from menet.attacks import (
    APGD,
    CW,
    CWL2,
    DLR,
    FGSM,
    NAMES,
    PGD,
    SPSA,
    TITLES,
    ApproximateInput,
    Attack,
    AutoAttack,
    AutoAttackRand,
    Boundary,
    ClassifierOnly,
    CoordinateSearch,
    CrossEntropy,
    HopSkipJump,
    LowFrequency,
    Margin,
    MultiTargeted,
    OnManifold,
    ProjectedBPDA,
    RandomSearch,
    SmallestPGD,
    Square,
    ThreatModel,
    Transfer,
    WorstCase,
    build,
    split_name,
)
from menet.errors import AttackError, ConfigurationError, MenetError


def blur(images: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(images, 3, stride=1, padding=1)


def other_network(images: Tensor) -> Tensor:
    weights = torch.randn(10, images[0].numel(), generator=torch.Generator().manual_seed(7), dtype=images.dtype)
    return images.flatten(1) @ weights.T / 10


def generated(latents: Tensor) -> Tensor:
    weights = torch.randn(3, 784, generator=torch.Generator().manual_seed(8), dtype=latents.dtype)
    return (latents @ weights).sigmoid().view(-1, 1, 28, 28)


ATTACKS: dict[str, Callable[[ThreatModel], Attack]] = {
    "fgsm": lambda threat: FGSM(threat=threat),
    "fgsm on margin, eot": lambda threat: FGSM(threat=threat, loss=Margin(), eot=2),
    "pgd": lambda threat: PGD(threat=threat, steps=3),
    "pgd, last iterate": lambda threat: PGD(threat=threat, steps=3, keep="last"),
    "pgd, restarts": lambda threat: PGD(threat=threat, steps=2, restarts=3),
    "pgd, eot in small passes": lambda threat: PGD(threat=threat, steps=2, eot=3, max_batch=5),
    "pgd, dlr": lambda threat: PGD(threat=threat, steps=2, loss=DLR()),
    "pgd, targeted": lambda threat: MultiTargeted(PGD(threat=threat, steps=2), classes=2),
    "pgd, smallest budget": lambda threat: SmallestPGD(threat=threat, steps=2, rounds=3, max_batch=5),
    "cw": lambda threat: CW(threat=threat, steps=3),
    "cw-l2": lambda threat: CWL2(threat=threat, steps=10, binary_search_steps=3, initial_const=1.0),
    "boundary": lambda threat: Boundary(threat=threat, steps=12),
    "hop-skip-jump": lambda threat: HopSkipJump(threat=threat, steps=1, initial_evaluations=10),
    "spsa": lambda threat: SPSA(threat=threat, steps=2, samples=16, max_batch=24),
    "spsa, stopping": lambda threat: SPSA(threat=threat, steps=2, samples=16, stop=0.0),
    "square": lambda threat: Square(threat=threat, max_queries=10),
    "random search": lambda threat: RandomSearch(threat=threat, proposals=6),
    "coordinate search": lambda threat: CoordinateSearch(threat=threat, max_queries=60),
    "low frequency": lambda threat: LowFrequency(threat=threat, steps=3),
    "apgd-ce": lambda threat: APGD(threat=threat, steps=6, loss=CrossEntropy()),
    "apgd-dlr, eot": lambda threat: APGD(threat=threat, steps=4, loss=DLR(), eot=2),
    "autoattack": lambda threat: AutoAttack(threat=threat, steps=3, max_queries=5),
    "autoattack-rand": lambda threat: AutoAttackRand(threat=threat, steps=2, eot=2),
    "projected bpda": lambda threat: ProjectedBPDA(threat=threat, steps=2),
    "approximate input": lambda threat: ApproximateInput(threat=threat, steps=2, reconstruct=blur),
    "classifier only": lambda threat: ClassifierOnly(
        threat=threat, steps=2, reconstruct=blur, classifier=other_network
    ),
    "on manifold": lambda threat: OnManifold(
        threat=threat, steps=2, starts=2, generate=generated, classifier=other_network, latent=3
    ),
    "transfer": lambda threat: Transfer(PGD(threat=threat, steps=2), other_network),
    "worst case": lambda threat: WorstCase((FGSM(threat=threat), PGD(threat=threat, steps=2))),
}
NEEDS_DETERMINISM = {"boundary", "hop-skip-jump", "autoattack", "coordinate search"}
ATTACKS_ANOTHER_MODEL = {"classifier only", "transfer"}
THREATS = [ThreatModel("linf", 0.1), ThreatModel("l2", 1.5)]

every_attack = pytest.mark.parametrize("make", ATTACKS.values(), ids=ATTACKS.keys())
every_threat = pytest.mark.parametrize("threat", THREATS, ids=["linf", "l2"])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def few(digits) -> tuple[Tensor, Tensor]:
    images, labels = digits
    return images[4000:4006], labels[4000:4006]


@every_attack
@every_threat
def test_stays_in_the_threat_model(make, threat, plain, few):
    images, labels = few
    result = make(threat)(plain, images, labels, generator=generator())
    for found in result.candidates:
        perturbation = (found - images).flatten(1)
        norms = perturbation.abs().amax(1) if threat.norm == "linf" else perturbation.norm(dim=1)
        assert found.shape == images.shape
        assert found.dtype == images.dtype
        assert (norms <= threat.epsilon + 2e-6).all()
        assert found.min() >= 0
        assert found.max() <= 1
    assert not result.images.requires_grad
    assert result.queries.shape == labels.shape
    assert result.queries.dtype == torch.int64


@every_attack
def test_epsilon_zero_changes_nothing(make, plain, few):
    images, labels = few
    result = make(ThreatModel("linf", 0.0))(plain, images, labels, generator=generator())
    assert torch.equal(result.images, images)
    assert result.images.data_ptr() != images.data_ptr()


@every_attack
def test_repeats_from_its_generator_and_leaves_the_global_one_alone(make, plain, masked, few, request):
    images, labels = few
    name = request.node.callspec.id
    model = Frozen(masked) if name in NEEDS_DETERMINISM else masked
    attack = make(THREATS[0])

    def attacked() -> Tensor:
        masked.reseed(3)
        return attack(model, images, labels, generator=generator(5)).images

    before = torch.random.get_rng_state()
    first = attacked()
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        second = attacked()
    assert torch.equal(first, second)


@every_attack
def test_leaves_the_model_alone(make, digits, few):
    images, labels = few
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 784, 10)
    )
    model.eval()
    model[0].train()
    model[4].bias.requires_grad_(False)
    model(images).sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    modes = [module.training for module in model.modules()]
    pixels = images.clone()
    with torch.no_grad():
        make(THREATS[0])(model, images, labels, generator=generator())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [one.requires_grad for one in model.parameters()] == [True] * 5 + [False]
    for one, before in zip(model.parameters(), gradients, strict=True):
        assert (one.grad is None) == (before is None)
        assert before is None or torch.equal(one.grad, before)
    assert torch.equal(images, pixels)


@every_attack
@every_threat
def test_takes_a_batch_of_one_and_of_none(make, threat, plain, few):
    images, labels = few
    attack = make(threat)
    assert attack(plain, images[:1], labels[:1], generator=generator()).images.shape == images[:1].shape
    assert attack(plain, images[:0], labels[:0], generator=generator()).images.shape == images[:0].shape


@every_attack
def test_takes_examples_that_are_already_misclassified(make, plain, few):
    images, _ = few
    wrong = (plain(images).argmax(1) + 1) % 10
    result = make(THREATS[0])(plain, images, wrong, generator=generator())
    assert (plain(result.images).argmax(1) != wrong).all()


@every_attack
def test_names_the_example_whose_logits_are_not_numbers(make, plain, few, request):
    images, labels = few

    def broken(rows: Tensor) -> Tensor:
        # The fourth image is the only one with a bright corner.
        logits = plain(rows)
        return torch.where(rows[:, 0, 0, :1] > 0.2, logits * math.nan, logits)

    images = images.clone()
    images[3, 0, :2, :2] = 0.8
    attack = make(THREATS[0])
    if request.node.callspec.id in ATTACKS_ANOTHER_MODEL:
        assert attack(broken, images, labels, generator=generator()).queries.sum() == 0
        return
    with pytest.raises(AttackError, match=r"NaN for example 3$"):
        attack(broken, images, labels, generator=generator())


@every_attack
def test_counts_its_queries(make, plain, few, request):
    images, labels = few
    rows = []

    def counted(batch: Tensor) -> Tensor:
        rows.append(len(batch))
        return plain(batch)

    result = make(THREATS[0])(counted, images, labels, generator=generator())
    name = request.node.callspec.id
    if name in ATTACKS_ANOTHER_MODEL:
        assert result.queries.sum() == 0
        assert not rows
    elif name == "autoattack":
        assert result.queries.sum() >= sum(rows)
    else:
        assert result.queries.sum() == sum(rows)


@every_attack
def test_takes_double_precision(make, few):
    images, labels = few
    result = make(THREATS[0])(other_network, images.double(), labels, generator=generator())
    assert result.images.dtype == torch.float64


@every_attack
def test_refuses_what_is_not_a_batch_of_images_and_labels(make, plain, few):
    images, labels = few
    attack = make(THREATS[0])
    for arguments, message in [
        ((images[0], labels), "expected floating-point images"),
        (((images * 255).to(torch.uint8), labels), "got torch.uint8"),
        ((images * 2, labels), r"expected images with pixels from 0 to 1, got .* example"),
        ((images - math.nan, labels), "expected images with pixels"),
        ((images, labels[:2]), "expected labels of type int64"),
        ((images, labels.float()), "expected labels of type int64 .*float32"),
        ((images, labels - 10), "expected labels >= 0, got -"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            attack(plain, *arguments, generator=generator())


@every_attack
def test_refuses_labels_the_model_does_not_know(make, plain, few):
    images, labels = few
    with pytest.raises(ConfigurationError, match=r"expected labels from 0 to 9, .* got 10"):
        make(THREATS[0])(plain, images, torch.full_like(labels, 10), generator=generator())


@every_attack
def test_is_frozen_and_says_what_it_is(make):
    attack = make(THREATS[0])
    assert repr(attack).startswith(f"{type(attack).__name__}(")
    assert "epsilon=0.1" in repr(attack)
    with pytest.raises(AttributeError):
        attack.max_batch = 3


@pytest.mark.parametrize("name", sorted(NEEDS_DETERMINISM))
def test_refuses_a_random_model(name, masked, few):
    images, labels = few
    with pytest.raises(AttackError, match="needs a deterministic model"):
        ATTACKS[name](THREATS[0])(masked, images, labels, generator=generator())


def test_says_when_it_needs_a_generator(plain, few):
    with pytest.raises(ConfigurationError, match="expected a generator, got None"):
        PGD(threat=THREATS[0])(plain, *few)
    FGSM(threat=THREATS[0])(plain, *few)


def test_a_result_outside_the_threat_model_is_caught(plain, few):
    class Careless(FGSM):
        def run(self, task):
            result = super().run(task)
            result.images[2, 0, 5, 5] += 0.2
            return result

    with pytest.raises(AttackError, match="left its threat model at example 2"):
        Careless(threat=THREATS[0])(plain, *few)


@given(
    norm=strategies.sampled_from(["linf", "l2"]),
    epsilon=strategies.floats(0, 50),
    scale=strategies.floats(0, 1e4),
    seed=strategies.integers(0, 1000),
)
@settings(max_examples=100)
def test_projection_keeps_the_ball_and_what_is_inside(norm, epsilon, scale, seed):
    threat = ThreatModel(norm, epsilon)
    random = generator(seed)
    origin = torch.rand(3, 2, 4, 5, generator=random)
    inside = threat.project(origin + scale * torch.randn(origin.shape, generator=random), origin)
    threat.check(inside, origin)
    torch.testing.assert_close(threat.project(inside, origin), inside, rtol=0, atol=1e-6)
    threat.check(threat.random_start(origin, random), origin)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_builds(name):
    needed = {
        "approximate-input": {"reconstruct": blur},
        "classifier-only": {"reconstruct": blur, "classifier": other_network},
        "on-manifold": {"generate": generated, "classifier": other_network, "latent": 3},
    }
    attack = build(name, epsilon=0.25, norm="l2", **needed.get(name, {}))
    assert attack.threat == ThreatModel("l2", 0.25)


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("pdg", {}, r"unknown attack 'pdg'; choose from standard, fgsm, pgd, .* \(did you mean 'pgd'\?\)"),
        (
            "pgd",
            {"stepps": 3},
            r"unknown setting 'stepps' of attack 'pgd'; .* \(did you mean 'steps'\?\)",
        ),
        ("pgd", {"loss": "hinge"}, "unknown loss 'hinge'; choose from cross-entropy"),
        ("pgd", {"steps": 0}, "expected steps >= 1, got 0"),
        ("pgd", {"epsilon": -1.0}, "expected epsilon >= 0, got -1.0"),
        ("spsa", {"samples": 5}, "expected an even number of samples >= 2, got 5"),
        ("approximate-input", {}, "needs the setting 'reconstruct'"),
        ("menet.attacks:Nothing", {}, "expected an attack package.module:Class, got 'menet.attacks:Nothing'"),
        ("no.such.module:PGD", {}, "No module named 'no'"),
        ("menet.attacks:build", {}, "a dataclass derived from menet.attacks.Attack"),
        ("user_attacks:Brighter", {"stepps": 1}, "unknown setting 'stepps' of attack 'user_attacks:Brighter'"),
    ],
)
def test_wrong_settings_are_explained(name, settings, message):
    with pytest.raises(MenetError, match=message):
        build(name, **settings)


def test_an_attack_of_ones_own_builds_by_its_module_and_class(plain, few):
    attack = build("user_attacks:Brighter", epsilon=0.2, amount=0.5)
    assert attack == Brighter(threat=ThreatModel("linf", 0.2), amount=0.5)
    result = attack(plain, *few)
    assert torch.equal(result.images, (few[0] + 0.1).clamp(max=1))
    assert (result.queries == 0).all()
    assert attack.title == "Brighter"


@pytest.mark.parametrize(
    "text, name, rest",
    [
        ("pgd", "pgd", ""),
        ("pgd:steps=3,eot=2", "pgd", "steps=3,eot=2"),
        ("pdg:steps=3", "pdg", "steps=3"),
        ("boundary:draws=fixed:10", "boundary", "draws=fixed:10"),
        ("user_attacks:Brighter", "user_attacks:Brighter", ""),
        ("a.b:Own:steps=3", "a.b:Own", "steps=3"),
    ],
)
def test_a_name_is_split_from_its_settings(text, name, rest):
    assert split_name(text) == (name, rest)


def test_titles_are_distinct_and_those_of_the_classes():
    assert TITLES["CWL2"] == CWL2.title == "CW-L2"
    assert TITLES["CW"] == CW.title == "CW (margin)"
    assert len(set(TITLES.values())) == len(TITLES)

    class Variant(PGD):
        pass

    assert Variant.title == "Variant"

"""The same attacks as others wrote them: accuracies on the same examples agree within one point."""

import numpy
import pytest
import torch
from attack_models import EPSILON, LINF, Frozen, accuracy
from torch import Tensor

from menet.attacks import (
    APGD,
    CW,
    CWL2,
    DLR,
    FGSM,
    PGD,
    CrossEntropy,
    Margin,
    MultiTargeted,
    Square,
    ThreatModel,
)
from menet.attacks.losses import LOSSES

POINT = 0.01
# Where the undefended network is right on a part of the digits, so that a weak attack would show.
SMALL = {"linf": ThreatModel("linf", 0.08), "l2": ThreatModel("l2", 1.2)}


@pytest.fixture
def many(digits) -> tuple[Tensor, Tensor]:
    images, labels = digits
    return images[4000:4300], labels[4000:4300]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def foolbox_accuracy(attack, model, images, labels, epsilon) -> float:
    from foolbox import PyTorchModel
    from foolbox.criteria import Misclassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bounded = PyTorchModel(model, bounds=(0, 1), device="cpu")
        _, found, _ = attack(bounded, images, Misclassification(labels), epsilons=epsilon)
    return accuracy(model, found, labels)


def art_classifier(model):
    from art.estimators.classification import PyTorchClassifier

    return PyTorchClassifier(
        model, torch.nn.CrossEntropyLoss(), input_shape=(1, 28, 28), nb_classes=10, clip_values=(0, 1)
    )


def art_accuracy(attack, model, images, labels) -> float:
    state = numpy.random.get_state()
    numpy.random.seed(0)
    found = torch.from_numpy(attack.generate(images.numpy(), labels.numpy()))
    numpy.random.set_state(state)
    return accuracy(model, found, labels)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_fgsm_agrees_with_foolbox_and_art(norm, plain, many):
    from art.attacks.evasion import FastGradientMethod
    from foolbox.attacks import L2FastGradientAttack, LinfFastGradientAttack

    threat = SMALL[norm]
    ours = accuracy(plain, FGSM(threat=threat)(plain, *many).images, many[1])
    foolboxs = {"linf": LinfFastGradientAttack, "l2": L2FastGradientAttack}[norm]()
    order = {"linf": numpy.inf, "l2": 2}[norm]
    arts = FastGradientMethod(art_classifier(plain), norm=order, eps=threat.epsilon, batch_size=300)
    assert 0.2 < ours < 0.8
    assert abs(ours - foolbox_accuracy(foolboxs, plain, *many, threat.epsilon)) <= POINT
    assert abs(ours - art_accuracy(arts, plain, *many)) <= POINT


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_pgd_agrees_with_foolbox_and_art(norm, plain, many):
    from art.attacks.evasion import ProjectedGradientDescentPyTorch
    from foolbox.attacks import L2PGD, LinfPGD

    threat, steps = SMALL[norm], 12
    size = threat.epsilon / 6
    ours = PGD(threat=threat, steps=steps, step_size=size)(plain, *many, generator=generator())
    foolboxs = {"linf": LinfPGD, "l2": L2PGD}[norm](steps=steps, abs_stepsize=size)
    arts = ProjectedGradientDescentPyTorch(
        art_classifier(plain),
        norm={"linf": numpy.inf, "l2": 2}[norm],
        eps=threat.epsilon,
        eps_step=size,
        max_iter=steps,
        num_random_init=1,
        batch_size=300,
        verbose=False,
    )
    left = accuracy(plain, ours.images, many[1])
    assert 0.2 < left < 0.8
    assert abs(left - foolbox_accuracy(foolboxs, plain, *many, threat.epsilon)) <= POINT
    assert abs(left - art_accuracy(arts, plain, *many)) <= POINT


def test_cw_in_a_ball_agrees_with_foolboxs_steps_on_the_same_loss(plain, many):
    import eagerpy
    from foolbox.attacks import LinfPGD

    threat = SMALL["linf"]

    class Carlini(LinfPGD):
        def get_loss_fn(self, model, labels):
            def loss(inputs):
                return eagerpy.astensor(Margin(50.0)(model(inputs).raw, labels.raw).sum())

            return loss

    size = threat.epsilon / 6
    ours = CW(threat=threat, steps=12, step_size=size)(plain, *many, generator=generator())
    theirs = foolbox_accuracy(Carlini(steps=12, abs_stepsize=size), plain, *many, threat.epsilon)
    assert abs(accuracy(plain, ours.images, many[1]) - theirs) <= POINT


@pytest.mark.slow
def test_cw_l2_finds_perturbations_as_small_as_others(plain, some):
    from art.attacks.evasion import CarliniL2Method
    from foolbox import PyTorchModel
    from foolbox.attacks import DDNAttack

    images, labels = some[0][:20], some[1][:20]
    attack = CWL2(steps=120, binary_search_steps=5, step_size=0.05, initial_const=0.1)
    ours = attack(plain, images, labels, generator=generator())
    arts = CarliniL2Method(
        art_classifier(plain),
        max_iter=5,
        binary_search_steps=2,
        learning_rate=0.2,
        initial_const=10,
        max_halving=2,
        max_doubling=2,
        batch_size=20,
        verbose=False,
    )
    ddn, _, _ = DDNAttack(steps=40)(
        PyTorchModel(plain, bounds=(0, 1), device="cpu"), images, labels, epsilons=None
    )

    def median(changed: Tensor) -> float:
        right = plain(images).argmax(1) == labels
        return (changed - images)[right].flatten(1).norm(dim=1).median().item()

    assert accuracy(plain, ours.images, labels) <= art_accuracy(arts, plain, images, labels)
    assert accuracy(plain, ours.images, labels) == 0
    assert not ours.failed.any()
    assert 0.9 * median(ddn) < median(ours.images) < 1.2 * median(ddn)


@pytest.mark.parametrize("loss, name", [(CrossEntropy(), "ce"), (DLR(), "dlr")])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_apgd_agrees_with_the_reference(loss, name, norm, plain, many):
    from pyautoattack.autopgd_base import APGDAttack

    threat = SMALL[norm]
    ours = APGD(threat=threat, steps=15, loss=loss)(plain, *many, generator=generator())
    with torch.random.fork_rng(devices=[]):
        reference = APGDAttack(
            plain, n_iter=15, norm={"linf": "Linf", "l2": "L2"}[norm], eps=threat.epsilon, loss=name, seed=0
        )
        theirs = reference.perturb(*many)
    left = accuracy(plain, ours.images, many[1])
    assert 0.2 < left < 0.8
    assert abs(left - accuracy(plain, theirs, many[1])) <= POINT


def test_targeted_apgd_agrees_with_the_reference(plain, some):
    from pyautoattack.autopgd_base import APGDAttack_targeted

    threat, some = SMALL["linf"], (some[0][:100], some[1][:100])
    attack = MultiTargeted(APGD(threat=threat, steps=10, loss=DLR()), classes=9)
    ours = attack(plain, *some, generator=generator())
    with torch.random.fork_rng(devices=[]):
        reference = APGDAttack_targeted(plain, n_iter=10, norm="Linf", eps=threat.epsilon, n_target_classes=9)
        theirs = reference.perturb(*some)
    assert abs(accuracy(plain, ours.images, some[1]) - accuracy(plain, theirs, some[1])) <= POINT


def test_square_is_the_reference_where_that_succeeds(masked, some):
    from pyautoattack.square import SquareAttack

    model = Frozen(masked)
    ours = Square(threat=LINF, max_queries=60)(model, *some, generator=generator())
    with torch.random.fork_rng(devices=[]):
        theirs = SquareAttack(model, norm="Linf", n_queries=60, eps=EPSILON, seed=0).perturb(*some)
    assert abs(accuracy(model, ours.images, some[1]) - accuracy(model, theirs, some[1])) <= 4 * POINT


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("targeted", [False, True])
def test_losses_are_the_reference_formulas(name, targeted):
    from pyautoattack.autopgd_base import APGDAttack_targeted

    random = generator()
    logits = 5 * torch.randn(200, 10, generator=random)
    labels = torch.randint(0, 10, (200,), generator=random)
    targets = (labels + torch.randint(1, 10, (200,), generator=random)) % 10
    reference = APGDAttack_targeted(None, eps=0.1)
    reference.y_target = targets
    rows = torch.arange(200)
    if targeted:
        others = logits.clone()
        others[rows, targets] = -torch.inf
        expected = {
            "cross-entropy": lambda: logits.log_softmax(1)[rows, targets],
            "margin": lambda: logits[rows, targets] - others.amax(1),
            "dlr": lambda: reference.dlr_loss_targeted(logits, labels),
        }
    else:
        others = logits.clone()
        others[rows, labels] = -torch.inf
        expected = {
            "cross-entropy": lambda: -logits.log_softmax(1)[rows, labels],
            "margin": lambda: others.amax(1) - logits[rows, labels],
            "dlr": lambda: reference.dlr_loss(logits, labels),
        }
    ours = LOSSES[name]()(logits, labels, targets if targeted else None)
    torch.testing.assert_close(ours, expected[name]())

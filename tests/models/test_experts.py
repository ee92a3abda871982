"""Networks of experts: what each sees, and how they are trained."""

import math

import pytest
import torch

from menet import masks
from menet.errors import ConfigurationError
from menet.models import build
from menet.training.objectives import ALONE, VOTE_MARGIN, VOTE_SHARPNESS, Standard, vote_loss


@pytest.mark.parametrize(
    ("name", "channels", "side"), [("experts-3x64", 1, 28), ("experts-3x25", 3, 12), ("experts-lines", 1, 28)]
)
@torch.no_grad()
def test_an_expert_depends_on_the_pixels_of_its_cell_alone(name, channels, side):
    """What a certificate by partitions rests on: bit for bit, whatever stands elsewhere."""
    random = torch.Generator().manual_seed(0)
    network = build(name, channels=channels, side=side, generator=random).eval()
    images = torch.rand(4, channels, side, side, generator=random)
    before, layout = network.cell_logits(images), network.partitions
    cells = int(layout.max()) + 1
    sizes = {"experts-3x64": (3, 64), "experts-3x25": (3, 25), "experts-lines": (2, 28)}
    assert (len(layout), cells) == sizes[name]
    assert before.shape == (4, len(layout) * cells, 10)
    for expert in range(0, len(layout) * cells, 7):
        own = layout[expert // cells] == expert % cells
        elsewhere = network.cell_logits(torch.where(own, images, torch.rand(images.shape, generator=random)))
        assert torch.equal(elsewhere[:, expert], before[:, expert])
        assert (elsewhere != before).any(-1).any(0).sum() > 0.9 * before.shape[1]
        inside = network.cell_logits(torch.where(own, 1 - images, images))
        assert (inside[:, expert] != before[:, expert]).any()
    torch.testing.assert_close(network(images), before.mean(1))


def test_lattices_are_partitions_into_cells_that_are_spread_evenly():
    for cells in (1, 7, 25, 36, 49):
        layout = masks.lattices(min(cells, 3), cells, (28, 28))
        for one in layout:
            sizes = torch.bincount(one.flatten(), minlength=cells)
            assert len(sizes) == cells
            assert sizes.min() >= 0.6 * 784 / cells
            assert sizes.max() <= 1.5 * 784 / cells
            places = (one == one[14, 14]).nonzero()
            apart = torch.cdist(places.double(), places.double()).fill_diagonal_(99).amin()
            # The closest points of the densest lattice are √(2T/√3) = 1.07 √T apart, of one by columns 1.
            assert cells == 1 or apart >= 0.8 * cells**0.5
        assert len({tuple(one.flatten().tolist()) for one in layout}) == len(layout)
    square = masks.lattices(31, 25, (28, 28))
    rows, columns = torch.meshgrid(torch.arange(28), torch.arange(28), indexing="ij")
    assert any(torch.equal(one, rows % 5 * 5 + columns % 5) for one in square)
    with pytest.raises(ConfigurationError, match=r"count <= 31, the lattices of 25 cells, got 25 and 32"):
        masks.lattices(32, 25, (28, 28))
    with pytest.raises(ConfigurationError, match="cells <= 16, the pixels"):
        masks.lattices(1, 25, (4, 4))


def test_every_expert_is_trained_to_answer_alone():
    random = torch.Generator().manual_seed(0)
    network = build("experts-1x25", channels=1, side=28, generator=random)
    images, labels = torch.rand(6, 1, 28, 28, generator=random), torch.arange(6)
    loss, logits = Standard()(network, images, labels, random)
    cells = network.cell_logits(images)
    each = torch.stack([torch.nn.functional.cross_entropy(one, labels) for one in cells.unbind(1)])
    torch.testing.assert_close(loss, ALONE * each.mean() + vote_loss(cells, labels))
    torch.testing.assert_close(logits, network(images))
    lenet = build("lenet", channels=1, side=28, generator=random)
    assert lenet.partitions is None
    torch.testing.assert_close(lenet.cell_logits(images)[:, 0], lenet(images))


def test_the_loss_of_a_vote_is_that_of_its_leads():
    # Two experts, three classes: certain that 0 is before 1, and divided over 2.
    cells = torch.tensor([[[9.0, -9.0, -9.0], [9.0, -9.0, 27.0]]])
    expected = math.log(1 + sum(math.exp(VOTE_SHARPNESS * (VOTE_MARGIN - lead)) for lead in (1, 0)))
    assert float(vote_loss(cells, torch.tensor([0]))) == pytest.approx(expected, abs=1e-6)
    # The divided pair is where votes are missing, so it gets more of the gradient than the certain one.
    logits = torch.zeros(1, 4, 3)
    logits[..., 0], logits[:, :3, 1], logits[:, 2:, 2] = 0.2, -0.2, 0.3
    logits.requires_grad_()
    vote_loss(logits, torch.tensor([0])).backward()
    assert logits.grad is not None
    assert logits.grad[..., 2].sum() > 1.5 * logits.grad[..., 1].sum() > 0
    # A lead of a tenth is a right vote, but less than what is asked for.
    narrow = torch.tensor([[[0.1, 0.0]]], requires_grad=True)
    vote_loss(narrow, torch.tensor([0])).backward()
    assert narrow.grad is not None
    assert float(narrow.grad.abs().amax()) > VOTE_SHARPNESS / 2
    # In eight bits, as under autocast, the leads of many experts would be lost.
    assert vote_loss(cells.bfloat16(), torch.tensor([0])).dtype == torch.float32


def test_experts_for_large_images_are_refused():
    with pytest.raises(ConfigurationError, match="expected side <= 512 for experts, got 600"):
        build("experts-1x25", side=600)

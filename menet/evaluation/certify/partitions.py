"""Certificates by partitions: every cell of pixels votes, and a pixel reaches few cells.

The pixels are divided into T cells, in R public ways; the classifier votes once on each of the
R·T cells, so nothing is random and nothing is estimated. A perturbed pixel i lies in one cell of each
partition. Let N be the lead of A over another class B, u_B(cell) how much the cell can narrow it by a vote of
the adversary's choice, and w_B(i) the sum of u_B over the R cells in which i lies. Perturbing a set S narrows
the lead by at most the sum of w_B(i) over S (a cell that holds two pixels of S is counted twice), hence by at
most the sum of the ρ largest. The vote remains A if for every B

    N > the sum of the ρ largest w_B(i).

By plurality N = N_A − N_B, the difference of their votes. A cell that voted A can turn to B, so u_B = 2; one
that voted for a third class has u_B = 1; one that voted B has 0. By pairwise votes N is the number of cells
that rank A above B less that of the others, and u_B = 2 for the former and 0 for the latter: they can do no
further harm. Since w_B(i) ≤ 2R, either holds whenever N > 2ρR; with R = 1 and plurality this is the bound of
Hammoudeh & Lowd (2023). A tie after the perturbation counts as a changed vote. There is no probability of error
and no abstention.

**Patches.** An adversary who perturbs all pixels of a w×w square reaches, for each place of the square, the
cells that have a pixel in it, each once. The vote remains A if N exceeds the sum of u_B over these cells, for
every place and every B. There are few places, so the bound is computed for each of them.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from menet.attacks.losses import MAX_BATCH
from menet.evaluation.certify.votes import (
    Certificates,
    Decision,
    beaten_by,
    first_choices,
    pairwise_winner,
    require_masks,
    tally,
)
from menet.models import Network
from menet.preprocessed import evaluation_mode, require_numbers


def partition_certificates(
    model: nn.Module,
    images: Float[Tensor, "b c h w"],
    partitions: Int[Tensor, "r h w"],
    max_batch: int = MAX_BATCH,
    decision: Decision = "pairwise",
) -> Certificates:
    """Certify a batch by the votes on each cell of each partition, in evaluation mode.

    Entry (r, i, j) of `partitions` is the cell of pixel (i, j) in partition r, counted from 0. The model is a
    ME-Net, or a network of experts, whose own partitions these must be.
    """
    cells = int(partitions.max()) + 1
    with evaluation_mode(model), torch.no_grad():
        logits = torch.cat(
            [cell_logits(model, part, partitions, max_batch).cpu() for part in images.split(max_batch)]
        )
    votes = tally(require_numbers(logits.transpose(0, 1)).transpose(0, 1))
    counts = first_choices(votes)
    prediction = pairwise_winner(votes) if decision == "pairwise" else counts.argmax(1)
    lead, harm = leads(logits, prediction, decision)
    harm = harm.unflatten(1, (len(partitions), cells))
    radius = partition_radius(lead, harm, partitions.cpu())
    # The lead of half the votes is the fraction that ranks the prediction above its closest rival.
    narrowest = lead.amin(1).double() / logits.shape[1] if lead.shape[1] else torch.ones(len(images)).double()
    winning = counts.gather(1, prediction[:, None])[:, 0].double() / logits.shape[1]
    first = (1 + narrowest) / 2 if decision == "pairwise" else winning
    return Certificates(
        prediction,
        counts,
        first,
        first - narrowest,
        radius,
        beaten_by(prediction, votes) if decision == "pairwise" else None,
        patch_side(lead, harm, partitions.cpu()),
    )


def cell_logits(
    model: nn.Module,
    images: Float[Tensor, "b c h w"],
    partitions: Int[Tensor, "r h w"],
    max_batch: int = MAX_BATCH,
) -> Float[Tensor, "b cells classes"]:
    """The logits of a model that sees one cell at a time, partition by partition."""
    if isinstance(model, Network):
        return model.cell_logits(images)
    known = require_masks(model)
    cells = int(partitions.max()) + 1
    shown = torch.stack([partitions == cell for cell in range(cells)], 1).flatten(0, 1).to(images.device)
    found = []
    for masks in shown.split(max(1, max_batch // len(images))):
        repeated = images.repeat(len(masks), 1, 1, 1)
        mask = masks.repeat_interleave(len(images), 0)[:, None].expand(repeated.shape)
        found.append(known(repeated, mask).unflatten(0, (len(masks), len(images))))
    return torch.cat(found).transpose(0, 1)


def leads(
    logits: Float[Tensor, "b cells classes"], prediction: Int[Tensor, " b"], decision: Decision
) -> tuple[Int[Tensor, "b rivals"], Int[Tensor, "b cells rivals"]]:
    """The lead of the prediction over each other class, and by how much each cell can narrow it."""
    classes = logits.shape[-1]
    # Each image's classes but the predicted one, in order.
    others = torch.arange(classes - 1).expand(len(logits), -1)
    others = others + (others >= prediction[:, None]).long()
    if decision == "pairwise":
        own = logits.gather(2, prediction[:, None, None].expand(-1, logits.shape[1], 1))
        above = (own > logits).gather(2, others[:, None].expand(-1, logits.shape[1], -1)).long()
        return 2 * above.sum(1) - logits.shape[1], 2 * above
    chosen = logits.argmax(-1)[..., None]
    winning, for_rival = (chosen == prediction[:, None, None]).long(), (chosen == others[:, None]).long()
    return (winning - for_rival).sum(1), 1 + winning - for_rival


def partition_radius(
    lead: Int[Tensor, "b rivals"], harm: Int[Tensor, "b r t rivals"], partitions: Int[Tensor, "r h w"]
) -> Int[Tensor, " b"]:
    """The most pixels that can be perturbed without changing the vote: N > the sum of the ρ largest w_B(i).

    `lead` is N for each rival, `harm` is u_B of each cell.
    """
    cell_of = partitions.flatten(1)
    radius = torch.full((len(lead),), cell_of.shape[1])
    for rival in range(lead.shape[1]):
        weights = torch.stack([harm[:, r, cells, rival] for r, cells in enumerate(cell_of)]).sum(0)
        lost = weights.sort(1, descending=True).values.cumsum(1)
        # The sums never fall, so counting those below is finding the last of them.
        radius = radius.minimum((lost < lead[:, rival, None]).sum(1))
    return radius


def patch_side(
    lead: Int[Tensor, "b rivals"], harm: Int[Tensor, "b r t rivals"], partitions: Int[Tensor, "r h w"]
) -> Int[Tensor, " b"]:
    """The side of the largest square patch, anywhere in the image, that cannot change the vote; 0 where none."""
    cells, least = int(partitions.max()) + 1, min(partitions.shape[1:])
    shown = torch.stack([partitions == cell for cell in range(cells)], 1).flatten(0, 1).float()
    flat = harm.flatten(1, 2).transpose(1, 2).float()
    found = torch.zeros(len(lead), dtype=torch.int64)
    holds = torch.ones(len(lead), dtype=torch.bool)
    for side in range(1, least + 1):
        # Which cells have a pixel in the patch, for each of its places.
        reached = torch.nn.functional.max_pool2d(shown, side, 1).flatten(1)
        holds = holds & ((flat @ reached).amax(2) < lead).all(1)
        if not bool(holds.any()):
            break
        found[holds] = side
    return found

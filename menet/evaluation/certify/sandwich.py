"""The sandwich: attacks on what is certified, which have to stay above every radius."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from menet.attacks import PGD, RandomSearch, ThreatModel
from menet.attacks.losses import MARGIN, MAX_BATCH
from menet.defense import MENet
from menet.evaluation.accuracy import upper_bound
from menet.evaluation.certify.partitions import cell_logits, partition_certificates
from menet.evaluation.certify.votes import LABEL, beaten_by, count_votes, require_masks
from menet.preprocessed import evaluation_mode
from menet.seeding import batch_seed


class PartitionVote(nn.Module):
    """The pairwise decision over partitions as a deterministic classifier, for attacks on it.

    The score of a class is its narrowest majority: the smallest fraction of cells that rank it above another
    class, less a half; it is positive for the winner alone. Gradients are those of the same fractions with
    sigmoids of the differences of logits in place of steps: votes have none.
    """

    def __init__(self, model: nn.Module, partitions: Int[Tensor, "r h w"], max_batch: int = MAX_BATCH) -> None:
        super().__init__()
        self.model, self.partitions, self.max_batch = model, partitions, max_batch

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        logits = cell_logits(self.model, images, self.partitions, self.max_batch)
        scores = []
        for one in range(logits.shape[-1]):
            difference = logits[..., one, None] - torch.cat([logits[..., :one], logits[..., one + 1 :]], -1)
            soft = difference.sigmoid().mean(1)
            above = (difference > 0).to(soft).mean(1)
            scores.append((soft + (above - soft).detach()).amin(1) - 0.5)
        return torch.stack(scores, 1)


BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
"""Pixels that the attacks of a sandwich may perturb, one budget after the other."""
JUDGES = 1000
"""Fresh draws that judge whether an attack on the vote over random masks has turned it."""
DOUBT = 0.001
"""The probability with which they may judge so wrongly."""


def fewest_pixels(
    model: nn.Module,
    images: Float[Tensor, "b c h w"],
    prediction: Int[Tensor, " b"],
    partitions: Int[Tensor, "r h w"] | None = None,
    proposals: int = 300,
    seed: int = 0,
) -> Int[Tensor, " b"]:
    """The fewest pixels with which an l0 attack took the pairwise vote from the `prediction`; 0 where none did.

    The vote is that over `partitions`, or over the random masks of a ME-Net. Attacks are PGD with gradients of
    soft votes, or of the mean over masks, and random search over the scores, at budgets from 1 to 64. The
    certified radius is below each of these numbers, or the certificate is wrong. The vote over all masks cannot
    be counted: it has turned if fresh draws prove that, with confidence 1 − `DOUBT`.
    """
    found = torch.zeros_like(prediction)
    if partitions is not None:
        vote: nn.Module = PartitionVote(model, partitions).eval()
    else:
        vote = require_masks(model).with_gradient("exact").eval()
    for budget in BUDGETS:
        left = (found == 0).nonzero()[:, 0]
        threat = ThreatModel("l0", budget)
        for attack in (
            PGD(threat=threat, steps=20, loss=MARGIN),
            RandomSearch(threat=threat, proposals=proposals),
        ):
            if not len(left):
                break
            seeds = batch_seed(seed, "attack", LABEL, budget), batch_seed(seed, "scoring", LABEL, budget)
            generator = torch.Generator().manual_seed(seeds[0])
            attacked = attack(vote, images[left], prediction[left], generator=generator).images
            if partitions is not None:
                now = partition_certificates(model, attacked, partitions).prediction.to(prediction.device)
                turned = now != prediction[left]
            else:
                turned = _turned(require_masks(model), attacked, prediction[left], seeds[1])
            pixels = (attacked != images[left]).any(1).flatten(1).sum(1)
            found[left] = torch.where(turned, pixels, 0)
            left = left[~turned]
    return found


def _turned(
    model: MENet, images: Float[Tensor, "b c h w"], prediction: Int[Tensor, " b"], seed: int
) -> Bool[Tensor, " b"]:
    """Whether fresh draws prove that the prediction does not beat every other class."""
    with evaluation_mode(model):
        model.reseed(seed)
        beaten = beaten_by(prediction, count_votes(model, images, JUDGES))
    beaten = beaten.scatter(1, prediction[:, None], JUDGES)
    each = DOUBT / max(1, beaten.shape[1] - 1)
    proven = [upper_bound(count, JUDGES, each) <= 0.5 for count in beaten.amin(1).tolist()]
    return torch.tensor(proven, device=prediction.device)

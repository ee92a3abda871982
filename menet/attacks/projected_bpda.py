"""Projected BPDA, the paper's second adaptive attack (section "Evaluation against Adaptive Attacks")."""

from dataclasses import dataclass

import torch
from torch import Tensor

from menet.attacks.ascent import Objective
from menet.attacks.base import Task
from menet.attacks.kinds import Images, Losses
from menet.attacks.pgd import PGD
from menet.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ProjectedBPDA(PGD):
    """PGD whose gradient is projected, at every step, on the main structure of the original image.

    With U_k and V_k the top `rank` singular vectors of the image as one matrix [R G B] in [-1,1], the
    gradient G becomes U_k U_kᵀ G V_k V_kᵀ. The paper says "the top few singular vectors" and reports 74.7 %
    for it, above its own plain BPDA (52.8 %): a weaker attack, kept for comparison.
    """

    rank: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ConfigurationError(f"rank is {self.rank}; it must be 1 or more")

    def objective(self, task: Task) -> Objective:
        left, _, right = torch.linalg.svd(_to_matrix(2 * task.images - 1), full_matrices=False)
        return _OnSubspace(super().objective(task), left[..., : self.rank], right[..., : self.rank, :])


@dataclass(frozen=True)
class _OnSubspace:
    inner: Objective
    left: Tensor
    right: Tensor

    def gradient(self, images: Images) -> tuple[Losses, Images]:
        losses, gradient = self.inner.gradient(images)
        inside = self.left.mT @ _to_matrix(gradient) @ self.right.mT
        return losses, _to_image(self.left @ inside @ self.right, gradient)

    def value(self, images: Images) -> Losses:
        return self.inner.value(images)


def _to_matrix(images: Tensor) -> Tensor:
    return images.transpose(1, 2).flatten(2)


def _to_image(matrix: Tensor, like: Tensor) -> Tensor:
    return matrix.unflatten(2, (like.shape[1], like.shape[3])).transpose(1, 2)

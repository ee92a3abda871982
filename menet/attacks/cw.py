"""Carlini and Wagner's loss inside an epsilon-ball, as Madry et al. and the paper's CW columns use it."""

from dataclasses import dataclass

from menet.attacks.losses import MARGIN_50, Loss
from menet.attacks.pgd import PGD


@dataclass(frozen=True, kw_only=True)
class CW(PGD):
    """PGD on the margin between the best wrong logit and the label's, capped at a confidence.

    The paper's κ = 20 and κ = 50 are `loss=Margin(20)` and `loss=Margin(50)`.
    """

    loss: Loss = MARGIN_50

"""How a model answers images over many fresh draws of its randomness."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from menet.attacks.eot import ROWS
from menet.attacks.kinds import Model
from menet.errors import ConfigurationError, MenetError


@dataclass(frozen=True)
class Outcome:
    """The answers of `masks` draws for each image; ranks count from 0, the label's rank when it is predicted."""

    predictions: Int[Tensor, "masks b"]
    ranks: Int[Tensor, "masks b"]
    """The place of the label when classes are ordered by their logits."""
    mean_prediction: Int[Tensor, " b"]
    mean_rank: Int[Tensor, " b"]
    mean_probability: Float[Tensor, " b"]
    """The label's probability by the softmax of the mean logits."""

    @property
    def accuracy(self) -> float:
        """The share of draws and images that are right."""
        return (self.ranks == 0).double().mean().item()

    def rows(self) -> list[dict[str, Any]]:
        """One plain description per image, as records hold it."""
        return [
            {
                "predictions": predictions,
                "ranks": ranks,
                "mean": {"prediction": prediction, "rank": rank, "probability": probability},
            }
            for predictions, ranks, prediction, rank, probability in zip(
                self.predictions.T.tolist(),
                self.ranks.T.tolist(),
                self.mean_prediction.tolist(),
                self.mean_rank.tolist(),
                self.mean_probability.tolist(),
                strict=True,
            )
        ]


@torch.no_grad()
def score(
    model: Model, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], masks: int, rows: int = ROWS
) -> Outcome:
    """Ask `model` about each image `masks` times; draws share forward passes of at most `rows` images.

    The model draws from its own generator; the caller seeds it.
    """
    if masks < 1 or rows < 1:
        raise ConfigurationError(f"masks is {masks} and rows is {rows}; both must be 1 or more")
    parts = [
        _score(model, images[start : start + rows], labels[start : start + rows], masks, rows)
        for start in range(0, len(images), rows)
    ]
    if len(parts) == 1:
        return parts[0]
    return Outcome(
        predictions=torch.cat([part.predictions for part in parts], 1),
        ranks=torch.cat([part.ranks for part in parts], 1),
        mean_prediction=torch.cat([part.mean_prediction for part in parts]),
        mean_rank=torch.cat([part.mean_rank for part in parts]),
        mean_probability=torch.cat([part.mean_probability for part in parts]),
    )


def _score(model: Model, images: Tensor, labels: Tensor, masks: int, rows: int) -> Outcome:
    together = max(1, rows // max(1, len(images)))
    predictions, ranks = [], []
    total: Tensor | None = None
    for done in range(0, masks, together):
        draws = min(together, masks - done)
        logits = model(images.repeat(draws, 1, 1, 1)).unflatten(0, (draws, len(images))).double()
        _require_numbers(logits)
        predictions.append(logits.argmax(-1))
        ranks.append(_ranks(logits, labels))
        total = logits.sum(0) if total is None else total + logits.sum(0)
    assert total is not None
    mean = total / masks
    return Outcome(
        predictions=torch.cat(predictions),
        ranks=torch.cat(ranks),
        mean_prediction=mean.argmax(-1),
        mean_rank=_ranks(mean, labels),
        mean_probability=mean.softmax(-1).gather(-1, labels[:, None])[:, 0],
    )


def answers_alike(model: Model, images: Float[Tensor, "b c h w"]) -> bool:
    """Whether two calls of `model` agree exactly: it has no randomness that draws could average over."""
    with torch.no_grad():
        return bool(torch.equal(model(images), model(images)))


def _ranks(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.expand(logits.shape[:-1])[..., None]
    above = (logits > logits.gather(-1, chosen)).sum(-1)
    # A tie for the first place goes to the class that is predicted.
    return above + ((above == 0) & (logits.argmax(-1) != labels))


def _require_numbers(logits: Tensor) -> None:
    wrong = logits.isnan().any(-1).any(0)
    if wrong.any():
        raise MenetError(f"the model gave logits that are not numbers (NaN) for image {int(wrong.nonzero()[0])}")

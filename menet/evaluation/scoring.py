"""What a model predicts over many fresh draws of its randomness."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from menet.attacks.base import Model
from menet.attacks.losses import MAX_BATCH
from menet.errors import ConfigurationError
from menet.preprocessed import require_numbers


@dataclass(frozen=True)
class Scores:
    """The predictions of several draws for each image; ranks count from 0, the rank of a predicted label."""

    predictions: Int[Tensor, "draws b"]
    ranks: Int[Tensor, "draws b"]
    """The position of the label when classes are sorted by their logits."""
    mean_prediction: Int[Tensor, " b"]
    mean_rank: Int[Tensor, " b"]
    mean_probability: Float[Tensor, " b"]
    """The label's probability by the softmax of the mean logits."""

    @property
    def accuracy(self) -> float:
        """The fraction of draws and images that are classified correctly."""
        return (self.ranks == 0).double().mean().item()

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary of plain values per image, as records hold it."""
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
    model: Model,
    images: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    draws: int,
    max_batch: int = MAX_BATCH,
) -> Scores:
    """Classify each image `draws` times; draws share forward passes of at most `max_batch` images.

    The model draws from its own generator; the caller seeds it.
    """
    if draws < 1 or max_batch < 1:
        raise ConfigurationError(f"expected draws >= 1 and max_batch >= 1, got {draws} and {max_batch}")
    parts = [
        _score(model, images[start : start + max_batch], labels[start : start + max_batch], draws, max_batch)
        for start in range(0, len(images), max_batch)
    ]
    if len(parts) == 1:
        return parts[0]
    return Scores(
        predictions=torch.cat([part.predictions for part in parts], 1),
        ranks=torch.cat([part.ranks for part in parts], 1),
        mean_prediction=torch.cat([part.mean_prediction for part in parts]),
        mean_rank=torch.cat([part.mean_rank for part in parts]),
        mean_probability=torch.cat([part.mean_probability for part in parts]),
    )


def _score(model: Model, images: Tensor, labels: Tensor, draws: int, max_batch: int) -> Scores:
    together = max(1, max_batch // max(1, len(images)))
    predictions, ranks = [], []
    total: Tensor | None = None
    for done in range(0, draws, together):
        count = min(together, draws - done)
        logits = model(images.repeat(count, 1, 1, 1)).unflatten(0, (count, len(images))).double()
        require_numbers(logits)
        predictions.append(logits.argmax(-1))
        ranks.append(_ranks(logits, labels))
        total = logits.sum(0) if total is None else total + logits.sum(0)
    assert total is not None
    mean = total / draws
    return Scores(
        predictions=torch.cat(predictions),
        ranks=torch.cat(ranks),
        mean_prediction=mean.argmax(-1),
        mean_rank=_ranks(mean, labels),
        mean_probability=mean.softmax(-1).gather(-1, labels[:, None])[:, 0],
    )


def require_positive(settings: Any, *names: str) -> None:
    """Refuse settings that are less than 1; None, for a default that is computed later, is fine."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"expected {name} >= 1, got {value}")


def _ranks(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.expand(logits.shape[:-1])[..., None]
    above = (logits > logits.gather(-1, chosen)).sum(-1)
    # A tie for the first place goes to the class that is predicted.
    return above + ((above == 0) & (logits.argmax(-1) != labels))

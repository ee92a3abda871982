"""The attacked model as an attack sees it: every answer is checked, and every question counted."""

import torch
from torch import Tensor

from menet.attacks.kinds import Model
from menet.errors import AttackError, ConfigurationError


class Queries:
    """A model together with how often each example of the batch has gone through it."""

    def __init__(self, model: Model, labels: Tensor, targets: Tensor | None = None) -> None:
        self.model = model
        self.counts = torch.zeros(len(labels), dtype=torch.int64, device=labels.device)
        self._answers = {"labels": labels, "targets": targets}
        self._first = True

    def __call__(self, rows: Tensor, examples: slice | Tensor | None = None, draws: int = 1) -> Tensor:
        """Logits of `rows`: the images of `examples` (all of them if None), repeated `draws` times.

        Rows are ordered by draw: all examples once, then all of them again. Attacks from other libraries
        choose their own part of the batch without saying which; such a call counts for every example, so that
        `counts` is then an upper bound.
        """
        logits = self.model(rows)
        if self._first:
            self._check_shape(logits, rows)
        self._check_numbers(logits, examples, draws)
        self.counts[slice(None) if examples is None else examples] += draws
        return logits

    def _check_shape(self, logits: Tensor, rows: Tensor) -> None:
        if logits.ndim != 2 or len(logits) != len(rows) or not logits.is_floating_point():
            raise ConfigurationError(
                f"model gave {logits.dtype} of shape {tuple(logits.shape)} for {len(rows)} images; "
                f"accepted are floating-point logits of shape ({len(rows)}, classes)"
            )
        for name, classes in self._answers.items():
            if classes is not None and int(classes.max()) >= logits.shape[1]:
                raise ConfigurationError(
                    f"{name} has class {int(classes.max())}, but the model knows {logits.shape[1]} classes: "
                    f"accepted are 0 to {logits.shape[1] - 1}"
                )
        self._first = False

    def _check_numbers(self, logits: Tensor, examples: slice | Tensor | None, draws: int) -> None:
        wrong = logits.detach().isnan()
        if wrong.any():
            row = int(wrong.any(1).nonzero()[0]) % (len(logits) // draws)
            numbers = torch.arange(len(self.counts), device=self.counts.device)
            numbers = numbers if examples is None else numbers[examples]
            known = len(logits) == len(numbers) * draws
            which = (
                f"example {int(numbers[row])}" if known else f"image {row} of {len(logits)} that the attack made"
            )
            raise AttackError(f"the model gave logits that are not numbers (NaN) for {which}")

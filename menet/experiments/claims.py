"""The paper's numbers as data: every percentage in its tables, with the setting it was measured in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from menet.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a number was measured on.

    Where the paper leaves a value open, this project had to choose: `p` is that of the row with the same number
    in another table, and ME-Net's for total variation; so is `kappa`, which is else 50 where the paper says only
    "CW"; ME-Net's estimator is the nuclear norm unless a table names another.
    """

    dataset: str
    network: str
    method: str
    """vanilla, madry, thermometer, pixel-defend, total-variation or me-net."""
    training: str
    """standard or adversarial."""
    training_steps: int | None = None
    """Optimizer steps: epochs of Appendix B in batches of 256 (the published code), an epoch of ME-Net without
    adversarial training being all its estimates (Algorithm 1). None for numbers quoted from other papers."""
    p: float | tuple[float, float] | None = None
    masks: int | None = None
    """Masks per image in ME-Net's training."""
    estimator: str | None = None
    access: str
    """clean, black-box, gray-box, white-box or classifier-only (table 12)."""
    attack: str | None = None
    epsilon: str | None = None
    """The budget in linf as the paper writes it, 8/255; None for clean images and Boundary, which has none."""
    steps: int | None = None
    kappa: int | None = None
    samples: int | None = None
    """Samples per gradient of SPSA."""
    step_size: str | None = None
    """As the paper writes it: 2/255."""
    restarts: int | None = None
    inference: str = "single"
    """One mask (single), a vote of ten, or correct after every restart (all-restarts)."""
    metric: str = "top-1"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Setting":
        p = values.get("p")
        return cls(**{**values, "p": tuple(p) if isinstance(p, list) else p})

    def difference(self, other: "Setting") -> str | None:
        """The first field in which two settings differ, with both values; None if they are equal."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if mine != theirs:
                return f"{one.name}: {mine!r} here, {theirs!r} there"
        return None


@dataclass(frozen=True)
class Claim:
    """One number of one table, in percent."""

    table: str
    """The table's label in the paper's source, without its `table:`."""
    row: str
    column: str
    value: float
    quoted: bool
    """Whether the paper took it from another paper (its stars)."""
    setting: Setting

    @property
    def place(self) -> tuple[str, str, str]:
        """Its position in the paper, which is unique."""
        return self.table, self.row, self.column


@dataclass(frozen=True)
class TrainingClaim:
    """A row of the paper's table of hyper-parameters (Appendix B)."""

    dataset: str
    augmentation: bool
    momentum: float
    epochs: int
    learning_rate: float
    milestones: tuple[int, ...]


@cache
def load() -> tuple[Claim, ...]:
    """All claims, in the order of the paper."""
    return tuple(Claim(**{**one, "setting": Setting.from_dict(one["setting"])}) for one in _content()["claims"])


@cache
def training() -> tuple[TrainingClaim, ...]:
    """The paper's hyper-parameters, by dataset."""
    return tuple(
        TrainingClaim(**{**one, "milestones": tuple(one["milestones"])}) for one in _content()["training"]
    )


def tables() -> tuple[str, ...]:
    """The labels of the tables with claims, in the order of the paper."""
    return tuple(dict.fromkeys(claim.table for claim in load()))


def query(table: str | None = None, **wanted: Any) -> tuple[Claim, ...]:
    """The claims of a table, or of all, whose setting has the values `wanted`."""
    if table is not None and table not in tables():
        raise ConfigurationError(f"unknown table {table!r}; choose from {', '.join(tables())}")
    known = {one.name for one in fields(Setting)}
    if not wanted.keys() <= known:
        unknown = sorted(wanted.keys() - known)[0]
        raise ConfigurationError(f"unknown field {unknown!r}; choose from {', '.join(sorted(known))}")
    return tuple(
        claim
        for claim in load()
        if (table is None or claim.table == table)
        and all(getattr(claim.setting, name) == value for name, value in wanted.items())
    )


@cache
def by_place() -> dict[tuple[str, str, str], Claim]:
    """The claims by table, row and column."""
    return {claim.place: claim for claim in load()}


def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(files(__package__).joinpath("claims.json").read_text("utf-8"))
    return content

"""`menet models`: the networks that come with the package, and packing one's own."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from menet.commands import Csv, Json, Latex, Output, printing

if TYPE_CHECKING:
    from menet.training.pretrained import Card

Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True)
class ModelsList:
    """List the networks that come with the package, with what was measured on each.

    Load one with `menet.load("NAME")`, or write NAME wherever a command takes a run: `menet evaluate NAME`.
    """

    json: Json = False

    csv: Csv = False

    latex: Latex = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.training import pretrained

        cards = [pretrained.card(name) for name in pretrained.names()]
        out.value(networks=[asdict(card) for card in cards])
        out.table(_table(cards))
        return 0


@dataclass(frozen=True)
class ModelsShow:
    """Show the card of a network: training, data, accuracy with intervals, limits, license."""

    name: Name
    """A name of `menet models list`."""

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.training import pretrained

        card = pretrained.card(self.name)
        out.value(**asdict(card))
        print(_card_text(card))
        return 0


@dataclass(frozen=True)
class ModelsPack:
    """Pack the best epoch of a run into a small file: half precision, large matrices as factors of low rank.

    The file loads like any other. Evaluate it before you hand it on: what packing costs is for you to measure.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder or weights file of `menet train`."""

    out: Path
    """The file to write, such as small.safetensors."""

    rank: int = 64
    """Rank of the factors. Matrices that would not become smaller by it are kept whole."""

    defense: str | None = None
    """Put this defense in front of the network, which was trained without: jpeg, bit-depth, …"""

    settings: str | None = None
    """Settings of the defense, as a JSON object."""

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.commands.train import json_object
        from menet.errors import ConfigurationError
        from menet.training.pretrained import pack

        if self.settings is not None and self.defense is None:
            raise ConfigurationError("expected --defense with --settings")
        defense = None if self.defense is None else {"name": self.defense, **json_object(self.settings)}
        size = pack(self.run, self.out, self.rank, defense)
        out.value(written=self.out, bytes=size)
        print(f"{self.out}: {size / 2**20:.2f} MiB")
        return 0


@dataclass(frozen=True)
class ModelsMeasured:
    """Write what published results say of the networks of the package into their cards.

    The results of the network mnist-adversarial are those in RESULTS/mnist/adversarial.
    """

    results: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RESULTS")] = Path("results")
    """Folder of all results (`menet publish` writes it)."""

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        from menet.files import write_atomically
        from menet.training import pretrained

        found = measured(self.results)
        text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        write_atomically(pretrained.FOLDER / pretrained.MEASURED, text)
        missing = [name for name in pretrained.names() if name not in found]
        out.value(measured=list(found), missing=missing)
        print(f"measured: {', '.join(found) or 'none'}; not measured: {', '.join(missing) or 'none'}")
        return 0


def measured(results: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of the board of each network of the package."""
    from menet.report.board import certificates, entries, rows
    from menet.training import pretrained

    found: dict[str, list[dict[str, Any]]] = {}
    for line in rows(entries(results), certificates(results)):
        name = line["name"].replace("/", "-")
        if name in pretrained.names():
            found.setdefault(name, []).append(line)
    return found


def _table(cards: "list[Card]") -> Any:
    from menet.report import Cell, Table

    rows = []
    for card in cards:
        # The first line is of the threat model of most models; `menet models show` has all of them.
        line = card.measured[0] if card.measured else {}
        rows.append(
            (
                Cell(card.name),
                Cell(f"{card.size / 2**20:.1f} MiB", number=True),
                _number(line.get("clean")),
                _number(line.get("robust")),
                Cell(line.get("threat", "not measured")),
            )
        )
    columns = ("name", "size", "clean %", "robust %", "threat model")
    return Table("Networks of the package", columns, tuple(rows))


def _card_text(card: "Card") -> str:
    from menet.training.pretrained import LICENSE

    training = ", ".join(
        f"{name} {card.training[name]}"
        for name in ("objective", "epochs", "batch_size", "seed")
        if name in card.training
    )
    defense = ", ".join(f"{name} {_plain(value)}" for name, value in card.defense.items()) or "none"
    lines = [
        card.name,
        f"  network   {card.model}, {card.size / 2**20:.1f} MiB",
        f"  data      {card.dataset}",
        f"  defense   {defense}",
        f"  training  {training}",
    ]
    for line in card.measured:
        numbers = f"clean {_percent(line['clean'])} %, robust {_percent(line['robust'])} %"
        how = f"{line['attack']}, {line['examples']:,} examples, {line['draws']} draws"
        lines.append(f"  measured  {line['threat']}: {numbers} ({how})")
        if proven := line.get("certificate"):
            how = f"{proven['method']}; vote {_percent(proven['vote'])} %, {proven['examples']:,} examples"
            lines.append(f"  certified median {proven['median_radius']} pixels ({how})")
    lines += [
        "" if card.measured else "  measured  nothing yet",
        f"  limits    {card.limits}",
        f"  license   {LICENSE}",
    ]
    return "\n".join(line for line in lines if line)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return value.get("name", value)
    return "→".join(map(str, value)) if isinstance(value, list) else value


def _number(number: "dict[str, float] | None") -> Any:
    from menet.report import Cell

    value, _, interval = _percent(number).partition(" ")
    return Cell(value, interval.strip("()"), number=True)


def _percent(number: dict[str, float] | None) -> str:
    from menet.report.narrative import tenth

    if number is None:
        return ""
    return f"{tenth(number['value'])} ({tenth(number['low'])}–{tenth(number['high'])})"

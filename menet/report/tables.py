"""Tables as plain values: computed from records once, written as HTML, Markdown or on a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rich.table import Table as RichTable

from menet.evaluation.accuracy import CRITERIA, Accuracy, Criterion, accuracies, accuracy
from menet.evaluation.certify import certified_accuracies
from menet.evaluation.compare import compare
from menet.evaluation.records import Records
from menet.report.collect import Collection, PaperNumber, Subject
from menet.report.plain_words import common_threat, is_at
from menet.report.words import attack_words, interval, percent, signed, threat_words

FEW = 4
"""Models that can all be compared with each other before the table is longer than anyone reads."""


@dataclass(frozen=True)
class Cell:
    """What stands in a place of a table: text, and below it in small letters what qualifies it."""

    text: str
    note: str = ""
    number: bool = False


@dataclass(frozen=True)
class Table:
    """A table with a title above and an explanation below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    explanation: str = ""

    def markdown(self) -> str:
        """The table as Markdown; a cell's note follows it in brackets."""
        lines = ["| " + " | ".join(map(_markdown, self.columns)) + " |"]
        numbers = [bool(self.rows) and self.rows[0][place].number for place in range(len(self.columns))]
        lines.append("|" + "|".join("---:" if number else "---" for number in numbers) + "|")
        for row in self.rows:
            lines.append("| " + " | ".join(_markdown(_joined(cell)) for cell in row) + " |")
        return "\n".join(lines)

    def rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for place, column in enumerate(self.columns):
            number = bool(self.rows) and self.rows[0][place].number
            table.add_column(column, justify="right" if number else "left", no_wrap=number)
        above: str | None = None
        for row in self.rows:
            # A name is said once; a line stands between models.
            repeated = row[0].text == above
            if above is not None and not repeated:
                table.add_section()
            above = row[0].text
            first = "" if repeated else _plain(_joined(row[0]))
            table.add_row(first, *(_plain(_joined(cell)) for cell in row[1:]))
        return table

    def only(self, *columns: str, explanation: str = "") -> "Table":
        """The same with these columns alone."""
        places = [self.columns.index(column) for column in columns]
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        return Table(self.title, columns, rows, explanation)


def cell_of(number: Accuracy) -> Cell:
    """An accuracy with its interval."""
    return Cell(percent(number.value), interval(number), number=True)


def overview(collection: Collection) -> Table:
    """One row per model and attack: expected and voted accuracy, clean and attacked, beside the paper's."""
    paper = collection.notes.paper
    rows = []
    for subject in collection.subjects:
        for position, (label, records) in enumerate(subject.evaluations.items()):
            if position == 0:
                rows.append(_row(subject, "none (clean)", "", records, "clean", _claim(paper, subject, "clean")))
            words, threat = attack_words(records), threat_words(records.evaluation)
            rows.append(_row(subject, words, threat, records, "adversarial", _claim(paper, subject, label)))
    columns = ["model", "attack", "expected", "by vote", "worst mask", "examples"]
    if any(row[-1].text for row in rows):
        columns.append("the paper")
    else:
        rows = [row[:-1] for row in rows]
    return Table(
        "Accuracy, scored on fresh masks",
        tuple(columns),
        tuple(rows),
        "With each number stands its 95% interval over examples. Expected: the share of masks under "
        "which an example is right, averaged. Vote: the class most masks choose is right. Worst: every mask is "
        "right. A network without randomness has one answer, so its three numbers are the same.",
    )


def every_accuracy(subject: Subject) -> Table:
    """All criteria of one model, clean beside adversarial."""
    rows = []
    for records in subject.evaluations.values():
        numbers = accuracies(records)
        by = {(number.images, number.criterion, number.top): number for number in numbers}
        for images, criterion, top in by:
            if images != "adversarial":
                continue
            words = f"top-{top}, {CRITERIA.get(criterion, criterion)}"  # type: ignore[call-overload]
            pair = [cell_of(by[kind, criterion, top]) for kind in ("clean", "adversarial")]
            rows.append((Cell(attack_words(records), threat_words(records.evaluation)), Cell(words), *pair))
        for number in numbers:
            if number.images == "restarts":
                words = f"top-1, {number.criterion} over restarts"
                rows.append((Cell(attack_words(records)), Cell(words), Cell("", number=True), cell_of(number)))
    return Table(subject.name, ("attack", "accuracy", "clean", "attacked"), tuple(rows))


def certificates(subjects: Sequence[Subject]) -> Table:
    """Certified accuracy of each model at some radii."""
    rows = []
    for subject in subjects:
        records = subject.certificate
        if records is None:
            continue
        found = certified_accuracies(records)
        for radius, number in found.items():
            if radius in _spread(max(found)):
                rows.append(
                    (
                        Cell(subject.name),
                        Cell(f"{records.evaluation['p']:.3g}", number=True),
                        Cell(f"{radius}", number=True),
                        cell_of(number),
                        Cell(f"{number.examples:,}", number=True),
                    )
                )
    return Table(
        "Certified accuracy",
        ("model", "p", "changed pixels", "right and proven", "examples"),
        tuple(rows),
        "So many pixels may be changed in any way and by any amount, and the vote over all masks stays right.",
    )


def comparisons(collection: Collection, criterion: Criterion = "vote") -> Table:
    """Each pair of models under the attacks that both were put to, on the same examples.

    Of many models, each only with those that have no defense, and at the common size of attacks.
    """
    subjects = [subject for subject in collection.subjects if subject.evaluations]
    pairs, reference = list(combinations(subjects, 2)), None
    explanation = "By vote. A small p says that a difference so large is unlikely between equally good models."
    if len(subjects) > FEW:
        pairs = [pair for pair in pairs if not all(map(_defended, pair))] or pairs
        reference = common_threat(subjects)
        explanation += (
            f" Of {len(subjects)} models, each is compared with those that have no defense, at the size most "
            "attacks have; `menet evaluate --against` compares any two."
        )
    rows = []
    for first, second in pairs:
        for label, one in first.evaluations.items():
            other = second.evaluations.get(label)
            if other is None or not _comparable(one, other) or not is_at(one, reference):
                continue
            found = compare(one, other, criterion=criterion)
            rows.append(
                (
                    Cell(f"{first.name} – {second.name}"),
                    Cell(attack_words(one), threat_words(one.evaluation)),
                    Cell(f"{signed(100 * found.difference)} points", number=True),
                    Cell(f"{found.only_first} : {found.only_second}", number=True),
                    Cell(_chance(found.p_value), number=True),
                )
            )
    return Table(
        "Models compared on the same examples",
        ("models", "attack", "difference", "right alone", "McNemar p"),
        tuple(rows),
        explanation,
    )


def _defended(subject: Subject) -> bool:
    return any(records.evaluation["model"].get("defense") for records in subject.evaluations.values())


def _row(
    subject: Subject, words: str, threat: str, records: Records, images: str, claim: PaperNumber | None
) -> tuple[Cell, ...]:
    numbers = [
        cell_of(accuracy(records, images, criterion))  # type: ignore[arg-type]
        for criterion in ("expected", "vote", "worst")
    ]
    if int(records.evaluation["scoring"]["masks"]) == 1:
        single = cell_of(accuracy(records, images, "vote"))  # type: ignore[arg-type]
        numbers = [single, Cell("same", number=True), Cell("same", number=True)]
    beside = Cell(percent(claim.accuracy), claim.where, number=True) if claim else Cell("", number=True)
    examples = Cell(f"{len(records.rows):,}", number=True)
    return (Cell(subject.name), Cell(words, threat), *numbers, examples, beside)


def _claim(paper: Sequence[PaperNumber], subject: Subject, attack: str) -> PaperNumber | None:
    return next((one for one in paper if one.model == subject.name and one.attack == attack), None)


def _comparable(first: Records, second: Records) -> bool:
    same = all(
        first.evaluation["dataset"][name] == second.evaluation["dataset"][name] for name in ("name", "split")
    )
    shared = {row["index"] for row in first.rows} & {row["index"] for row in second.rows}
    return same and bool(shared)


def _chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _spread(most: int) -> set[int]:
    # A handful of radii, dense where they are small.
    return {radius for radius in (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50) if radius < most} | {most}


def _joined(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _markdown(text: str) -> str:
    for character in "\\|*_<`[":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def _plain(text: str) -> str:
    # rich reads square brackets as markup.
    return text.replace("[", "\\[")

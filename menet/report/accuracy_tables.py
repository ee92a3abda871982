"""The tables of a report, computed from records: accuracies, certificates, audits, models compared."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from menet.evaluation.accuracy import CRITERIA, Accuracy, Criterion, accuracies, accuracy, compare, incomparable
from menet.evaluation.certify import certified_accuracies
from menet.evaluation.records import Records
from menet.report import Cell, Table
from menet.report.collect import Collection, PaperNumber, Subject
from menet.report.narrative import (
    at_threat,
    attack_words,
    common_threat,
    interval,
    is_at,
    is_transfer,
    percent,
    signed,
    tenth,
    threat_words,
    worst_case,
)

FEW = 4
"""The most models of which each pair is compared; with more, the table would be too long to read."""
STATUS_STYLES = {"pass": "green", "warn": "yellow", "fail": "red"}


def cell_of(number: Accuracy) -> Cell:
    """An accuracy with its interval."""
    return Cell(percent(number.value), interval(number), number=True)


def overview(collection: Collection) -> Table:
    """One row per model and attack: expected, voted and worst-case accuracy, beside the paper's numbers."""
    paper = collection.notes.paper
    rows = []
    for subject in collection.subjects:
        for position, (label, records) in enumerate(subject.evaluations.items()):
            if position == 0:
                rows.append(_row(subject, "none (clean)", "", records, "clean", _claim(paper, subject, "clean")))
            words, threat = attack_words(records), threat_words(records.evaluation)
            rows.append(_row(subject, words, threat, records, "adversarial", _claim(paper, subject, label)))
    columns = ["model", "attack", "expected", "majority vote", "worst draw", "examples"]
    if any(row[-1].text for row in rows):
        columns.append("paper")
    else:
        rows = [row[:-1] for row in rows]
    return Table(
        "Clean and robust accuracy, scored on fresh random draws",
        tuple(columns),
        tuple(rows),
        "With 95% intervals over examples. Expected: the fraction of draws of the defense under which an example "
        "is classified correctly, averaged. Majority vote: the class most draws predict is correct. "
        "Worst draw: every draw is correct. For a deterministic model the three are the same.",
    )


def summary(collection: Collection) -> Table:
    """One row per model: clean, under transfer, under the paper's attack of one draw, and in the worst case."""
    subjects = [subject for subject in collection.subjects if subject.evaluations]
    reference = common_threat(subjects)
    rows = []
    for subject in subjects:
        evaluations = at_threat(subject, reference)
        worst = worst_case(evaluations)
        transfers = [one for one in evaluations if is_transfer(one)]
        single = [one for one in evaluations if one.evaluation["attack"].get("eot") == 1 and one not in transfers]
        cells = [cell_of(accuracy(worst, "clean"))]
        for group in (transfers, single, [worst]):
            cells.append(cell_of(accuracy(worst_case(group))) if group else Cell("–", number=True))
        rows.append((Cell(subject.name), *cells, Cell(attack_words(worst))))
    threat = threat_words(worst_case(at_threat(subjects[0], reference)).evaluation) if subjects else ""
    return Table(
        f"Clean and robust accuracy, {threat}",
        ("model", "clean", "transfer", "one draw", "worst case", "attack that decided"),
        tuple(rows),
        "Expected over fresh draws, with 95% intervals over examples. One draw: PGD with one draw per gradient, "
        "as the paper attacks.",
    )


def every_accuracy(subject: Subject) -> Table:
    """Every accuracy of one model under each attack, clean beside robust."""
    rows = []
    for records in subject.evaluations.values():
        numbers = accuracies(records)
        by = {(number.images, number.criterion, number.top): number for number in numbers}
        attack = Cell(attack_words(records), threat_words(records.evaluation))
        for images, criterion, top in by:
            if images != "adversarial":
                continue
            words = f"top-{top}, {CRITERIA.get(criterion, criterion)}"  # type: ignore[call-overload]
            pair = [cell_of(by[kind, criterion, top]) for kind in ("clean", "adversarial")]
            rows.append((attack, Cell(words), *pair))
        for number in numbers:
            if number.images == "restarts":
                words = f"top-1, {number.criterion} over restarts"
                rows.append((attack, Cell(words), Cell("", number=True), cell_of(number)))
    examples = {len(records.rows) for records in subject.evaluations.values()}
    draws = {records.evaluation["scoring"]["draws"] for records in subject.evaluations.values()}
    return Table(
        subject.name,
        ("attack", "criterion", "clean accuracy", "robust accuracy"),
        tuple(rows),
        f"Examples: {_range(examples)}; random draws per example: {_range(draws)}; 95% intervals over examples.",
    )


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
        ("model", "p", "perturbed pixels", "certified accuracy", "examples"),
        tuple(rows),
        "The fraction of examples whose majority vote is correct and provably stays so under any perturbation of "
        "this many pixels (ℓ0), with 95% intervals over examples.",
    )


def audit_table(findings: Iterable[Mapping[str, Any]]) -> Table:
    """The findings of an audit, one row each."""
    rows = []
    for finding in findings:
        numbers = "; ".join(f"{name}: {value_words(value)}" for name, value in finding["numbers"].items())
        status = Cell(finding["status"], style=STATUS_STYLES.get(finding["status"], ""))
        rows.append((Cell(finding["name"]), status, Cell(finding["meaning"], numbers)))
    return Table("Audit", ("check", "result", "meaning"), tuple(rows))


def value_words(value: Any) -> str:
    """A measured value, or a list of them, with four digits."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(value_words, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def comparisons(collection: Collection, criterion: Criterion = "vote") -> Table:
    """Each pair of models under the attacks that both were evaluated with, on the same examples.

    With many models, only the pairs that include an undefended one, under the most common threat model.
    """
    subjects = [subject for subject in collection.subjects if subject.evaluations]
    pairs, reference = list(combinations(subjects, 2)), None
    note = ""
    if len(subjects) > FEW:
        pairs = [pair for pair in pairs if not all(map(_defended, pair))] or pairs
        reference = common_threat(subjects)
        note = (
            f" Of {len(subjects)} models, only pairs that include an undefended one are shown, under the most "
            "common threat model; menet compare compares any two."
        )
    rows = [
        row
        for first, second in pairs
        for label, one in first.evaluations.items()
        if (other := second.evaluations.get(label)) and incomparable(one, other) is None and is_at(one, reference)
        for row in [_compared(first.name, one, second.name, other, criterion)]
    ]
    return _comparison_table(rows, criterion, note)


def comparison(first: Subject, second: Subject, labels: Iterable[str], criterion: Criterion = "vote") -> Table:
    """Two models under the attacks `labels`, which both were evaluated with."""
    return _comparison_table(
        [
            _compared(first.name, first.evaluations[label], second.name, second.evaluations[label], criterion)
            for label in labels
        ],
        criterion,
    )


def results_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """The board in short: one row per model and threat model, the most robust first."""
    rows = tuple(
        (
            Cell(f"{line['dataset']}, {line['threat']}"),
            Cell(line["defense"], line["training"]),
            *(_plain_cell(line[name]) for name in ("clean", "robust", "vote")),
            Cell(line["attack"]),
            Cell(f"{line['examples']:,}", number=True),
        )
        for line in _by_robustness(lines)
    )
    columns = (
        "dataset, threat model", "model", "clean %", "robust %", "by vote %", "attack that decided", "examples",
    )  # fmt: skip
    return Table("Worst case over attacks", columns, rows)


def brief_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """The same for a first look: of its training only the objective, and no attack."""
    rows = tuple(
        (
            Cell(f"{line['dataset']}{' (a part)' if 'part of the dataset' in line['training'] else ''}"),
            Cell(line["threat"]),
            Cell(f"{line['defense']}, {line['training'].split(',')[0]} training"),
            *(_plain_cell(line[name]) for name in ("clean", "robust")),
            Cell(f"{line['examples']:,}", number=True),
        )
        for line in _by_robustness(lines)
    )
    columns = ("dataset", "threat model", "model", "clean %", "robust %", "examples")
    return Table("Worst case over attacks", columns, rows)


def _by_robustness(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(lines, key=lambda one: (one["dataset"], one["threat"], -one["robust"]["value"]))


def _plain_cell(value: Mapping[str, float]) -> Cell:
    return Cell(tenth(value["value"]), f"{tenth(value['low'])}–{tenth(value['high'])}", number=True)


def _comparison_table(rows: Sequence[tuple[Cell, ...]], criterion: Criterion, note: str = "") -> Table:
    return Table(
        "Models compared on the same examples",
        ("models", "attack", "examples", "difference", "only one correct", "McNemar p"),
        tuple(rows),
        f"Correct by: {CRITERIA[criterion]}. A small p-value means that models of equal accuracy would rarely "
        f"differ this much.{note}",
    )


def _compared(first: str, one: Records, second: str, other: Records, criterion: Criterion) -> tuple[Cell, ...]:
    found = compare(one, other, criterion=criterion)
    return (
        Cell(f"{first} – {second}"),
        Cell(attack_words(one), threat_words(one.evaluation)),
        Cell(f"{found.examples:,}", number=True),
        Cell(f"{signed(100 * found.difference)} points", number=True),
        Cell(f"{found.only_first} : {found.only_second}", number=True),
        Cell(_chance(found.p_value), number=True),
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
    if int(records.evaluation["scoring"]["draws"]) == 1:
        single = cell_of(accuracy(records, images, "vote"))  # type: ignore[arg-type]
        numbers = [single, Cell("same", number=True), Cell("same", number=True)]
    paper = Cell(percent(claim.accuracy), claim.where, number=True) if claim else Cell("", number=True)
    examples = Cell(f"{len(records.rows):,}", number=True)
    return (Cell(subject.name), Cell(words, threat), *numbers, examples, paper)


def _claim(paper: Sequence[PaperNumber], subject: Subject, attack: str) -> PaperNumber | None:
    return next((one for one in paper if one.model == subject.name and one.attack == attack), None)


def _chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _spread(most: int) -> set[int]:
    # A handful of radii, dense among the small ones.
    return {radius for radius in (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50) if radius < most} | {most}


def _range(values: set[int]) -> str:
    return f"{min(values):,}" if len(values) == 1 else f"{min(values):,} to {max(values):,}" if values else "none"

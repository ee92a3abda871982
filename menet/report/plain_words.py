"""What the numbers of a report mean, in sentences; every number in them is computed from records."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from scipy.stats import wilcoxon

from menet.evaluation.accuracy import Accuracy, accuracy, correctness
from menet.evaluation.certify import certified_accuracies
from menet.evaluation.records import Records
from menet.report.collect import Collection, Subject
from menet.report.series import sweeps
from menet.report.words import attack_words, counted, percent, signed, size

Threat = tuple[str, float]

NOTABLE = 0.02
"""A rise of accuracy with the size of the attack that is worth a word: two points."""

BOUND = (
    "Every accuracy under attack is an upper bound: a stronger attack can only lower it. "
    "Only certified accuracies are proven."
)


def meaning(collection: Collection) -> list[str]:
    """What was found, one paragraph per finding: each model, where its defense does not hold, what is proven."""
    subjects = [subject for subject in collection.subjects if subject.evaluations]
    reference = common_threat(subjects)
    paragraphs = [_of_subject(subject, reference) for subject in subjects]
    for threat in _threats(subjects, reference):
        there = [subject for subject in subjects if _has(subject, threat)]
        paragraphs += [words for subject in there for words in _of_expectation(subject, threat)]
        paragraphs += _of_strongest(there, threat)
    paragraphs += _of_rising(subjects)
    paragraphs += [
        _of_certificate(subject, subject.certificate) for subject in collection.subjects if subject.certificate
    ]
    if subjects:
        paragraphs.append(BOUND)
    return paragraphs


def common_threat(subjects: Sequence[Subject]) -> Threat | None:
    """The norm and size that most evaluations have; numbers of other sizes are for curves."""
    found = Counter(
        threat
        for subject in subjects
        for records in subject.evaluations.values()
        if (threat := _threat(records)) is not None
    )
    return found.most_common(1)[0][0] if found else None


def _threats(subjects: Sequence[Subject], reference: Threat | None) -> list[Threat | None]:
    """The sizes at which a defense is judged: the common one, and any with an expectation over masks."""
    averaged = {
        _threat(records)
        for subject in subjects
        for records in subject.evaluations.values()
        if (records.evaluation["attack"].get("eot") or 1) > 1 and _threat(records) is not None
    }
    return [reference, *sorted(threat for threat in averaged - {reference} if threat is not None)]


def _threat(records: Records) -> Threat | None:
    threat = records.evaluation.get("threat")
    if not threat or not isinstance(threat["epsilon"], (int, float)):
        return None
    return str(threat["norm"]), float(threat["epsilon"])


def is_at(records: Records, threat: Threat | None) -> bool:
    """Whether an evaluation has this norm and size; any has where none is asked for."""
    return threat is None or _threat(records) == threat


def _has(subject: Subject, threat: Threat | None) -> bool:
    return any(is_at(records, threat) for records in subject.evaluations.values())


def at_threat(subject: Subject, reference: Threat | None) -> list[Records]:
    """The evaluations of a model at the reference size, all of them where there is none."""
    chosen = [one for one in subject.evaluations.values() if is_at(one, reference)]
    return chosen or list(subject.evaluations.values())


def strongest(evaluations: Sequence[Records]) -> Records:
    """The evaluation with the lowest expected accuracy."""
    return min(evaluations, key=lambda records: accuracy(records, "adversarial", "expected").value)


def _of_subject(subject: Subject, reference: Threat | None) -> str:
    evaluations = at_threat(subject, reference)
    worst = strongest(evaluations)
    clean = _number(worst, "clean")
    words = (
        f"{subject.name}: {_told(clean)} of clean images are right. The strongest attack measured at "
        f"{_size(worst)} ({attack_words(worst)}) leaves {_told(_number(worst))}."
    )
    transferred = [one for one in evaluations if one.evaluation["attack"].get("kind") == "Transfer"]
    if transferred and worst not in transferred:
        words += f" Images made on another network leave {_told(_number(strongest(transferred)))}."
    return words


def _of_expectation(subject: Subject, reference: Threat | None) -> list[str]:
    """How much following the gradient in expectation over masks takes away, the gradient being of one kind."""
    white = [one for one in at_threat(subject, reference) if one.evaluation["attack"].get("kind") != "Transfer"]
    pairs = []
    for kind in dict.fromkeys(one.evaluation.get("gradient") for one in white):
        alike = [one for one in white if one.evaluation.get("gradient") == kind]
        single = [one for one in alike if (one.evaluation["attack"].get("eot") or 1) == 1]
        several = [one for one in alike if (one.evaluation["attack"].get("eot") or 1) > 1]
        if single and several:
            pairs.append((strongest(single), strongest(several)))
    if not pairs:
        return []
    before, after = min(pairs, key=lambda pair: _number(pair[1]).value)
    first, second = _number(before), _number(after)
    examples, chance = _paired(before, after)
    masks = after.evaluation["attack"]["eot"]
    clear = chance < 0.05
    if second.value < first.value and clear:
        verdict = f"A number from one mask per gradient overstates this defense (Wilcoxon p = {chance:.1g})."
    elif second.value > first.value and clear:
        verdict = "The expectation finds less here, so the smaller number counts."
    else:
        verdict = f"On {examples} examples this difference may be chance (Wilcoxon p = {chance:.2g})."
    return [
        f"{subject.name} draws fresh masks, so an adversary can average over them. At {_size(after)} and one "
        f"mask per gradient {_told(first)} remain, with {masks} masks {_told(second)}: "
        f"{signed(100 * (second.value - first.value))} points. {verdict}"
    ]


def _paired(first: Records, second: Records) -> tuple[int, float]:
    """How many examples two attacks share, and how likely their shares of right masks differ so by chance."""
    rows = {row["index"]: row for row in second.rows}
    pairs = [(row, rows[row["index"]]) for row in first.rows if row["index"] in rows]
    if not pairs:
        return 0, 1.0
    before, after = (correctness(side, "adversarial", "expected") for side in zip(*pairs, strict=True))
    same = bool((before == after).all())
    return len(pairs), 1.0 if same else float(wilcoxon(before, after).pvalue)


def _of_strongest(subjects: Sequence[Subject], reference: Threat | None) -> list[str]:
    """How models with a defense stand beside those without, each under its own strongest attack."""
    numbers = {one.name: _number(strongest(at_threat(one, reference))) for one in subjects}
    plain = [
        one for one in subjects if not strongest(at_threat(one, reference)).evaluation["model"].get("defense")
    ]
    found = []
    for other in plain:
        theirs = numbers[other.name]
        better: list[str] = []
        alike: list[str] = []
        worse: list[str] = []
        for subject in subjects:
            if subject not in plain:
                own = numbers[subject.name]
                group = better if own.low > theirs.high else worse if own.high < theirs.low else alike
                group.append(f"{subject.name} ({percent(own.value)})")
        against = f"{other.name} ({percent(theirs.value)})"
        verdicts = [
            (better, f"hold better than {against}", f"holds better than {against}"),
            (alike, f"cannot be told apart from {against}", f"cannot be told apart from {against}"),
            (worse, f"do not hold where {against} does", f"does not hold where {against} does"),
        ]
        start = f"At {_size(strongest(at_threat(other, reference)))}, each under its strongest measured attack, "
        found += [start + f"{', '.join(who)} {of[len(who) == 1]}." for who, *of in verdicts if who]
    return found


def _of_rising(subjects: Sequence[Subject]) -> list[str]:
    """Where an attack finds less when it may change more, so that it is not at its best."""
    found = []
    for axis, curves in sweeps(subjects).items():
        for curve in curves if axis.name == "epsilon" else ():
            for before, after in pairwise(curve.points):
                if after.value > before.value + NOTABLE:
                    found.append(
                        f"{curve.name}: {percent(before.value)} remain at ε = {size(before.at)} and "
                        f"{percent(after.value)} at ε = {size(after.at)}. Whoever may change more can do no "
                        "worse, so the attack is not at its best there and the larger number too high."
                    )
    return found


def _of_certificate(subject: Subject, records: Records) -> str:
    found = certified_accuracies(records)
    p = records.evaluation["p"]
    proven = {radius: number for radius, number in found.items() if number.value > 0}
    most = max(proven, default=-1)
    if most < 1:
        return (
            f"{subject.name} observes {percent(p)} of the pixels, too many for the certificate: no example is "
            "proven against even one changed pixel."
        )
    return (
        f"{subject.name} observes {percent(p)} of the pixels. Proven: {_told(proven[1])} of the examples are "
        f"right by vote and stay so whatever one pixel is changed to; the furthest any reaches is "
        f"{counted(most, 'pixel')} ({percent(proven[most].value)}). That is about a few changed pixels, "
        "not about small changes of all of them."
    )


def _number(records: Records, images: str = "adversarial") -> Accuracy:
    alone = int(records.evaluation["scoring"]["masks"]) == 1
    return accuracy(records, images, "vote" if alone else "expected")  # type: ignore[arg-type]


def _told(number: Accuracy) -> str:
    return f"{percent(number.value)} ({100 * number.low:.0f}–{100 * number.high:.0f})"


def _size(records: Records) -> str:
    threat = records.evaluation.get("threat")
    if not threat:
        return "no bound"
    return f"{'ℓ∞' if threat['norm'] == 'linf' else 'ℓ2'} ε = {size(threat['epsilon'])}"

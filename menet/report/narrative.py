"""A report's findings in sentences, and the names of attacks, models and numbers used in them and in tables.

Every number in a sentence is computed from records.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from scipy.stats import wilcoxon

from menet.evaluation.accuracy import Accuracy, accuracy, correctness
from menet.evaluation.certify import certified_accuracies
from menet.evaluation.records import Records
from menet.experiments.jobs import format_schedule
from menet.report.collect import Collection, Subject
from menet.report.curves import ATTACK_NAMES, sweeps

Threat = tuple[str, float]
"""Norm and epsilon."""

NOTABLE = 0.02
"""A rise of robust accuracy with epsilon that is worth a sentence: two points."""

UPPER_BOUND = (
    "Every robust accuracy is an upper bound: a stronger attack can only lower it. "
    "Only certified accuracies are proven."
)


def answer(collection: Collection) -> list[str]:
    """Does it help? In at most three sentences: who is most robust, what the attack matters, what is proven."""
    subjects = [subject for subject in collection.subjects if subject.evaluations]
    if not subjects:
        return []
    reference = common_threat(subjects)
    worst = {subject.name: worst_case(at_threat(subject, reference)) for subject in subjects}
    ranked = sorted(worst, key=lambda name: -_number(worst[name]).value)
    listed = ", ".join(f"{name} {_told(_number(worst[name]))}" for name in ranked)
    first = worst[ranked[0]]
    sentences = [f"In the worst case over attacks at {_budget(first)}, robust accuracy is: {listed}."]
    overstated = [one for subject in subjects if (one := _overstated(subject, reference)) is not None]
    if overstated:
        name, single, lowest = max(overstated, key=lambda one: one[1].value - one[2].value)
        points = 100 * (single.value - lowest.value)
        sentences.append(
            f"{name} keeps {percent(single.value)} if the attacker takes one draw per gradient, and "
            f"{percent(lowest.value)} in the worst case: {points:.0f} points rested on a weak attack."
        )
    proven = [_proven(one.name, one.certificate) for one in collection.subjects if one.certificate]
    return [*sentences, " ".join([*proven[:1], UPPER_BOUND])]


def _proven(name: str, records: Records) -> str:
    found = certified_accuracies(records)
    if 1 not in found:
        return f"For {name} no example is certified."
    return f"{name} is certified against one arbitrarily perturbed pixel on {_told(found[1])} of the examples."


def _overstated(subject: Subject, reference: Threat | None) -> tuple[str, Accuracy, Accuracy] | None:
    """A random model's robust accuracy under attacks of one draw per gradient, and in the worst case."""
    white = [one for one in at_threat(subject, reference) if not is_transfer(one)]
    random = [one for one in white if int(one.evaluation["scoring"]["draws"]) > 1]
    single = [one for one in random if one.evaluation["attack"].get("eot") == 1]
    if not single or len(random) == len(single):
        return None
    before, after = _number(worst_case(single)), _number(worst_case(random))
    return (subject.name, before, after) if after.value < before.value else None


def findings(collection: Collection) -> list[str]:
    """The findings, one paragraph each: every model, EOT, comparisons, attacks that fail, certificates."""
    subjects = [subject for subject in collection.subjects if subject.evaluations]
    reference = common_threat(subjects)
    paragraphs = [_of_subject(subject, reference) for subject in subjects]
    for threat in _threats(subjects, reference):
        there = [subject for subject in subjects if _has(subject, threat)]
        paragraphs += [words for subject in there for words in _of_expectation(subject, threat)]
        paragraphs += _of_worst_case(there, threat)
    paragraphs += _of_rising(subjects)
    paragraphs += [
        _of_certificate(subject, subject.certificate) for subject in collection.subjects if subject.certificate
    ]
    if subjects:
        paragraphs.append(UPPER_BOUND)
    return paragraphs


def common_threat(subjects: Sequence[Subject]) -> Threat | None:
    """The threat model that most evaluations share; the others are points of curves."""
    found = Counter(
        threat
        for subject in subjects
        for records in subject.evaluations.values()
        if (threat := _threat(records)) is not None
    )
    return found.most_common(1)[0][0] if found else None


def is_at(records: Records, threat: Threat | None) -> bool:
    """Whether an evaluation has this threat model; True if none is asked for."""
    return threat is None or _threat(records) == threat


def at_threat(subject: Subject, reference: Threat | None) -> list[Records]:
    """A model's evaluations under the reference threat model, or all of them if it has none there.

    Without those of an attacker who knows the random draws, if there are others.
    """
    every = list(subject.evaluations.values())
    secret = [one for one in every if not is_frozen(one)] or every
    return [one for one in secret if is_at(one, reference)] or secret


def worst_case(evaluations: Sequence[Records]) -> Records:
    """The evaluation with the lowest expected robust accuracy."""
    return min(evaluations, key=lambda records: accuracy(records, "adversarial", "expected").value)


def is_frozen(records: Records) -> bool:
    """Whether the attacker knew the random draws that examples were scored on."""
    return bool((records.evaluation.get("fixed_draws") or {}).get("scored"))


def is_transfer(records: Records) -> bool:
    """Whether the attack was computed on a surrogate."""
    return bool(records.evaluation["attack"].get("kind") == "Transfer")


def _threats(subjects: Sequence[Subject], reference: Threat | None) -> list[Threat | None]:
    """The threat models to judge defenses under: the common one, and each with an EOT attack."""
    averaged = {
        _threat(records)
        for subject in subjects
        for records in subject.evaluations.values()
        if _draws_per_gradient(records) > 1 and _threat(records) is not None
    }
    return [reference, *sorted(threat for threat in averaged - {reference} if threat is not None)]


def _threat(records: Records) -> Threat | None:
    threat = records.evaluation.get("threat")
    if not threat or not isinstance(threat["epsilon"], (int, float)):
        return None
    return str(threat["norm"]), float(threat["epsilon"])


def _has(subject: Subject, threat: Threat | None) -> bool:
    return any(is_at(records, threat) for records in subject.evaluations.values())


def _draws_per_gradient(records: Records) -> int:
    return int(records.evaluation["attack"].get("eot") or 1)


def _of_subject(subject: Subject, reference: Threat | None) -> str:
    evaluations = at_threat(subject, reference)
    worst = worst_case(evaluations)
    words = (
        f"{subject.name}: clean accuracy {_told(_number(worst, 'clean'))}. Robust accuracy at {_budget(worst)}, "
        f"worst case over attacks: {_told(_number(worst))} ({attack_words(worst)})."
    )
    transfers = [one for one in evaluations if is_transfer(one)]
    if transfers and worst not in transfers:
        words += f" Under a transfer attack from a surrogate: {_told(_number(worst_case(transfers)))}."
    return words


def _of_expectation(subject: Subject, reference: Threat | None) -> list[str]:
    """How much EOT lowers robust accuracy, compared within one kind of gradient."""
    white = [one for one in at_threat(subject, reference) if not is_transfer(one)]
    pairs = []
    for kind in dict.fromkeys(one.evaluation.get("gradient") for one in white):
        alike = [one for one in white if one.evaluation.get("gradient") == kind]
        single = [one for one in alike if _draws_per_gradient(one) == 1]
        several = [one for one in alike if _draws_per_gradient(one) > 1]
        if single and several:
            pairs.append((worst_case(single), worst_case(several)))
    if not pairs:
        return []
    before, after = min(pairs, key=lambda pair: _number(pair[1]).value)
    first, second = _number(before), _number(after)
    examples, chance = _paired(before, after)
    clear = chance < 0.05
    if second.value < first.value and clear:
        verdict = f"An attack without EOT overestimates this defense (Wilcoxon p = {chance:.1g})."
    elif second.value > first.value and clear:
        verdict = "EOT weakens the attack here, so the lower number counts."
    else:
        verdict = f"On {examples} examples this difference may be chance (Wilcoxon p = {chance:.2g})."
    return [
        f"{subject.name} is random, so an attack can average gradients over draws (EOT). At {_budget(after)}, "
        f"robust accuracy is {_told(first)} with one draw per gradient and {_told(second)} with "
        f"{_draws_per_gradient(after)} draws: {signed(100 * (second.value - first.value))} points. {verdict}"
    ]


def _paired(first: Records, second: Records) -> tuple[int, float]:
    """The examples that two attacks share, and the p-value of their difference (Wilcoxon signed-rank)."""
    rows = {row["index"]: row for row in second.rows}
    pairs = [(row, rows[row["index"]]) for row in first.rows if row["index"] in rows]
    if not pairs:
        return 0, 1.0
    before, after = (correctness(side, "adversarial", "expected") for side in zip(*pairs, strict=True))
    same = bool((before == after).all())
    return len(pairs), 1.0 if same else float(wilcoxon(before, after).pvalue)


def _of_worst_case(subjects: Sequence[Subject], reference: Threat | None) -> list[str]:
    """Defended models compared with undefended ones, each in its own worst case over attacks."""
    worst = {one.name: worst_case(at_threat(one, reference)) for one in subjects}
    numbers = {name: _number(records) for name, records in worst.items()}
    undefended = [one for one in subjects if not worst[one.name].evaluation["model"].get("defense")]
    found = []
    for other in undefended:
        theirs = numbers[other.name]
        better: list[str] = []
        alike: list[str] = []
        worse: list[str] = []
        for subject in subjects:
            if subject not in undefended:
                own = numbers[subject.name]
                group = better if own.low > theirs.high else worse if own.high < theirs.low else alike
                group.append(f"{subject.name} ({percent(own.value)})")
        against = f"{other.name} ({percent(theirs.value)})"
        verdicts = [
            (better, f"are more robust than {against}", f"is more robust than {against}"),
            (alike, f"do not differ clearly from {against}", f"does not differ clearly from {against}"),
            (worse, f"are less robust than {against}", f"is less robust than {against}"),
        ]
        start = f"At {_budget(worst[other.name])}, in the worst case over attacks, "
        found += [start + f"{', '.join(who)} {of[len(who) == 1]}." for who, *of in verdicts if who]
    return found


def _of_rising(subjects: Sequence[Subject]) -> list[str]:
    """Where robust accuracy rises with epsilon, a sign that the attack fails."""
    found = []
    for axis, curves in sweeps(subjects).items():
        for curve in curves if axis.name == "epsilon" else ():
            for before, after in pairwise(curve.points):
                if after.value > before.value + NOTABLE:
                    found.append(
                        f"{curve.name}: robust accuracy rises from {percent(before.value)} at ε = "
                        f"{budget(before.at)} to {percent(after.value)} at ε = {budget(after.at)}. A larger "
                        "budget can only help, so this attack fails there and the larger number is too high."
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
            "certified against even one perturbed pixel."
        )
    return (
        f"{subject.name} observes {percent(p)} of the pixels. Certified accuracy against one arbitrarily "
        f"perturbed pixel is {_told(proven[1])}; the largest certified radius is {counted(most, 'pixel')} "
        f"({percent(proven[most].value)} of the examples). This bounds how many pixels are perturbed (ℓ0), not "
        "small perturbations of all of them."
    )


def _number(records: Records, images: str = "adversarial") -> Accuracy:
    alone = int(records.evaluation["scoring"]["draws"]) == 1
    return accuracy(records, images, "vote" if alone else "expected")  # type: ignore[arg-type]


def _told(number: Accuracy) -> str:
    return f"{percent(number.value)} ({100 * number.low:.0f}–{100 * number.high:.0f})"


def _budget(records: Records) -> str:
    threat = records.evaluation.get("threat")
    if not threat:
        return "an unbounded threat model"
    return f"{'ℓ∞' if threat['norm'] == 'linf' else 'ℓ2'} ε = {budget(threat['epsilon'])}"


def attack_words(records: Records) -> str:
    """The attack in a few words: its name, kind of gradient, steps, restarts and draws per gradient."""
    evaluation = records.evaluation
    attack = evaluation["attack"]
    inner = attack.get("attack")
    settings = inner if isinstance(inner, Mapping) else attack
    kind = str(settings.get("kind", records.label))
    name = ATTACK_NAMES.get(kind, kind)
    if is_transfer(records):
        name = f"{name}, transferred from {_source_words(records)}"
    elif settings is not attack:
        outer = str(attack.get("kind", ""))
        name = f"{ATTACK_NAMES.get(outer, outer)} {name}"
    precision = ", in bfloat16" if evaluation.get("bfloat16") else ""
    if kind == "Standard":
        # The suite takes every kind of gradient, whatever the model's own is.
        return f"{name} {settings.get('version', 1)}, budget {settings.get('budget')}{precision}"
    if not is_transfer(records) and evaluation.get("gradient"):
        name = f"{name}, {'BPDA' if evaluation['gradient'] == 'bpda' else 'exact gradient'}"
    parts = [name]
    if fixed := evaluation.get("fixed_draws"):
        frozen = ", on which it is scored" if fixed.get("scored") else ""
        parts.append(f"{counted(fixed['draws'], 'fixed draw')}{frozen}")
    if settings.get("steps"):
        parts.append(counted(settings["steps"], "step"))
    if (settings.get("restarts") or 1) > 1:
        parts.append(counted(settings["restarts"], "restart"))
    if (settings.get("eot") or 1) > 1:
        parts.append(f"EOT over {settings['eot']} draws")
    return ", ".join(parts) + precision


def _source_words(records: Records) -> str:
    """The surrogate of a transfer attack, by the name that the evaluation was given."""
    found = re.search(r"\bon=([^,]+)", records.label)
    if found is None:
        return "a surrogate"
    return "its own classifier" if found[1] == "classifier" else found[1]


def threat_words(evaluation: Mapping[str, Any]) -> str:
    """The threat model: ℓ∞ ≤ 8/255."""
    threat = evaluation.get("threat")
    if not threat:
        return "no bound"
    norm = {"linf": "ℓ∞", "l2": "ℓ2", "l0": "ℓ0"}.get(threat["norm"], threat["norm"])
    return f"{norm} ≤ {budget(threat['epsilon'])}"


def budget(epsilon: Any) -> str:
    """Epsilon in pixels of [0,1], as a fraction of 255 if it is one."""
    if not isinstance(epsilon, (int, float)):
        return "any"
    over = Fraction(epsilon * 255).limit_denominator(1)
    if 0 < over <= 16 and abs(float(over) / 255 - epsilon) < 1e-9:
        return f"{over}/255"
    return f"{epsilon:.4g}"


def model_words(records: Records) -> str:
    """The network and its defense in a few words."""
    model = records.evaluation["model"]
    architecture = model.get("architecture")
    network = architecture.get("name", "network") if isinstance(architecture, Mapping) else str(architecture)
    defense = model.get("defense") or {}
    if not defense:
        return network
    words = f"{network} behind {defense.get('name', 'a defense')}"
    estimator = defense.get("estimator")
    if isinstance(estimator, Mapping):
        words += f" ({estimator.get('name', '')}"
        if defense.get("encoding") not in (None, "estimate"):
            words += f", {defense['encoding']}"
        p = defense.get("p")
        words += ")" if p is None else f", {format_schedule(p)})"
    return words


def counted(number: int, noun: str) -> str:
    """`1 step`, `40 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def tenth(value: float) -> str:
    """A fraction in percent to one digit, halves up: a value and its first six decimals have the same digit."""
    return f"{math.floor(round(1000 * value, 3) + 0.5) / 10:.1f}"


def percent(value: float) -> str:
    return f"{tenth(value)}%"


def interval(number: Accuracy) -> str:
    return f"{tenth(number.low)}–{tenth(number.high)}"


def signed(value: float) -> str:
    """A difference to one digit, with a true minus."""
    return f"{value:+.1f}".replace("-", "−")

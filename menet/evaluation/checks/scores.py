"""On which masks success is judged."""

import torch

from menet.evaluation.checks.subject import Finding, Subject, Watched, clearly_above, mean
from menet.evaluation.scoring import score
from menet.seeding import reseed


def fresh_scoring(subject: Subject) -> Finding:
    """Numbers are scored on masks that the attack has not seen, and agree with an independent score."""
    if not subject.random:
        return Finding("pass", "The model is not random, so there are no masks to keep apart.")
    attempt, watched = subject.attempt, Watched(subject.model)
    outcome = subject.settings.scorer(watched, attempt.images, subject.labels, subject.masks, attempt.seed)
    reported = (outcome.ranks == 0).double().mean(0)
    fresh, shared = subject.robust, len(attempt.drawn & watched.drawn)
    numbers = {"reported": mean(reported), "fresh masks": mean(fresh), "draws shared with the attack": shared}
    if shared:
        return Finding("fail", "Scores are taken on masks that the attack itself has seen.", numbers)
    tolerance = subject.settings.tolerance
    if clearly_above(reported, fresh, tolerance) or clearly_above(fresh, reported, tolerance):
        return Finding("fail", "The reported score is not that on fresh masks.", numbers)
    return Finding("pass", "Scores are taken on fresh masks.", numbers)


def own_masks(subject: Subject) -> Finding:
    """How much a score on the attack's own masks, or on one draw, would mislead."""
    if not subject.random:
        return Finding("pass", "The model is not random, so one draw says it all.")
    attempt, fresh = subject.attempt, subject.robust
    reseed(subject.model, subject.seed())
    ranks = score(subject.model, attempt.images, subject.labels, subject.masks, subject.settings.rows).ranks
    numbers = {
        "fresh masks": mean(fresh),
        "one draw": mean(ranks[0] == 0),
        f"right under all of {subject.masks}": mean((ranks == 0).all(0)),
        f"right under all of {subject.masks}, clean": mean(subject.clean == 1),
    }
    if not hasattr(subject.model, "reseed"):
        return Finding("pass", "The attack's own masks cannot be replayed; these are scores on others.", numbers)
    reseed(subject.model, attempt.seed)
    with torch.no_grad():
        own = score(subject.model, attempt.images, subject.labels, subject.masks, subject.settings.rows)
    replayed = (own.ranks == 0).double().mean(0)
    numbers["attack's own masks"] = mean(replayed)
    if clearly_above(fresh, replayed, subject.settings.tolerance):
        return Finding(
            "warn",
            "The attack has fitted the masks it saw more than masks in general: take more draws per step.",
            numbers,
        )
    return Finding("pass", "What the attack found holds on masks it has not seen.", numbers)

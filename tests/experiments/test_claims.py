"""The claims against the paper's own source, read by other code than made them."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from menet.errors import ConfigurationError
from menet.experiments import claims
from menet.training import recipes


@pytest.fixture(scope="module")
def paper() -> str:
    place = os.environ.get("MENET_PAPER") or Path(__file__).parents[2] / "../shared/paper/me-net.tex"
    if not Path(place).is_file():
        pytest.skip("needs the paper's source: set MENET_PAPER to me-net.tex")
    return Path(place).read_text("utf-8")


def percentages(paper: str) -> dict[str, Counter[str]]:
    """Per table the multiset of its percentages, by scanning characters; comments and captions do not count."""
    found: dict[str, Counter[str]] = {}
    inside, depth, numbers = False, 0, Counter[str]()
    for line in paper.splitlines():
        text = line.replace("\\%", "percent").split("%")[0]
        if "\\begin{table" in text:
            inside, numbers = True, Counter[str]()
        depth += text.count("\\begin{tabular}")
        if inside and depth:
            for part in text.split("percent")[:-1]:
                digits = ""
                while part and (part[-1].isdigit() or part[-1] == "."):
                    digits, part = part[-1] + digits, part[:-1]
                assert digits, f"a percent sign without a number in {line!r}"
                numbers[digits] += 1
        depth -= text.count("\\end{tabular}")
        if inside and "\\label{table:" in text:
            found[text.split("\\label{table:")[1].split("}")[0]] = numbers
        if "\\end{table" in text:
            inside = False
    return {label: numbers for label, numbers in found.items() if numbers}


def test_every_percentage_of_every_table_is_a_claim(paper: str) -> None:
    expected = percentages(paper)
    ours = {table: Counter(f"{claim.value:.1f}" for claim in claims.query(table)) for table in claims.tables()}
    assert ours == expected
    assert sum(map(len, map(claims.query, claims.tables()))) == sum(
        sum(one.values()) for one in expected.values()
    )


def test_starred_numbers_are_marked_as_quoted(paper: str) -> None:
    assert sum(claim.quoted for claim in claims.load()) == paper.count("\\%*")


def test_no_two_claims_share_a_place() -> None:
    assert len(claims.by_place()) == len(claims.load())


def test_claims_that_say_the_same_have_one_value_but_where_the_paper_contradicts_itself() -> None:
    """The paper repeats its numbers; a mistyped setting would make equal settings differ in value."""
    values: dict[claims.Setting, set[float]] = {}
    for claim in claims.load():
        values.setdefault(claim.setting, set()).add(claim.value)
    differing = {setting: found for setting, found in values.items() if len(found) > 1}
    # In the tables of estimators the nuclear norm has other numbers than everywhere else, where it has those of
    # Soft-Impute there; and USVT has 89.4 under 40 steps in one table, under 20 in the other.
    assert all(setting.method == "me-net" for setting in differing)
    assert len(differing) == 9, differing


def test_the_recipes_have_the_papers_hyperparameters() -> None:
    for claim in claims.training():
        recipe = recipes.by_name(claim.dataset, "paper")
        assert (recipe.epochs, recipe.momentum) == (claim.epochs, claim.momentum)
        assert recipe.learning_rate == claim.learning_rate
        assert (recipe.milestones, recipe.augmentation) == (claim.milestones, claim.augmentation)


def test_queries() -> None:
    (claim,) = claims.query("cifar white sota", network="resnet18", method="me-net")
    assert claim.value == 52.8
    with pytest.raises(ConfigurationError, match="unknown table 'no such table'; choose from cifar black"):
        claims.query("no such table")
    with pytest.raises(ConfigurationError, match="unknown field 'color'; choose from access, attack,"):
        claims.query(color="red")


def test_budgets_samples_and_steps_are_those_of_the_papers_sentences(paper: str) -> None:
    """Every claim, against what the text says of its dataset: budget, step size, samples, Boundary's steps."""
    text = " ".join(paper.split())
    mnist = re.search(r"For MNIST.*?perturbation scale of \$([\d.]+/255)\$.*?step size \$([\d.]+/255)\$", text)
    others = re.search(
        r"ResNet-18 for SVHN and CIFAR-10, and DenseNet-121.*?perturbation of \$(\d+/255)\$.*?step size of"
        r" \$(\d+/255)\$",
        text,
    )
    queries = re.search(r"(\d+) steps for Boundary attack, and a batch size of (\d+) for SPSA", text)
    assert mnist
    assert others
    assert queries
    for claim in claims.load():
        setting = claim.setting
        epsilon, step_size = (mnist if setting.dataset == "mnist" else others).groups()
        bounded = setting.access != "clean" and setting.attack != "boundary"
        assert setting.epsilon == (epsilon if bounded else None), claim.place
        if setting.step_size is not None and claim.table != "appendix random start":
            assert setting.step_size == step_size, claim.place
        assert setting.samples == (int(queries[2]) if setting.attack == "spsa" else None), claim.place
        if setting.attack == "boundary":
            assert setting.steps == int(queries[1])


def test_training_steps_follow_from_the_papers_epochs() -> None:
    """Batches of 256; all estimates of an image in an epoch of ME-Net without adversarial training."""
    images = {"mnist": 60_000, "cifar10": 50_000, "svhn": 73_257, "tiny-imagenet": 100_000}
    epochs = {one.dataset: one.epochs for one in claims.training()}
    for claim in claims.load():
        setting = claim.setting
        copies = setting.masks if setting.method == "me-net" and setting.training == "standard" else 1
        steps = epochs[setting.dataset] * ((copies or 1) * images[setting.dataset] // 256)
        assert setting.training_steps == (None if claim.quoted else steps), claim.place

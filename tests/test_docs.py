"""What the documents tell users to type works as written; names, options and links in them exist; spelling."""

import importlib.util
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import menet
from menet import baselines
from menet.cli import COMMANDS
from menet.preprocessed import Preprocessed

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN_AS_WRITTEN = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("index", "tutorial", "how-to", "baselines", "choose")),
    *sorted((ROOT / "docs/baselines").glob("*.md")),
]
BRITISH = re.compile(
    r"colour|(?:normal|minim|maxim|optim|discret|summar|initial|random|synchron|regular|general|real|recogn|organ)is"
    r"(?:e|ed|es|er|ers|ing|ation|ations)\b|licence|behaviour|\bgrey|neighbour|favour|\bcentre|labelled|modelled",
    re.IGNORECASE,
)
OWN_WORDS = re.compile(r"answers? alike|goes on where|size of the change|accepted are|\bstrongest\b")
"""Words of the project's first edition that a reader of the literature would have to translate."""


@pytest.mark.parametrize(
    "document",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem == "tutorial")) for path in RUN_AS_WRITTEN],
    ids=lambda path: path.name,
)
def test_code_runs_in_the_order_it_is_read(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pieces = re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    assert pieces
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    names = {"classifier": network, "images": torch.rand(2, 3, 32, 32)}
    # Pages show how to register estimators and defenses; other tests must not find those.
    with patch.dict(menet.estimators.ESTIMATORS), patch.dict(Preprocessed.kinds):
        for piece in pieces:
            exec(compile(piece, document.name, "exec"), names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_in_code_can_be_imported(document):
    text = document.read_text()
    for module, names in re.findall(r"^from (menet[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        for name in names.split(", "):
            found = importlib.import_module(module)
            assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"
    for name in re.findall(r"\bmenet\.([A-Za-z_]\w*)(?=[(.`])", text):
        assert hasattr(menet, name) or importlib.util.find_spec(f"menet.{name}"), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_inside_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (document.parent / path).resolve() if path else document
        assert place.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", place.read_text(), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings
            }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_spelling_is_american_and_words_are_the_fields(document):
    text = document.read_text()
    assert not BRITISH.findall(text)
    assert not OWN_WORDS.findall(text)


def test_the_spelling_check_tells_british_from_american():
    british = "colour normalised Minimiser licence grey-box Behaviour optimise neighbouring"
    american = "color normalized minimizer license gray-box behavior optimize neighbor precision comparison noise"
    assert all(BRITISH.search(word) for word in british.split())
    assert not BRITISH.search(american)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_functions_exist(document):
    """`menet/…/file.py` is a file, and in `menet/…/file.py:name` the file defines that name."""
    mentions = re.findall(r"`((?:menet|tests|examples|benchmarks)/[\w/.]*)(?::(\w+))?`", document.read_text())
    for path, name in mentions:
        assert (ROOT / path).exists(), path
        if name:
            defined = rf"^\s*(?:def|class) {name}\b|^{name}\b.*="
            assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), f"{path}:{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(document):
    text = document.read_text().replace("\\\n", " ")
    # At the beginning of a line, after torchrun's options, or in backticks.
    for line in re.findall(r"(?:^|--no-python +|`)menet ([a-z][^`\n]*)", text, re.MULTILINE):
        words = line.split()
        name = " ".join(words[:2]) if words[0] == "data" else words[0]
        assert name in COMMANDS, line
        module, attribute = COMMANDS[name].target.split(":")
        options = {one.name for one in fields(getattr(importlib.import_module(module), attribute))}
        for option in re.findall(r" --([a-z-]+)", line.partition(" # ")[0]):
            assert option == "help" or option.replace("-", "_") in options, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_extras_exist(document):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"'(?:menet|\.)\[([\w,]+)\]'", document.read_text()):
        assert set(names.split(",")) <= extras.keys(), names


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(navigation) == pages


def test_the_reference_names_what_exists():
    names = re.findall(r"^::: (menet[\w.]*)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert names
    for name in names:
        found = menet
        for part in name.split(".")[1:]:
            found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")
        assert found.__doc__, name


def test_each_baseline_has_a_page_with_all_its_settings():
    kinds = {
        name: kind for name, kind in Preprocessed.kinds.items() if kind.__module__.startswith(baselines.__name__)
    }
    assert kinds
    for name, kind in kinds.items():
        page = (ROOT / "docs" / "baselines" / f"{name}.md").read_text()
        for words in ("**Claimed.**", "**Later.**", "**Measured here.**", kind.__name__):
            assert words in page, (name, words)
        for setting in kind(nn.Identity()).settings():
            assert f"`{setting}`" in page, (name, setting)

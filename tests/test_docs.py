"""What the documents tell users to type works as written, and their links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from menet import baselines
from menet.preprocessed import Preprocessed

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN_AS_WRITTEN = [
    ROOT / "README.md",
    ROOT / "docs" / "baselines.md",
    *sorted((ROOT / "docs/baselines").glob("*.md")),
]


@pytest.mark.parametrize("document", RUN_AS_WRITTEN, ids=lambda path: path.name)
def test_code_runs_in_the_order_it_is_read(document):
    pieces = re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    assert pieces
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    names = {"classifier": network, "images": torch.rand(2, 3, 32, 32)}
    for piece in pieces:
        exec(compile(piece, document.name, "exec"), names)


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

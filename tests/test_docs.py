"""What the documents tell users to type works as written; the site builds; names, options, links, spelling."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from torch import nn

import menet
from menet import baselines
from menet.cli import COMMANDS, main
from menet.preprocessed import Preprocessed
from menet.training import recipes

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "sh", "text", "json", "bibtex"}

# Lines of shell blocks that are parsed and not run, and why. Everything else of every block runs.
ELSEWHERE = "a program that is not menet"
NOT_RUN = {
    r"(pip|make|torchrun|srun|ray|sleep|head=|first=|export|source|#)": ELSEWHERE,
    r"menet demo": "takes minutes; tests/report/test_demo.py runs it small",
    r"menet (serve|explore)": "trains networks and waits for visitors; tests/web",
    r"menet train (digits|mnist|cifar10|folder)": "takes minutes to days; tests/training",
    r"menet prepare mnist": "takes an hour; tests/training",
    r"menet data rank cifar10": "needs CIFAR-10; tests/data",
    r"menet reproduce .*(table|--all)": "takes hours, or needs GPUs; tests/experiments",
    r"menet reproduce --list": "plans every experiment, which takes a minute; tests/experiments",
    r"menet evaluate .*(standard|bpda-eot|boundary|on-manifold|runs/surrogate)": "takes minutes; tests/attacks",
    r"menet (evaluate|audit|publish) (RUN --attacks )?package": "names code of yours; tests/commands",
    r"menet evaluate mnist-": "needs MNIST and takes minutes; tests/report",
    r"menet models pack": "needs a run of MNIST; tests/training",
    r"menet report results": "checks the results of the repository; tests/report",
    r"menet audit": "takes minutes; tests/evaluation",
    r"menet certify runs/(few|experts|lines)": "needs the network of the line before; tests/evaluation",
}
SLOW = {"tutorial", "how-to", "records", "training", "standard", "choose"}
BRITISH = re.compile(
    r"colour|(?:normal|minim|maxim|optim|discret|summar|initial|random|synchron|regular|general|real|recogn|organ)is"
    r"(?:e|ed|es|er|ers|ing|ation|ations)\b|licence|behaviour|\bgrey|neighbour|favour|\bcentre|labelled|modelled",
    re.IGNORECASE,
)
OWN_WORDS = re.compile(
    r"answers? alike|goes on where|size of the change|accepted are|\bstrongest\b|defended copy"
)
"""Words of the project's first edition that a reader of the literature would have to translate."""


class Block(NamedTuple):
    """A fenced block of a document."""

    document: Path
    language: str
    text: str


def blocks(document: Path, language: str | None = None) -> list[Block]:
    found = [Block(document, tag, text) for _, tag, text in FENCE.findall(document.read_text())]
    return [one for one in found if language in (None, one.language)]


def commands(document: Path) -> list[str]:
    """The lines of the shell blocks of a document, without comments."""
    text = "\n".join(block.text for block in blocks(document, "sh")).replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)# .*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


CLUSTER = [block for name in ("reproduce", "training") for block in blocks(ROOT / "docs" / f"{name}.md", "sh")]
CLUSTER = [block for block in CLUSTER if block.text.lstrip().startswith("#!/bin/bash")]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", CLUSTER, ids=lambda block: block.document.stem)
def test_scripts_of_a_cluster_start_every_node_and_a_command_that_exists(script, tmp_path, monkeypatch):
    """On four nodes, with programs that write down how they are called; srun calls what it is given."""
    file, calls = tmp_path / "job.sh", tmp_path / "calls"
    file.write_text("".join(line.strip() + "\n" for line in script.text.splitlines()))
    record = f'#!/bin/sh\necho "$(basename "$0") $*" >> {calls}\n'
    for name in ("ray", "torchrun", "menet", "sleep"):
        (tmp_path / name).write_text(record)
    (tmp_path / "srun").write_text(record + 'while [ "${1#--}" != "$1" ]; do shift; done\n"$@"\n')
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'node1\\nnode2\\nnode3\\nnode4\\n'\n")
    for name in ("ray", "torchrun", "menet", "sleep", "srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    given = {
        "SLURMD_NODENAME": "node1",
        "SLURM_NNODES": "4",
        "SLURM_JOB_NODELIST": "node[1-4]",
        "SLURM_JOB_ID": "7",
    }
    environment = {**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-eu", "-c", f". {file}; wait"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    called = calls.read_text()
    if script.document.stem == "reproduce":
        assert called.startswith("ray start --head --port=6379\n")
        assert "srun --exclude=node1 --nodes=3 --ntasks=3 ray start --address=node1:6379 --block\n" in called
        assert "\nray start --address=node1:6379 --block\n" in called
        (command,) = re.findall(r"^menet (.*)", called, re.MULTILINE)
    else:
        assert "--nnodes 4 " in called
        assert "--rdzv-endpoint node1:29500 " in called
        (command,) = re.findall(r"^torchrun .*--no-python menet (.*)", called, re.MULTILINE)
    # The command itself, as far as it goes without a cluster: its options are parsed.
    name, *options = shlex.split(command)
    module, attribute = COMMANDS[name].target.split(":")
    with monkeypatch.context() as patched:
        patched.setattr(getattr(importlib.import_module(module), attribute), "__call__", lambda self: 0)
        assert main([name, *options]) == 0


def reason_not_to_run(line: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, line)), None)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the documents speak of: photographs, runs, and their records."""
    folder = tmp_path_factory.mktemp("world")
    generator = torch.Generator().manual_seed(0)
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(8):
            pixels = torch.randint(256, (16, 16, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / "photos" / name / f"{number}.png")
    shutil.copy(folder / "photos" / "cat" / "0.png", folder / "photo.png")
    here = os.getcwd()
    os.chdir(folder)
    try:
        trained = ["folder:photos@16", "--defense", "me-net", "--model", "small", "--epochs", "1"]
        assert main(["train", *trained, "--validation", "0", "--batch-size", "4", "--out", "RUN"]) == 0
        assert (
            main(["evaluate", "RUN", "--attacks", "pgd", "--epsilon", "8/255", "--stop", "2", "--draws", "5"])
            == 0
        )
    finally:
        os.chdir(here)
    for name in ("OTHER", "runs/NAME", "runs/OTHER", "runs/A", "runs/B"):
        shutil.copytree(folder / "RUN", folder / name)
    return folder


@pytest.fixture
def visited(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of that world as the current folder."""
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder. Pages show how to register estimators and defenses; other tests must not find those."""
    monkeypatch.chdir(tmp_path)
    digits = replace(recipes.digits(), limit=50, epochs=1, model="small", validation=10)
    with (
        patch.dict(menet.estimators.ESTIMATORS),
        patch.dict(Preprocessed.kinds),
        patch.object(recipes, "digits", lambda: digits),
    ):
        yield


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_what_it_is(document: Path) -> None:
    assert {block.language for block in blocks(document)} <= LANGUAGES
    # A fence that does not close would hide the blocks behind it.
    assert len(re.findall(r"^ *```", document.read_text(), re.MULTILINE)) == 2 * len(blocks(document))
    for block in blocks(document, "json"):
        json.loads(block.text)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW))
        for path in DOCUMENTS
        if blocks(path, "python")
    ],
    ids=lambda path: path.name,
)
@pytest.mark.usefixtures("alone")
def test_code_runs_in_the_order_it_is_read(document: Path, request: pytest.FixtureRequest) -> None:
    pieces = [block.text for block in blocks(document, "python")]
    if document.stem == "tutorial":
        # Its notebook holds the same code, so that is what runs.
        cells = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text())["cells"]
        pieces = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    names = {"classifier": network, "images": torch.rand(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    if document.stem == "records":
        request.getfixturevalue("visited")
        names["model"] = menet.MENet(network, "usvt", p=0.5).eval()
    for piece in pieces:
        exec(compile(piece, document.name, "exec"), names)


def test_the_notebook_is_the_tutorial() -> None:
    spec = importlib.util.spec_from_file_location("make_notebook", ROOT / "docs" / "make_notebook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text()
    assert module.NOTEBOOK.read_text() == module.text_of(page), "run `python docs/make_notebook.py`"
    cells = module.notebook_of(page)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code == [block.text.strip("\n") for block in blocks(module.PAGE, "python")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if any(reason_not_to_run(line) is None for line in commands(path))],
    ids=lambda path: path.name,
)
@pytest.mark.usefixtures("visited")
def test_commands_run(document: Path) -> None:
    for line in commands(document):
        if reason_not_to_run(line) is None:
            words, _, target = line.partition(" > ")
            with open(target or os.devnull, "w") as stream, patch.object(sys, "stdout", stream):
                assert main(shlex.split(words)[1:]) == 0, line
            if target.endswith(".json"):
                json.loads(Path(target).read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_do_not_run_are_parsed(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in commands(document):
        if re.match(r"(menet|.*--no-python +menet) ", line):
            arguments = shlex.split(re.sub(r"^(.*--no-python +)?menet | > .*", "", line))
            name = next(name for name in COMMANDS if arguments[: len(name.split())] == name.split())
            module, attribute = COMMANDS[name].target.split(":")
            with patch.object(getattr(importlib.import_module(module), attribute), "__call__") as call:
                call.return_value = 0
                assert main(arguments) == 0, line
            call.assert_called_once()


def test_every_reason_is_needed() -> None:
    every = [line for document in DOCUMENTS for line in commands(document)]
    for pattern in NOT_RUN:
        assert any(re.match(pattern, line) for line in every), pattern
    ran = [line for line in every if reason_not_to_run(line) is None]
    assert len(ran) >= 12
    assert all(line.startswith("menet ") for line in ran), ran


class References(HTMLParser):
    """What a page loads, and where it leads."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        for name in ("href", "src", "srcset", "poster", "data", "action"):
            if name in found:
                (self.links if tag == "a" else self.loaded).append(found[name])


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation as a site, built in strict mode."""
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("needs mkdocs-material: pip install 'menet[docs]'")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


def read(page: Path) -> References:
    references = References()
    references.feed(page.read_text())
    return references


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(DOCUMENTS) - 5
    outside = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)
    for page in pages:
        assert [one for one in read(page).loaded if outside.match(one)] == [], page.name
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", style.read_text()) == [], style.name


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    pages = {page: read(page) for page in site.rglob("*.html")}
    for page, references in pages.items():
        if page.name == "404.html":
            continue
        for link in [*references.links, *references.loaded]:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", path) or link in ("", "#"):
                continue
            place = (page.parent / path).resolve() if path else page
            place = place / "index.html" if place.is_dir() else place
            if place == site / "explore.html":
                continue  # `make docs` adds it, after a minute of training
            assert place.is_file(), f"{page.name}: {link}"
            if anchor and place in pages and not anchor.startswith("__"):
                assert anchor in pages[place].anchors, f"{page.name}: {link}"


@pytest.mark.slow
def test_the_reference_documents_every_name_it_lists(site: Path) -> None:
    page = (site / "api.html").read_text()
    for name in re.findall(r"^::: (menet[\w.]*)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE):
        _, _, shown = page.partition(f'id="{name}"')
        assert "<p>" in shown.partition('class="doc doc-object doc-')[0], name


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


def test_help_errors_and_docstrings_are_spelled_alike():
    for source in sorted((ROOT / "menet").rglob("*.py")):
        text = source.read_text()
        assert not [*BRITISH.findall(text), *OWN_WORDS.findall(text)], source


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
        name = " ".join(words[:2]) if words[0] in ("data", "models") else words[0]
        assert name in COMMANDS, line
        module, attribute = COMMANDS[name].target.split(":")
        options = {one.name for one in fields(getattr(importlib.import_module(module), attribute))}
        for option in re.findall(r" --([a-z][a-z0-9-]*)", line.partition(" # ")[0]):
            assert option == "help" or option.replace("-", "_") in options, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_extras_exist(document):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"'(?:menet|\.)\[([\w,]+)\]'", document.read_text()):
        assert set(names.split(",")) <= extras.keys(), names


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r"[-:] ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(navigation) == pages
    assert len(navigation) == len(pages)


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


@pytest.mark.parametrize("name", ["README.md", "docs/limits.md"])
def test_the_results_shown_are_those_of_the_records(name: str, tmp_path: Path) -> None:
    text = (ROOT / name).read_text()
    assert text.index("<!-- results") < text.index("<!-- /results -->")
    if any((ROOT / "results").rglob("*.npz")):
        from menet.report.documents import fill_results

        copy = tmp_path / "page.md"
        copy.write_text(text)
        fill_results(copy, ROOT / "results")
        assert copy.read_text() == text, "run `menet report results --fill README.md docs/limits.md`"


def test_package_data_is_in_the_wheel() -> None:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling: pip install 'menet[dev]'")
    wheel = builder.WheelBuilder(str(ROOT))
    inside = {Path(one.distribution_path).as_posix() for one in wheel.recurse_included_files()}
    data = [path for path in (ROOT / "menet").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT).as_posix() for path in data} == inside
    needed = {
        "menet/py.typed",
        "menet/web/page.html",
        "menet/report/page.html.jinja",
        "menet/experiments/claims.json",
    }
    assert needed <= inside
    assert "menet/pretrained/*.safetensors" in wheel.target_config["artifacts"]


def test_metadata_is_complete() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {
        "description",
        "readme",
        "license",
        "license-files",
        "requires-python",
        "keywords",
        "urls",
    } <= project.keys()
    assert all((ROOT / name).is_file() for name in (project["readme"], *project["license-files"]))
    assert "web" in project["optional-dependencies"]["all"][0]
    classifiers = pytest.importorskip("trove_classifiers", reason="comes with hatchling").classifiers
    assert set(project["classifiers"]) <= classifiers

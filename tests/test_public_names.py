"""The public face of the package: every name resolves, and importing it is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import menet
from menet.errors import CheckpointError


def test_importing_menet_does_not_import_torch():
    code = "import sys, menet; assert menet.__version__; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_defending_and_evaluating_load_no_compiler_and_no_distributions():
    """Each would add seconds to every start of a command."""
    code = (
        "import sys, menet; menet.MENet, menet.evaluate; print({'torch._dynamo', 'scipy.stats'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch._dynamo", "scipy.stats"} & set(done.stdout.split())


@pytest.mark.parametrize("name", menet.__all__)
def test_every_public_name_resolves(name):
    assert getattr(menet, name) is not None
    assert name in dir(menet)


def test_functions_are_functions_and_modules_modules():
    # `menet.estimators.usvt` is both a function and a file; the public name must be the function.
    for name in ("usvt", "soft_impute", "nuclear_norm", "tubal_nuclear_norm", "mask_only"):
        assert callable(getattr(menet, name))
    for name in ("train", "evaluate", "audit", "certify", "load"):
        assert callable(getattr(menet, name))
    assert menet.attacks.ThreatModel is menet.ThreatModel


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(menet.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen - {"nn"} == set(menet.__all__) - {"__version__", "load"}


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="module 'menet' has no attribute 'MeNet'"):
        _ = menet.MeNet


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A checkpoint of a small defended network, at runs/demo/best.safetensors."""
    monkeypatch.chdir(tmp_path)
    network = menet.models.build("small", generator=torch.Generator().manual_seed(0))
    model = menet.MENet(network, "usvt", gradient="exact")
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    weights = menet.models.weights
    from menet.preprocessed import describe

    header = {"architecture": weights.describe(network), "defense": describe(model)}
    weights.save(folder / "best.safetensors", model.state_dict(), header)
    return folder


def test_load_takes_a_folder_a_file_and_the_name_of_a_run(run):
    for where in (run, str(run), run / "best.safetensors", "runs/demo", "demo"):
        model = menet.load(where)
        assert isinstance(model, menet.MENet)
        assert model.estimator == menet.USVT()
        assert model.gradient == "exact"
        assert not model.training
    with pytest.raises(CheckpointError):
        menet.load("nothing")


def test_two_loads_of_one_file_do_not_replay_the_same_masks(run):
    images = torch.full((2, 3, 32, 32), 0.5)
    masks = [model.sample_mask(images, model.generator) for model in (menet.load(run), menet.load(run))]
    assert not torch.equal(*masks)

"""The examples run as they stand, from the root of the repository, and print what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRINTED = {
    "own_classifier": ("clean", "PGD-20, exact"),
    "own_attack": ("Momentum", "PGD"),
    "own_random_defense": ("clean accuracy", "robust accuracy"),
    "complete_matrices": ("nuclear_norm", "depends most on"),
    "impute_tables": ("breast cancer", "SoftImputer", "within 90 % band"),
}


def test_every_example_is_listed():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"} == set(PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_example_runs(name):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for words in PRINTED[name]:
        assert words in done.stdout

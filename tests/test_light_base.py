"""`pip install menet` suffices for defense, estimators, torch attacks and training; the rest names its extra."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

OPTIONAL = ("foolbox", "eagerpy", "pyautoattack", "matplotlib", "jinja2", "mlxtend", "sklearn", "ray", "art")

SCRIPT = f"""
import importlib, json, pkgutil, sys
for name in {OPTIONAL}:
    sys.modules[name] = None  # importing it now fails
import torch
import menet

failed = {{}}
def attempt(name, function):
    try:
        function()
    except menet.ConfigurationError as error:
        failed[name] = str(error)

for module in pkgutil.walk_packages(menet.__path__, "menet."):
    attempt(module.name, lambda: importlib.import_module(module.name))
images, labels = torch.rand(2, 1, 28, 28), torch.tensor([0, 1])
model = menet.MENet(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))).eval()
for name in ("pgd", "autoattack"):
    attack = menet.attacks.build(name, epsilon=0.1, steps=2)
    victim = model if name == "pgd" else model.fixed(draws=1)
    attempt(name, lambda: attack(victim, images, labels, generator=torch.Generator().manual_seed(0)))
attempt("digits", lambda: menet.data.load("digits", "test"))
print(json.dumps(failed))
"""


def test_without_extras_only_the_report_is_missing_and_says_so():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    failed = json.loads(done.stdout)
    assert "pip install 'menet[sklearn]'" in failed.pop("menet.estimators.sklearn")
    reports = {name: error for name, error in failed.items() if name.startswith("menet.")}
    assert reports
    assert all(name.startswith("menet.report.") for name in reports), reports
    assert all("pip install 'menet[report]'" in error for error in reports.values())
    assert "pgd" not in failed
    assert "pip install 'menet[external]'" in failed["autoattack"]
    assert "pip install 'menet[demo]'" in failed["digits"]


def test_the_demo_extra_brings_what_the_demo_attacks_with():
    """Its deterministic networks get AutoAttack from the standard suite, and its report needs figures."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert any(name.startswith("pyautoattack") for name in extras["external"])
    assert "menet[external,report]" in extras["demo"]

"""What commands import and load first, for the process that the soak forks them from: seconds for each of them.

Nothing here starts a thread: a process with threads cannot be forked safely.
"""

import importlib

import torch

import menet

for name in (
    *(f"menet.commands.{one}" for one in ("audit", "certify", "demo", "evaluate", "prepare", "report", "train")),
    *(f"menet.{one}" for one in ("attacks", "cli", "evaluation", "experiments", "report", "training")),
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "tyro",
):
    importlib.import_module(name)

with torch.no_grad():
    menet.estimators.nuclear_norm(torch.ones(1, 8, 8), torch.ones(1, 8, 8, dtype=torch.bool))

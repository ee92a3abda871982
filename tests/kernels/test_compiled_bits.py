"""Compiled loops give the same bits whether compiled now or loaded, in any order of first use."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from menet import USVT, NuclearNorm
from menet.baselines import total_variation
from menet.linalg import eigh

HASHES = """
import hashlib, sys
import torch
from menet import USVT, NuclearNorm
from menet.baselines import total_variation
from menet.linalg import eigh

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
x = torch.rand(8, 32, 3, generator=generator) @ torch.rand(8, 3, 96, generator=generator) / 3
x += 0.1 * torch.rand(x.shape, generator=generator)
mask = torch.rand(x.shape, generator=generator) < 0.5
square = x[..., :32] + x[..., :32].mT


def gradient_of(estimator):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(estimator(leaf, mask), leaf, square.repeat(1, 1, 3))[0]


loops = {
    "eigh": lambda: torch.cat([part.flatten() for part in eigh(square)]),
    "completion": lambda: NuclearNorm()(x, mask),
    "usvt": lambda: USVT()(x, mask),
    "gradients": lambda: torch.cat([gradient_of(NuclearNorm()), gradient_of(USVT())]),
    "variation": lambda: total_variation(x[..., :32], mask[..., :32], 0.1),
}
found = {name: hashlib.sha256(loops[name]().contiguous().numpy().tobytes()).hexdigest() for name in sys.argv[1:]}
print(*(f"{name}={found[name]}" for name in sorted(found)))
"""


def hashes(cache: Path, *order: str, warm: bool) -> dict[str, str]:
    """SHA-256 of each result, in a process of its own that uses the loops in this order."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(Path(__file__).parents[2])}
    printed = subprocess.run(
        [sys.executable, "-c", HASHES, *order], env=environment, check=True, capture_output=True, text=True
    )
    assert ("compiling" in printed.stderr) == (not warm), printed.stderr
    return dict(part.split("=") for part in printed.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(sys.platform != "linux", reason="moves the cache by XDG_CACHE_HOME")
def test_bits_do_not_depend_on_the_cache_or_the_order_of_first_use(tmp_path):
    cold = hashes(tmp_path / "one", "eigh", "completion", "usvt", "variation", "gradients", warm=False)
    other_order = hashes(tmp_path / "two", "completion", "eigh", warm=False)
    assert other_order.items() <= cold.items()
    for order in (
        ("eigh", "completion", "usvt", "variation", "gradients"),
        ("gradients", "variation", "usvt", "completion", "eigh"),
    ):
        assert hashes(tmp_path / "one", *order, warm=True) == cold


def test_no_arithmetic_is_in_a_symbol_that_two_loops_could_share(generator):
    """Of a symbol in two objects the linker takes the first one loaded, and the two may round differently."""
    x = torch.rand(2, 12, 12, generator=generator)
    eigh(x + x.mT)
    for estimator in (NuclearNorm(), USVT()):
        leaf = x.clone().requires_grad_()
        torch.autograd.grad(estimator(leaf, x > 0.5).sum(), leaf)
    total_variation(x, x > 0.5)
    from menet.kernels.completion import adjoint_each, complete_each
    from menet.kernels.eigenvectors import eigh_of_each
    from menet.kernels.total_variation import minimize_each
    from menet.kernels.truncation import truncate_adjoint_each, truncate_each

    for loop in (eigh_of_each, complete_each, adjoint_each, truncate_each, truncate_adjoint_each, minimize_each):
        assert loop.overloads
        for result in loop.overloads.values():
            functions = [f for f in result.library._get_module_for_linking().functions if not f.is_declaration]
            computing = [f.name for f in functions if re.search(r" f(add|sub|mul|div) ", str(f))]
            assert computing
            assert all(loop.py_func.__name__ in name for name in computing), computing

"""`menet doctor`: what a bug report should say about a machine; `menet completion`: options by the tab key."""

import importlib
import inspect
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from menet.commands import Json, Output, printing
from menet.commands.options import Root

PACKAGES = (
    "torch", "numpy", "scipy", "pillow", "numba", "llvmlite", "safetensors", "tyro", "rich", "pooch", "jaxtyping",
    "foolbox", "pyautoattack", "matplotlib", "jinja2", "mlxtend", "scikit-learn", "ray", "fsspec",
    "adversarial-robustness-toolbox", "tensorboard",
)  # fmt: skip


@dataclass
class Findings:
    """What was found, in sections of names and values, and which self-tests failed."""

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def text(self) -> str:
        """As Markdown, to paste into a bug report."""
        lines = []
        for title, values in self.sections.items():
            lines += [f"**{title}**", "", *(f"- {name}: {value}" for name, value in values.items()), ""]
        verdict = f"FAILED: {', '.join(self.failed)}" if self.failed else "all self-tests passed"
        return "\n".join([*lines, verdict])


@dataclass(frozen=True)
class Doctor:
    """Show versions, devices, data and compiled loops, and run a self-test of a few seconds.

    The output is Markdown, to paste into a bug report; it names no user and no file outside the folders of menet.
    The exit code is 1 if a self-test fails.
    """

    root: Root = None

    json: Json = False

    @printing
    def __call__(self, out: Output) -> int:
        found = Findings()
        found.sections["menet"] = _versions()
        found.sections["machine"] = _machine()
        found.sections["data"] = _data(self.root)
        found.sections["compiled loops"] = _compiled()
        found.sections["self-test"] = tests = {}
        for name, test in SELF_TESTS.items():
            began = time.perf_counter()
            try:
                result = test()
            except Exception as error:
                found.failed.append(name)
                result = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
            tests[name] = f"{result} ({time.perf_counter() - began:.2f} s)"
        out.value(**found.sections, failed=found.failed)
        print(found.text())
        return int(bool(found.failed))


def _versions() -> dict[str, str]:
    found = {}
    for name in ("menet", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    missing = [name for name, value in found.items() if value == "not installed"]
    found = {name: value for name, value in found.items() if value != "not installed"}
    return {**found, "not installed": ", ".join(missing) or "nothing"}


def _machine() -> dict[str, str]:
    import torch

    from menet.evaluation.provenance import of_machine

    made = of_machine()
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    mps = getattr(torch.backends, "mps", None)
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "processor": f"{made['processor']}, {made['cores']} cores, {made['threads']} threads used",
        "bfloat16": _bfloat16(),
        "GPUs": ", ".join(gpus) or "none that PyTorch can use",
        "MPS": "yes" if mps is not None and mps.is_available() else "no",
    }


def _bfloat16() -> str:
    """Whether the processor computes in bfloat16 itself, which decides what autocast does to speed and digits."""
    import torch

    gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    native = bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)())
    return f"CPU {'supported' if native else 'no'}, GPU {'supported' if gpu else 'no'}"


def _data(root: Path | None) -> dict[str, str]:
    from menet.data import SOURCES
    from menet.data.dataset import data_folder

    folder = data_folder(root)
    found = [name for name, source in SOURCES.items() if source.archives and (folder / name).is_dir()]
    return {
        "folder": _short(folder),
        "datasets": ", ".join(found) or "none; `menet data fetch NAME` downloads one",
    }


def _compiled() -> dict[str, str]:
    from menet.kernels import compiling

    folder = compiling.folder()
    stored = len(list(folder.glob("*.bin"))) if folder.is_dir() else 0
    place = folder if folder.exists() else next(one for one in folder.parents if one.exists())
    return {
        "folder": _short(folder),
        "stored": f"{stored} functions" if stored else "none yet; the first call compiles them (about a minute)",
        "writable": "yes" if os.access(place, os.W_OK) else "no: every process compiles them again",
    }


def _short(path: Path) -> str:
    """A path without the name of the user."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _estimates() -> str:
    import torch

    from menet import estimators, masks

    generator = torch.Generator().manual_seed(0)
    low_rank = torch.rand(4, 24, 2, generator=generator) @ torch.rand(4, 2, 24, generator=generator) - 0.5
    mask = masks.bernoulli(low_rank.shape, 0.7, generator)
    zeros = (low_rank * ~mask).norm()
    errors = {}
    # USVT keeps only singular values above a threshold that few of so small a matrix reach.
    for name, largest in (("soft-impute", 0.5), ("nuclear-norm", 0.5), ("usvt", 1.0)):
        estimate = estimators.build(name)(low_rank, mask)
        errors[name] = float(((estimate - low_rank) * ~mask).norm() / zeros)
        if not errors[name] < largest:
            raise ArithmeticError(f"expected {name} with an error below {largest:g}, got {errors[name]:.3g}")
    told = ", ".join(f"{name} {error:.2f}" for name, error in errors.items())
    return f"error on hidden entries of small matrices of rank 2, zeros being 1: {told}"


def _gradients() -> str:
    import torch

    from menet import estimators, masks

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 6, 8, generator=generator, dtype=torch.float64)
    mask = masks.bernoulli(x.shape, 0.7, generator)
    weights = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    estimator = estimators.build("nuclear-norm", tol=1e-10, max_iter=10_000)

    def loss(x: Any) -> Any:
        return (estimator(x, mask) * weights).sum()

    leaf = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(loss(leaf), leaf)
    direction = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    step = 1e-5
    measured = float(loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    expected = float((exact * direction).sum())
    if not abs(measured - expected) <= 1e-3 * max(1.0, abs(expected)):
        raise ArithmeticError(f"expected the derivative {measured:.6g}, got {expected:.6g}")
    return "exact gradients agree with difference quotients"


def _attack() -> str:
    import torch

    import menet

    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(4, 1, 12, 12, generator=generator), torch.tensor([0, 1, 0, 1])
    network = menet.models.build("lenet", channels=1, side=12, classes=2, generator=generator)
    model = menet.MENet(network, p=0.5).eval()
    result = menet.attacks.build("pgd", epsilon=0.1, steps=3)(model, images, labels, generator=generator)
    largest = float((result.images - images).abs().max())
    if not 0 < largest <= 0.1 + 1e-6:
        raise ArithmeticError(f"expected a perturbation in (0, 0.1], got {largest:.3g}")
    return "PGD on a ME-Net stays in its threat model"


SELF_TESTS: dict[str, Callable[[], str]] = {"estimators": _estimates, "gradients": _gradients, "attack": _attack}


@dataclass(frozen=True)
class Completion:
    """Print a script that completes commands and options of menet in a shell.

    The shell loads it at its start:

      bash  `source <(menet completion bash)` in ~/.bashrc
      zsh   `source <(menet completion zsh)` in ~/.zshrc, after `compinit`
      fish  `menet completion fish > ~/.config/fish/completions/menet.fish`
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """The shell."""

    def __call__(self) -> int:
        options = {name: _options(target) for name, target in _commands().items()}
        print({"bash": _bash, "zsh": _zsh, "fish": _fish}[self.shell](options), end="")
        return 0


def _commands() -> dict[str, tuple[str, str]]:
    # Imported here, since the table of commands names this module.
    cli = importlib.import_module("menet.cli")
    return {name: (command.target, command.summary) for name, command in cli.COMMANDS.items()}


def _options(described: tuple[str, str]) -> tuple[str, list[str]]:
    """The summary of a command and its options, as they are typed."""
    target, summary = described
    module, _, attribute = target.partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    hints = inspect.get_annotations(kind)
    named = [one.name for one in fields(kind) if "Positional" not in str(hints.get(one.name))]
    return summary, ["--" + name.replace("_", "-") for name in named] + ["--help"]


def _cases(options: dict[str, tuple[str, list[str]]]) -> str:
    return "\n".join(f'    "{name}") words="{" ".join(words)}" ;;' for name, (_, words) in options.items())


def _first_words(options: dict[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """The commands, and those of each group such as `data`."""
    groups: dict[str, list[str]] = {}
    for name in options:
        first, _, second = name.partition(" ")
        groups.setdefault(first, [])
        if second:
            groups[first].append(second)
    return list(groups), {first: seconds for first, seconds in groups.items() if seconds}


def _bash(options: dict[str, tuple[str, list[str]]]) -> str:
    first, groups = _first_words(options)
    group_cases = "\n".join(f'    "{name}") words="{" ".join(seconds)}" ;;' for name, seconds in groups.items())
    return f"""# Completion of menet; source <(menet completion bash)
_menet() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" name="${{COMP_WORDS[1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(first)} --help --version" -- "$current"))
    return
  fi
  if [ "$COMP_CWORD" -eq 2 ]; then
    case "$name" in
{group_cases}
    esac
    if [ -n "$words" ]; then COMPREPLY=($(compgen -W "$words" -- "$current")); return; fi
  fi
  case "$name" in {"|".join(groups)}) name="$name ${{COMP_WORDS[2]}}" ;; esac
  case "$name" in
{_cases(options)}
  esac
  case "$current" in -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;; *) COMPREPLY=() ;; esac
}}
complete -o default -F _menet menet
"""


def _zsh(options: dict[str, tuple[str, list[str]]]) -> str:
    return f"autoload -Uz bashcompinit && bashcompinit\n{_bash(options)}"


def _fish(options: dict[str, tuple[str, list[str]]]) -> str:
    first, groups = _first_words(options)
    known = " ".join(first)
    lines = ["# Completion of menet; menet completion fish > ~/.config/fish/completions/menet.fish"]
    for name, (summary, words) in options.items():
        group, _, second = name.partition(" ")
        condition = f"__fish_seen_subcommand_from {group}"
        if second:
            condition += f"; and __fish_seen_subcommand_from {second}"
            others = " ".join(groups[group])
            lines.append(
                f"complete -c menet -n '__fish_seen_subcommand_from {group}; and not __fish_seen_subcommand_from "
                f"{others}' -f -a {second} -d {json.dumps(summary)}"
            )
        else:
            lines.append(
                f"complete -c menet -n 'not __fish_seen_subcommand_from {known}' -f -a {name} "
                f"-d {json.dumps(summary)}"
            )
        lines += [f"complete -c menet -n '{condition}' -l {word[2:]}" for word in words]
    lines += [f"complete -c menet -n 'not __fish_seen_subcommand_from {known}' -f -a {group}" for group in groups]
    return "\n".join(lines) + "\n"

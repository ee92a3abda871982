"""A device with values on a machine without a GPU, and every kind of job of the smoke scale on it.

`test_on_a_gpu.py` runs this file in a process of its own, because torch takes a new device once per process and
keeps it. Tensors of the device hold their values on the CPU, and what a GPU refuses is refused: operations on
tensors of both devices, and random draws on the device from a generator of the CPU. (The device `meta` would not
do: torch takes its tensors for empty and skips what writes to them, so that indices in a list were never set.)
"""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from menet import data
from menet.data import Dataset
from menet.experiments import EXPERIMENTS, experiment, tables
from menet.experiments.jobs import Evaluate, Job, Prepare, Train, Workspace, transformed
from menet.experiments.measures import EstimationError, Timing
from menet.experiments.plan import graph
from menet.experiments.runner import Local, needs_gpu
from menet.experiments.scale import SMOKE, Scale
from menet.training import TrainingConfig, batches, loop

DEVICE = "simulated"
ATEN = torch.ops.aten
INDEXING = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default)
"""Operations that take indices of the CPU for a tensor of a device."""


def speck_training(config: TrainingConfig) -> TrainingConfig:
    small = SMOKE.training(config)
    defense = quick(small.defense)
    return replace(small, epochs=1, limit=40, steps=1, epsilon=0.1, step_size=0.1, batch_size=40, defense=defense)


def quick(defense: dict[str, Any]) -> dict[str, Any]:
    """A defense of the same kind; estimators differ in the jobs that measure their time."""
    if defense.get("name") == "pixel-defend":
        return {**defense, "width": 2, "layers": 1, "steps": 2}
    if defense.get("name") == "me-net":
        # An ablation shows what is observed, and takes no estimator.
        estimator = {} if defense.get("encoding") == "ablation" else {"estimator": {"name": "usvt"}}
        return {**defense, **estimator, "p": [0.4, 0.6], "masks": 2}
    return defense


class Speck(Scale):
    """The smoke scale made smaller, with jobs that differ in numbers alone made equal."""

    def __call__(self, job: Job) -> Job:
        job = super().__call__(job)
        if isinstance(job, Prepare):
            return replace(job, defense=quick(job.defense))
        if isinstance(job, Timing):
            return replace(job, batch_size=4, rounds=1)
        if isinstance(job, Evaluate):
            numbers = {"epsilon": 0.1, "step_size": 0.1, "kappa": 20}
            given = job.settings
            settings = {name: value and numbers.get(name, value) for name, value in given.items()}
            return replace(job, settings=settings)
        return job


SPECK = Speck(
    **{
        **vars(SMOKE),
        "training": speck_training,
        "images": 40,
        "examples": 4,
        "draws": 2,
        "batch_size": 4,
        "steps": lambda steps: 2,
        "restarts": lambda restarts: 2,
        "spsa_samples": 4,
        "boundary_steps": 3,
        "certificate_draws": 60,
    }
)


class Backend(backend_registration._DummyBackendModule):
    """What torch asks the module of a device for."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class OnDevice(Tensor):
    """A tensor on the simulated device."""

    held: Tensor
    # eagerpy, behind foolbox's attacks, knows tensors by the module of their class.
    __module__ = "torch"

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(DEVICE, 0),
        )
        made.held = held
        return cast(OnDevice, made)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.held!r})"

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(op, args, kwargs or {})


class Simulated(TorchDispatchMode):
    """Within it, what is moved to or made on the device has values; counts what is computed there."""

    operations = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(op, args, kwargs or {})


def computed(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operation, on the device if its tensors are there or it is made there."""
    leaves = list(leaves_of((args, kwargs)))
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    there = {id(one.held): one for one in tensors if isinstance(one, OnDevice)}
    on_device = bool(there)
    if kwargs.get("device") is not None:
        on_device = torch.device(kwargs["device"]).type == DEVICE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif there and op is not ATEN.copy_.default:
        # A device takes single numbers of the CPU, and indices.
        taken = args[1] if op in INDEXING and isinstance(args[0], OnDevice) else ()
        allowed = {id(one) for one in leaves_of(taken)}
        if any(not isinstance(one, OnDevice) and one.dim() > 0 and id(one) not in allowed for one in tensors):
            raise RuntimeError(f"expected all tensors on one device, got both: {op}")
    if on_device:
        Simulated.operations += 1
        if any(isinstance(one, torch.Generator) for one in leaves):
            raise RuntimeError(f"expected a generator of the device, got one of the CPU: {op}")

    def bare(one: Any) -> Any:
        return one.held if isinstance(one, OnDevice) else one

    def dressed(one: Any) -> Any:
        if not isinstance(one, Tensor) or isinstance(one, OnDevice):
            return one
        known = there.get(id(one))
        return OnDevice(one) if known is None else known

    found = op(*mapped(bare, args), **mapped(bare, kwargs))
    return mapped(dressed, found) if on_device else found


def leaves_of(tree: Any) -> Iterator[Any]:
    """What nested lists, tuples and dictionaries hold (torch's own functions take most of the test's time)."""
    if isinstance(tree, list | tuple):
        for one in tree:
            yield from leaves_of(one)
    elif isinstance(tree, dict):
        yield from leaves_of(list(tree.values()))
    else:
        yield tree


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree of changed leaves."""
    if isinstance(tree, list | tuple):
        changed = [mapped(change, one) for one in tree]
        return tuple(changed) if isinstance(tree, tuple) else changed
    if isinstance(tree, dict):
        return {name: mapped(change, one) for name, one in tree.items()}
    return change(tree)


def register() -> torch.library.Library:
    """Make the device known to torch; the library must be kept as long as the device is used."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=Backend())
    library = torch.library.Library("aten", "IMPL")

    # Where torch makes a tensor of Python numbers it calls these kernels, past the dispatch mode.
    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return OnDevice(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        cast(OnDevice, target).held.copy_(source)
        return target

    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    return library


class Immediately:
    """A pool whose thread is this one: a dispatch mode belongs to a thread."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_: Any) -> None: ...


def few_and_small(dataset: Dataset) -> Dataset:
    """The first images of a dataset, thinned to 8×8: PixelDefend goes through them value by value."""
    images = dataset.batch(slice(0, 60))[0][:, :, 2:26:3, 2:26:3]
    return replace(dataset, images=(255 * images).round().to(torch.uint8), labels=dataset.labels[:60])


def refusals() -> list[str]:
    """What the device refuses, as a GPU does, of operations that must be refused; and that it computes."""
    with Simulated():
        there, here = torch.arange(3.0).to(DEVICE), torch.ones(3)
        assert (there + 1).tolist() == [1, 2, 3]
        assert there[[2, 0]].tolist() == [2, 0]
        assert torch.tensor([4.0, 5.0], device=DEVICE).tolist() == [4, 5]
        assert there.device.type == DEVICE
        assert type((there * 2).cpu()) is Tensor
        refused = []
        mistakes: dict[str, Callable[[], Any]] = {
            "two devices": lambda: there + here,
            "index on the device, values not": lambda: here[there.long()],
            "generator of the CPU": lambda: torch.rand(3, device=DEVICE, generator=torch.Generator()),
            "to an array": lambda: there.numpy(),
        }
        for name, mistake in mistakes.items():
            try:
                mistake()
            except (RuntimeError, TypeError):
                refused.append(name)
        return refused


def traits(job: Job) -> Iterator[tuple[Any, ...]]:
    """What a job does on a device that another may not: its kind, method, attack, access, gradient."""
    if isinstance(job, Train):
        defense = job.config.defense
        yield job.kind, defense.get("name"), job.config.objective
        yield job.kind, "bank" in defense, job.prepared is not None
    elif isinstance(job, Evaluate):
        source = job.surrogate and bool(job.surrogate.config.defense)
        yield job.kind, job.attack, source, job.gray, job.gradient
        yield job.kind, job.settings.get("epsilon") is None, job.attack
        yield from ((job.kind, name) for name in ("eot", "restarts", "kappa") if name in job.settings)
        yield job.kind, job.model.config.defense.get("name")
    elif isinstance(job, EstimationError | Timing):
        yield job.kind, job.defense["name"], job.defense.get("estimator", {}).get("name")
    else:
        yield (job.kind,)


def jobs_of_every_kind() -> list[Job]:
    """Jobs of all experiments, as few as show every trait, with HopSkipJump, which no table has."""
    every = [job for name in EXPERIMENTS for job in experiment(name).at(SPECK).jobs]
    boundary = transformed(tables.black_box(tables.model("mnist"), "Boundary"), SPECK)
    every.append(replace(boundary, attack="hop-skip-jump"))
    chosen: dict[str, Job] = {}
    seen: set[tuple[Any, ...]] = set()
    for job in graph(every):
        new = set(traits(job)) - seen
        if new and job.key not in chosen:
            for one in graph([job]):
                chosen[one.key] = one
                seen.update(traits(one))
    return list(chosen.values())


def main(folder: str) -> None:
    """Run the jobs in `folder` and print how each ended, as JSON."""
    kept = register()
    batches.ThreadPoolExecutor = Immediately  # type: ignore[misc, assignment]
    loop.draw_curves = lambda folder: True  # type: ignore[assignment]
    load = data.load
    data.load = lambda *names: few_and_small(load(*names))  # type: ignore[assignment]
    # Memory that nothing was written to holds NaN, so that reading it is found.
    torch.use_deterministic_algorithms(True, warn_only=True)
    workspace = Workspace(Path(folder), device=DEVICE)
    found: dict[str, Any] = {"refused": refusals(), "jobs": []}
    for job in jobs_of_every_kind():
        Simulated.operations = 0
        with Simulated():
            outcome = Local()(graph([job]), workspace, lambda _: None)[job.key]
        row = {"kind": job.kind, "title": job.title(), "status": outcome.status, "message": outcome.message}
        row |= {"traits": [list(one) for one in traits(job)], "operations": Simulated.operations}
        row |= {"log": str(outcome.log), "device": needs_gpu(job), "seconds": outcome.seconds}
        found["jobs"].append(row)
    print(json.dumps(found))
    del kept


if __name__ == "__main__":
    main(sys.argv[1])

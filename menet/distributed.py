"""This process among those that `torchrun` started: one, several on a machine, or several machines."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")
PAUSE = 0.2


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Worker:
    """One of `world` processes, and the device it computes on."""

    rank: int = 0
    world: int = 1
    device: torch.device = CPU

    @classmethod
    def from_environment(cls) -> "Worker":
        """The rank and world size that `torchrun` announces; (0, 1) without it."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and reports progress."""
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """This process's equal part of a batch."""
        return batch[self.rank * len(batch) // self.world : (self.rank + 1) * len(batch) // self.world]

    def parallel(self, module: nn.Module) -> nn.Module:
        """`module` with gradients averaged over all processes."""
        if self.world == 1:
            return module
        if self.device.type == "cuda":
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return DistributedDataParallel(module, [self.device] if self.device.type == "cuda" else None)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum of `numbers` over all processes."""
        if self.world > 1:
            processes.all_reduce(numbers)
        return numbers

    def wait(self) -> None:
        """Block until all processes have reached this point."""
        if self.world > 1:
            processes.barrier()


@contextmanager
def joined(device: str = "auto") -> Iterator[Worker]:
    """This process as a worker, connected to the others within a `with` block.

    `auto` is CUDA where there is a GPU, else the CPU. With CUDA each process takes the GPU of its local rank (or
    the one that is named) and uses nccl, otherwise gloo.
    """
    worker = Worker.from_environment()
    rank, world = worker.rank, worker.world
    chosen = resolved(device)
    if chosen.type == "cuda":
        if chosen.index is None:
            chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    if world == 1:
        yield Worker(device=chosen)
        return
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    store = _store_of_this_attempt()
    if store is None:
        processes.init_process_group(backend)
    else:
        processes.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield Worker(rank, world, chosen)
        processes.barrier()
    finally:
        # Gloo's threads need Python's lock to release their last tensors, and destroying the group holds that
        # lock while it waits for them: without this pause a finished process may never exit.
        time.sleep(PAUSE)
        processes.destroy_process_group()


def resolved(device: str) -> torch.device:
    """The device of that name; `auto` is CUDA where there is a GPU, else the CPU."""
    if device == "auto":
        return torch.device("cuda") if torch.cuda.is_available() else CPU
    return torch.device(device)


def _store_of_this_attempt() -> processes.Store | None:
    # On one machine torchrun keeps its store when it restarts workers, and processes that find the addresses of
    # dead ones there wait for them forever. With several machines each counts its restarts by itself, so the
    # count is no common key (docs/training.md says what helps).
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]:
        return None
    store = processes.TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
    return processes.PrefixStore(f"menet/attempt/{environment['TORCHELASTIC_RESTART_COUNT']}", store)

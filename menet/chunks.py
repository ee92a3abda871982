"""Running a batched function piece by piece: in threads on a CPU, with bounded memory everywhere.

Batched decompositions (`eigh`, `cholesky`) in torch use one core, and element-wise passes over a large batch
fall out of the cache. Whole solvers run on chunks in threads that each compute on one core do neither.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

# Small enough for a solver's buffers to stay near the core, large enough for calls not to be what is paid for.
ELEMENTS_PER_CHUNK = 32 * 96 * 256

_lock = Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def in_chunks(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    elements: int = ELEMENTS_PER_CHUNK,
) -> tuple[Tensor, ...]:
    """Apply `function` to pieces of `tensors` along their first dimension and join what it returns.

    The first tensor decides the size of a piece. `function` must treat the entries of the batch independently
    and return tensors with the same first dimension; it runs without gradients.
    """
    batch = len(tensors[0])
    threads = torch.get_num_threads() if tensors[0].device.type == "cpu" else 1
    size = max(1, elements // max(1, tensors[0][:1].numel()))
    if threads > 1 and batch > 1:
        # At least one piece per thread, and a number of pieces that keeps all threads busy to the end.
        pieces = threads * max(1, round(batch / (size * threads)))
        size = min(size, -(-batch // pieces))
    elif tensors[0].device.type != "cpu":
        # An accelerator wants its whole batch at once; memory is the only bound, and a generous one.
        size *= 64
    if size >= batch:
        with torch.no_grad():
            return function(*tensors)
    pieces_of_each = [tensor.split(size) for tensor in tensors]
    if threads == 1:
        with torch.no_grad():
            results = [function(*piece) for piece in zip(*pieces_of_each, strict=True)]
    else:
        pool = _pool(threads)
        try:
            # Torch's own count is per thread, but MKL's is the process's: left alone, each decomposition
            # would try to use all cores from every thread.
            torch.set_num_threads(1)
            futures: list[Future[tuple[Tensor, ...]]] = [
                pool.submit(_without_gradients, function, piece) for piece in zip(*pieces_of_each, strict=True)
            ]
            results = [future.result() for future in futures]
        finally:
            torch.set_num_threads(threads)
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def _without_gradients(
    function: Callable[..., tuple[Tensor, ...]], piece: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return function(*piece)


def _pool(threads: int) -> ThreadPoolExecutor:
    # Keyed by process, because threads do not survive a fork.
    key = (os.getpid(), threads)
    with _lock:
        if key not in _pools:
            pool = ThreadPoolExecutor(
                threads, thread_name_prefix="menet", initializer=torch.set_num_threads, initargs=(1,)
            )
            _pools[key] = pool
    return _pools[key]

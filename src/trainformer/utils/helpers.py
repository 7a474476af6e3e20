"""Helpers for scripts and notebooks: seeds, devices, parameter counts, memory.

Runs do not use them: the engine and the backends seed and place batches themselves.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import random
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainformer.core.errors import BadArgument, expected
from trainformer.utils.processes import peak_resident_bytes, resident_bytes

logger = logging.getLogger(__name__)


def seed_everything(seed: int = 42, deterministic: bool = True) -> None:
    """Seed Python, NumPy and torch (CPU and all GPUs), and the hash seed of child processes.

    With `deterministic`, cuDNN uses deterministic algorithms and does not benchmark for the fastest ones; without it,
    its settings are not changed.

    >>> seed_everything(1)
    >>> first = torch.rand(1)
    >>> seed_everything(1)
    >>> bool(torch.rand(1) == first)
    True
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        do = "NumPy accepts no other seeds. Pass seed=42."
        raise BadArgument(expected("seed to be an integer from 0 to 2**32 - 1", seed, do))
    seed = int(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # all devices; GPUs that are not initialised yet are seeded when they are
    os.environ["PYTHONHASHSEED"] = str(seed)  # read at startup only, so it affects child processes
    if deterministic:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    logger.info("Set random seed to %d", seed)


def count_parameters(model: torch.nn.Module, trainable_only: bool = True) -> str:
    """The number of parameters (shared ones counted once) as text.

    >>> count_parameters(torch.nn.Linear(100, 15))
    '1.51K'
    """
    total = sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable_only)
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if total >= size:
            return f"{total / size:.2f}{unit}"
    return str(total)


@dataclass(eq=False)
class MemoryRecord:
    """What `profile_memory` measured. The values are set when the block ends.

    On a GPU they count the memory of tensors, and the peak is that of the block. On the CPU they count the resident
    memory of the process, and the peak is that of its whole lifetime, because the system keeps no other.
    """

    label: str
    device: str
    delta_bytes: int = 0
    peak_bytes: int = 0


_open_records: list[MemoryRecord] = []


@contextmanager
def profile_memory(label: str = "Operation") -> Iterator[MemoryRecord]:
    """Measure the memory use of a block of code, and log it when the block ends, also with an exception.

    >>> with profile_memory("build") as memory:
    ...     model = torch.nn.Linear(10, 10)
    >>> memory.peak_bytes > 0 or memory.device == "cuda"
    True
    """
    record = MemoryRecord(label, "cuda" if torch.cuda.is_available() else "cpu")
    if record.device == "cuda":
        # The allocator has one peak counter: enclosing blocks take its value before it is reset.
        for outer in _open_records:
            outer.peak_bytes = max(outer.peak_bytes, _peak_bytes(record.device))
        torch.cuda.reset_peak_memory_stats()
    _open_records.append(record)
    before = _used_bytes(record.device)
    try:
        yield record
    finally:
        # No synchronize: the allocator counts on the host, and after a failed kernel it would mask the first error.
        _open_records.remove(record)
        record.delta_bytes = _used_bytes(record.device) - before
        record.peak_bytes = max(record.peak_bytes, _peak_bytes(record.device))
        logger.info("%s: delta=%.2fGB, peak=%.2fGB", label, record.delta_bytes / 1e9, record.peak_bytes / 1e9)


def _used_bytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else resident_bytes()


def _peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else max(peak_resident_bytes(), resident_bytes())


def get_device() -> torch.device:
    """The best device of this machine: CUDA, else Apple's MPS, else the CPU.

    >>> get_device().type in ("cuda", "mps", "cpu")
    True
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def move_to_device(batch: Any, device: torch.device | str | int, non_blocking: bool = False) -> Any:
    """A copy of the batch with every tensor on `device`.

    Mappings, lists, tuples, named tuples, dataclasses and objects with a `to` method keep their type, at any depth; all
    other values are kept as they are.

    >>> move_to_device({"x": torch.zeros(2), "names": ["a", "b"]}, "meta")
    {'x': tensor(..., device='meta', size=(2,)), 'names': ['a', 'b']}
    """

    def move(item: Any) -> Any:
        return move_to_device(item, device, non_blocking)

    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, dict | UserDict):
        # Filling a copy keeps the attributes of a subclass: a default factory, a tokenizer's encodings.
        filled = copy.copy(batch)
        for key, value in batch.items():
            filled[key] = move(value)
        return filled
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        # Packed sequences, graphs, tensor dicts. On a copy, since some of them move in place.
        return copy.copy(batch).to(device, **({"non_blocking": True} if non_blocking else {}))
    if isinstance(batch, Mapping):
        return type(batch)({key: move(value) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_make"):  # a named tuple takes its fields as separate arguments
        return batch._make(map(move, batch))
    if isinstance(batch, list | tuple):
        return type(batch)([move(item) for item in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # Bypasses __init__ and __setattr__, for frozen instances and fields with init=False.
            object.__setattr__(moved, field.name, move(getattr(batch, field.name)))
        return moved
    return batch

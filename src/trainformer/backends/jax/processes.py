"""The processes of a run on JAX: how they meet, which rows are whose, and what they tell each other on the host.

Arrays are global: a step, its metrics and a checkpoint of orbax's belong to all processes, and jax itself carries what
they exchange. Left to do here is joining jax's runtime, a few exchanges of plain values, and agreeing after every step
whether somebody has a request. A process that dies is noticed by jax's own heartbeats.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.mesh import data_shards
from trainformer.backends.jax.sharding import batch_sharding
from trainformer.core.errors import BadArgument, expected
from trainformer.data.sharding import WHOLE, Shard
from trainformer.engine.process_group import ProcessGroup, SingleProcess, run_on_main

_FIRST = 1024  # bytes of a first exchange; what is longer needs a second
_LATER = 1  # steps by which an answer may be late: the devices never wait for the host to ask


class Processes:
    """The processes that train together; every one must take part in an exchange. `part` is whose rows these are."""

    monitor = None

    def __init__(self, part: Shard = WHOLE) -> None:
        self.rank = self.local_rank = jax.process_index()
        self.world_size = jax.process_count()
        self.part = part

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints, records and prunes."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """Whether there is nobody else."""
        return self.world_size == 1

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all processes, on every one."""
        message = pickle.dumps(value)
        heads = _exchange(len(message).to_bytes(8, "little") + message[: _FIRST - 8], _FIRST)
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        rest = max(sizes) + 8 - _FIRST
        tails = [b""] * self.world_size if rest <= 0 else _exchange(message[_FIRST - 8 :], 1 << (rest - 1).bit_length())
        whole = [(head[8:] + tail)[:size] for head, tail, size in zip(heads, tails, sizes, strict=True)]
        return [pickle.loads(one) for one in whole]  # from processes of this very run

    def broadcast(self, value: Any) -> Any:
        """The value that process 0 has."""
        return self.all_gather_object(value if self.is_main else None)[0]

    def all_gather_dp(self, value: Any) -> list[Any]:
        """One value: what a step gives is global already. That of process 0, which may know more of the past."""
        return [self.broadcast(value)]

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """What a function returns that process 0 alone calls. If it fails there, all fail: none waits for it."""
        return run_on_main(self, function)

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Sums over the parts of a batch. Processes that hold the same rows count them once."""
        rows = self.all_gather_object(values)
        return [sum(column) * self.part.count / self.world_size for column in zip(*rows, strict=True)]

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """Which of them at least one process has set."""
        return [any(column) for column in zip(*self.all_gather_object(flags), strict=True)]

    def monitoring(self, timeout: float) -> AbstractContextManager[None]:
        """jax watches over its processes itself: all are ended when one is gone."""
        return nullcontext()


def _exchange(message: bytes, size: int) -> list[bytes]:
    """The messages of all processes, each filled up to an agreed size."""
    box = np.frombuffer(message.ljust(size, b"\0"), np.uint8)
    return [row.tobytes() for row in multihost_utils.process_allgather(box)]


class Asking:
    """Whether any process has a request, agreed on without waiting: asked with every step, answered one step later."""

    def __init__(self, mesh: Mesh) -> None:
        devices = mesh.devices.flatten()
        self._mesh = Mesh(devices, ("all",))
        rows = NamedSharding(self._mesh, PartitionSpec("all"))
        shape = (len(devices),)

        def saying(flag: bool) -> jax.Array:
            return jax.make_array_from_callback(shape, rows, lambda part: np.full(shape, flag)[part])

        # A process only holds its own part of an array: with these two it says no or yes, whatever the others say.
        self._says = saying(False), saying(True)
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(self._mesh, PartitionSpec()))
        self._waiting: deque[jax.Array] = deque()

    def __call__(self, asks: bool) -> bool:
        """Ask with this step; what was asked with the one before, by anybody."""
        with jax.set_mesh(self._mesh):
            self._waiting.append(self._any(self._says[asks]))
        if len(self._waiting) <= _LATER:
            return False
        return bool(self._waiting.popleft().addressable_data(0))


# -- joining -----------------------------------------------------------------------------------------------------


def join(environment: Mapping[str, str] = os.environ) -> None:
    """Meet the other processes, if the environment says that there are some and nobody has done so yet."""
    if jax.distributed.is_initialized():
        return
    given = launched(environment)
    if given is None:
        return
    try:
        jax.distributed.initialize(**given)
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise BadArgument(
            "Several processes were started, but jax was used before they met. Call jax.distributed.initialize() at "
            "the beginning of the program."
        ) from error


def launched(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` is to be told; None if this process is alone, as far as it is said.

    >>> launched({"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"})
    {'num_processes': 2, 'process_id': 1}
    >>> launched({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4"}), launched({"SLURM_JOB_ID": "7"})
    ({}, None)
    """
    if "JAX_COORDINATOR_ADDRESS" in environment:
        names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
        return {name: _number(environment, own) for name, own in names.items() if own in environment}
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):  # of the step: sbatch without srun is one process
        if name in environment and _number(environment, name) > 1:
            return {}
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.strip().isdecimal():
        raise BadArgument(expected(f"the environment variable {name} to be a whole number", text))
    return int(text)


# -- rows and arrays ---------------------------------------------------------------------------------------------


def peers_on(mesh: Mesh) -> ProcessGroup:
    """The processes of a mesh, each with its part of the rows."""
    return SingleProcess() if jax.process_count() == 1 else Processes(rows_of_process(mesh))


def rows_of_process(mesh: Mesh) -> Shard:
    """Which part of each batch the devices of this process hold."""
    if jax.process_count() == 1:
        return WHOLE
    shards = data_shards(mesh)
    held = batch_sharding(mesh).addressable_devices_indices_map((shards,)).values()
    places = sorted({index[0].start or 0 for index in held if index is not None})
    first, count = places[0], len(places)
    if places != list(range(first, first + count)) or first % count:
        raise BadArgument(
            expected(
                "a mesh on which the rows of each process follow each other",
                f"{dict(mesh.shape)} with parts {places} of {shards} on process {jax.process_index()}",
                "Let the axes dp and fsdp come out so that each process holds whole neighbouring parts.",
            )
        )
    return Shard(first // count, shards // count)


def on_every_host(tree: Any) -> Any:
    """Arrays that are spread over processes, as NumPy arrays on each of them. All processes have to call it."""

    def whole(leaf: Any) -> Any:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if not isinstance(leaf, jax.Array) or is_key or leaf.is_fully_addressable:
            return leaf
        return np.asarray(leaf.addressable_data(0)) if leaf.is_fully_replicated else _whole(leaf)

    return jax.tree.map(whole, tree)


def _whole(leaf: jax.Array) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

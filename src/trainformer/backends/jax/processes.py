"""The processes of a multi-host run: joining jax's runtime, exchanging host values, and which rows each one holds.

Arrays are global: jax itself communicates for steps, metrics and orbax checkpoints. This module joins the runtime,
exchanges Python objects, and agrees after every step on whether a process has a request. jax's own heartbeats detect a
process that died.
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

from trainformer.backends.jax.clusters import distributed_options
from trainformer.backends.jax.sharding import batch_sharding, data_shards
from trainformer.core.errors import BadArgument, expected
from trainformer.data.sharding import WHOLE, Shard
from trainformer.engine.process_group import ProcessGroup, SingleProcess, run_on_main

_FIRST_BYTES = 1024  # of the first all-gather; longer messages need a second one
_DELAY = 1  # steps between a request and its answer, so that the devices never wait for the host


class JaxProcessGroup:
    """`ProcessGroup` on jax's multi-host runtime. `shard` says which rows of a batch this process holds."""

    monitor = None

    def __init__(self, shard: Shard = WHOLE) -> None:
        self.rank = self.local_rank = jax.process_index()
        self.world_size = jax.process_count()
        self.shard = shard

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        return self.world_size == 1

    def all_gather_object(self, value: Any) -> list[Any]:
        message = pickle.dumps(value)
        split = _FIRST_BYTES - 8
        heads = _all_gather_bytes(len(message).to_bytes(8, "little") + message[:split], _FIRST_BYTES)
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        rest = max(sizes) - split
        tails = [b""] * self.world_size
        if rest > 0:
            tails = _all_gather_bytes(message[split:], 1 << (rest - 1).bit_length())
        messages = [(head[8:] + tail)[:size] for head, tail, size in zip(heads, tails, sizes, strict=True)]
        return [pickle.loads(one) for one in messages]  # sent by processes of this very run

    def broadcast(self, value: Any) -> Any:
        return self.all_gather_object(value if self.is_main else None)[0]

    def all_gather_dp(self, value: Any) -> list[Any]:
        """One value: the results of a step are global. Rank 0's, which may have a longer history."""
        return [self.broadcast(value)]

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        return run_on_main(self, function)

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Sums over the shards of a batch. Rows that several processes hold are counted once."""
        rows = self.all_gather_object(values)
        return [sum(column) * self.shard.count / self.world_size for column in zip(*rows, strict=True)]

    def any_rank(self, flags: list[bool]) -> list[bool]:
        return [any(column) for column in zip(*self.all_gather_object(flags), strict=True)]

    def monitoring(self, timeout: float) -> AbstractContextManager[None]:
        """Nothing to do: jax terminates all processes when one dies."""
        return nullcontext()


def _all_gather_bytes(message: bytes, size: int) -> list[bytes]:
    """The messages of all processes, each padded to `size` bytes."""
    padded = np.frombuffer(message.ljust(size, b"\0"), np.uint8)
    return [row.tobytes() for row in multihost_utils.process_allgather(padded)]


class RequestPoll:
    """Non-blocking any-reduce of a flag: sent with every step, answered one step later."""

    def __init__(self, mesh: Mesh) -> None:
        devices = mesh.devices.flatten()
        self._mesh = Mesh(devices, ("all",))
        sharding = NamedSharding(self._mesh, PartitionSpec("all"))
        shape = (len(devices),)

        def filled(flag: bool) -> jax.Array:
            return jax.make_array_from_callback(shape, sharding, lambda index: np.full(shape, flag)[index])

        # Each process fills only its own part of the array, whatever the others send.
        self._flags = filled(False), filled(True)
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(self._mesh, PartitionSpec()))
        self._in_flight: deque[jax.Array] = deque()

    def __call__(self, has_request: bool) -> bool:
        """Send this process's flag; returns whether any process sent True with the previous step."""
        with jax.set_mesh(self._mesh):
            self._in_flight.append(self._any(self._flags[has_request]))
        if len(self._in_flight) <= _DELAY:
            return False
        return bool(self._in_flight.popleft().addressable_data(0))


def initialize_distributed(environment: Mapping[str, str] = os.environ) -> None:
    """Call `jax.distributed.initialize` if the environment describes several processes and nobody has called it."""
    if jax.distributed.is_initialized():
        return
    options = distributed_options(environment)
    if options is None:
        return
    try:
        jax.distributed.initialize(**options)
    except ValueError as error:
        raise BadArgument(
            f"Several processes were launched, but jax cannot connect them ({str(error).rstrip('.')}). Set "
            "JAX_COORDINATOR_ADDRESS=first-host:port, and if the launcher is not Slurm or Open MPI also "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ) from error
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise BadArgument(
            "Several processes were launched, but jax was used before they were connected. Call "
            "jax.distributed.initialize() at the beginning of the program."
        ) from error


def process_group_on(mesh: Mesh) -> ProcessGroup:
    """The processes of a mesh, each with its shard of the rows."""
    return SingleProcess() if jax.process_count() == 1 else JaxProcessGroup(process_shard(mesh))


def process_shard(mesh: Mesh) -> Shard:
    """Which rows of each batch the devices of this process hold."""
    if jax.process_count() == 1:
        return WHOLE
    shards = data_shards(mesh)
    held = batch_sharding(mesh).addressable_devices_indices_map((shards,)).values()
    positions = sorted({index[0].start or 0 for index in held if index is not None})
    first, count = positions[0], len(positions)
    if positions != list(range(first, first + count)) or first % count:
        what = "a mesh on which each process holds contiguous rows"
        received = f"{dict(mesh.shape)} with shards {positions} of {shards} on process {jax.process_index()}"
        do = "Choose dp and fsdp so that each process holds whole, neighbouring shards."
        raise BadArgument(expected(what, received, do))
    return Shard(first // count, shards // count)


def gather_to_host(tree: Any) -> Any:
    """A pytree whose arrays that are sharded over processes are NumPy arrays. All processes must call this."""

    def gather(leaf: Any) -> Any:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if not isinstance(leaf, jax.Array) or is_key or leaf.is_fully_addressable:
            return leaf
        if leaf.is_fully_replicated:
            return np.asarray(leaf.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(gather, tree)

"""State, tensors and events that the components of a run share.

Owns lifecycles: step and epoch values are dropped automatically, run values are saved in checkpoints. Nothing here is
logged. Only the method that concatenates tensors imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from trainformer.context.config import PipelineConfig, UnknownKey
from trainformer.core.errors import BadArgument, expected

if TYPE_CHECKING:
    from torch import Tensor

Subscriber = Callable[[dict[str, Any]], None]


class Lifecycle(Enum):
    """How long a value lives."""

    STEP = auto()  # until the optimizer step ends
    EPOCH = auto()  # until the epoch ends
    RUN = auto()  # as long as the run; saved in checkpoints
    CACHED = auto()  # until `invalidate(key)`; never saved, since it can be recomputed


@dataclass(slots=True)
class StateEntry:
    """A value, its lifecycle, and the component that set it."""

    value: Any
    lifecycle: Lifecycle
    owner: str


class _Store:
    """Entries by key, and the keys of each lifecycle, so that ending an empty one is free."""

    def __init__(self) -> None:
        self.entries: dict[str, StateEntry] = {}
        self.keys: dict[Lifecycle, set[str]] = {lifecycle: set() for lifecycle in Lifecycle}

    def put(self, key: str, entry: StateEntry) -> None:
        self.remove(key)  # it may have a different lifecycle
        self.entries[key] = entry
        self.keys[entry.lifecycle].add(key)

    def remove(self, key: str) -> bool:
        entry = self.entries.pop(key, None)
        if entry is None:
            return False
        self.keys[entry.lifecycle].discard(key)
        return True

    def end(self, lifecycle: Lifecycle) -> None:
        for key in self.keys[lifecycle]:
            del self.entries[key]
        self.keys[lifecycle].clear()

    def run_entries(self) -> dict[str, StateEntry]:
        return {key: entry for key, entry in self.entries.items() if entry.lifecycle is Lifecycle.RUN}


class PipelineContext:
    """Values, tensors and events that the components of a run share.

    State holds plain values and buffers hold tensors, under separate keys. Both are saved if their lifecycle is `RUN`.
    `config` is the configuration of the run.

    >>> context = PipelineContext()
    >>> context.set("best", 0.9)
    >>> context.set("scratch", [1, 2], Lifecycle.STEP)
    >>> context.on_step_end()
    >>> context.get("best"), context.get("scratch")
    (0.9, None)
    """

    def __init__(self) -> None:
        self.config = PipelineConfig()
        self._state = _Store()
        self._buffers = _Store()
        self._subscribers: dict[str, list[Subscriber]] = {}
        # Looked up once: on_step_end runs every step (55 ns with nothing to drop), and hashing an enum member costs
        # more than the check itself.
        self._step_keys = (self._state.keys[Lifecycle.STEP], self._buffers.keys[Lifecycle.STEP])

    # -- state -----------------------------------------------------------------------------------------------

    def set(self, key: str, value: Any, lifecycle: Lifecycle = Lifecycle.RUN, owner: str = "trainer") -> None:
        """Store a value for the time of its lifecycle."""
        self._state.put(key, StateEntry(value, lifecycle, owner))

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` if there is none (any more)."""
        entry = self._state.entries.get(key)
        return default if entry is None else entry.value

    def entry(self, key: str) -> StateEntry:
        """The value with its lifecycle and owner; looks in the state first, then in the buffers."""
        entry = self._state.entries.get(key) or self._buffers.entries.get(key)
        if entry is None:
            raise UnknownKey(key, [*self._state.entries, *self._buffers.entries])
        return entry

    def delete(self, key: str) -> bool:
        """Drop the value and the buffer with this key; returns whether there was one."""
        dropped = [store.remove(key) for store in (self._state, self._buffers)]
        return any(dropped)

    def invalidate(self, key: str) -> bool:
        """Drop a `CACHED` value or buffer, so that it is recomputed; returns whether there was one."""
        holding = [store for store in (self._state, self._buffers) if key in store.entries]
        cached = [store for store in holding if key in store.keys[Lifecycle.CACHED]]
        if holding and not cached:
            lifecycle = holding[0].entries[key].lifecycle.name
            raise BadArgument(expected(f"{key!r} to be CACHED", lifecycle, f"Use delete({key!r}) to drop it anyway."))
        for store in cached:
            store.remove(key)
        return bool(cached)

    # -- buffers ---------------------------------------------------------------------------------------------

    def register_buffer(
        self, key: str, tensor: Tensor, lifecycle: Lifecycle = Lifecycle.RUN, owner: str = "trainer"
    ) -> None:
        """Store a tensor for the time of its lifecycle."""
        self._buffers.put(key, StateEntry(tensor, lifecycle, owner))

    def get_buffer(self, key: str) -> Tensor | None:
        """The tensor, or None if there is none (any more)."""
        entry = self._buffers.entries.get(key)
        return None if entry is None else entry.value

    def accumulate(
        self, key: str, tensor: Tensor, dim: int = 0, max_size: int | None = None, owner: str = "trainer"
    ) -> None:
        """Append to a buffer along `dim`, keeping the newest `max_size` items.

        The first call creates a buffer that lives until the end of the epoch; an existing buffer keeps its lifecycle
        and owner. The tensor is detached. Each call copies the whole buffer.
        """
        import torch

        if max_size is not None and max_size < 1:
            raise BadArgument(expected("max_size to be a positive integer or None", max_size))
        new = _newest(tensor.detach(), dim, max_size)
        entry = self._buffers.entries.get(key)
        if entry is None:
            # A copy: the caller may reuse the tensor, and a slice would keep all of it alive.
            self.register_buffer(key, new.clone(), Lifecycle.EPOCH, owner)
            return
        old = entry.value.detach().to(new.device)  # a buffer restored from a checkpoint is on the CPU
        room = None if max_size is None else max_size - new.size(dim)
        entry.value = torch.cat([_newest(old, dim, room), new], dim=dim)

    # -- events ----------------------------------------------------------------------------------------------

    def subscribe(self, event: str, callback: Subscriber) -> None:
        """Call `callback(data)` whenever `event` is published, in the order of subscription."""
        self._subscribers.setdefault(event, []).append(callback)

    def unsubscribe(self, event: str, callback: Subscriber) -> bool:
        """Undo one `subscribe`; returns whether there was one."""
        callbacks = self._subscribers.get(event, [])
        if callback not in callbacks:
            return False
        callbacks.remove(callback)
        return True

    def publish(self, event: str, data: dict[str, Any] | None = None) -> None:
        """Call all current subscribers. An exception of a subscriber propagates to the publisher."""
        for callback in tuple(self._subscribers.get(event, ())):
            callback({} if data is None else data)

    # -- lifecycles ------------------------------------------------------------------------------------------

    def on_step_end(self) -> None:
        """Drop the values and buffers of the step."""
        state, buffers = self._step_keys
        if state:
            self._state.end(Lifecycle.STEP)
        if buffers:
            self._buffers.end(Lifecycle.STEP)

    def on_epoch_end(self) -> None:
        """Drop the values and buffers of the epoch, then publish "epoch_end": what subscribers set is for the next."""
        self._state.end(Lifecycle.EPOCH)
        self._buffers.end(Lifecycle.EPOCH)
        self.publish("epoch_end")

    # -- views and checkpoints -------------------------------------------------------------------------------

    def scope(self, namespace: str) -> ScopedContext:
        """A view in which every key is prefixed with ``namespace/``."""
        return ScopedContext(self, namespace)

    def state_dict(self) -> dict[str, Any]:
        """Everything of lifecycle `RUN`, copied, on the CPU, in types that load without executing code."""
        stores = {"state": self._state, "buffers": self._buffers}
        found = {name: store.run_entries() for name, store in stores.items()}
        values = {
            name: {k: _snapshot(k, entry.value) for k, entry in entries.items()} for name, entries in found.items()
        }
        owners = {name: {key: entry.owner for key, entry in entries.items()} for name, entries in found.items()}
        return {"config": self.config.to_checkpoint(), **values, "owners": owners}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore everything of lifecycle `RUN`. The config stays as this run set it."""
        owners = checkpoint.get("owners", {})
        for name, store in (("state", self._state), ("buffers", self._buffers)):
            values = {key: _snapshot(key, value) for key, value in checkpoint.get(name, {}).items()}
            store.end(Lifecycle.RUN)
            for key, value in values.items():
                owner = owners.get(name, {}).get(key, "trainer")
                store.put(key, StateEntry(value, Lifecycle.RUN, owner))


def _newest(tensor: Tensor, dim: int, size: int | None) -> Tensor:
    """The last `size` items along `dim`; all of them if None."""
    if size is None or tensor.size(dim) <= size:
        return tensor
    return tensor.narrow(dim, tensor.size(dim) - size, size)


def _snapshot(key: str, value: Any) -> Any:
    """A deep copy of plain values and of tensors (on the CPU); anything else is refused.

    Types must match exactly: a NumPy float is a float to Python, but pickle writes it as code to call. Bytes are
    refused because torch's safe loader cannot read empty ones.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str):
        return value
    if kind in (list, tuple, set):
        return kind(_snapshot(key, item) for item in value)
    if kind is dict:
        return {_snapshot(key, name): _snapshot(key, item) for name, item in value.items()}
    torch = sys.modules.get("torch")  # if torch is not imported, there are no tensors
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        return value.detach().to("cpu", copy=True)
    raise BadArgument(
        f"Expected {key!r} to hold plain Python values and tensors, received {kind.__module__}.{kind.__qualname__}. "
        "Values of lifecycle RUN are saved in checkpoints: convert it (a NumPy scalar with .item(), an object to a "
        "dict of its fields), or give it another lifecycle, such as Lifecycle.CACHED."
    )


class ScopedContext:
    """A view of a `PipelineContext` for one component: keys are prefixed with its namespace, and it owns what it sets.

    The methods are those of `PipelineContext`. Events and the config are shared, without a prefix.
    """

    def __init__(self, parent: PipelineContext, namespace: str) -> None:
        self._parent = parent
        self._namespace = namespace
        self.config = parent.config
        self.subscribe, self.unsubscribe, self.publish = parent.subscribe, parent.unsubscribe, parent.publish

    def _key(self, key: str) -> str:
        return f"{self._namespace}/{key}"

    def set(self, key: str, value: Any, lifecycle: Lifecycle = Lifecycle.RUN) -> None:
        self._parent.set(self._key(key), value, lifecycle, self._namespace)

    def get(self, key: str, default: Any = None) -> Any:
        return self._parent.get(self._key(key), default)

    def delete(self, key: str) -> bool:
        return self._parent.delete(self._key(key))

    def invalidate(self, key: str) -> bool:
        return self._parent.invalidate(self._key(key))

    def buffer(self, key: str, tensor: Tensor, lifecycle: Lifecycle = Lifecycle.EPOCH) -> None:
        """As `PipelineContext.register_buffer`, but for an epoch by default."""
        self._parent.register_buffer(self._key(key), tensor, lifecycle, self._namespace)

    def get_buffer(self, key: str) -> Tensor | None:
        return self._parent.get_buffer(self._key(key))

    def accumulate(self, key: str, tensor: Tensor, dim: int = 0, max_size: int | None = None) -> None:
        self._parent.accumulate(self._key(key), tensor, dim, max_size, self._namespace)

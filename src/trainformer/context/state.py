"""Values, tensors and events that the components of a run share while it goes on.

Owns lifetimes: what lives for a step or an epoch vanishes by itself, what lives as long as the run is saved with it.
Nothing here is logged. torch is imported only by the one method that concatenates tensors.
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
    """How long a value of the context lives."""

    STEP = auto()  # until the optimizer step ends
    EPOCH = auto()  # until the epoch ends
    RUN = auto()  # as long as the run, and saved with it
    CACHED = auto()  # until `invalidate(key)`; never saved, for it can be computed again


@dataclass(slots=True)
class StateEntry:
    """A value, how long it lives, and which component put it there."""

    value: Any
    lifecycle: Lifecycle
    owner: str


class _Store:
    """Entries by key, and the keys of each lifecycle, so that ending an empty one costs nothing."""

    def __init__(self) -> None:
        self.entries: dict[str, StateEntry] = {}
        self.keys: dict[Lifecycle, set[str]] = {lifecycle: set() for lifecycle in Lifecycle}

    def put(self, key: str, entry: StateEntry) -> None:
        self.remove(key)  # it may have had another lifecycle
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

    def lasting(self) -> dict[str, StateEntry]:
        return {key: entry for key, entry in self.entries.items() if entry.lifecycle is Lifecycle.RUN}


class PipelineContext:
    """Values, tensors and events that the components of a run share.

    State holds plain values and buffers hold tensors, under separate keys. Both are saved when their lifecycle is
    `RUN`. The run's configuration is `config`.

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
        """Keep a value for as long as `lifecycle` says."""
        self._state.put(key, StateEntry(value, lifecycle, owner))

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where there is none (any more)."""
        entry = self._state.entries.get(key)
        return default if entry is None else entry.value

    def entry(self, key: str) -> StateEntry:
        """The value together with its lifecycle and owner; state first, then buffers."""
        entry = self._state.entries.get(key) or self._buffers.entries.get(key)
        if entry is None:
            raise UnknownKey(key, [*self._state.entries, *self._buffers.entries])
        return entry

    def delete(self, key: str) -> bool:
        """Drop the value and the buffer of this name; says whether there was one."""
        dropped = [store.remove(key) for store in (self._state, self._buffers)]
        return any(dropped)

    def invalidate(self, key: str) -> bool:
        """Drop a `CACHED` value or buffer, so that whoever needs it computes it anew; says whether there was one."""
        holding = [store for store in (self._state, self._buffers) if key in store.entries]
        cached = [store for store in holding if key in store.keys[Lifecycle.CACHED]]
        if holding and not cached:
            lifecycle = holding[0].entries[key].lifecycle.name
            raise BadArgument(
                expected(f"{key!r} to be CACHED", lifecycle, f"Use delete({key!r}) to drop it all the same.")
            )
        for store in cached:
            store.remove(key)
        return bool(cached)

    # -- buffers ---------------------------------------------------------------------------------------------

    def register_buffer(
        self, key: str, tensor: Tensor, lifecycle: Lifecycle = Lifecycle.RUN, owner: str = "trainer"
    ) -> None:
        """Keep a tensor for as long as `lifecycle` says."""
        self._buffers.put(key, StateEntry(tensor, lifecycle, owner))

    def get_buffer(self, key: str) -> Tensor | None:
        """The tensor, or None where there is none (any more)."""
        entry = self._buffers.entries.get(key)
        return None if entry is None else entry.value

    def accumulate(
        self, key: str, tensor: Tensor, dim: int = 0, max_size: int | None = None, owner: str = "trainer"
    ) -> None:
        """Append along `dim`, keeping the newest `max_size` items.

        The first call makes a buffer that lives until the end of the epoch; a buffer that is there already keeps its
        own lifecycle and owner. Gradients are cut. Each call copies the whole buffer.
        """
        import torch

        if max_size is not None and max_size < 1:
            raise BadArgument(expected("max_size to be a positive integer or None", max_size))
        new = _newest(tensor.detach(), dim, max_size)
        entry = self._buffers.entries.get(key)
        if entry is None:
            # A copy, because the caller's tensor may be reused, and a slice would keep all of it alive.
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
        """Undo one `subscribe`; says whether there was one."""
        callbacks = self._subscribers.get(event, [])
        if callback not in callbacks:
            return False
        callbacks.remove(callback)
        return True

    def publish(self, event: str, data: dict[str, Any] | None = None) -> None:
        """Call everyone who is subscribed at this moment. What a subscriber raises reaches the publisher."""
        for callback in tuple(self._subscribers.get(event, ())):
            callback({} if data is None else data)

    # -- lifecycles ------------------------------------------------------------------------------------------

    def on_step_end(self) -> None:
        """Drop what lives for a step."""
        state, buffers = self._step_keys
        if state:
            self._state.end(Lifecycle.STEP)
        if buffers:
            self._buffers.end(Lifecycle.STEP)

    def on_epoch_end(self) -> None:
        """Drop what lives for an epoch, then publish "epoch_end": what subscribers set is there for the next epoch."""
        self._state.end(Lifecycle.EPOCH)
        self._buffers.end(Lifecycle.EPOCH)
        self.publish("epoch_end")

    # -- views and checkpoints -------------------------------------------------------------------------------

    def scope(self, namespace: str) -> ScopedContext:
        """A view in which every key begins with ``namespace/``."""
        return ScopedContext(self, namespace)

    def state_dict(self) -> dict[str, Any]:
        """What lives as long as the run, copied, on the CPU, in types that load without executing code."""
        state, buffers = self._state.lasting(), self._buffers.lasting()
        return {
            "config": self.config.to_checkpoint(),
            "state": {key: _snapshot(key, entry.value) for key, entry in state.items()},
            "buffers": {key: _snapshot(key, entry.value) for key, entry in buffers.items()},
            "owners": {
                "state": {key: entry.owner for key, entry in state.items()},
                "buffers": {key: entry.owner for key, entry in buffers.items()},
            },
        }

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Make everything of lifecycle `RUN` what it was at `state_dict()`; the config is left as this run set it."""
        owners = checkpoint.get("owners", {})
        for name, store in (("state", self._state), ("buffers", self._buffers)):
            values = {key: _snapshot(key, value) for key, value in checkpoint.get(name, {}).items()}
            store.end(Lifecycle.RUN)
            for key, value in values.items():
                owner = owners.get(name, {}).get(key, "trainer")
                store.put(key, StateEntry(value, Lifecycle.RUN, owner))


def _newest(tensor: Tensor, dim: int, size: int | None) -> Tensor:
    """The last `size` items along `dim`; all of them without a size."""
    if size is None or tensor.size(dim) <= size:
        return tensor
    return tensor.narrow(dim, tensor.size(dim) - size, size)


def _snapshot(key: str, value: Any) -> Any:
    """A deep copy of plain values and tensors, the latter on the CPU; anything else is refused by name.

    Types must match exactly: a NumPy float is a float to Python, but pickle writes it as code to be called. Bytes are
    left out because torch's safe loader reads them back except when they are empty.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str):
        return value
    if kind in (list, tuple, set):
        return kind(_snapshot(key, item) for item in value)
    if kind is dict:
        return {_snapshot(key, name): _snapshot(key, item) for name, item in value.items()}
    torch = sys.modules.get("torch")  # without torch loaded, there are no tensors
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        return value.detach().to("cpu", copy=True)
    raise BadArgument(
        f"Expected {key!r} to hold plain Python values and tensors, received {kind.__module__}.{kind.__qualname__}. "
        "What lives as long as the run is saved with it: convert it (a NumPy scalar with .item(), an object to a dict "
        "of its fields), or give it another lifecycle, such as Lifecycle.CACHED."
    )


class ScopedContext:
    """A component's own corner of a `PipelineContext`: its keys carry the namespace, and it owns what it sets.

    Events and the config are shared: they keep their plain names.
    """

    def __init__(self, parent: PipelineContext, namespace: str) -> None:
        self._parent = parent
        self._namespace = namespace

    def _key(self, key: str) -> str:
        return f"{self._namespace}/{key}"

    @property
    def config(self) -> PipelineConfig:
        """The configuration of the whole run."""
        return self._parent.config

    def set(self, key: str, value: Any, lifecycle: Lifecycle = Lifecycle.RUN) -> None:
        """As `PipelineContext.set`."""
        self._parent.set(self._key(key), value, lifecycle, self._namespace)

    def get(self, key: str, default: Any = None) -> Any:
        """As `PipelineContext.get`."""
        return self._parent.get(self._key(key), default)

    def delete(self, key: str) -> bool:
        """As `PipelineContext.delete`."""
        return self._parent.delete(self._key(key))

    def invalidate(self, key: str) -> bool:
        """As `PipelineContext.invalidate`."""
        return self._parent.invalidate(self._key(key))

    def buffer(self, key: str, tensor: Tensor, lifecycle: Lifecycle = Lifecycle.EPOCH) -> None:
        """As `PipelineContext.register_buffer`, for an epoch unless said otherwise."""
        self._parent.register_buffer(self._key(key), tensor, lifecycle, self._namespace)

    def get_buffer(self, key: str) -> Tensor | None:
        """As `PipelineContext.get_buffer`."""
        return self._parent.get_buffer(self._key(key))

    def accumulate(self, key: str, tensor: Tensor, dim: int = 0, max_size: int | None = None) -> None:
        """As `PipelineContext.accumulate`."""
        self._parent.accumulate(self._key(key), tensor, dim, max_size, self._namespace)

    def subscribe(self, event: str, callback: Subscriber) -> None:
        """As `PipelineContext.subscribe`."""
        self._parent.subscribe(event, callback)

    def unsubscribe(self, event: str, callback: Subscriber) -> bool:
        """As `PipelineContext.unsubscribe`."""
        return self._parent.unsubscribe(event, callback)

    def publish(self, event: str, data: dict[str, Any] | None = None) -> None:
        """As `PipelineContext.publish`."""
        self._parent.publish(event, data)

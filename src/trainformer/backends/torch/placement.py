"""Moving data between host and device: batches with their transforms, the request flag of a step, scalars."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import DeviceBatch, HostBatch
from trainformer.data.order import sample_keys
from trainformer.utils.helpers import get_device, move_to_device

# Keys of the inputs in a batch that is a mapping; transforms are applied to the first one found.
_INPUT_KEYS = ("image", "images", "img", "pixel_values", "x", "input", "inputs")


def resolve_device(device: str | int | torch.device | None) -> torch.device:
    """The requested device, checked; ``None`` or ``"auto"`` picks the best one available."""
    if device is None or device == "auto":
        return get_device()
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        what = "device to be one this machine has"
        raise BadArgument(expected(what, str(device), "Use device='cpu', or leave it out.")) from error
    return resolved


class Feeder:
    """Moves batches to the device and applies the task's transforms there.

    On CUDA the copy runs on its own stream, from pinned memory, and so overlaps with the previous step.
    """

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self.device = device
        self.channels_last = channels_last
        self.counts_padding = False  # whether padding counts as tokens
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Indices, and labels if they are out of reach on the device, of the newest batches: for error messages.
        self._recent: deque[tuple[int, Any, list[Tensor]]] = deque(maxlen=16)

    def samples_of(self, batch: DeviceBatch) -> Any:
        """The indices of the samples of a batch that was fed a moment ago; None if they are not known."""
        return next((origin.samples for key, origin, _ in self._recent if key == id(batch.data) and origin), None)

    def recent_labels(self) -> list[tuple[Any, Tensor]]:
        """Indices and labels, on the host, of the newest batches that were copied to a GPU."""
        return [(origin.samples, labels) for _, origin, held in self._recent if origin for labels in held]

    def feed(self, batches: Iterable[HostBatch], transform: nn.Module | None) -> Iterator[DeviceBatch]:
        """Batches on the device, in order.

        A transform with `takes_keys` also gets a 64-bit key per sample that seeds its random numbers; None if unknown.
        """
        takes_keys = getattr(transform, "takes_keys", False)
        for data, size, bad, origin, global_size, consumed, sources in batches:
            tokens = count_tokens(data, self.counts_padding) if size else 0
            if sources is None:
                placed = self._move(data)
            else:
                placed, numbers = self._move((data, torch.from_numpy(np.ascontiguousarray(sources.numbers))))
                sources = sources._replace(on_device=numbers)
            if transform is not None:
                keys = None if origin is None else sample_keys(*origin)
                placed = apply_to_inputs(partial(transform, keys=keys) if takes_keys else transform, placed)
            self._recent.appendleft((id(placed), origin, [] if self._stream is None else _labels(data)))
            yield DeviceBatch(placed, size, tokens, bad, False, global_size, consumed, sources)

    def _move(self, data: Any) -> Any:
        if self._stream is None:
            return self._format(data if self.device.type == "cpu" else move_to_device(data, self.device))
        data = map_tensors(lambda t: t if t.is_cuda or t.is_pinned() else t.pin_memory(), data)
        with torch.cuda.stream(self._stream):
            moved = self._format(move_to_device(data, self.device, non_blocking=True))
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        # The allocator must not reuse this memory before the step that reads it is done.
        map_tensors(lambda t: t.record_stream(current), moved)
        return moved

    def _format(self, data: Any) -> Any:
        if not self.channels_last:
            return data
        return map_tensors(lambda t: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t, data)


def _labels(data: Any) -> list[Tensor]:
    """Integer tensors of one dimension: a few hundred bytes."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return [t for t in parts if isinstance(t, Tensor) and t.ndim == 1 and t.dtype == torch.int64 and not t.is_cuda]


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Apply a function to every tensor of a nested batch; everything else passes through."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return {key: map_tensors(function, value) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(function, value) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_tensors(function, value) for value in data)
    return data


def apply_to_inputs(transform: Callable[[Any], Any], data: Any) -> Any:
    """Apply a transform to the inputs of a batch: a tensor, the first item of a sequence, the image of a dict."""
    if isinstance(data, Tensor):
        return transform(data)
    if isinstance(data, Mapping):
        key = next((k for k in _INPUT_KEYS if k in data), None)
        if key is None:
            what = f"a batch with one of the keys {_INPUT_KEYS} for the task's transforms"
            raise BadArgument(expected(what, list(data)))
        return {**data, key: transform(data[key])}
    if isinstance(data, (list, tuple)) and data:
        return type(data)([transform(data[0]), *data[1:]])
    raise BadArgument(expected("a batch that is a tensor, a sequence or a mapping", type(data).__name__))


def count_tokens(data: Any, padding: bool = False) -> int:
    """Number of tokens in a batch: the `input_ids` that the attention mask keeps, or all; 0 for other data.

    >>> count_tokens({"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])})
    4
    """
    ids = data.get("input_ids") if isinstance(data, Mapping) else None
    if not isinstance(ids, Tensor):
        return 0
    mask = data.get("attention_mask")
    if not padding and isinstance(mask, Tensor) and mask.shape == ids.shape and mask.device.type == "cpu":
        return int(mask.sum())
    return ids.numel()  # from the shape alone: no device sync


class RequestFlag:
    """The number of ranks with a pending request (save, stop, ...), all-reduced together with a step's gradients.

    On the CPU it is read at once. On an accelerator it is copied to the host asynchronously and read one step later,
    when the copy has finished. All ranks read the same number at the same step.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"
        self._newest: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._due: tuple[Tensor, torch.cuda.Event | None] | None = None

    def record(self, count: Tensor) -> None:
        """Take in the all-reduced number of a step."""
        if self._on_host:
            self._due = count, None
            return
        self._due = self._newest
        host = torch.empty((), dtype=count.dtype, pin_memory=True)
        host.copy_(count, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._newest = host, event

    def pop(self) -> bool:
        """Whether any rank had a request; each step's number counts once."""
        due, self._due = self._due, None
        if due is None:
            return False
        number, event = due
        if event is not None:
            event.synchronize()
        return bool(number > 0.5)


def start_copy(scalars: Sequence[Tensor], device: torch.device) -> Callable[[], list[float] | None]:
    """Start to copy scalars to the host. The result returns them once they have arrived, None until then.

    Nothing waits: on CUDA an event is polled, and where that is impossible (MPS) the result is always None.
    """
    if device.type == "cpu":
        values = [float(s) for s in scalars]
        return lambda: values
    if device.type != "cuda":
        return lambda: None
    gathered = torch.empty(len(scalars), dtype=torch.float64, device=device)
    for place, scalar in enumerate(scalars):
        if scalar.device.type == "cpu":
            gathered[place].fill_(float(scalar))  # copying a number from unpinned memory would sync
        else:
            gathered[place].copy_(scalar, non_blocking=True)
    host = torch.empty(len(scalars), dtype=torch.float64, pin_memory=True)
    host.copy_(gathered, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return lambda: host.tolist() if event.query() else None

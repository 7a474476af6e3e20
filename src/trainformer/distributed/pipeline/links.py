"""What goes from rank to rank in a pipeline outside of its schedules: batches that are only looked at, and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainformer.core.errors import BadArgument, expected

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMENSIONS = 8


def send(tensor: Tensor, to: int) -> None:
    """Send a tensor whose shape the other side does not know yet."""
    if tensor.dtype not in _DTYPES or tensor.ndim > _MOST_DIMENSIONS:
        what = f"{tensor.ndim} dimensions of {tensor.dtype}"
        raise BadArgument(
            expected("floating point numbers to go from one stage to the next", what, "Pass another split.")
        )
    head = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    dist.send(torch.tensor(head + [0] * (_MOST_DIMENSIONS + 2 - len(head))), dst=to)
    dist.send(tensor.detach().contiguous(), dst=to)


def receive(source: int, device: torch.device) -> Tensor:
    """Such a tensor."""
    head = torch.zeros(_MOST_DIMENSIONS + 2, dtype=torch.int64)
    dist.recv(head, src=source)
    dtype, dimensions, *sizes = head.tolist()
    tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[dtype], device=device)
    dist.recv(tensor, src=source)
    return tensor


def from_rank(rank: int, value: Any) -> Any:
    """The value that a rank has, on all of them."""
    box = [value]
    dist.broadcast_object_list(box, src=rank)
    return box[0]


def on_host(output: Any) -> Any:
    """The same tree with its tensors on the host.

    >>> on_host({"loss": (torch.zeros((), requires_grad=True), 3)})
    {'loss': (tensor(0.), 3)}
    """
    if isinstance(output, Tensor):
        return output.detach().cpu()
    if isinstance(output, Mapping):
        return {key: on_host(value) for key, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(on_host, output))
    return type(output)(map(on_host, output)) if isinstance(output, (list, tuple)) else output


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in at the moment; None: it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def present_autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What turns autocast on as it is now."""
    dtype = autocast_dtype(device)
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype)


def random_state(device: torch.device) -> list[Tensor]:
    """Where the random numbers of the host and the device are."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states

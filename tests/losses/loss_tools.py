"""What the tests of losses share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

HALVES = [torch.bfloat16, torch.float16]


def value_and_gradients(
    loss: Callable[..., Tensor], *inputs: Tensor, autocast: torch.dtype | None = None
) -> list[Tensor]:
    """The loss, then its gradient by each input; inputs are copied first. `autocast` holds for the forward pass."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.autocast(leaves[0].device.type, dtype=autocast, enabled=autocast is not None):
        value = loss(*leaves)
    value.backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [value.detach(), *gradients]


def assert_close(mine: list[Tensor], theirs: list[Tensor], relative: float = 1e-5) -> None:
    """Every tensor equal to its counterpart, to `relative` of the counterpart's largest element."""
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        bound = relative * max(b.abs().max().item(), 1e-6)
        torch.testing.assert_close(a.to(b.dtype), b, rtol=0, atol=bound)


@contextlib.contextmanager
def waits_are_errors() -> Iterator[None]:
    """Any wait of the host for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

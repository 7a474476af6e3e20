"""Hearing whether a rank asks for something, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class RequestFlag:
    """The number of ranks that ask for something, as it came with the gradients.

    On the CPU it is read at once. On an accelerator it is copied to the host while the device goes on, and read one
    step later: by then it is there. All ranks read the same number at the same step, which is all that matters.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"
        self._newest: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._due: tuple[Tensor, torch.cuda.Event | None] | None = None

    def note(self, asking: Tensor) -> None:
        """Take in the number of a step."""
        if self._on_host:
            self._due = asking, None
            return
        self._due = self._newest
        host = torch.empty((), dtype=asking.dtype, pin_memory=True)
        host.copy_(asking, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._newest = host, event

    def any_rank_asks(self) -> bool:
        """Whether any rank did; each step's number counts once."""
        due, self._due = self._due, None
        if due is None:
            return False
        number, event = due
        if event is not None:
            event.synchronize()
        return bool(number > 0.5)

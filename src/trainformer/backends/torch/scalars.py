"""Scalars on a device: reading many of them in one transfer, without waiting for one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainformer.backends.torch.placement import start_copy


class DeviceScalars:
    """Reads and sums scalars that are on `device` or plain numbers."""

    device: torch.device

    def _wide(self) -> torch.dtype:
        return torch.float32 if self.device.type == "mps" else torch.float64

    def read(self, scalars: Sequence[Any]) -> list[float]:
        """Values of tensors and numbers, in one transfer to the host."""
        tensors = [s.detach().reshape(()) for s in scalars if isinstance(s, Tensor)]
        if not tensors:
            return [float(s) for s in scalars]
        home = self.device if any(t.device == self.device for t in tensors) else tensors[0].device
        values = iter(torch.stack([t.to(home, self._wide(), non_blocking=True) for t in tensors]).tolist())
        return [next(values) if isinstance(s, Tensor) else float(s) for s in scalars]

    def start_read(self, scalars: Sequence[Any]) -> Callable[[], list[float] | None]:
        """Start to copy tensors to the host; see `placement.start_copy`."""
        return start_copy([torch.as_tensor(s).detach().reshape(()) for s in scalars], self.device)

    def fold(self, scalars: Sequence[Any]) -> Any:
        """The sum of tensors and numbers, still on the device."""
        tensors = [s.detach() for s in scalars if isinstance(s, Tensor)]
        numbers = sum(s for s in scalars if not isinstance(s, Tensor))
        if not tensors:
            return numbers
        return torch.stack([t.to(self.device, self._wide()) for t in tensors]).sum() + numbers

"""A trace of some steps by torch's profiler, in Chrome's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

FILE = "trace.json.gz"


class Trace:
    """Traces the host and the device from its creation until `stop`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._path = folder / FILE
        self._device = device
        self._step: Any = None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def begin_step(self, step: int) -> None:
        """Mark the beginning of the `step`-th step."""
        self._step = record_function(f"step {step}")
        self._step.__enter__()

    def end_step(self) -> None:
        """Mark its end, as far as the host is concerned."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def stop(self) -> str:
        """Write the trace. Returns how to open it."""
        self.end_step()
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        return f"open {self._path} at https://ui.perfetto.dev"

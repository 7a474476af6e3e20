"""A trace of some steps by JAX's profiler, for xprof, TensorBoard and Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


class Trace:
    """Traces the host and the devices from its creation until `stop`. `wait` returns when the devices are done."""

    def __init__(self, folder: Path, wait: Callable[[], None]) -> None:
        self._folder = folder
        self._wait = wait
        self._step: Any = None
        jax.profiler.start_trace(str(folder), create_perfetto_trace=True)

    def begin_step(self, step: int) -> None:
        """Mark the beginning of the `step`-th step."""
        self._step = jax.profiler.StepTraceAnnotation("train", step_num=step)
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
            self._wait()
        finally:
            jax.profiler.stop_trace()
        found = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        shown = found[-1] if found else self._folder
        return f"run `xprof --logdir {self._folder}` (pip install xprof), or open {shown} at https://ui.perfetto.dev"

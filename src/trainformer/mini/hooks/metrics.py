"""Hooks for numbers: a line of progress, means at intervals, and the memory of the GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from trainformer.callbacks.compat.mini import BaseHook
from trainformer.mini.hooks.intervals import IntervalHook, whole_number
from trainformer.mini.utils import as_numbers, flattened, key_average, mean_over_ranks
from trainformer.utils.distributed import rank

_OWN = ("loss", "grad_norm", "step_time", "data_time", "records")


class ProgressHook(IntervalHook):
    """Writes a line to `trainer.logger` every `interval` steps, and at the last one.

    Loss, gradient norm, rates and (with `with_records`) records are those of the step; `step` and `data` are the mean
    seconds since the last line. The time left is judged by the steps after the first `eta_warmup`. With `sync` values
    are means over ranks. Only the first rank writes.
    """

    def __init__(self, interval: int = 10, with_records: bool = True, sync: bool = False, eta_warmup: int = 10) -> None:
        super().__init__(interval)
        self.with_records = with_records
        self.sync = sync
        self.eta_warmup = whole_number("ProgressHook's eta_warmup", eta_warmup, least=0)
        self._began = self._warm = (0.0, 0)
        self._times: list[dict[str, float]] = []

    def on_before_train(self, trainer: Any) -> None:
        """Start the clock."""
        self._began = self._warm = (time.perf_counter(), trainer.step)
        self._times = []

    def on_after_step(self, trainer: Any) -> None:
        """Write a line, if it is time."""
        info, step = trainer.step_info, trainer.step
        self._times.append({name: info[name] for name in ("step_time", "data_time") if name in info})
        if self.is_time(trainer) or step == trainer.max_steps:
            self._write(trainer, {**as_numbers(info), **key_average(self._times)})
            self._times = []
        if step - self._began[1] == self.eta_warmup:
            self._warm = time.perf_counter(), step

    def _write(self, trainer: Any, values: dict[str, Any]) -> None:
        if self.sync:
            values = mean_over_ranks(values)
        if rank() == 0:
            trainer.logger.info("%s", self.line(trainer.step, trainer.max_steps, values))

    def line(self, step: int, max_steps: int | None, values: dict[str, Any]) -> str:
        """The line for a step."""
        width = len(str(max_steps)) if max_steps is not None else 1
        parts = [f"Step {step:{width}d}/{max_steps if max_steps is not None else '?'}:"]
        parts += [f"{n} {values[f'{n}_time']:.4f}s" for n in ("step", "data") if f"{n}_time" in values]
        if max_steps is not None:
            parts.append(f"eta {self._time_left(step, max_steps)}")
        parts += [f"{name} {values[name]:.4f}" for name in ("loss", "grad_norm") if name in values]
        parts += [f"{name} {value:.2e}" for name, value in values.items() if name.startswith("lr_")]
        if self.with_records:
            extra = {name: v for name, v in values.items() if name not in _OWN and not name.startswith("lr_")}
            shown = flattened(values.get("records", {})) | flattened(extra)
            parts += [f"{name} {value:.4f}" for name, value in shown.items()]
        return " ".join(parts)

    def _time_left(self, step: int, max_steps: int) -> str:
        then, first = self._warm if step > self._warm[1] else self._began
        per_step = (time.perf_counter() - then) / max(step - first, 1)
        minutes, seconds = divmod(round(per_step * (max_steps - step)), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


class LoggingHook(IntervalHook):
    """Calls ``trainer.log(records)`` every `interval` steps with the means since the last time, and at the end.

    With `sync` they are means over ranks. Every rank calls `log`; on all but the first with ``dry_run=True``.
    """

    def __init__(self, interval: int = 100, sync: bool = True) -> None:
        super().__init__(interval)
        self.sync = sync
        self._steps: list[dict[str, Any]] = []

    def on_after_step(self, trainer: Any) -> None:
        """Keep the step's values, on the device; log, if it is time."""
        self._steps.append(_merged(trainer.step_info))
        if self.is_time(trainer):
            self._log(trainer)

    def on_after_train(self, trainer: Any) -> None:
        """Log the rest, unless the run goes on in another process."""
        if self._steps and not trainer.is_interrupted:
            self._log(trainer)

    def _log(self, trainer: Any) -> None:
        records = key_average(self._steps)
        self._steps = []
        trainer.log(mean_over_ranks(records) if self.sync else records, dry_run=rank() > 0)

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """The steps that are not yet logged."""
        state_dict["steps"] = [as_numbers(step) for step in self._steps]

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """Take them back."""
        self._steps = list(state_dict["steps"])


def _merged(info: dict[str, Any]) -> dict[str, Any]:
    """A step's values with the user's records among them; those with a name that is taken stay under ``records``."""
    own = {name: value for name, value in info.items() if name != "records"}
    records = info.get("records", {})
    free = {name: value for name, value in records.items() if name not in own}
    taken = {name: value for name, value in records.items() if name in own}
    return {**own, **free, **({"records": taken} if taken else {})}


class CudaMaxMemoryHook(BaseHook):
    """Adds ``max_memory`` to `trainer.step_info`: the most memory that tensors have taken on the GPU so far, in GiB.

    Put it before the hooks that are to see the value. On a device other than a GPU it adds nothing.
    """

    def on_after_step(self, trainer: Any) -> None:
        """Ask the allocator, which counts on the host."""
        if trainer.device.type == "cuda":
            trainer.step_info["max_memory"] = torch.cuda.max_memory_allocated(trainer.device) / 2**30

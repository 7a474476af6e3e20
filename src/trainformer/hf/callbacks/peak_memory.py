"""`PeakMemory`: how much memory a run needed at most, in each log record."""

from __future__ import annotations

from typing import Any

import torch

from trainformer.callbacks.compat.huggingface_types import TrainerCallback, TrainerControl, TrainerState
from trainformer.hf.callbacks.names import is_evaluation
from trainformer.hf.callbacks.writers import WriterHandle
from trainformer.utils.helpers import _peak_resident_bytes

_GIB = 2**30


class PeakMemory(TrainerCallback):
    """Adds the peak of memory since the last record to each record of training, in GiB.

    On CUDA: ``peak_memory_allocated`` (what tensors occupied) and ``peak_memory_reserved`` (what the process took from
    the device). Reading them does not wait for the device. With ``reset=False`` they are the peaks since training
    began. On the CPU: ``peak_memory_resident``, the peak of the process's whole life, because the system keeps no
    other. With `summary_writer` (a writer or a folder) they are scalars there, under ``memory/``.
    """

    sets_control = False

    def __init__(self, summary_writer: Any = None, reset: bool = True) -> None:
        self.reset = reset
        self._writer = WriterHandle(summary_writer, "PeakMemory")
        self._device = torch.device("cpu")

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Begin to measure, where the model is."""
        self._writer.open(state)
        first = next(iter(model.parameters()), None) if model is not None else None
        self._device = first.device if first is not None else torch.device("cpu")
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Add to a record of training."""
        if not logs or "loss" not in logs or is_evaluation(logs):
            return
        peaks = self._peaks()
        logs.update(peaks)
        if state.is_world_process_zero:
            self._writer.add_scalars({f"memory/{name}": value for name, value in peaks.items()}, state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Everything is written."""
        self._writer.close()

    def _peaks(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {"peak_memory_resident": _peak_resident_bytes() / _GIB}
        peaks = {
            "peak_memory_allocated": torch.cuda.max_memory_allocated(self._device) / _GIB,
            "peak_memory_reserved": torch.cuda.max_memory_reserved(self._device) / _GIB,
        }
        if self.reset:
            torch.cuda.reset_peak_memory_stats(self._device)
        return peaks

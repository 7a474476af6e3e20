"""How much of the hardware training uses."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from trainformer.callbacks.base import TrainerLike

logger = logging.getLogger("trainformer")

# Dense peak of the tensor cores in FLOP/s for 16-bit inputs, from the vendors' data sheets.
_PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
}


@dataclass
class Throughput:
    """Add to each log record what the speed in it means: FLOP/s, MFU, steps per second, and memory.

    Samples and tokens per second are in every record anyway. FLOPs of a sample are counted once, by running one step
    that leaves no trace, or given as `flops_per_sample`. MFU, the share of the device's peak that the model uses,
    needs the peak: known for common GPUs, else given as `peak_flops`.
    """

    needs_torch = True

    flops_per_sample: float | None = None
    peak_flops: float | None = None
    measure_flops: bool = True

    def on_train_begin(self, trainer: TrainerLike) -> None:
        """Count FLOPs, find the device's peak."""
        if self.flops_per_sample is None and self.measure_flops:
            self.flops_per_sample = _count_flops(trainer)
        if self.peak_flops is None and torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            self.peak_flops = next((peak for key, peak in _PEAK_FLOPS.items() if key in name), None)

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        """Add to the record that is about to be written."""
        speed = metrics.get("train/samples_per_second")
        if speed is None:
            return
        metrics["train/steps_per_second"] = speed * trainer.state.step / trainer.state.samples
        if self.flops_per_sample:
            metrics["train/tflops_per_second"] = speed * self.flops_per_sample / 1e12
            if self.peak_flops:
                metrics["train/mfu"] = speed * self.flops_per_sample / self.peak_flops
        if torch.cuda.is_available():
            metrics["train/peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9


def _count_flops(trainer: TrainerLike) -> float | None:
    """FLOPs of forward, backward and update per sample, by torch's counter."""
    with trainer.sandbox() as probe:
        batch: Any = next(probe.batches())
        with FlopCounterMode(display=False) as counter:
            probe.step(batch)
    flops = counter.get_total_flops()
    if not flops:
        logger.info("Throughput: torch counts no FLOPs for this model; speed is logged without them")
        return None
    return flops / max(batch.size, 1)  # 0: a sample was lent to this rank, so that it can take part

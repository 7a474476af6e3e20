"""Log learning rates, gradient norms, throughput and memory; warn of collapsed features."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainformer.callbacks.base import GradientNorms, TrainerLike
from trainformer.core.errors import BadArgument, expected

logger = logging.getLogger("trainformer")

# Dense peak of one device in FLOP/s for 16-bit inputs, from the vendors' data sheets. The first name that fits counts.
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
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


@dataclass
class LRMonitor:
    """Add the learning rate of every parameter group to each log record (``train/lr``, ``train/lr_1``, ...)."""

    def on_train_begin(self, trainer: TrainerLike) -> None:
        """Check that the learning rate is known."""
        if not trainer.learning_rates():
            do = "On JAX, wrap yours: optax.inject_hyperparams(optax.adam)(learning_rate=...)."
            raise BadArgument(expected("an optimizer whose learning rate is known, for LRMonitor", "none", do))

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        for index, lr in enumerate(trainer.learning_rates()):
            metrics["train/lr" if index == 0 else f"train/lr_{index}"] = lr


@dataclass
class CollapseMonitor:
    """Warn, and with ``stop=True`` stop, when features collapse to the same vector for all images.

    Reads ``train/feature_std``, which self-supervised tasks log: 1 for features spread evenly over all directions, 0
    for identical ones. Values below `threshold` for `patience` consecutive log records are a collapse.
    """

    threshold: float = 0.05
    patience: int = 3
    stop: bool = False

    _low: int = field(init=False, default=0, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise BadArgument(expected("CollapseMonitor's threshold to be above 0 and below 1", self.threshold))
        if self.patience < 1:
            raise BadArgument(expected("CollapseMonitor's patience to be at least 1", self.patience))

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        spread = metrics.get("train/feature_std")
        if spread is None:
            return
        self._low = self._low + 1 if spread < self.threshold else 0
        if self._low == self.patience:
            logger.warning(
                "the features have collapsed: feature_std is %.3g (1: spread evenly, 0: all the same). Lower the "
                "learning rate, raise the momentum or the batch size, or check the augmentation.", spread,
            )  # fmt: skip
            if self.stop:
                trainer.stop(f"features collapsed: feature_std {spread:.3g} below {self.threshold}")

    def state_dict(self) -> dict[str, Any]:
        return {"low": self._low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._low = state["low"]


@dataclass
class GradientMonitor:
    """Log the distribution of gradient norms, and warn of exploding gradients.

    Every `log_every` steps it logs the maximum and a percentile of the total gradient norms since the last time
    (``train/grad_norm_max``, ``train/grad_norm_p99``), and the largest norm of a single parameter. All norms are those
    before clipping. It synchronises with the device only when it logs. The mean norm is in every log record anyway.
    """

    sets_control = False

    log_every: int = 100
    clip_percentile: float = 99.0
    explosion_threshold: float = 100.0

    _norms: GradientNorms | None = field(init=False, default=None, repr=False)
    _record: dict[str, float] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.log_every < 1:
            raise BadArgument(expected("GradientMonitor's log_every to be at least 1", self.log_every))
        if not 0 <= self.clip_percentile <= 100:
            raise BadArgument(expected("GradientMonitor's clip_percentile to be from 0 to 100", self.clip_percentile))

    def attach(self, trainer: TrainerLike) -> None:
        """Have the run record the norms."""
        self._norms = trainer.gradient_norms(self.log_every)

    def on_step_end(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        if step % self.log_every:
            return
        assert self._norms is not None
        norms, parameters = self._norms.take()
        largest = max(parameters, key=parameters.__getitem__)
        peak = float(np.max(norms))
        self._record = {
            "train/grad_norm_max": peak,
            f"train/grad_norm_p{self.clip_percentile:g}": float(np.percentile(norms, self.clip_percentile)),
            "train/grad_norm_largest_parameter": parameters[largest],
        }
        if not peak <= self.explosion_threshold:
            logger.warning(
                "GradientMonitor: gradient norm reached %.3g (threshold %g) in the %d steps up to step %d; "
                "the largest gradient in the last one belongs to %s",
                peak, self.explosion_threshold, len(norms), step, largest,
            )  # fmt: skip

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        """Add to the log record of the same step, if there is one."""
        metrics |= self._record
        self._record = {}

    def on_step_begin(self, trainer: TrainerLike, step: int) -> None:
        """Otherwise log a separate record before the next step."""
        if self._record:
            trainer.log_metrics(self._record)
            self._record = {}

    def state_dict(self) -> dict[str, Any]:
        return {"norms": []} if self._norms is None else self._norms.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self._norms is not None
        self._norms.load_state_dict(state)


@dataclass
class Throughput:
    """Add FLOP/s, MFU, steps per second and peak memory to each log record.

    Samples and tokens per second are in every record anyway. The FLOPs of a sample are counted once, without side
    effects, unless you pass `flops_per_sample`. Model FLOPs utilisation (MFU) needs the peak FLOP/s of a device: known
    for common GPUs and TPUs, otherwise pass `peak_flops`.
    """

    flops_per_sample: float | None = None
    peak_flops: float | None = None
    measure_flops: bool = True

    def on_train_begin(self, trainer: TrainerLike) -> None:
        if self.flops_per_sample is None and self.measure_flops:
            self.flops_per_sample = trainer.flops_per_sample()
        if self.peak_flops is None:
            name = trainer.accelerator or ""
            self.peak_flops = next((peak for key, peak in _PEAK_FLOPS.items() if key in name), None)

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        speed = metrics.get("train/samples_per_second")
        if speed is None:
            return
        metrics["train/steps_per_second"] = speed * trainer.state.step / trainer.state.samples
        if self.flops_per_sample:
            metrics["train/tflops_per_second"] = speed * self.flops_per_sample / 1e12
            if self.peak_flops:
                metrics["train/mfu"] = speed * self.flops_per_sample / (self.peak_flops * trainer.num_devices)
        if (memory := trainer.peak_memory_gb) is not None:
            metrics["train/peak_memory_gb"] = memory

"""Log learning rates, gradient norms, throughput and memory; warn of collapsed features."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainformer.callbacks.base import TrainerLike
from trainformer.core.errors import BadArgument, expected
from trainformer.utils.distributed import is_dtensor

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
class LRMonitor:
    """Add the learning rate of every parameter group to each log record (``train/lr``, ``train/lr_1``, ...)."""

    needs_torch = True

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        for index, group in enumerate(trainer.active_optimizer.param_groups):
            metrics["train/lr" if index == 0 else f"train/lr_{index}"] = float(group["lr"])


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

    needs_torch = True
    sets_control = False

    log_every: int = 100
    clip_percentile: float = 99.0
    explosion_threshold: float = 100.0

    _norms: list[Tensor] = field(init=False, default_factory=list, repr=False)
    _record: dict[str, float] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.log_every < 1:
            raise BadArgument(expected("GradientMonitor's log_every to be at least 1", self.log_every))
        if not 0 <= self.clip_percentile <= 100:
            raise BadArgument(expected("GradientMonitor's clip_percentile to be from 0 to 100", self.clip_percentile))

    def on_before_optimizer_step(self, trainer: TrainerLike, step: int) -> None:
        self._norms.append(trainer.grad_norm)
        if (step + 1) % self.log_every:
            return
        norms = torch.stack(self._norms).float()
        self._norms = []
        grads = named_gradients(trainer.task.model, trainer.active_optimizer)
        parts = torch.stack([gradient_norm(grad).float() for _, grad in grads])
        percentile = torch.quantile(norms, self.clip_percentile / 100)
        # Clipping scaled all gradients by one factor; the ratio of the total norms undoes it.
        undo_clipping = norms[-1] / torch.linalg.vector_norm(parts).clamp_min(1e-30)
        peak, high, largest, which = torch.stack(
            [norms.max(), percentile, parts.max() * undo_clipping, parts.argmax().float()]
        ).tolist()
        self._record = {
            "train/grad_norm_max": peak,
            f"train/grad_norm_p{self.clip_percentile:g}": high,
            "train/grad_norm_largest_parameter": largest,
        }
        if not peak <= self.explosion_threshold:
            logger.warning(
                "GradientMonitor: gradient norm reached %.3g (threshold %g) in the %d steps up to step %d; "
                "the largest gradient in the last one belongs to %s",
                peak, self.explosion_threshold, len(norms), step + 1, grads[int(which)][0] or "a parameter of the loss",
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
        return {"norms": [float(norm) for norm in self._norms]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms = [torch.tensor(norm) for norm in state["norms"]]


@dataclass
class Throughput:
    """Add FLOP/s, MFU, steps per second and peak memory to each log record.

    Samples and tokens per second are in every record anyway. The FLOPs of a sample are counted once in a trial step
    without side effects, unless you pass `flops_per_sample`. Model FLOPs utilisation (MFU) needs the peak FLOP/s of the
    device: known for common GPUs, otherwise pass `peak_flops`.
    """

    needs_torch = True

    flops_per_sample: float | None = None
    peak_flops: float | None = None
    measure_flops: bool = True

    def on_train_begin(self, trainer: TrainerLike) -> None:
        if self.flops_per_sample is None and self.measure_flops:
            self.flops_per_sample = _count_flops(trainer)
        if self.peak_flops is None and torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            self.peak_flops = next((peak for key, peak in _PEAK_FLOPS.items() if key in name), None)

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
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
    """FLOPs of a full optimizer step per sample, by torch's counter."""
    with trainer.sandbox() as probe:
        batch: Any = next(probe.batches())
        try:
            with FlopCounterMode(display=False, custom_mapping=_uncounted_by_torch()) as counter:
                probe.step(batch)
        except RuntimeError as error:  # a backward pass inside of the step, for instance; a real error comes back later
            logger.warning(
                "Throughput: torch cannot count the FLOPs of this step; logging throughput without (%s)", error
            )
            return None
    flops = counter.get_total_flops()
    if not flops:
        logger.info("Throughput: torch counts no FLOPs for this model; logging throughput without them")
        return None
    return flops / max(batch.size, 1)  # 0: this rank has no sample of its own and computes a borrowed one


def _uncounted_by_torch() -> dict[Any, Any]:
    """Formulas that torch's counter lacks: grouped matrix products, with which transformers computes experts."""
    grouped = getattr(torch.ops.aten, "_grouped_mm", None)
    return {} if grouped is None else {grouped: _grouped_mm_flops}


def _grouped_mm_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """Each row of a stack is multiplied with one of the matrices.

    >>> _grouped_mm_flops((10, 4), (3, 4, 5))  # ten tokens, three experts
    400
    """
    return 2 * math.prod(a) * b[-1]


def named_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str | None, Tensor]]:
    """The gradients of all optimized parameters, with their names in the model (None: not part of it)."""
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [(names.get(id(p)), p.grad.detach()) for p in parameters]


def gradient_norm(grad: Tensor) -> Tensor:
    """The norm of a whole gradient in at least fp32; a collective operation if it is sharded."""
    norm: Any = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    return norm.full_tensor() if is_dtensor(norm) else norm

"""Watch learning rates and gradients."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainformer.callbacks.base import TrainerLike
from trainformer.core.errors import BadArgument, expected
from trainformer.utils.distributed import is_dtensor

logger = logging.getLogger("trainformer")


@dataclass
class LRMonitor:
    """Add the learning rate of every parameter group to each log record (``train/lr``, ``train/lr_1``, ...)."""

    needs_torch = True

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        """Add to the record that is about to be written."""
        for index, group in enumerate(trainer.active_optimizer.param_groups):
            metrics["train/lr" if index == 0 else f"train/lr_{index}"] = float(group["lr"])


@dataclass
class CollapseMonitor:
    """Warn, and stop if asked to, when embeddings collapse: when all images look the same to the network.

    Looks at ``train/feature_std`` of the log records, which self-supervised tasks give: 1 where features point in all
    directions alike, 0 where they are the same. Below `threshold` for `patience` records in a row is a collapse.
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
        """Look at the record that is about to be written."""
        spread = metrics.get("train/feature_std")
        if spread is None:
            return
        self._low = self._low + 1 if spread < self.threshold else 0
        if self._low == self.patience:
            logger.warning(
                "the features have collapsed: feature_std is %.3g (1 is spread evenly, 0 all the same). Lower the "
                "learning rate, raise the momentum or the batch size, or look at the augmentation.", spread,
            )  # fmt: skip
            if self.stop:
                trainer.stop(f"features collapsed: feature_std {spread:.3g} below {self.threshold}")

    def state_dict(self) -> dict[str, Any]:
        """How long it has been low."""
        return {"low": self._low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._low = state["low"]


@dataclass
class GradientMonitor:
    """Log the distribution of gradient norms, and warn of explosions.

    Looks at gradients while they are there: after clipping, before the update. Norms are those before clipping.
    Every `log_every` steps it logs the largest norm and a percentile of the norms since the last time
    (``train/grad_norm_max``, ``train/grad_norm_p99``), and the largest norm of a single parameter, and waits for the
    device; in between it only keeps references. The mean norm is in every record anyway.
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
        """Keep the norm; look at everything when it is time."""
        self._norms.append(trainer.grad_norm)
        if (step + 1) % self.log_every:
            return
        norms = torch.stack(self._norms).float()
        self._norms = []
        names, parts = self._parameter_norms(trainer)
        percentile = torch.quantile(norms, self.clip_percentile / 100)
        # Clipping multiplied all by one factor: the ratio of the total norms undoes it.
        undo = norms[-1] / torch.linalg.vector_norm(parts).clamp_min(1e-30)
        peak, high, largest, which = torch.stack(
            [norms.max(), percentile, parts.max() * undo, parts.argmax().float()]
        ).tolist()
        self._record = {
            "train/grad_norm_max": peak,
            f"train/grad_norm_p{self.clip_percentile:g}": high,
            "train/grad_norm_largest_parameter": largest,
        }
        if not peak <= self.explosion_threshold:
            logger.warning(
                "GradientMonitor: gradient norm reached %.3g (threshold %g) in the %d steps up to step %d; "
                "the largest gradient of the last one is that of %s",
                peak, self.explosion_threshold, len(norms), step + 1, names[int(which)],
            )  # fmt: skip

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        """Add to the record of the same step, where there is one."""
        metrics |= self._record
        self._record = {}

    def on_step_begin(self, trainer: TrainerLike, step: int) -> None:
        """Else write a record of its own before the next step begins."""
        if self._record:
            trainer.log_metrics(self._record)
            self._record = {}

    @staticmethod
    def _parameter_norms(trainer: TrainerLike) -> tuple[list[str], Tensor]:
        model = trainer.task.model
        names = {id(p): name for name, p in model.named_parameters()}
        found = [
            (names.get(id(p), "a parameter of the loss"), _norm(p.grad.detach()))
            for group in trainer.active_optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        return [name for name, _ in found], torch.stack([norm for _, norm in found])

    def state_dict(self) -> dict[str, Any]:
        """Norms since the last record."""
        return {"norms": [float(norm) for norm in self._norms]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on collecting."""
        self._norms = [torch.tensor(norm) for norm in state["norms"]]


def _norm(grad: Tensor) -> Tensor:
    """The norm of a gradient, all of it: where it is divided over ranks, every rank takes part."""
    norm: Any = grad.float().norm()
    return norm.full_tensor() if is_dtensor(norm) else norm

"""An optimizer of a run together with what belongs to it: parameters, schedules, clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainformer.backends.torch import gradients
from trainformer.backends.torch.schedules import DecaySchedule, Schedule, make_schedule
from trainformer.core.errors import BadArgument

if TYPE_CHECKING:
    from trainformer.run.torch.settings import RunSettings


class ActiveOptimizer:
    """One optimizer with its parameters, its schedules and how its gradients are clipped.

    `name` is empty unless there are several. `parameters` are those whose gradients enter the norm, `uniform` whether
    one kernel can process all of them, `reads_found_inf` whether the optimizer skips an update by itself if its
    attribute ``found_inf`` is 1.
    """

    name = ""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        settings: RunSettings,
        *,
        scheduler: Any,
        gradient_clip: float | None,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.scheduler = scheduler
        self.gradient_clip = gradient_clip
        self.uniform = gradients.are_uniform(parameters)
        self.reads_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.schedule = Schedule(optimizer, lambda step: 1.0)
        self._warmup_ratio = settings.warmup_ratio
        end = settings.weight_decay_end
        self._decay = None if end is None else DecaySchedule(optimizer, end)
        self._total_steps = 0
        self._scheduled_for: int | None = None

    @property
    def lr(self) -> float:
        """The current learning rate of the first param group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def schedule_for(self, total_steps: int | None) -> None:
        """Build the schedule for this many steps. A user's scheduler is created once and kept."""
        if self._decay is not None and total_steps is None:
            raise BadArgument(
                "weight_decay_end needs the number of steps, but the data have no length. Pass max_steps."
            )
        self._total_steps = total_steps or 0
        is_ours = isinstance(self.scheduler, str) or self.scheduler is None
        if self._scheduled_for is None or (is_ours and self._scheduled_for != total_steps):
            old = self.schedule
            self.schedule = make_schedule(self.scheduler, self.optimizer, total_steps, self._warmup_ratio)
            if is_ours:
                self.schedule.configured, self.schedule.base = old.configured, old.base
            self._scheduled_for = total_steps if total_steps is not None else -1

    def apply_schedules(self, step: int) -> float:
        """Set learning rate and weight decay for the step after `step` steps; returns the learning rate."""
        lr = self.schedule.apply(step)
        if self._decay is not None:
            self._decay.apply(step, self._total_steps)
        return lr

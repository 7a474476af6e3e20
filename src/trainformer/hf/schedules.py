"""Learning-rate schedules of Forgather's projects."""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainformer.core.errors import BadArgument, expected


class InfiniteLRScheduler(LRScheduler):
    """Warms up, cools down to a constant learning rate, and stays there: a run may end at any step.

    After `checkpoint_step` the rate decays exponentially, for the last part of a run. The schedule is that of
    https://arxiv.org/abs/2503.02844.

    Args:
        optimizer: The optimizer.
        warmup_steps: Steps from 0 to the optimizer's rate.
        cooldown_steps: Steps of a cosine from there to `constant_lr`; with 0 the optimizer's rate is kept.
        constant_lr: The rate afterwards.
        min_lr: The rate that the decay approaches.
        tau: Steps in which the distance to `min_lr` falls to 37%.
        checkpoint_step: Where the decay begins; -1: never.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> schedule = InfiniteLRScheduler(optimizer, warmup_steps=2, cooldown_steps=2, constant_lr=0.1)
    >>> rates = []
    >>> for _ in range(6):
    ...     rates.append(round(schedule.get_last_lr()[0], 3))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_steps: int = 0,
        cooldown_steps: int = 0,
        constant_lr: float = 3.75e-5,
        min_lr: float = 1e-8,
        tau: float = 1e4,
        checkpoint_step: int = -1,
        last_epoch: int = -1,
    ) -> None:
        for name, value in {"warmup_steps": warmup_steps, "cooldown_steps": cooldown_steps, "min_lr": min_lr}.items():
            if value < 0:
                raise BadArgument(expected(f"{name} of at least 0", value))
        for name, value in {"constant_lr": constant_lr, "tau": tau}.items():
            if value <= 0:
                raise BadArgument(expected(f"{name} above 0", value))
        if 0 <= checkpoint_step < warmup_steps + cooldown_steps:
            do = "Warm-up and cool-down have to end before."
            raise BadArgument(
                expected(f"checkpoint_step of at least {warmup_steps + cooldown_steps}", checkpoint_step, do)
            )
        self.warmup_steps, self.cooldown_steps, self.constant_lr = warmup_steps, cooldown_steps, constant_lr
        self.min_lr, self.tau, self.checkpoint_step = min_lr, tau, checkpoint_step
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The learning rate of each parameter group at the current step."""
        return [self._rate(float(base), self.last_epoch) for base in self.base_lrs]

    def _rate(self, base: float, step: int) -> float:
        if step < self.warmup_steps:
            return base * step / self.warmup_steps
        if step < self.warmup_steps + self.cooldown_steps:
            done = (step - self.warmup_steps) / self.cooldown_steps
            return self.constant_lr + (base - self.constant_lr) / 2 * (1 + math.cos(math.pi * done))
        if 0 <= self.checkpoint_step <= step:
            return self.min_lr + (self.constant_lr - self.min_lr) * math.exp((self.checkpoint_step - step) / self.tau)
        return self.constant_lr if self.cooldown_steps else base

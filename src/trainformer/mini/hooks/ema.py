"""An average of the weights, kept by a hook."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trainformer.callbacks.compat.mini import BaseHook
from trainformer.callbacks.ema import EMA
from trainformer.distributed import Strategy


class EmaHook(BaseHook):
    """Keeps an exponential moving average of the weights, updated every `update_interval` steps: `hook.ema_model`.

    The average is a model of its own, without wrappers, in evaluation mode; `device` is where it is kept (None: where
    the model is). Running statistics are averaged as well, other buffers copied.
    """

    def __init__(
        self, decay: float = 0.9999, update_interval: int = 1, device: torch.device | str | int | None = None
    ) -> None:
        self._average = _PlacedEMA(decay=decay, update_every=update_interval, warmup=False, evaluate=False)
        self.device = device

    @property
    def ema_model(self) -> nn.Module | None:
        """The average; None before training has begun."""
        return self._average.model

    def on_before_train(self, trainer: Any) -> None:
        """Begin with the weights as they are, unless an average was loaded."""
        self._begin(trainer)

    def on_after_step(self, trainer: Any) -> None:
        """Move the average towards the new weights."""
        self._average.on_step_end(trainer, trainer.step, None)

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """The average, under the model's own names."""
        self._begin(trainer)
        state_dict.update(self._average.state_dict())

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self._begin(trainer)
        self._average.load_state_dict(state_dict)

    def _begin(self, trainer: Any) -> None:
        if self._average.model is None:
            single = Strategy()  # whatever the model is wrapped in, what is inside is copied as it is
            single.task = SimpleNamespace(model=trainer.unwrapped_model)
            self._average.attach(single)  # type: ignore[arg-type]
            if self.device is not None:
                self._average.move(self.device)


class _PlacedEMA(EMA):
    """An average that may be on another device than the weights."""

    def move(self, device: torch.device | str | int) -> None:
        """Keep it there from now on."""
        assert self.model is not None
        self.model.to(device)
        averages = [*self.model.parameters(), *self.model.buffers()]
        self._pairs = [(average, source) for average, (_, source) in zip(averages, self._pairs, strict=True)]

    def _update(self, weight: float) -> None:
        pairs = self._pairs
        self._pairs = [(a, w if w.device == a.device else w.detach().to(a.device)) for a, w in pairs]
        try:
            super()._update(weight)
        finally:
            self._pairs = pairs

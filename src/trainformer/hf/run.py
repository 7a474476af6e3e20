"""The run behind a `trainformer.hf.Trainer`, and the API of it that native callbacks receive as `trainer`."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from trainformer.callbacks.compat.huggingface import HuggingFaceCallback, add_new_entries, from_hf_name, to_hf_metrics
from trainformer.checkpointing import StateComponent
from trainformer.engine import Event
from trainformer.run import TorchRun
from trainformer.run.torch.api import TorchTrainerApi

if TYPE_CHECKING:
    from trainformer.hf.trainer import Trainer


class HfRun(TorchRun):
    """A run that evaluates as HF arguments say: several datasets, a delay, a limit."""

    owner: HfHandle

    def evaluate(self) -> dict[str, float]:
        """Evaluate on all evaluation datasets, unless `eval_delay` has not passed."""
        front, args = self.owner.front, self.owner.front.args
        done = self.state.epoch if args.eval_strategy == "epoch" else self.state.step
        if self.val_source is not None and done < args.eval_delay:
            return {}
        one_dataset = not isinstance(front.eval_dataset, dict) and args.max_eval_steps <= 0
        if self.val_source is None or (one_dataset and not front._overrides("evaluate")):
            return super().evaluate()
        front._called_by_run = True
        try:
            found = front.evaluate() or {}
        finally:
            front._called_by_run = False
        numbers = {name: value for name, value in found.items() if isinstance(value, Real) and name != "epoch"}
        self._last_metrics = metrics = {from_hf_name(name): value for name, value in numbers.items()}
        self.backend.schedule.observe(metrics.get(self.settings.monitor_metric))
        return metrics

    def task_handlers(self) -> dict[Event, Any]:
        return {**super().task_handlers(), Event.EPOCH_BEGIN: lambda epoch: self._draw_loader_seed()}

    def _draw_loader_seed(self) -> None:
        """Draw a number where HF's dataloader does: with the same seed, dropout masks are then those of HF."""
        if self.state.batch == 0:
            torch.empty((), dtype=torch.int64).random_()

    def components(self) -> list[StateComponent]:
        """The parts of a checkpoint. Each but the model is skipped if its file was deleted."""
        return [part if part.key == "model" else replace(part, required=False) for part in super().components()]

    def _attach(self, callback: Any) -> None:
        # HF callbacks receive `on_init_end` once, when the trainer is built, not with every run.
        if not isinstance(callback, HuggingFaceCallback):
            super()._attach(callback)


class HfHandle(TorchTrainerApi):
    """The API of a run for native callbacks; `hf.Trainer` itself has HF's names for most of it."""

    _run: HfRun  # once there is one

    def __init__(self, front: Trainer) -> None:
        self.front = front

    args = property(lambda self: self.front.args)
    processing_class = property(lambda self: self.front.processing_class)
    task = property(lambda self: self._run.task)
    lr = property(lambda self: self._run.settings.lr)
    monitor_metric = property(lambda self: self._run.settings.monitor_metric)

    def was_set(self, name: str) -> bool:
        """True: every setting is derived from the arguments."""
        return True


class LogRelay:
    """First callback of a trainer that overrides `log`: passes every log record of the run through it."""

    sets_control = False

    def __init__(self, front: Trainer) -> None:
        self._front = front

    def on_log(self, trainer: Any, metrics: dict[str, Any]) -> None:
        front = self._front
        front._record = {}
        try:
            front.log({**to_hf_metrics(metrics), "epoch": front.state.epoch})
            add_new_entries(metrics, front._record)
        finally:
            front._record = None

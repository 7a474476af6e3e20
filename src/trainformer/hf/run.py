"""The run behind a `trainformer.hf.Trainer`, and the API of it that native callbacks receive as `trainer`."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainformer.callbacks.compat.huggingface import HuggingFaceCallback, add_new_entries, from_hf_name, to_hf_metrics
from trainformer.callbacks.compat.huggingface_types import TrainerState
from trainformer.checkpointing import StateComponent
from trainformer.engine import Event
from trainformer.hf.checkpoints import STATE, HfFiles, callback_states, read_checkpoint_states, report_changes
from trainformer.hf.forgather import skipped_components
from trainformer.hf.settings import CHECKPOINT_NAME
from trainformer.run import RunSettings, TorchRun
from trainformer.run.torch.api import TorchTrainerApi

if TYPE_CHECKING:
    from trainformer.hf.trainer import Trainer


class HfRun(TorchRun):
    """A run that evaluates as HF arguments say: several datasets, a delay, a limit."""

    owner: HfHandle
    eval_dataloader: Any = None  # of the latest evaluation, for callbacks
    _saved_path: str | None = None

    @property
    def window_weight(self) -> Any:
        """The items of the current step, if `training_step` is overridden."""
        return self.task.window_weight

    def reads(self, data: Any) -> bool:
        """Whether `data` is the validation data of the run."""
        return self.val_source is not None and data is self.eval_data

    @property
    def eval_data(self) -> Any:
        """The validation data of the run."""
        return self._evaluation.loaded.val

    def __init__(self, owner: HfHandle, task: Any, settings: RunSettings, **options: Any) -> None:
        super().__init__(owner, task, settings, **options)
        by_user = owner.front._overrides("save_model", "_save")
        self.files = HfFiles(task.model, getattr(self.parts.files, "on_device", False), by_user)
        self._saves_model_only = False
        self._not_saved: set[str] = set()
        self.backend.feeder.counts_padding = owner.front.args.include_num_input_tokens_seen == "all"

    @property
    def eval_sets(self) -> list[str]:
        """The names of the evaluation datasets, if there are several."""
        given = self.owner.front.eval_dataset
        return list(map(str, given)) if isinstance(given, dict) else []

    def record_config(self) -> None:
        super().record_config()
        if self.eval_sets:
            self.context.config.set_from_data("val_sets", self.eval_sets)

    def check_monitors(self) -> None:
        """Nothing: overridden methods and `compute_metrics` decide what is measured."""

    def check_monitored(self) -> None:
        """Nothing, for the same reason."""

    def evaluate_first_batches(self, most: int, names: Sequence[str] = ()) -> dict[str, float]:
        """Metrics of a few batches of each evaluation dataset, with `compute_metrics` and overridden methods."""
        front, found = self.owner.front, dict[str, Any]()
        before = front.args.max_eval_steps, front.is_in_train
        front.args.max_eval_steps, front.is_in_train = most, True  # in training, weights are not cast to evaluate
        try:
            for name in self.eval_sets or [""]:
                prefix = f"eval_{name}" if name else "eval"
                loader = front.get_eval_dataloader(name or front._eval_data)
                loss_only = True if front.compute_metrics is None else None
                found |= front.evaluation_loop(loader, "Evaluation", loss_only, metric_key_prefix=prefix).metrics
        finally:
            front.args.max_eval_steps, front.is_in_train = before
        numbers = {name: value for name, value in found.items() if isinstance(value, Real)}
        return {native_name(name, self.eval_sets): float(value) for name, value in numbers.items()}

    @property
    def measures_more(self) -> bool:
        return self.owner.front._overrides("evaluate", "_evaluate")

    def evaluate(self, names: Sequence[str] = ()) -> dict[str, float]:
        """Evaluate with `evaluate` of the trainer, unless there is no data or `eval_delay` has not passed."""
        front, args = self.owner.front, self.owner.front.args
        done = self.state.epoch if args.eval_strategy == "epoch" else self.state.step
        if done < args.eval_delay:
            return {}
        if self.val_source is None and not front._overrides("evaluate", "_evaluate", "get_eval_dataloader"):
            return super().evaluate()
        front._called_by_run = True
        try:
            found = front._evaluate(None, front._ignore_keys_for_eval) or {}
        finally:
            front._called_by_run = False
        metrics: dict[str, Any] = {
            native_name(name, self.eval_sets): value
            for name, value in found.items()
            if isinstance(value, Real) and name != "epoch"
        }
        self.backend.observe(metrics, self.settings.monitor_metric)
        metrics = self.add_callback_metrics(metrics)
        if metrics:
            front._bridge.skip_record()  # that of the run: `evaluate` has logged its own
        return metrics

    # -- checkpoints -----------------------------------------------------------------------------------------

    def components(self) -> list[StateComponent]:
        """The parts of a checkpoint. Each but the model is skipped if its file was deleted."""
        components = [part if part.key == "model" else replace(part, required=False) for part in super().components()]
        if type(self.task.model).load_state_dict is not nn.Module.load_state_dict:
            # The model decides what it can load, for example buffers of another size.
            components[0] = replace(components[0], stateful=replace(components[0].stateful, check=None))
        if self._saves_model_only:
            return components[:1]
        components += self.owner.front.extra_components(part.key for part in components)
        return [part for part in components if part.key not in self._not_saved]

    def save(self) -> str | None:
        """Write a checkpoint, with `_save_checkpoint` of the trainer if it is overridden."""
        front = self.owner.front
        if not front._overrides("_save_checkpoint"):
            return self.save_now()
        self._saved_path = None
        front._save_checkpoint(front.model, None)
        return self._saved_path

    def save_now(self) -> str | None:
        """Write a checkpoint; with `save_only_model`, of the weights alone."""
        front, best = self.owner.front, self.state.best_step
        if front.args.metric_for_best_model is not None and best > 0 and self.checkpointer is not None:
            name = CHECKPOINT_NAME.format(best)
            if best == self.state.step or self.checkpointer.store.path_of(best).exists():
                front._bridge.state.best_model_checkpoint = os.path.join(front.args.output_dir, name)
        self._saves_model_only = front.args.save_only_model
        self._not_saved = skipped_components(front.args, "save")
        try:
            self._saved_path = super().save()
            if self._saved_path is not None:
                front._push_checkpoint(self._saved_path)
            return self._saved_path
        finally:
            self._saves_model_only, self._not_saved = False, set()

    def load(self, path: Path, only: Collection[str] | None = None) -> None:
        """Load a checkpoint of ours or of transformers."""
        front = self.owner.front
        states = read_checkpoint_states(path, self)
        skipped = skipped_components(front.args, "restore")
        if only is None and front._overrides("_load_from_checkpoint"):
            front._load_from_checkpoint(str(path))
            skipped.add("model")
        chosen = only
        if only is None and skipped:
            chosen = [part.key for part in self.components() if part.key not in skipped]
        if states is None:
            super().load(path, chosen)
        else:
            self.load_states([c for c in self.components() if c.key in states], states, path, chosen)
        if only is None:
            if (path / STATE).exists():
                self.task.flos = TrainerState.load_from_json(path / STATE).total_flos
            self._restore_callbacks(path)
            report_changes(self.owner.front.args, path)
            if self.owner.front.args.ignore_data_skip:
                self.state.batch = self.state.position = 0

    def _restore_callbacks(self, path: Path) -> None:
        """Restore callbacks with their arguments, as HF does on request. Their own states are restored anyway."""
        if not self.owner.front.args.restore_callback_states_from_checkpoint or not (path / STATE).exists():
            return
        states = callback_states(TrainerState.load_from_json(path / STATE), self.callbacks.named())
        for name, state in states.items():
            self.callbacks.named()[name].load_state_dict(state)

    def task_handlers(self) -> dict[Event, Any]:
        return {
            **super().task_handlers(),
            Event.EPOCH_BEGIN: lambda epoch: self._draw_loader_seed(),
            Event.LOG: self._report_last_norm,
        }

    def _report_last_norm(self, metrics: dict[str, Any]) -> None:
        """The gradient norm of the last step, as HF logs it; natively it is the mean since the last record."""
        if "train/grad_norm" in metrics and self.backend.grad_norm is not None:
            metrics["train/grad_norm"] = float(self.backend.grad_norm)

    def _draw_loader_seed(self) -> None:
        """Draw a number where HF's dataloader does: with the same seed, dropout masks are then those of HF."""
        if self.state.batch == 0:
            torch.empty((), dtype=torch.int64).random_()

    def _attach(self, callback: Any) -> None:
        # HF callbacks receive `on_init_end` once, when the trainer is built, not with every run.
        if not isinstance(callback, HuggingFaceCallback):
            super()._attach(callback)


def native_name(name: str, eval_sets: Collection[str] = ()) -> str:
    """The name of an HF metric in the records of a run; `eval_sets` are the names of several evaluation datasets.

    >>> native_name("eval_loss"), native_name("eval_clean_loss", ["clean"])
    ('val/loss', 'val/clean/loss')
    """
    matching = [one for one in eval_sets if name.startswith(f"eval_{one}_")]
    if not matching:
        return from_hf_name(name)
    longest = max(matching, key=len)
    return f"val/{longest}/{name.removeprefix(f'eval_{longest}_')}"


class HfHandle(TorchTrainerApi):
    """The API of a run for native callbacks; `hf.Trainer` itself has HF's names for most of it."""

    _run: HfRun  # once there is one

    def __init__(self, front: Trainer) -> None:
        self.front = front

    args = property(lambda self: self.front.args)
    processing_class = property(lambda self: self.front.processing_class)
    task = property(lambda self: self._run.task)
    lr = property(lambda self: self._run.settings.lr)
    logs_evaluations = True  # in `evaluate`, with `on_log` and `on_evaluate`
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

    def on_train_end(self, trainer: Any) -> None:
        front, summary = self._front, self._front._bridge.summary(trainer)
        front._record = {}
        try:
            front.log(dict(summary))
            summary.update(front._record)
        finally:
            front._record = None

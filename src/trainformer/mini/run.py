"""`MiniRun`: the run behind a `BaseTrainer`, and the trainer as native and HF callbacks see it.

It differs from a `TorchRun` in that hooks write the checkpoints, as single files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from trainformer.backends.torch import capture_random, restore_random
from trainformer.backends.torch.state import cloned
from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.compat.mini import BaseHook, StepLosses, overrides
from trainformer.checkpointing import StateComponent, StatefulAdapter
from trainformer.mini.adapter import Loader, NoSchedule, TrainerTask, UserStrategy, as_loader, state_options
from trainformer.mini.hooks import LoggingHook, ProgressHook
from trainformer.run import RunSettings, TorchRun
from trainformer.run.provenance import size_of
from trainformer.run.settings import FrontOptions
from trainformer.run.signals import SignalRules
from trainformer.run.torch.api import TorchTrainerApi
from trainformer.utils.distributed import rank
from trainformer.utils.helpers import seed_everything

if TYPE_CHECKING:
    from trainformer.mini.trainer import BaseTrainer

_LOG_EVERY = 100  # without a hook that has an interval
_PRECISIONS = {None: "no", torch.float16: "fp16", torch.bfloat16: "bf16"}
#: Folder of the run's own checkpoints inside the workspace: there are none.
_NO_CHECKPOINTS = ".checkpoints"


class MiniRun(TorchRun):
    """A run whose checkpoints are written by `CheckpointingHook`s."""

    mini: BaseTrainer

    def save(self) -> str | None:
        """Let the hooks save. Returns the path of the first file."""
        self.loggers.flush()
        state = self.state
        before, state.saved_at = state.saved_at, state.step
        hooks = self.mini._checkpointing()
        due = [hook for hook in hooks if hook.is_pending] or hooks  # none: the end of the run, a signal or a callback
        written = [path for path in [hook.save(self.mini) for hook in due] if path is not None]
        if not written:
            state.saved_at = before
        return str(written[0]) if written else None

    def components(self) -> list[StateComponent]:
        """Those of the run; a sharded model and its optimizer use `torch.distributed.checkpoint` state dicts.

        Those compare names and shapes themselves; with a full state dict only rank 0 may hold the state.
        """
        components = super().components()
        options, task = state_options(self.mini), self.task
        if options is None:
            return components
        model, optimizer = self.mini.model, self.backend.optimizer

        def load(state: dict[str, Any]) -> None:
            set_optimizer_state_dict(model, optimizer, cloned(state), options=options)

        shared = {
            "model": StatefulAdapter(task.model_state_dict, task.load_model_state_dict),
            "optimizer": StatefulAdapter(lambda: get_optimizer_state_dict(model, optimizer, options=options), load),
        }
        return [replace(c, stateful=shared.get(c.key, c.stateful)) for c in components]


def make_run(trainer: BaseTrainer) -> MiniRun:
    """The run of a trainer whose parts are built."""
    loader = as_loader(trainer.data_loader, trainer)
    # The run carries the name of the user's class.
    task: TrainerTask = type(type(trainer).__name__, (TrainerTask,), {})(trainer)
    view = NativeView(trainer)
    recorder = StepRecorder(trainer, task, loader)
    callbacks = CallbackList([recorder, *trainer.hooks])
    passed = frozenset({"max_steps", "device", "optimizer", "scheduler"})
    with _keep_random_state():
        run = MiniRun(
            view,
            task,
            _settings(trainer),
            data=loader,
            callbacks=callbacks,
            passed=passed,
            options=_options(trainer),
        )
    run.mini = trainer
    run.train_size = size_of(getattr(trainer.data_loader, "dataset", None))
    scaler = trainer.grad_scaler
    run.backend.precision.scaler = scaler if scaler is not None and scaler.is_enabled() else None
    view._run = run
    hooks = [h for h in trainer.hooks if isinstance(h, BaseHook) and overrides(h, "on_before_optimizer_step")]
    if hooks:

        def before_clipping() -> None:
            recorder.record_gradients()
            for hook in hooks:
                hook.on_before_optimizer_step(trainer)

        run.backend.before_clipping = before_clipping
    return run


@contextmanager
def _keep_random_state() -> Iterator[None]:
    """Creating a run seeds all generators; in mini the user does that, and has built a model by now."""
    random_state, hash_seed = capture_random(), os.environ.get("PYTHONHASHSEED")
    seed_logger = logging.getLogger(seed_everything.__module__)
    level = seed_logger.level
    seed_logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        seed_logger.setLevel(level)
        restore_random(random_state)
        if hash_seed is None:
            os.environ.pop("PYTHONHASHSEED", None)
        else:
            os.environ["PYTHONHASHSEED"] = hash_seed


def _settings(trainer: BaseTrainer) -> RunSettings:
    retries = trainer.max_non_finite_grad_retries
    # The interval of hooks that read from the device anyway.
    logged = [hook.interval for hook in trainer.hooks if isinstance(hook, LoggingHook)]
    shown = [hook.interval for hook in trainer.hooks if isinstance(hook, ProgressHook)]
    return RunSettings(
        strategy=UserStrategy(),
        max_steps=trainer.max_steps,
        gradient_clip=trainer.grad_clip,
        nonfinite=f"retry:{retries}" if retries else "raise",
        precision=_PRECISIONS[trainer.mixed_precision],
        accumulation_steps=trainer.gradient_accumulation_steps,
        device=trainer.device,
        optimizer=trainer.optimizer,
        scheduler=trainer.lr_scheduler or NoSchedule(trainer.optimizer),
        oom="raise",  # forward() of half a batch need not be half of that of a batch
        seed=trainer._data_seed,
        log="none",
        log_every=min(logged or shown or [_LOG_EVERY]),
        run_dir=trainer.workspace,
        save_dir=_NO_CHECKPOINTS,
        save_every=None,
        eval_every=None,
        num_workers=0,
    )


def _options(trainer: BaseTrainer) -> FrontOptions:
    hooks = trainer._checkpointing()
    signals = SignalRules(stopping=())
    if hooks:
        stopping = dict.fromkeys(number for hook in hooks for number in hook.exit_signals)
        signals = SignalRules(tuple(stopping), hooks[0].exit_code, max(hook.exit_wait for hook in hooks))
    return FrontOptions(
        plan={"log_first": False, "save_at_end": bool(hooks)},
        keeps_folder=trainer.workspace is not None and rank() == 0,
        records_task=False,
        checks_cadences=False,
        fresh_start_hint="pass load=None to the CheckpointingHook",
        continue_hint="pass load='{checkpoint}' to it",
        signals=signals,
    )


class StepRecorder:
    """The first callback of a run: updates the trainer's `step` and `step_info` before any hook reads them."""

    def __init__(self, trainer: BaseTrainer, task: TrainerTask, loader: Loader) -> None:
        self._trainer = trainer
        self._task = task
        self._loader = loader
        self._learning_rates: list[Any] = []

    def on_train_begin(self, trainer: Any) -> None:
        self._loader.pop_times(0.0)

    def on_step_begin(self, trainer: Any, step: int) -> None:
        self._trainer._in_step = True
        self._trainer.step_info = {}
        self._task.begin_step()

    def record_gradients(self) -> None:
        """Gradients are complete: what is known of the step by now."""
        task = self._task
        self._trainer.step_info |= {
            "loss": StepLosses(task.losses),
            "records": task.records,
            "data_time": list(self._loader.waits),
            "non_finite_grad_retry_count": task.retries,
        }

    def on_before_optimizer_step(self, trainer: Any, step: int) -> None:
        # After the update the schedule has already advanced.
        self._learning_rates = [group["lr"] for group in self._trainer.optimizer.param_groups]

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        owner = self._trainer
        self.record_gradients()
        step_time, data_times = self._loader.pop_times(time.perf_counter())
        owner._in_step = False
        owner.step_info |= {
            "grad_norm": trainer.grad_norm,
            **{f"lr_{i}": rate for i, rate in enumerate(self._learning_rates)},
            "step_time": step_time,
            "data_time": data_times,
        }


class NativeView(TorchTrainerApi):
    """A mini trainer with the attributes of `trainformer.Trainer`, for native and HF callbacks."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self.mini_trainer = trainer

    def __getattr__(self, name: str) -> Any:
        run = self.__dict__.get("_run")
        if run is not None and name == "task":
            return run.task
        if run is not None and name in RunSettings.__dataclass_fields__:
            return getattr(run.settings, name)
        raise AttributeError(f"a mini trainer has no attribute {name!r} for callbacks")

    def was_set(self, name: str) -> bool:
        return name in self._run.passed

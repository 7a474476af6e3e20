"""A run of a `BaseTrainer`: its session, its books, and how callbacks of other dialects see it.

The loop, the checkpoint components and the run folder are the session's. What differs from it is that checkpoints are
written by hooks, into single files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from trainformer.backends.torch import capture_random, restore_random
from trainformer.backends.torch.state import cloned
from trainformer.callbacks.base import CallbackList
from trainformer.checkpointing import StateComponent, StatefulAdapter
from trainformer.mini.adapter import Loader, StandingRates, TrainerTask, UsersStrategy, as_loader, state_options
from trainformer.mini.hooks.metrics import LoggingHook, ProgressHook
from trainformer.run import RunSettings, TorchRun
from trainformer.run.provenance import size_of
from trainformer.run.settings import FrontOptions
from trainformer.run.signals import SignalRules
from trainformer.run.torch.api import TorchTrainerApi
from trainformer.utils.distributed import rank, world_size
from trainformer.utils.helpers import seed_everything

if TYPE_CHECKING:
    from trainformer.mini.trainer import BaseTrainer

_LOG_EVERY = 100  # where no hook says how often
#: Inside the workspace, for the session's own checkpoints, of which there are none.
_NO_CHECKPOINTS = ".checkpoints"


class MiniRun(TorchRun):
    """A session whose checkpoints are those of the `CheckpointingHook`s."""

    mini: BaseTrainer

    def save(self) -> str | None:
        """Let the hooks write; where the first of them wrote to."""
        self.loggers.flush()
        state = self.state
        before, state.saved_at = state.saved_at, state.step
        hooks = self.mini._checkpointing()
        due = [hook for hook in hooks if hook.is_due] or hooks  # nobody's interval: the end, a signal, or a callback
        written = [path for path in [hook.save(self.mini) for hook in due] if path is not None]
        if not written:
            state.saved_at = before
        return str(written[0]) if written else None

    def components(self) -> list[StateComponent]:
        """The session's own. A model that ranks divide, and its optimizer, go through `torch.distributed.checkpoint`.

        It compares names and shapes itself; here the first rank alone may hold the whole state.
        """
        components = super().components()
        options, task = state_options(self.mini), self.task
        if options is None:
            return components
        model, optimizer = self.mini.model, self.backend.optimizer

        def put(state: dict[str, Any]) -> None:
            set_optimizer_state_dict(model, optimizer, cloned(state), options=options)

        shared = {
            "model": StatefulAdapter(task.model_state_dict, task.load_model_state_dict),
            "optimizer": StatefulAdapter(lambda: get_optimizer_state_dict(model, optimizer, options=options), put),
        }
        return [replace(c, stateful=shared.get(c.key, c.stateful)) for c in components]


def make_run(trainer: BaseTrainer) -> MiniRun:
    """The session of a trainer whose parts have been built."""
    loader = as_loader(trainer.data_loader, trainer)
    # The run is announced under the name of the user's class.
    task: TrainerTask = type(type(trainer).__name__, (TrainerTask,), {})(trainer)
    view = NativeView(trainer)
    callbacks = CallbackList([Bookkeeper(trainer, task, loader), *trainer.hooks])
    passed = frozenset({"max_steps", "device", "optimizer", "scheduler"})
    with _seeds_as_they_are():
        run = MiniRun(
            view,
            task,
            _settings(trainer),
            data=loader,
            callbacks=callbacks,
            passed=passed,
            options=_habits(trainer),
        )
    run.mini = trainer
    run.train_size = size_of(getattr(trainer.data_loader, "dataset", None))
    scaler = trainer.grad_scaler
    run.backend.precision.scaler = scaler if scaler is not None and scaler.is_enabled() else None
    view._run = run
    return run


@contextmanager
def _seeds_as_they_are() -> Iterator[None]:
    """A session seeds everything; here that is the user's business, who has built a model by now."""
    random, hashing = capture_random(), os.environ.get("PYTHONHASHSEED")
    says_so = logging.getLogger(seed_everything.__module__)
    level = says_so.level
    says_so.setLevel(logging.WARNING)
    try:
        yield
    finally:
        says_so.setLevel(level)
        restore_random(random)
        if hashing is None:
            os.environ.pop("PYTHONHASHSEED", None)
        else:
            os.environ["PYTHONHASHSEED"] = hashing


def _settings(trainer: BaseTrainer) -> RunSettings:
    retries = trainer.max_non_finite_grad_retries
    return RunSettings(
        strategy=UsersStrategy(),
        max_steps=trainer.max_steps,
        gradient_clip=trainer.grad_clip,
        nonfinite=f"retry:{retries}" if retries else "raise",
        precision=trainer.mixed_precision or "no",
        accumulation_steps=trainer.gradient_accumulation_steps,
        device=trainer.device,
        optimizer=trainer.optimizer,
        scheduler=trainer.lr_scheduler or StandingRates(trainer.optimizer),
        oom="raise",  # half a batch need not give half of what forward() makes of it
        seed=trainer._data_seed,
        log="none",
        log_every=_log_every(trainer.hooks),
        run_dir=trainer.workspace,
        save_dir=_NO_CHECKPOINTS,
        save_every=None,
        eval_every=None,
        num_workers=0,
    )


def _log_every(hooks: list[Any]) -> int:
    """The run's own records come when the hooks read from the device anyway."""
    for kind in (LoggingHook, ProgressHook):
        if intervals := [hook.interval for hook in hooks if isinstance(hook, kind)]:
            return min(intervals)
    return _LOG_EVERY


def _habits(trainer: BaseTrainer) -> FrontOptions:
    hooks = trainer._checkpointing()
    signals = SignalRules(stopping=())
    if hooks:
        stopping = dict.fromkeys(number for hook in hooks for number in hook.exit_signals)
        # SingleProcess there is nobody to wait for.
        wait = max(hook.exit_wait for hook in hooks) if world_size() > 1 else 0.0
        signals = SignalRules(tuple(stopping), hooks[0].exit_code, wait)
    return FrontOptions(
        plan={"log_first": False, "save_at_end": bool(hooks)},
        keeps_folder=trainer.workspace is not None and rank() == 0,
        fresh_start_hint="pass load=None to the CheckpointingHook",
        signals=signals,
    )


class Bookkeeper:
    """The first to hear of a step: keeps the trainer's `step` and `step_info`, before any hook looks at them."""

    def __init__(self, trainer: BaseTrainer, task: TrainerTask, loader: Loader) -> None:
        self._trainer = trainer
        self._task = task
        self._loader = loader
        self._rates: list[Any] = []

    def on_train_begin(self, trainer: Any) -> None:
        """Forget what an earlier run was waiting for."""
        self._loader.take_times(0.0)
        self._task.on_step_skipped()

    def on_step_begin(self, trainer: Any, step: int) -> None:
        """From here on the step counts as the current one."""
        self._trainer._in_step = True

    def on_before_optimizer_step(self, trainer: Any, step: int) -> None:
        """The rates of this step; after it the schedule has moved on."""
        self._rates = [group["lr"] for group in self._trainer.optimizer.param_groups]

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        """What the step gave. Tensors stay on the device."""
        owner = self._trainer
        step_time, data_time = self._loader.take_times(time.perf_counter())
        mean, records = self._task.take_window()
        owner._in_step = False
        owner.step_info = {
            "loss": mean,
            "records": records,
            "grad_norm": trainer.grad_norm,
            **{f"lr_{i}": rate for i, rate in enumerate(self._rates)},
            "step_time": step_time,
            "data_time": data_time,
        }


class NativeView(TorchTrainerApi):
    """A mini trainer as callbacks of other dialects see it: with the names of `trainformer.Trainer`."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self.mini_trainer = trainer

    def __getattr__(self, name: str) -> Any:
        run = self.__dict__.get("_run")
        if run is not None and name == "task":
            return run.task
        if run is not None and name in RunSettings.__dataclass_fields__:
            return getattr(run.settings, name)
        raise AttributeError(f"a mini trainer offers callbacks no {name!r}")

    def was_set(self, name: str) -> bool:
        """Whether the user set a setting."""
        return name in self._run.passed

"""A run on torch: task, data and backend, and what can be asked of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from trainformer.backends.torch import TorchBackend
from trainformer.backends.torch.state import cloned, gathered
from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.ema import EMA
from trainformer.checkpointing import SharingPattern, StateComponent
from trainformer.checkpointing.checkpointer import Assets, load_components
from trainformer.checkpointing.components import callback_states
from trainformer.checkpointing.torch_components import TRAINED, torch_components
from trainformer.checkpointing.torch_files import TorchFiles, write_single_file
from trainformer.core.types import DataSource
from trainformer.distributed import TorchProcessGroup, make_strategy
from trainformer.engine import Event
from trainformer.run.provenance import size_of
from trainformer.run.run import Run
from trainformer.run.settings import FrontOptions
from trainformer.run.setup import validate_settings
from trainformer.run.torch.data import load_options, load_training_data, make_source
from trainformer.run.torch.dry_run import DryRun
from trainformer.run.torch.evaluation import Evaluation
from trainformer.run.torch.provenance import record_config, record_derived
from trainformer.run.torch.settings import RunSettings
from trainformer.run.torch.setup import adapt_settings, check_launch, check_task, configure_task, is_map_style
from trainformer.tasks.base import provides
from trainformer.utils.helpers import seed_everything


class TorchRun(Run):
    """One run on torch; `owner` is what callbacks receive as `trainer`.

    `passed` are the settings that the user named; they stay as they are. `adapted` are those that follow from task or
    data, `declared` the arguments of the task before it saw the data, `same_classes` whether a label means the same
    class in training and validation data.
    """

    settings: RunSettings
    process_group: TorchProcessGroup
    backend: TorchBackend
    train_source: DataSource
    val_source: DataSource | None

    def __init__(
        self,
        owner: Any,
        task: Any,
        settings: RunSettings,
        *,
        data: Any,
        val_data: Any = None,
        val_split: float | int | None = None,
        callbacks: CallbackList,
        passed: frozenset[str] = frozenset(),
        console: Console | None = None,
        options: FrontOptions | None = None,
    ) -> None:
        validate_settings(settings)
        strategy = make_strategy(settings.strategy)
        strategy.setup_environment(settings.device, settings.rank_timeout)
        process_group = strategy.process_group
        seed_everything(settings.seed, deterministic=False)
        check_task(task)
        adapted = adapt_settings(settings, task, data, passed)
        if settings.ema is not None and not any(isinstance(callback, EMA) for callback in callbacks):
            callbacks.add(EMA(decay=settings.ema))
        with process_group.main_first():  # rank 0 reads and fills caches, the others use them
            loaded = load_training_data(task, data, val_data, val_split, settings.seed)
        if "sampler" in adapted and not is_map_style(loaded.train):
            settings.sampler = None
            del adapted["sampler"]
        arguments = dataclasses.fields(task) if dataclasses.is_dataclass(task) else ()
        self.declared = {f.name: copy.copy(getattr(task, f.name)) for f in arguments if f.init}
        self.task, self.info, self.adapted, self.same_classes = task, loaded.info, adapted, loaded.comparable
        configure_task(task, loaded)
        # A copy: the backend keeps the settings that it was built with.
        backend = TorchBackend(task, RunSettings(**settings.values()), strategy, provides(task, "on_eval_end"))
        with process_group.main_first():
            load = load_options(settings, backend.device, process_group)
            train_source = make_source(task, loaded.train, load, train=True)
            self.evaluation = Evaluation(owner, task, backend, callbacks, settings, loaded)
        if not process_group.is_single_process:
            # Up to here all ranks have drawn the same random numbers, so they have the same initial weights.
            seed_everything(settings.seed + 1 + strategy.random_stream, deterministic=False)
        super().__init__(
            owner=owner,
            settings=settings,
            options=options or FrontOptions(),
            process_group=process_group,
            backend=backend,
            files=TorchFiles(on_device=backend.device.type != "cpu"),
            callbacks=callbacks,
            train_source=train_source,
            val_source=self.evaluation.val_source,
            train_size=size_of(getattr(train_source, "dataset", loaded.train)),
            data=data,
            passed=passed,
            console=console or Console(),
        )

    # -- description -------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return type(self.task).__name__

    def describe(self) -> str:
        backend = self.backend
        parameters = backend.strategy.count_parameters(backend.parameters)
        together = "" if self.process_group.is_single_process else f" ({backend.strategy.describe()})"
        name = getattr(self.task, "title", self.title)
        others = sorted({str(p.dtype).removeprefix("torch.") for p in backend.parameters} - {"float32", "float64"})
        return (
            f"{name} on {backend.device}{together} in {backend.precision.name}: {parameters:,} trainable parameters"
            + (f" ({', '.join(others)})" if others else "")
        )

    def model_shapes(self) -> list[tuple[str, list[int]]]:
        return [(name, list(p.shape)) for name, p in self.task.model.named_parameters()]

    def assets(self) -> Assets | None:
        return self.task.save_assets if provides(self.task, "save_assets") else None

    def task_handlers(self) -> dict[Event, Any]:
        task = self.task
        handlers = {
            "on_train_begin": (Event.TRAIN_BEGIN, lambda: task.on_train_begin()),
            "on_train_end": (Event.TRAIN_END, lambda: task.on_train_end()),
            "on_epoch_begin": (Event.EPOCH_BEGIN, lambda epoch: task.on_epoch_begin(epoch)),
            "on_epoch_end": (Event.EPOCH_END, lambda epoch, metrics: task.on_epoch_end(epoch, metrics)),
            "on_step_end": (Event.STEP_END, lambda step, loss: task.on_step_end(step, self.total_steps() or 0)),
            "on_validation_end": (Event.EVAL_END, lambda metrics: task.on_validation_end(metrics)),
        }
        return {event: handler for name, (event, handler) in handlers.items() if provides(task, name)}

    def device_info(self) -> dict[str, Any]:
        return {"device": str(self.backend.device), "precision": self.backend.precision.name}

    def fault_counters(self) -> dict[str, int]:
        return {"skipped": self.backend.guard.skipped, "pieces": self.backend.splitter.pieces}

    def memory_gb(self) -> float | None:
        device = self.backend.device  # the CUDA allocator counts on the host: no sync
        return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else super().memory_gb()

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        return self.task.evaluation_records() if provides(self.task, "evaluation_records") else {}

    def check_launch(self) -> None:
        check_launch(self.backend.strategy)

    def record_config(self) -> None:
        record_config(self)

    def record_derived(self) -> None:
        record_derived(self)

    def validate(self) -> dict[str, float]:
        return self.evaluation.validate()

    # -- state -------------------------------------------------------------------------------------------------

    def components(self) -> list[StateComponent]:
        return torch_components(
            self.task,
            self.backend,
            self.train_source,
            self.common_components(),
            callback_states(self.callbacks.named()),
        )

    def save_file(self, path: Path) -> Path:
        """Write everything to a single file. A collective: rank 0 writes."""
        states = {c: gathered(c.stateful.state_dict()) for c in self.components()}
        own = {c.key: state for c, state in states.items() if c.sharing_pattern is SharingPattern.PER_RANK}
        per_rank = self.process_group.all_gather_object(own)
        content = {c.key: state for c, state in states.items()}
        self.process_group.run_on_main(lambda: write_single_file(path, content, per_rank))
        return path

    def unsharded_model(self) -> nn.Module:
        """The model to evaluate, predict and export with, all of it on this rank. A collective."""
        chosen, model = self.evaluation.model(), self.backend.strategy.unsharded_model()
        if model is self.task.model:  # not sharded
            return chosen
        if chosen is not self.task.model:
            model.load_state_dict(gathered(chosen.state_dict()))
        return model

    @contextmanager
    def sandbox(self) -> Iterator[DryRun]:
        """For trial steps: afterwards model, optimizer, random numbers and position are as before."""
        before = self.trained_state()
        try:
            yield DryRun(self)
        finally:
            self.backend.drop_step()
            self.backend.guard.reset()
            self.restore_trained(before)

    def trained_state(self) -> dict[str, Any]:
        """A copy of everything that steps change."""
        to_host = self.backend.device.type != "cpu"
        return {c.key: cloned(c.stateful.state_dict(), to_host) for c in self.components() if c.key in TRAINED}

    def restore_trained(self, state: dict[str, Any]) -> None:
        """Restore what `trained_state` returned."""
        load_components([c for c in self.components() if c.key in state], state)

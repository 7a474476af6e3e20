"""Set-up of a torch run: from task, data and settings to the parts of a run, in one function.

`build_run` is the whole order of things: process group, seeds, task defaults, data, model, optimizer, sources. Only
settings that the user left alone are adapted to the task and the data.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from trainformer.backends.torch import TorchBackend
from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.ema import EMA
from trainformer.checkpointing.torch_files import TorchFiles
from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import DataSource
from trainformer.data.labels import is_stream
from trainformer.data.metadata import DatasetInfo
from trainformer.data.mixture.dataset import MixtureDataset
from trainformer.data.mixture.stream import MixtureStream
from trainformer.distributed import Strategy, TorchProcessGroup, make_strategy
from trainformer.distributed.process_group import Launch
from trainformer.run.monitoring import adapt_monitor_mode, warn_about_callbacks
from trainformer.run.provenance import size_of
from trainformer.run.settings import FrontOptions
from trainformer.run.setup import RunParts, validate_settings
from trainformer.run.torch.data import TrainingData, is_loader, load_options, load_training_data, make_source
from trainformer.run.torch.data_checks import (
    check_batches,
    check_reusable,
    describe_sample,
    warn_about_data,
    warn_about_ignored,
)
from trainformer.run.torch.evaluation import Evaluation, Inference
from trainformer.run.torch.mixture import as_training_data
from trainformer.run.torch.record import RecordedData
from trainformer.run.torch.settings import RunSettings
from trainformer.run.validation_sets import check_eval_every, default_monitor, eval_cadences
from trainformer.tasks.base import provides
from trainformer.tasks.contract import check_methods, check_model, explain_missing
from trainformer.utils.helpers import seed_everything

logger = logging.getLogger("trainformer")


@dataclass(frozen=True, kw_only=True)
class TorchParts(RunParts):
    """The parts of a torch run.

    `adapted` are the settings that follow from task or data, `declared` the arguments of the task before it saw the
    data, `same_classes` whether a label means the same class in training and validation data.
    """

    settings: RunSettings
    process_group: TorchProcessGroup
    backend: TorchBackend
    train_source: DataSource
    task: Any
    info: DatasetInfo
    evaluation: Evaluation
    adapted: dict[str, Any]
    declared: dict[str, Any]
    same_classes: bool


def build_run(
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
) -> TorchParts:
    """Build the parts of a run. `passed` are the settings that the user named; they stay as they are."""
    validate_settings(settings)
    data = as_training_data(data)
    strategy = make_strategy(settings.strategy)
    strategy.setup_environment(settings.device, settings.rank_timeout)
    process_group = strategy.process_group
    seed_everything(settings.seed, deterministic=False)
    check_task(task)
    check_reusable(val_data)
    adapted = adapt_to_loader(settings, data, passed) | adapt_to_task(settings, task, passed)
    adapted |= adapt_monitor_mode(settings, passed)
    warn_about_ignored(settings, data, passed)
    if settings.ema is not None and not any(isinstance(callback, EMA) for callback in callbacks):
        callbacks.add(EMA(decay=settings.ema))
    with process_group.main_first():  # rank 0 reads and fills caches, the others use them
        loaded = load_training_data(task, data, val_data, val_split, settings.seed)
    is_mixture = isinstance(loaded.train, MixtureDataset | MixtureStream)
    if not isinstance(loaded.train, RecordedData):
        check_batches(loaded.train, "the training data")
        for name, val in loaded.val_sets.items():
            check_batches(val, f"the validation data {name}".rstrip())
            warn_about_data(loaded.train, val, loaded.info)
        if not loaded.val_sets:
            warn_about_data(loaded.train, None, loaded.info)
        warn_about_callbacks(callbacks, has_validation=bool(loaded.val_sets))
    if "sampler" in adapted and (is_mixture or not is_map_style(loaded.train)):
        if is_mixture and settings.sampler != "length":
            what = "the sampler %r of %s is not used: a mixture decides which samples are drawn"
            logger.warning(what, settings.sampler, type(task).__name__)
        settings.sampler = None
        del adapted["sampler"]
    if not isinstance(loaded.train, RecordedData):  # which is for evaluation and prediction only
        adapted |= adapt_to_validation(settings, loaded, passed)
    if is_mixture and hasattr(task, "per_sample_losses"):
        task.per_sample_losses = True
    declared = _declared_arguments(task)
    configure_task(task, loaded)
    check_model(task)
    # A copy: the backend keeps the settings that it was built with.
    make_backend = backend_class(task)
    backend = make_backend(task, RunSettings(**settings.values()), strategy, provides(task, "on_eval_end"))
    backend.checks.describe_sample = partial(describe_sample, loaded.train)
    with process_group.main_first():
        load = load_options(settings, backend.device, process_group)
        train_source = make_source(task, loaded.train, load, train=True)
        inference = Inference(owner, task, backend, callbacks, settings.seed)
        evaluation = Evaluation(inference, settings, loaded)
    if not process_group.is_single_process:
        # Up to here all ranks have drawn the same random numbers, so they have the same initial weights.
        seed_everything(settings.seed + 1 + strategy.random_stream, deterministic=False)
    return TorchParts(
        settings=settings,
        options=options or FrontOptions(),
        process_group=process_group,
        backend=backend,
        files=TorchFiles(on_device=backend.device.type != "cpu"),
        callbacks=callbacks,
        train_source=train_source,
        val_sources=evaluation.val_sources,
        train_size=size_of(getattr(train_source, "dataset", loaded.train)),
        data=data,
        passed=passed,
        console=console or Console(),
        task=task,
        info=loaded.info,
        evaluation=evaluation,
        adapted=adapted,
        declared=declared,
        same_classes=loaded.comparable,
    )


def check_task(task: Any) -> None:
    """Reject an object that is not a task."""
    # Several optimizers may have one function each instead of `train_step`.
    needed = ("eval_step",) if hasattr(task, "configure_optimizers") else ("train_step", "eval_step")
    missing = [name for name in needed if not callable(getattr(task, name, None))]
    if missing or isinstance(task, type):
        what = f"the class {task.__name__}" if isinstance(task, type) else type(task).__name__
        do = f"Write {task.__name__}(...)." if isinstance(task, type) else explain_missing(task)
        raise BadArgument(expected("a task: an object with `model`, `train_step` and `eval_step`", what, do))
    check_methods(task)


def backend_class(task: Any) -> type[TorchBackend]:
    """The backend for the optimizers of a task: one, several, or stepped by the task."""
    if not hasattr(task, "configure_optimizers"):
        if hasattr(task, "manual_step"):
            do = "Return {name: OptimizerConfig(params=...)} from it; manual_step receives those optimizers."
            raise BadArgument(expected("configure_optimizers on a task with manual_step", "none", do))
        return TorchBackend
    from trainformer.backends.torch.manual import ManualOptimization
    from trainformer.backends.torch.several_optimizers import SeveralOptimizers

    return ManualOptimization if hasattr(task, "manual_step") else SeveralOptimizers


def configure_task(task: Any, loaded: TrainingData) -> None:
    """Let the task inspect the training data and build what depends on it, such as the head of its model."""
    if isinstance(loaded.train, RecordedData):
        loaded.train.configure(task)
        return
    if provides(task, "inspect_dataset") and is_map_style(loaded.train):
        task.inspect_dataset(loaded.train)
    if provides(task, "configure"):
        task.configure(loaded.info)


def check_launch(strategy: Strategy) -> None:
    """Raise if several processes were launched, and each would train on its own in the same folder."""
    world_size = Launch.find().world_size
    if type(strategy) is Strategy and world_size > 1:
        raise BadArgument(
            f"Expected a strategy for the {world_size} processes that were launched together, received 'single': each "
            "of them would train the whole model on its own and write to the same folder. Pass strategy='auto', or "
            "launch one process."
        )


# -- settings that the user left alone -----------------------------------------------------------------------------


def adapt_to_loader(settings: RunSettings, data: Any, passed: frozenset[str]) -> dict[str, Any]:
    """Take over the batch size of the user's own DataLoader. Returns what was changed."""
    size = getattr(data, "batch_size", None)
    if not is_loader(data) or not isinstance(size, int) or "batch_size" in passed:
        return {}
    settings.batch_size = size
    return {"batch_size": size}


def adapt_to_task(settings: RunSettings, task: Any, passed: frozenset[str]) -> dict[str, Any]:
    """Apply the task's `training_defaults`. Returns what was changed."""
    if not provides(task, "training_defaults"):
        return {}
    wanted = task.training_defaults(settings, passed)
    unknown = sorted(set(wanted) - set(RunSettings.defaults()))
    if unknown:
        raise BadArgument(expected("training_defaults to name settings of the run", ", ".join(unknown)))
    adapted = {name: value for name, value in wanted.items() if name not in passed}
    for name, value in adapted.items():
        setattr(settings, name, value)
    settings.validate()
    return adapted


def adapt_to_validation(settings: RunSettings, loaded: TrainingData, passed: frozenset[str]) -> dict[str, Any]:
    """With several validation sets, monitor the first that is evaluated by default. Returns what was changed."""
    check_eval_every(settings.eval_every, loaded.val_sets)
    cadences = eval_cadences(settings.eval_every, loaded.val_sets)
    evaluated = [n for n, every in cadences.items() if every is not None] if isinstance(cadences, dict) else []
    monitor = default_monitor(settings.monitor_metric, evaluated or loaded.val_sets)
    if "monitor_metric" in passed or monitor == settings.monitor_metric:
        return {}
    settings.monitor_metric = monitor
    return {"monitor_metric": monitor}


def is_map_style(data: Any) -> bool:
    """Whether samples can be read by index: neither a loader of batches nor a stream."""
    return not (is_loader(data) or is_stream(data))


def _declared_arguments(task: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(task):
        return {}
    return {f.name: copy.copy(getattr(task, f.name)) for f in dataclasses.fields(task) if f.init}

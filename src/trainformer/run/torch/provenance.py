"""What a torch run records of its configuration: settings, data, task, environment, and where each came from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from trainformer.run.provenance import record_length, record_settings
from trainformer.tasks.base import provides

if TYPE_CHECKING:
    from trainformer.run.torch.run import TorchRun


def record_config(run: TorchRun) -> None:
    """Fill the context's config: settings, environment, data, task, and derived values."""
    config = run.context.config
    record_settings(run, run.parts.adapted)
    _record_environment(run)
    info = run.info
    config.set_from_data("num_samples", info.num_samples)
    for name in ("num_classes", "class_names", "input_shape", "max_length"):
        if getattr(info, name) is not None:
            config.set_from_data(name, getattr(info, name), filterable=name == "num_classes")
    if run.val_sets:
        config.set_from_data("val_sets", list(run.val_sets))
    config.set_user("task_type", type(run.task).__name__, filterable=True)
    _record_task(run)
    record_derived(run)


def _record_task(run: TorchRun) -> None:
    """An argument that differs from its default was set by the user; what the data decided is derived."""
    task, config, declared = run.task, run.context.config, run.parts.declared
    if not provides(task, "config_dict"):
        return
    fields = dataclasses.fields(task) if declared else ()
    defaults = {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for f in fields}
    passed = getattr(task, "_passed", None)  # of tasks that set some of their arguments themselves (a recipe)
    for key, value in task.config_dict().items():
        name = f"task/{key}"
        by_itself = passed is not None and key not in passed and key in defaults and _differs(value, defaults[key])
        if declared and (key not in declared or _differs(value, declared[key]) or by_itself):
            config.set_derived(name, value, ("task_type", "num_samples"), filterable=True)
        elif key in defaults and not _differs(value, defaults[key]):
            config.set_default(name, value, filterable=True)
        else:
            config.set_user(name, value, filterable=True)


def _differs(value: Any, other: Any) -> bool:
    # A recorded value may differ in form from the argument: modules and functions are recorded by name.
    if not isinstance(other, (str, int, float, bool, list, tuple, dict, type(None))):
        return False
    return bool(value != other)


def _record_environment(run: TorchRun) -> None:
    config = run.context.config
    config.set_env("torch_version", torch.__version__)
    if run.settings.device is None:
        config.set_env("device", str(run.backend.device))
    config.set_env("cuda_available", torch.cuda.is_available())
    if torch.cuda.is_available():
        config.set_env("cuda_version", torch.version.cuda)
        config.set_env("gpu_name", torch.cuda.get_device_name(0))
        config.set_env("num_gpus", torch.cuda.device_count())


def record_derived(run: TorchRun) -> None:
    """What follows from the settings."""
    config = run.context.config
    record_length(config, run, run.settings.warmup_ratio)
    config.set_derived("precision_used", run.backend.precision.name, ("precision", "device"))

"""What is recorded of a run's configuration, and where each value came from."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainformer.context import record_arguments
from trainformer.session.data import size_of
from trainformer.tasks.base import provides

if TYPE_CHECKING:
    from trainformer.session.session import Session

# Values by which one would group or filter many runs.
_FILTERABLE = ("epochs", "batch_size", "lr", "accumulation_steps", "precision", "compile", "optimizer", "seed")

# Settings that do not change what is computed.
_INCIDENTAL = (
    "run_dir", "log", "log_every", "project", "resume", "num_workers", "prefetch_factor", "pin_memory", "suggested_lr",
    "strategy", "dispatch_batches", "rank_timeout",
)  # fmt: skip


def record_config(session: Session) -> None:
    """Fill the context's config: settings, environment, data, task, and what follows from them."""
    config, settings = session.context.config, session.settings
    record_arguments(config, settings.values(), settings.defaults(), session.passed, _FILTERABLE)
    for name, value in session.suited.items():
        config.set_derived(name, value, ("task_type",), filterable=name in _FILTERABLE)
    _record_environment(session)
    info = session.info
    config.set_from_data("num_samples", info.num_samples)
    for name in ("num_classes", "class_names", "input_shape", "max_length"):
        if getattr(info, name) is not None:
            config.set_from_data(name, getattr(info, name), filterable=name == "num_classes")
    config.set_user("task_type", type(session.task).__name__, filterable=True)
    _record_task(session)
    _record_derived(session)


def record_changes(session: Session) -> None:
    """Settings that were changed between two calls of `fit`, and what follows from them."""
    config = session.context.config
    for name, value in session.settings.values().items():
        if config.get(name) != value:
            config.set_user(name, value, filterable=name in _FILTERABLE)
    _record_derived(session)


def declared_arguments(task: Any) -> dict[str, Any]:
    """The arguments of a task that is a dataclass, as they are before the data have been seen."""
    if not dataclasses.is_dataclass(task):
        return {}
    return {f.name: copy.copy(getattr(task, f.name)) for f in dataclasses.fields(task) if f.init}


def _record_task(session: Session) -> None:
    """An argument of the task is the user's where it differs from its default; what the data decided is derived."""
    task, config, declared = session.task, session.context.config, session.declared
    if not provides(task, "config_dict"):
        return
    defaults = {f.name: _default(f) for f in dataclasses.fields(task)} if declared else {}
    passed = getattr(task, "_passed", None)  # of tasks that set some of their arguments themselves (by a recipe)
    for key, value in task.config_dict().items():
        name = f"task/{key}"
        by_itself = passed is not None and key not in passed and key in defaults and _differs(value, defaults[key])
        if declared and (key not in declared or _differs(value, declared[key]) or by_itself):
            config.set_derived(name, value, ("task_type", "num_samples"), filterable=True)
        elif key in defaults and not _differs(value, defaults[key]):
            config.set_default(name, value, filterable=True)
        else:
            config.set_user(name, value, filterable=True)


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _differs(value: Any, other: Any) -> bool:
    # A value written down may have another form than the argument: a module or a function is given by its name.
    if not isinstance(other, (str, int, float, bool, list, tuple, dict, type(None))):
        return False
    return bool(value != other)


def fingerprint(session: Session) -> str:
    """What makes two commands the same command: settings, task, model and data, but not where things are written."""
    recorded = session.context.config.to_json()
    parts = {
        "config": {k: v["value"] for k, v in recorded.items() if v["source"] != "env" and k not in _INCIDENTAL},
        "resume": str(session.settings.resume or "auto"),
        "model": [(name, list(p.shape)) for name, p in session.task.model.named_parameters()],
        "data": describe_data(session.owner_data),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def describe_data(data: Any) -> Any:
    """Enough of what was passed as data to tell other data apart, at no cost: a path, or a look at some of the rows."""
    if isinstance(data, (str, Path)):
        return str(data)
    if isinstance(data, (tuple, list)) and len(data) <= 8:
        return [describe_data(part) for part in data]
    if hasattr(data, "tensors"):
        return [describe_data(part) for part in data.tensors]
    if hasattr(data, "shape") and hasattr(data, "dtype") and len(data.shape) > 0:
        rows = torch.as_tensor(data[:4]), torch.as_tensor(data[-4:])
        return [list(data.shape), *(hashlib.sha256(str(r.double().tolist()).encode()).hexdigest()[:16] for r in rows)]
    # A data set of HuggingFace knows its own history.
    place = getattr(data, "root", None) or getattr(data, "path", None) or getattr(data, "_fingerprint", None)
    return [type(data).__name__, size_of(data), str(place) if place else None]


def _record_environment(session: Session) -> None:
    config = session.context.config
    config.set_env("torch_version", torch.__version__)
    config.set_env("device", str(session.backend.device))
    config.set_env("cuda_available", torch.cuda.is_available())
    if torch.cuda.is_available():
        config.set_env("cuda_version", torch.version.cuda)
        config.set_env("gpu_name", torch.cuda.get_device_name(0))
        config.set_env("num_gpus", torch.cuda.device_count())


def _record_derived(session: Session) -> None:
    config, settings = session.context.config, session.settings
    total = session.total_steps()
    inputs = "num_samples", "batch_size", "accumulation_steps"
    config.set_derived("steps_per_epoch", session.steps_per_epoch(), inputs)
    config.set_derived("total_steps", total, ("steps_per_epoch", "epochs", "max_steps"))
    warmup = None if total is None else int(total * settings.warmup_ratio)
    config.set_derived("warmup_steps", warmup, ("total_steps", "warmup_ratio"))
    effective = settings.batch_size * settings.accumulation_steps
    config.set_derived("effective_batch_size", effective, ("batch_size", "accumulation_steps"), filterable=True)
    config.set_derived("precision_used", session.backend.precision.name, ("precision", "device"))

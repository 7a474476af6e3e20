"""What is recorded of a run's configuration, and where each value came from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

import torch

from trainformer.context import PipelineConfig, record_arguments
from trainformer.tasks.base import provides

if TYPE_CHECKING:
    from trainformer.session.session import Session

# Values by which one would group or filter many runs.
_FILTERABLE = ("epochs", "batch_size", "lr", "accumulation_steps", "precision", "compile", "optimizer", "seed")

# Settings that do not change what is computed.
_INCIDENTAL = ("run_dir", "log", "log_every", "project", "resume", "num_workers", "suggested_lr")


def record_config(session: Session) -> None:
    """Fill the context's config: settings, environment, data, task, and what follows from them."""
    config, settings = session.context.config, session.settings
    record_arguments(config, settings.values(), settings.defaults(), session.passed, _FILTERABLE)
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


def _record_task(session: Session) -> None:
    """Arguments of the task are the user's where they differ from their defaults; the rest was derived."""
    task, config = session.task, session.context.config
    if not provides(task, "config_dict"):
        return
    values = task.config_dict()
    if not dataclasses.is_dataclass(task):
        for key, value in values.items():
            config.set_user(f"task/{key}", value, filterable=True)
        return
    arguments = {f.name: f.default for f in dataclasses.fields(task) if f.init}
    for key, value in values.items():
        if key not in arguments:
            config.set_derived(f"task/{key}", value, ("task_type",))
        elif value == arguments[key]:
            config.set_default(f"task/{key}", value, filterable=True)
        else:
            config.set_user(f"task/{key}", value, filterable=True)


def fingerprint(config: PipelineConfig) -> str:
    """What makes two commands the same command: settings, task and data, but not where things are written."""
    values = {k: v for k, v in config.to_json().items() if v["source"] != "env" and k not in _INCIDENTAL}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


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

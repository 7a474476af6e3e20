"""What a run records of its configuration, and the fingerprint by which the same command is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainformer.checkpointing.checkpointer import versions
from trainformer.context import ConfigSource, PipelineConfig, record_arguments
from trainformer.core.errors import BadArgument
from trainformer.core.secrets import find_mask
from trainformer.data.mixture.mixture import Mixture
from trainformer.live.runs import read_config

if TYPE_CHECKING:
    from trainformer.checkpointing.manifest import Manifest
    from trainformer.run.run import Run

# Values by which runs are typically grouped or filtered.
FILTERABLE = ("epochs", "batch_size", "lr", "accumulation_steps", "precision", "compile", "optimizer", "seed")

# Settings that do not change what is computed.
_INCIDENTAL = (
    "run_dir", "log", "log_every", "project", "resume", "num_workers", "prefetch_factor", "pin_memory", "suggested_lr",
    "strategy", "dispatch_batches", "rank_timeout", "sharding_array",
)  # fmt: skip


_PLACES = ("run_dir", "save_dir", "name", "resume", "load_components")

# Settings that may differ when a run is resumed: these, its length, and what is saved and evaluated when.
ADJUSTABLE = frozenset(_INCIDENTAL) | {
    "epochs", "max_steps", "name", "save_dir", "save_every", "save_strategy", "save_best", "save_last", "keep_every",
    "save_async", "eval_on_save", "eval_every", "eval_batch_size", "monitor_metric", "monitor_mode", "load_components",
    "exit_on_signal", "nonfinite", "oom", "bad_samples", "compile", "channels_last", "gradient_checkpointing",
    "activation_offload", "sdpa_backend", "matmul_precision", "fp8_dim_alignment",
}  # fmt: skip


def record_settings(run: Run, derived: Mapping[str, Any]) -> None:
    """Record the settings and where each came from: the user, a default, or `derived` from the task or data."""
    config, settings = run.context.config, run.settings
    record_arguments(config, settings.values(), settings.defaults(), run.passed, FILTERABLE)
    if isinstance(run.parts.data, Mixture):
        config.set_user("mixture", run.parts.data.describe())
    for name, value in derived.items():
        config.set_derived(name, value, ("task_type",), filterable=name in FILTERABLE)


def record_changes(run: Run) -> None:
    """Record settings that were changed between two calls of `fit`, and what follows from them."""
    config = run.context.config
    for name, value in run.settings.values().items():
        # A setting left to the machine, such as the device, still counts as unset.
        left = value is None and name in config and config.source(name) is ConfigSource.ENV
        if config.get(name) != value and not left:
            config.set_user(name, value, filterable=name in FILTERABLE)
    run.record_derived()


def record_length(config: PipelineConfig, run: Run, warmup_ratio: float) -> None:
    """Record the length of the run, which follows from data and settings."""
    total, settings = run.total_steps(), run.settings
    inputs = "num_samples", "batch_size", "accumulation_steps"
    config.set_derived("steps_per_epoch", run.steps_per_epoch(), inputs)
    config.set_derived("total_steps", total, ("steps_per_epoch", "epochs", "max_steps"))
    warmup = None if total is None else int(total * warmup_ratio)
    config.set_derived("warmup_steps", warmup, ("total_steps", "warmup_ratio"))
    effective = settings.batch_size * settings.accumulation_steps
    config.set_derived("effective_batch_size", effective, ("batch_size", "accumulation_steps"), filterable=True)


def fingerprint(run: Run) -> str:
    """Identifies a command: settings, task, model and data, but not where output goes."""
    recorded = run.context.config.to_json()
    parts = {
        "config": {k: v["value"] for k, v in recorded.items() if v["source"] != "env" and k not in _INCIDENTAL},
        "resume": str(run.settings.resume or "auto"),
        "model": run.model_shapes(),
        "data": describe_data(run.parts.data),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_unchanged(run: Run, folder: Path, checkpoint: Path, ignore: Collection[str] = ()) -> None:
    """Refuse to resume a run of the folder with settings that would make it another run. Run by rank 0."""
    config, before = run.context.config, read_config(folder)
    now = json.loads(json.dumps(config.to_json()))
    skipped = {*ADJUSTABLE, *ignore}
    names = [k for k in now if k in before and k not in skipped and now[k]["source"] not in ("env", "derived")]
    names = [k for k in names if before[k].get("source") != "derived"]  # during the run: a learning rate by LRFinder
    names = [k for k in names if _is_plain(config.get(k))]  # the text of an optimizer changes while it trains
    changed = {k: (before[k]["value"], now[k]["value"]) for k in names if before[k]["value"] != now[k]["value"]}
    # Where a model or data lie may differ from one job of a cluster to the next.
    changed = {k: pair for k, pair in changed.items() if not all(map(_is_absolute, pair))}
    changed = {k: values for k, values in changed.items() if find_mask(values[0]) is None}  # a secret may be another
    if changed:
        listed = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())
        proceed = run.options.continue_hint.format(folder=folder, checkpoint=checkpoint)
        raise BadArgument(
            f"Expected the settings that wrote {checkpoint}, received others: {listed}. To continue from it with the "
            f"new settings, {proceed}; to start from scratch, {run.options.fresh_start_hint}; or choose another folder "
            "or name."
        )


def differences(run: Run, folder: Path, manifest: Manifest) -> list[str]:
    """What is different from the process that wrote a checkpoint: settings, number of processes, versions."""
    before, now = read_config(folder), json.loads(json.dumps(run.context.config.to_json()))
    found = []
    for name, entry in now.items():
        old, new = before.get(name, entry)["value"], entry["value"]
        # What follows from other settings, and where files are, would repeat or tell nothing.
        # What the run found itself before, such as the learning rate of LRFinder, is restored and no different now.
        is_found = entry["source"] == "default" and before.get(name, entry).get("source") == "derived"
        told = entry["source"] != "derived" and name not in _PLACES and _is_plain(run.context.config.get(name))
        told = told and not is_found
        if told and old != new and find_mask(old) is None:
            found.append(f"{name} {old!r} -> {new!r}")
    if manifest.world_size != run.process_group.world_size:
        found.append(f"{manifest.world_size} -> {run.process_group.world_size} processes")
    installed = versions(run.files)
    pairs = [(name, old, installed.get(name)) for name, old in manifest.versions.items()]
    return found + [f"{name} {old} -> {new}" for name, old, new in pairs if new is not None and old != new]


def _is_absolute(value: Any) -> bool:
    return isinstance(value, str) and Path(value).is_absolute()


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, Path))


def describe_data(data: Any) -> Any:
    """Enough to tell datasets apart at no cost: a path, or a few of the rows."""
    if isinstance(data, (str, Path)):
        return str(data)
    if isinstance(data, Mixture):
        return [data.describe(), {name: describe_data(source) for name, source in data.sources.items()}]
    if isinstance(data, (tuple, list)) and len(data) <= 8:
        return [describe_data(part) for part in data]
    if hasattr(data, "tensors"):
        return [describe_data(part) for part in data.tensors]
    if hasattr(data, "shape") and hasattr(data, "dtype") and len(data.shape) > 0:
        # bf16 of torch, too
        first, last = (r.double() if hasattr(r, "double") else np.asarray(r, np.float64) for r in (data[:4], data[-4:]))
        return [
            list(data.shape),
            *(hashlib.sha256(str(rows.tolist()).encode()).hexdigest()[:16] for rows in (first, last)),
        ]
    # A HuggingFace dataset has its own fingerprint.
    place = getattr(data, "root", None) or getattr(data, "path", None) or getattr(data, "_fingerprint", None)
    return [type(data).__name__, size_of(data), str(place) if place else None]


def size_of(data: Any) -> int | None:
    """Number of samples, where that is known; of a DataLoader, those of its dataset."""
    if hasattr(data, "batch_sampler") and hasattr(data, "dataset"):
        data = data.dataset
    try:
        return len(data)
    except TypeError:
        return None

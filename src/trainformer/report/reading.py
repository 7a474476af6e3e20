"""Reads run and sweep folders into plain values for the page. Missing or damaged files are skipped, never an error."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainformer.checkpointing.store import CheckpointStore, checkpoints_folder
from trainformer.core.secrets import mask
from trainformer.engine.state import is_better
from trainformer.live.runs import RunInfo, describe, read_config
from trainformer.loggers.jsonl import read_jsonl
from trainformer.report.events import collect_events, shortened, texts_in_metrics
from trainformer.report.series import MAX_POINTS, Series, read_clock, read_series
from trainformer.sweep.reading import read_sweep

_LOG_LINES, _LOG_BYTES = 200, 1 << 16
_MAX_VALUE_LENGTH = 2_000


def read_run(folder: Path, points: int = MAX_POINTS) -> dict[str, Any]:
    """The content of the page about one run. `points` is the maximum per curve."""
    info, notes = describe(folder), list[str]()
    config = {
        name: {
            "value": shortened(mask(entry["value"], name), _MAX_VALUE_LENGTH),
            "source": str(entry.get("source", "")),
            "depends_on": [str(other) for other in found] if isinstance(found := entry.get("depends_on"), list) else [],
        }
        for name, entry in read_config(folder).items()
    }
    metrics = _records(folder / "metrics.jsonl", notes)
    records = _records(folder / "records.jsonl", notes)
    events = collect_events([*records, *texts_in_metrics(metrics, records)])
    series = read_series(metrics, points)
    timed = [record for record in records if isinstance(record.get("time"), float | int)]
    starts = [record["time"] for record in timed if record.get("kind") in ("began", "resumed")]
    clock = read_clock(metrics, starts, [record["time"] for record in timed])
    best = _best(series, config)
    return {
        "name": info.name,
        "path": str(folder),
        "status": info.status,
        "host": info.host,
        "since": info.since,
        "task": _value(config, "task_type"),
        "step": max(info.step, clock["steps"][-1] if clock["steps"] else 0, _last_step(records)),
        "steps_planned": total if isinstance(total := _value(config, "total_steps"), int) else info.steps,
        "seconds": _training_seconds(info, clock, starts),
        "loss": series["train/loss"].values[-1] if "train/loss" in series else None,
        "best": best,
        "series": {name: [_rounded(s.steps), _rounded(s.values), s.total] for name, s in series.items()},
        "clock": clock,
        "config": config,
        "marks": [
            {"kind": event["kind"], "step": _step_of(event)}
            for event in events["events"]
            if event["kind"] in ("resumed", "split", "skipped") and isinstance(_step_of(event), int)
        ],
        "checkpoints": _checkpoints(folder, best, notes),
        "log": mask(_log(folder)),
        "notes": notes,
        **mask(events),
    }


def _records(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            records = read_jsonl(path)
        except OSError as error:
            notes.append(f"{path.name} cannot be read: {error.strerror}.")
            return []
    if damaged := [w for w in caught if issubclass(w.category, RuntimeWarning)]:
        lines = "1 line" if len(damaged) == 1 else f"{len(damaged)} lines"
        notes.append(f"{lines} of {path.name} cannot be read and are skipped.")
    return records


def _value(config: dict[str, dict[str, Any]], key: str) -> Any:
    return config.get(key, {}).get("value")


def _training_seconds(info: RunInfo, clock: dict[str, list], starts: Sequence[float]) -> float | None:
    """Training time: to the last record, or to the end of an uninterrupted run that has ended."""
    has_ended = info.status not in ("running", "killed")
    if len(starts) == 1 and info.since is not None and info.since > starts[0] and has_ended:
        return info.since - starts[0]
    return clock["seconds"][-1] if clock["seconds"] else None


def _best(series: dict[str, Series], config: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The best value of the monitored metric."""
    name, mode = _value(config, "monitor_metric") or "val/loss", _value(config, "monitor_mode") or "min"
    if not isinstance(name, str) or name not in series or mode not in ("min", "max"):
        return None
    best: tuple[int, float] | None = None
    for step, value in zip(series[name].steps, series[name].values, strict=True):
        if is_better(value, best and best[1], mode):
            best = step, value
    return None if best is None else {"name": name, "mode": mode, "step": best[0], "value": best[1]}


def _last_step(records: Sequence[dict[str, Any]]) -> int:
    """The step of the last record, which may be after the last metrics."""
    step = records[-1].get("step") if records else 0
    return step if isinstance(step, int) else 0


def _step_of(event: dict[str, Any]) -> Any:
    """The position of an event on the step axis."""
    return event["content"].get("from_step", event["step"]) if event["kind"] == "resumed" else event["step"]


def _checkpoints(folder: Path, best: dict[str, Any] | None, notes: list[str]) -> list[dict[str, Any]]:
    checkpoints = checkpoints_folder(folder)
    if checkpoints == folder:
        return []
    logger = logging.getLogger("trainformer")
    # Damaged checkpoints are reported by `trainformer ckpt verify`, not here.
    was, logger.disabled = logger.disabled, True
    try:
        found = CheckpointStore(checkpoints).checkpoints()
    except OSError as error:
        notes.append(f"the checkpoints cannot be read: {error.strerror}.")
        return []
    finally:
        logger.disabled = was
    name, mode = (best["name"], best["mode"]) if best else ("", "min")
    best_checkpoint, best_value = None, None
    for checkpoint in found:
        value = checkpoint.manifest.metrics.get(name)
        if value is not None and is_better(value, best_value, mode):
            best_checkpoint, best_value = checkpoint, value
    return [
        {
            "name": checkpoint.path.name,
            "step": checkpoint.step,
            "epoch": checkpoint.manifest.epoch,
            "time": checkpoint.manifest.time,
            "bytes": sum(f.size for files in checkpoint.manifest.components.values() for f in files),
            "metrics": checkpoint.manifest.metrics,
            "is_best": checkpoint is best_checkpoint,
            "is_last": checkpoint is found[-1],
            "is_protected": checkpoint.is_protected,
        }
        for checkpoint in found
    ]


def _log(folder: Path) -> list[str]:
    try:
        with (folder / "log.txt").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = text.splitlines()
    return (lines[1:] if size > _LOG_BYTES else lines)[-_LOG_LINES:]


def _rounded(values: Sequence[float]) -> list[Any]:
    """Seven digits are more than a screen shows, and half the bytes of a full float."""
    return [value if isinstance(value, int) else float(f"{value:.7g}") for value in values]


def read_sweep_trials(folder: Path, storage: Any = None) -> dict[str, Any]:
    """The content of the page about one sweep. `run` of a trial is the resolved path of its run folder."""
    content = asdict(read_sweep(folder, storage))
    for trial in content["trials"]:
        trial["intermediate"] = sorted(trial["intermediate"].items())
        trial["run"] = None if trial["run"] is None else str(Path(trial["run"]).resolve())
        del trial["earlier"]
    return {"path": str(content.pop("folder")), **mask(content)}

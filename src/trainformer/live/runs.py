"""The status of runs, read from their folders without contacting the process."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainformer.checkpointing.manifest import MANIFEST
from trainformer.checkpointing.store import checkpoints_folder, is_named, step_of
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.live import address
from trainformer.utils.files import decode_json
from trainformer.utils.processes import process_identity

RUNS = Path("runs")
_STATUS_KINDS: dict[str, Any] = {
    **dict.fromkeys(("status", "identity", "fingerprint"), str),
    "process": int,
    "time": (int, float),
}
_TAIL_BYTES = 1 << 16  # of metrics.jsonl that are read


@dataclass(frozen=True)
class RunInfo:
    """The status of a run, read from its folder.

    `status` is what the run wrote last: running, finished, stopped, interrupted, aborted or failed; or killed, if it
    says running but its process is gone. `since` is when the status was written (Unix time).
    """

    name: str
    path: Path
    status: str
    process: int | None = None
    host: str | None = None  # where it runs, if on another machine
    since: float | None = None
    step: int = 0
    steps: int | None = None  # planned
    progress: float | None = None  # from 0 to 1
    loss: float | str | None = None
    checkpoint: str | None = None
    checkpoint_step: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether its process is running, as far as this machine can tell."""
        return self.status == "running"

    @property
    def age(self) -> float | None:
        """Seconds since the status was written."""
        return None if self.since is None else max(0.0, time.time() - self.since)


def read_status(folder: Path) -> dict[str, Any]:
    """The content of ``status.json``; empty if it is missing or unreadable. Values of another type are left out."""
    content = _read_object(folder / "status.json")
    return {name: value for name, value in content.items() if isinstance(value, _STATUS_KINDS.get(name, object))}


def read_config(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings in ``config.json``, each with its `value`; empty if it is missing or unreadable."""
    content = _read_object(folder / "config.json")
    return {name: entry for name, entry in content.items() if isinstance(entry, dict) and "value" in entry}


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = decode_json(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    return bool(read_status(folder).get("status"))


def find_run(run: str | os.PathLike[str]) -> Path:
    """The folder of a run, given a path or a name under ``runs/``."""
    paths = (Path(run), RUNS / run)
    for path in paths:
        if is_run(path):
            return path
    for path in paths:
        if path.is_dir():
            raise BadArgument(expected("the folder of a run", str(path), "It has no status.json of a run."))
    known = [path.name for path in _run_folders(RUNS)]
    hint = did_you_mean(str(run), known) or "`trainformer runs` lists the runs."
    raise BadArgument(expected("the folder of a run, or the name of one under runs/", str(run), hint))


def list_runs(*folders: str | os.PathLike[str]) -> list[RunInfo]:
    """The runs in folders (default: ``runs/``), newest status last. A folder may itself be a run folder.

    >>> list_runs()
    []
    """
    found: dict[Path, RunInfo] = {}
    for folder in map(Path, folders or (RUNS,)):
        if folders and not folder.is_dir():
            raise BadArgument(expected("a folder of runs", str(folder), "There is no such folder."))
        for path in [folder] if is_run(folder) else _run_folders(folder):
            found[path.resolve()] = describe(path)
    return sorted(found.values(), key=lambda info: (info.since or 0.0, info.name))


def _run_folders(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and is_run(path)] if folder.is_dir() else []


def describe(folder: str | os.PathLike[str]) -> RunInfo:
    """Read the status of a run from its folder."""
    folder = Path(folder)
    content = read_status(folder)
    status, process, host = content.get("status", "unknown"), content.get("process"), None
    identity = content.get("identity")
    is_here = isinstance(process, int) and identity is not None and process_identity(process) == identity
    if status == "running" and not is_here:
        host = _other_host(folder, process)
        status = "running" if host else "killed"
    checkpoint = newest_checkpoint(folder)
    records = last_records(folder / "metrics.jsonl")
    trained: dict[str, Any] = next((r for r in reversed(records) if "train/loss" in r), {})
    saved = None if checkpoint is None else step_of(checkpoint)
    logged = [record["step"] for record in records if isinstance(record.get("step"), int)]
    step = max(logged[-1] if logged else 0, saved or 0)
    steps, progress = _progress(folder, step, trained.get("train/epoch"))
    return RunInfo(
        name=folder.resolve().name,
        path=folder,
        status=status,
        process=process,
        host=host,
        since=content.get("time"),
        step=step,
        steps=steps,
        progress=1.0 if status == "finished" else progress,
        loss=trained.get("train/loss"),
        checkpoint=None if checkpoint is None else str(checkpoint),
        checkpoint_step=saved,
    )


def _other_host(folder: Path, process: Any) -> str | None:
    """The machine on which the run is running, if its address names another one."""
    try:
        found = address.read(folder)
    except OSError:
        return None
    if found is None or found.process != process or found.host == socket.gethostname():
        return None
    return found.host


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, by name; its files are not read."""
    try:
        paths = [path for path in checkpoints_folder(folder).iterdir() if is_named(path) and (path / MANIFEST).exists()]
    except OSError:
        return None
    return max(paths, key=step_of, default=None)


def last_records(path: Path) -> list[dict[str, Any]]:
    """The last records of a ``metrics.jsonl``; reads only the end of the file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    records = []
    for line in lines:
        try:  # the first and the last line may be partial
            record = decode_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _progress(folder: Path, step: int, epochs_done: float | None) -> tuple[int | None, float | None]:
    """Planned steps, and the fraction done, if the config has them."""
    config = read_config(folder)
    most, epochs = (config.get(name, {}).get("value") for name in ("max_steps", "epochs"))
    if isinstance(most, int) and most > 0:
        return most, min(1.0, step / most)
    if isinstance(epochs, int) and epochs > 0 and isinstance(epochs_done, int | float):
        return None, min(1.0, epochs_done / epochs)
    return None, None


def how_to_resume(info: RunInfo) -> str:
    """What to do with a run that has ended; empty if it is finished."""
    if info.status == "finished":
        return ""
    if info.status == "stopped":
        return f'To resume it anyway, pass resume="{info.checkpoint}".' if info.checkpoint else ""
    if info.checkpoint_step is None:
        return "Run the same command again to start over: it had no checkpoint yet."
    return f"Run the same command again to resume from step {info.checkpoint_step}."


def why_not_running(info: RunInfo) -> str:
    """Why a request cannot be sent to a run, and what to do."""
    if info.status == "killed":
        what = f"Its process ({info.process}) is gone"
    else:
        what = f"It {'has' if info.status in ('finished', 'failed') else 'was'} {info.status} at step {info.step}"
    return f"{info.name} is not running. {what}. {how_to_resume(info)}".rstrip()

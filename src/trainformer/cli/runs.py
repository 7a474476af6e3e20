"""`trainformer runs`: the runs in folders and how they went, to be compared. What a running one is told is `ctl`'s."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.cli.ctl import as_json, how_far, up_to_date
from trainformer.cli.output import duration, number, print_json, print_table, width
from trainformer.cli.trained import monitored, settings_of

if TYPE_CHECKING:
    from trainformer.live import RunInfo

STATUSES = ("running", "finished", "stopped", "interrupted", "aborted", "failed", "killed")
_NARROW = 110  # characters; below, the table does without what can be done without
SORTS = ("since", "name", "task", "status", "step", "best", "loss", "size")


@dataclass(frozen=True)
class Row:
    """A run as the table shows it. `best` is the best value of the metric that it monitors, reached at `best_step`."""

    info: RunInfo
    task: str | None
    metric: str
    mode: str
    best: float | None
    best_step: int | None
    size: int  # bytes of its checkpoints

    def as_json(self) -> dict[str, Any]:
        """Everything that is known."""
        own = {"task": self.task, "monitor_metric": self.metric, "monitor_mode": self.mode}
        best = {"best": self.best, "best_step": self.best_step, "checkpoints_size": self.size}
        return as_json(self.info) | own | best


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("folders", metavar="FOLDER", nargs="*", help="folders of runs, or runs (default: runs)")
    order = "by what to sort; best: the best first, of runs with the same metric (default: since, the newest last)"
    parser.add_argument("--sort", choices=SORTS, default="since", help=order)
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--status", choices=STATUSES, action="append", help="only these; can be given several times")
    parser.add_argument("--task", metavar="NAME", action="append", help="only runs of these tasks")
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from trainformer.live import list_runs

    rows = [row_of(up_to_date(info)) for info in list_runs(*args.folders)]
    found = [row for row in rows if _is_wanted(row, args)]
    found.sort(key=lambda row: _place(row, args.sort), reverse=args.reverse)
    if args.json:
        print_json([row.as_json() for row in found])
    elif not found:
        where = ", ".join(args.folders) or "runs"
        print(f"no such runs in {where} (there are {len(rows)} others)" if rows else f"no runs in {where}")
    else:
        _print(found)
    return 0


def row_of(info: RunInfo) -> Row:
    """What the folder of a run tells beside its status."""
    from trainformer.checkpointing.store import checkpoints_folder

    settings = settings_of(info.path)
    metric, mode = monitored(settings)
    step, best = best_of(info.path / "metrics.jsonl", metric, mode)
    checkpoints = checkpoints_folder(info.path)
    # A run without any has no such folder, and its own is not meant.
    size = size_of(checkpoints) if checkpoints != info.path else 0
    return Row(info, settings.get("task_type"), metric, mode, best, step, size)


def best_of(path: Path, metric: str, mode: str) -> tuple[int | None, float | None]:
    """Step and value of the best evaluation in a ``metrics.jsonl``."""
    mark, sign = json.dumps(metric).encode(), 1 if mode == "min" else -1
    found: list[tuple[float, int]] = []
    try:
        with path.open("rb") as file:
            for line in file:
                if mark in line:  # most lines are of training steps
                    found += _value(line, metric, sign)
    except OSError:
        return None, None
    if not found:
        return None, None
    value, step = min(found)
    return step, sign * value


def _value(line: bytes, metric: str, sign: int) -> list[tuple[float, int]]:
    try:
        record = json.loads(line)
        value = sign * float(record[metric])
        return [] if math.isnan(value) else [(value, int(record["step"]))]
    except (ValueError, KeyError, TypeError):  # cut off in the middle of a line, or no number
        return []


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder; what is deleted meanwhile does not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _is_wanted(row: Row, args: argparse.Namespace) -> bool:
    return (not args.status or row.info.status in args.status) and (not args.task or row.task in args.task)


def _place(row: Row, sort: str) -> tuple[Any, ...]:
    info = row.info
    if sort == "best":
        worth = math.inf if row.best is None else (row.best if row.mode == "min" else -row.best)
        return (row.metric, row.best is None, worth, info.name)
    values = {
        "since": info.since or 0.0,
        "name": info.name,
        "task": row.task or "",
        "status": info.status,
        "step": info.step,
        "loss": info.loss if isinstance(info.loss, int | float) else math.inf,
        "size": row.size,
    }
    return (values[sort], info.name)


def _print(rows: Iterable[Row]) -> None:
    columns = dict.fromkeys(("run", "task", "status", "step", "done", "best", "loss", "since", "size"), "right")
    columns |= {"run": "fold", "task": "left", "status": "left", "best": "left"}
    cells = [dict(zip(columns, _cells(row), strict=True)) for row in rows]
    if width() < _NARROW:
        del columns["task"], columns["loss"]
    print_table(columns, [[row[name] for name in columns] for row in cells])


def _cells(row: Row) -> list[str]:
    from trainformer.checkpointing.tools.summary import in_words

    info = row.info
    name, *far = how_far(info)
    best = "" if row.best is None else f"{row.metric.removeprefix('val/')} {row.best:.4g}"
    loss = f"{info.loss:.4g}" if isinstance(info.loss, float) else number(info.loss)
    since = " ".join(duration(info.age).split()[:2])  # the larger unit will do
    return [name, row.task or "", *far, best, loss, since, in_words(row.size) if row.size else ""]

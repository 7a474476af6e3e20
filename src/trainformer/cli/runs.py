"""`trainformer runs`, `ctl` and `report`: list runs, control running ones, and write reports about them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.cli.app import Command, add_action
from trainformer.cli.output import duration, lines_of, note, number, print_json, print_result, print_table, width
from trainformer.cli.trained import monitored, settings_of
from trainformer.live.address import STATUS, VERBS
from trainformer.utils.files import decode_json

if TYPE_CHECKING:
    from trainformer.live import RunInfo

STATUSES = ("running", "finished", "stopped", "interrupted", "aborted", "failed", "killed")
SORTS = ("since", "name", "task", "status", "step", "best", "loss", "size")
_NARROW = 110  # characters; a narrower table has fewer columns
_PURPOSES = {
    "save": "write a checkpoint now and continue",
    "stop": "write a checkpoint and end the run",
    "abort": "end the run without saving anything since its last checkpoint",
    "eval": "evaluate on the validation data now and continue",
}
assert _PURPOSES.keys() == set(VERBS)


def _up_to_date(info: RunInfo) -> RunInfo:
    """With the progress that a running process reports itself: its folder has only what was logged last."""
    from trainformer.live import ControlError, ask

    if not info.is_running:
        return info
    try:
        answer = ask(info.path, STATUS, timeout=10.0)
    except ControlError:  # of another user, on another machine, or about to end: the folder must do
        return info
    step, planned = answer["step"], answer["planned_steps"]
    progress = step / planned if planned else info.progress
    loss = answer["metrics"].get("train/loss", info.loss)
    return dataclasses.replace(info, step=step, steps=planned, progress=progress, loss=loss)


def _as_json(info: RunInfo) -> dict[str, Any]:
    return {**dataclasses.asdict(info), "path": str(info.path), "age": info.age}


def _progress_cells(run: Mapping[str, Any]) -> list[str]:
    """Name, status, step and progress: the first cells of a run's row."""
    return [
        run["name"],
        f"{run['status']} on {run['host']}" if run["host"] else run["status"],
        f"{run['step']}/{run['steps']}" if run["steps"] else str(run["step"]),
        "" if run["progress"] is None else f"{run['progress']:.0%}",
    ]


# -- runs ------------------------------------------------------------------------------------------------------------


def _add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", metavar="FOLDER", nargs="*", help="folders of runs, or runs (default: runs)")
    order = "sort key; best: the best first, among runs with the same metric (default: since, the newest last)"
    parser.add_argument("--sort", choices=SORTS, default="since", help=order)
    parser.add_argument("--reverse", action="store_true", help="reverse the order")
    parser.add_argument(
        "--status", choices=STATUSES, action="append", help="only runs with this status; can be repeated"
    )
    parser.add_argument("--task", metavar="NAME", action="append", help="only runs of this task; can be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _runs(args: argparse.Namespace) -> None:
    from trainformer.live import list_runs

    rows = [_row(_up_to_date(info)) for info in list_runs(*args.folders)]
    found = [
        row
        for row in rows
        if (not args.status or row["status"] in args.status) and (not args.task or row["task"] in args.task)
    ]
    found.sort(key=lambda row: _sort_key(row, args.sort), reverse=args.reverse)
    if args.json:
        print_json(found)
    elif not found:
        where = ", ".join(args.folders) or "runs"
        print(f"no such runs in {where} (there are {len(rows)} others)" if rows else f"no runs in {where}")
    else:
        columns = dict.fromkeys(("run", "task", "status", "step", "done", "best", "loss", "since", "size"), "right")
        columns |= {"run": "fold", "task": "left", "status": "left", "best": "left"}
        cells = [dict(zip(columns, _cells(row), strict=True)) for row in found]
        if width() < _NARROW:
            del columns["task"], columns["loss"]
        print_table(columns, [[row[name] for name in columns] for row in cells])


def _row(info: RunInfo) -> dict[str, Any]:
    """A run with its task, the best value of the metric that it monitors, and the size of its checkpoints."""
    from trainformer.checkpointing.store import checkpoints_folder

    settings = settings_of(info.path)
    metric, mode = monitored(settings)
    step, best = best_of(info.path / "metrics.jsonl", metric, mode)
    checkpoints = checkpoints_folder(info.path)
    # For a run without checkpoints this is its own folder.
    size = size_of(checkpoints) if checkpoints != info.path else 0
    own = {"task": settings.get("task_type"), "monitor_metric": metric, "monitor_mode": mode}
    return _as_json(info) | own | {"best": best, "best_step": step, "checkpoints_size": size}


def best_of(path: Path, metric: str, mode: str) -> tuple[int | None, float | None]:
    """Step and value of the best evaluation in a ``metrics.jsonl``."""
    mark, sign = json.dumps(metric).encode(), 1 if mode == "min" else -1
    found: list[tuple[float, int]] = []
    try:
        with path.open("rb") as file:
            for line in file:
                if mark in line:  # most lines are training steps
                    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):  # truncated, or no number
                        record = decode_json(line)
                        found.append((sign * float(record[metric]), int(record["step"])))
    except OSError:
        return None, None
    value, step = min((pair for pair in found if not math.isnan(pair[0])), default=(None, None))
    return step, None if value is None else sign * value


def size_of(folder: Path) -> int:
    """Total size of the files in a folder; files that are deleted meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


def _sort_key(row: Mapping[str, Any], sort: str) -> tuple[Any, ...]:
    name, best, loss = row["name"], row["best"], row["loss"]
    if sort == "best":
        value = math.inf if best is None else (best if row["monitor_mode"] == "min" else -best)
        return (row["monitor_metric"], best is None, value, name)
    values = {
        **row,
        "since": row["since"] or 0.0,
        "task": row["task"] or "",
        "loss": loss if isinstance(loss, int | float) else math.inf,
        "size": row["checkpoints_size"],
    }
    return (values[sort], name)


def _cells(row: Mapping[str, Any]) -> list[str]:
    from trainformer.checkpointing.tools.summary import in_words

    name, *far = _progress_cells(row)
    best = "" if row["best"] is None else f"{row['monitor_metric'].removeprefix('val/')} {row['best']:.4g}"
    loss = f"{row['loss']:.4g}" if isinstance(row["loss"], float) else number(row["loss"])
    since = " ".join(duration(row["age"]).split()[:2])  # the larger unit is enough
    size = row["checkpoints_size"]
    return [name, row["task"] or "", *far, best, loss, since, in_words(size) if size else ""]


# -- ctl -------------------------------------------------------------------------------------------------------------


def _add_ctl_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    listing = add_action(verbs, "list", "the runs in a folder, and their progress")
    listing.add_argument("folders", metavar="FOLDER", nargs="*", help="folders of runs (default: runs)")
    status = add_action(verbs, STATUS, "the progress of a run; a running one is asked itself")
    _add_run(status)
    _add_timeout(status, 5.0)
    for verb in VERBS:
        asking = add_action(verbs, verb, _PURPOSES[verb])
        _add_run(asking)
        wait = asking.add_mutually_exclusive_group()
        _add_timeout(wait, 60.0)
        wait.add_argument("--no-wait", action="store_true", help="do not wait for the answer")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or its name under runs/")


def _add_timeout(parser: Any, seconds: float) -> None:
    text = f"how long to wait for the answer (default: {seconds:g})"
    parser.add_argument("--timeout", metavar="SECONDS", type=_seconds, default=seconds, help=text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, received {text!r}")
    return value


def _ctl(args: argparse.Namespace) -> None:
    if args.verb == "list":
        _list(args)
    elif args.verb == STATUS:
        _status(args)
    else:
        from trainformer.live import ask

        answer = ask(args.run, args.verb, wait=not args.no_wait, timeout=args.timeout)
        print_result(args, answer, _answer_text(args.verb, answer))


def _answer_text(verb: str, answer: dict[str, Any]) -> str:
    if answer.get("accepted"):
        return f"{verb}: accepted; it happens at the next step boundary"
    step, checkpoint = answer["step"], answer.get("checkpoint")
    if verb == "save":
        return f"saved at step {step}: {checkpoint}"
    if verb == "eval":
        return "\n".join([f"evaluated at step {step}", *lines_of(answer["metrics"])])
    kept = f"the newest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
    return f"the run has ended at step {step} ({answer['status']}); {kept}"


def _status(args: argparse.Namespace) -> None:
    """Ask a running job itself; read the folder of any other."""
    from trainformer.live.runs import describe, find_run, how_to_resume

    info = describe(find_run(args.run))
    answer = _as_json(info)
    if info.is_running:
        from trainformer.live import ask

        answer |= ask(args.run, STATUS, timeout=args.timeout)
        del answer["ok"]
    advice = {} if info.is_running else {"continue": how_to_resume(info)}
    shown = {name: text for name, text in (_readable(answer) | advice).items() if text}
    print_result(args, answer, "\n".join(lines_of(shown)))


def _readable(answer: dict[str, Any]) -> dict[str, str]:
    """The lines to print, by their names; empty where nothing is known."""
    step, planned = answer["step"], answer.get("planned_steps") or answer["steps"]
    rate, eta, best = answer.get("steps_per_second"), answer.get("eta_seconds"), answer.get("best")
    loss = answer.get("metrics", {}).get("train/loss", answer["loss"])
    return {
        "run": answer["path"],
        "status": f"{answer['status']} (process {answer['process']}, {duration(answer['age'])})",
        "step": f"{step} of {planned} ({step / planned:.1%})" if planned else str(step),
        "epoch": str(answer.get("epoch", "")),
        "loss": number(loss),
        "evaluation": _pairs(answer.get("evaluation")),
        "best": f"{_pairs(best)} (step {answer.get('best_step')})" if best else "",
        "speed": f"{rate:.3g} steps/s" if rate else "",
        "remaining": duration(eta) if eta is not None else "",
        "checkpoint": answer["checkpoint"] or "none yet",
    }


def _pairs(metrics: dict[str, Any] | None) -> str:
    return ", ".join(
        f"{name} {number(value)}" for name, value in (metrics or {}).items() if name not in ("step", "epoch")
    )


def _list(args: argparse.Namespace) -> None:
    from trainformer.live import list_runs

    runs = [_as_json(_up_to_date(info)) for info in list_runs(*args.folders)]
    if args.json or not runs:
        print_result(args, runs, f"no runs in {', '.join(args.folders) or 'runs'}")
    else:
        columns = dict.fromkeys(("run", "status", "step", "done", "loss", "since", "process"), "right")
        rows = []
        for run in runs:
            process = run["process"] if run["status"] == "running" else None
            rows.append([*_progress_cells(run), number(run["loss"]), duration(run["age"]), process])
        print_table(columns | {"run": "fold", "status": "left"}, rows)


# -- report ----------------------------------------------------------------------------------------------------------


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    sources = "the folder of a run, of a sweep, or of several runs; or a name under runs/ or sweeps/"
    parser.add_argument("sources", metavar="RUN", nargs="+", help=sources)
    out = "the file to write (default: report.html in the folder of the run; here, if there are several)"
    parser.add_argument("--out", metavar="FILE", help=out)
    parser.add_argument("--title", help="the title of the page (default: the names)")
    top = "of each sweep, also show the runs of the N best trials (default: 0)"
    parser.add_argument("--top", metavar="N", type=int, default=0, help=top)
    storage = "storage of the trials of sweeps, if it is not in their folder"
    parser.add_argument("--storage", metavar="URL", help=storage)
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _report(args: argparse.Namespace) -> None:
    from trainformer.report import write_report

    path = write_report(args.sources, args.out, title=args.title, top=args.top, storage=args.storage)
    size = path.stat().st_size
    print_result(args, {"report": str(path), "bytes": size}, f"wrote {path} ({size / 1e6:.1f} MB)")
    if args.open:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            note("no browser could be opened here")


COMMANDS = {
    "runs": Command(_add_runs_arguments, _runs),
    "ctl": Command(_add_ctl_arguments, _ctl),
    "report": Command(_add_report_arguments, _report),
}

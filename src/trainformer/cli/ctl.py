"""`trainformer ctl`: look at running jobs and tell them what to do, from another terminal. See `trainformer.live`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from trainformer.cli.frame import add_action
from trainformer.cli.output import duration, lines_of, number, print_json, print_table
from trainformer.live.address import STATUS, VERBS

_PURPOSES = {
    "save": "write a checkpoint now and go on",
    "stop": "write a checkpoint and end the run",
    "abort": "end the run without saving anything since its last checkpoint",
    "eval": "evaluate on the validation data now and go on",
}
assert _PURPOSES.keys() == set(VERBS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    listing = _add_verb(verbs, "list", "the runs in a folder, and how far they are")
    listing.add_argument("folders", metavar="FOLDER", nargs="*", help="folders of runs (default: runs)")
    status = _add_verb(verbs, STATUS, "where a run is, as it says itself if it is running")
    _add_run(status)
    _add_timeout(status, 5.0)
    for verb in VERBS:
        asking = _add_verb(verbs, verb, _PURPOSES[verb])
        _add_run(asking)
        wait = asking.add_mutually_exclusive_group()
        _add_timeout(wait, 60.0)
        wait.add_argument("--no-wait", action="store_true", help="do not wait until it is done")


def _add_verb(verbs: Any, name: str, purpose: str) -> argparse.ArgumentParser:
    parser = add_action(verbs, name, purpose)
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    return parser


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


def run(args: argparse.Namespace) -> int:
    """Do it, and say what came of it."""
    if args.verb == "list":
        return _list(args)
    if args.verb == STATUS:
        return _status(args)
    from trainformer.live import ask

    answer = ask(args.run, args.verb, wait=not args.no_wait, timeout=args.timeout)
    if args.json:
        print_json(answer)
    else:
        print(_in_words(args.verb, answer))
    return 0


def _in_words(verb: str, answer: dict[str, Any]) -> str:
    if answer.get("accepted"):
        return f"{verb}: accepted; it is done at the next step boundary"
    step, checkpoint = answer["step"], answer.get("checkpoint")
    if verb == "save":
        return f"saved at step {step}: {checkpoint}"
    if verb == "eval":
        return "\n".join([f"evaluated at step {step}", *lines_of(answer["metrics"])])
    kept = f"the newest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
    return f"the run has ended at step {step} ({answer['status']}); {kept}"


# -- where a run is ----------------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> int:
    """Of a running job what it says itself; of any other what its folder tells."""
    from trainformer.live.runs import describe, find_run, how_to_resume

    info = describe(find_run(args.run))
    answer = as_json(info)
    if info.is_running:
        from trainformer.live import ask

        answer |= ask(args.run, STATUS, timeout=args.timeout)
        del answer["ok"]
    if args.json:
        print_json(answer)
        return 0
    advice = {} if info.is_running else {"go on": how_to_resume(info)}
    print("\n".join(lines_of({name: text for name, text in (_readable(answer) | advice).items() if text})))
    return 0


def _readable(answer: dict[str, Any]) -> dict[str, str]:
    """The lines for a person, by their names; empty where nothing is known."""
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
        "ready in": duration(eta) if eta is not None else "",
        "checkpoint": answer["checkpoint"] or "none yet",
    }


def _pairs(metrics: dict[str, Any] | None) -> str:
    return ", ".join(
        f"{name} {number(value)}" for name, value in (metrics or {}).items() if name not in ("step", "epoch")
    )


# -- all runs ----------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from trainformer.live import list_runs

    runs = [up_to_date(info) for info in list_runs(*args.folders)]
    if args.json:
        print_json([as_json(info) for info in runs])
    elif not runs:
        print(f"no runs in {', '.join(args.folders) or 'runs'}")
    else:
        _print_table(runs)
    return 0


def up_to_date(info: Any) -> Any:
    """Its folder tells what was logged last; the run itself knows better."""
    from trainformer.live import ControlError, ask

    if not info.is_running:
        return info
    try:
        answer = ask(info.path, STATUS, timeout=10.0)
    except ControlError:  # another user's, on another machine, just ending: what the folder tells must do
        return info
    step, planned = answer["step"], answer["planned_steps"]
    progress = step / planned if planned else info.progress
    loss = answer["metrics"].get("train/loss", info.loss)
    return dataclasses.replace(info, step=step, steps=planned, progress=progress, loss=loss)


def as_json(info: Any) -> dict[str, Any]:
    """What is known of a run."""
    return {**dataclasses.asdict(info), "path": str(info.path), "age": info.age}


def _print_table(runs: list[Any]) -> None:
    columns = dict.fromkeys(("run", "status", "step", "done", "loss", "since", "process"), "right")
    print_table(
        columns | {"run": "fold", "status": "left"},
        [
            [*how_far(info), number(info.loss), duration(info.age), info.process if info.is_running else None]
            for info in runs
        ],
    )


def how_far(info: Any) -> list[str]:
    """Name, status, step and what share is done: the first cells of a run's row."""
    return [
        info.name,
        f"{info.status} on {info.host}" if info.host else info.status,
        f"{info.step}/{info.steps}" if info.steps else str(info.step),
        "" if info.progress is None else f"{info.progress:.0%}",
    ]

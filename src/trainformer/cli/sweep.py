"""`trainformer sweep SCRIPT` runs the sweep that a script defines; `trainformer sweep show` shows sweeps."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from trainformer.cli.app import Command
from trainformer.cli.output import duration, lines_of, note, print_json, print_table
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.secrets import mask

#: Options that are passed to `Sweep.run` unchanged.
_PASSED = (
    "method", "n_trials", "n_parallel", "seed", "direction", "storage", "timeout", "name", "folder", "backend",
    "cpus_per_trial", "gpus_per_trial", "address", "pruner", "isolate",
)  # fmt: skip
_MODULE = "sweep_script"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "`trainformer sweep show [SWEEP]` shows sweeps and their trials; for a script of that name write ./show."
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file with a function decorated by @sweep(...)")
    parser.add_argument("--function", metavar="NAME", help="which sweep, if the script defines several")
    add = parser.add_argument
    add("--method", choices=("random", "grid", "bayes", "hyperband"), help="search method (default: random)")
    add("--n-trials", type=int, metavar="N", help="number of trials (default: 10, or the whole grid)")
    add("--n-parallel", type=int, metavar="N", help="parallel trials, each in its own process (default: 1)")
    add("--seed", type=int, help="same seed, same trials (default: 42)")
    add("--direction", choices=("maximize", "minimize"), help="what is better (default: maximize)")
    add("--name", help="name of the sweep (default: that of the function)")
    add("--folder", help="folder of the sweep (default: sweeps/NAME)")
    add("--storage", metavar="URL", help="an Optuna storage, or a journal file (default: a file in the folder)")
    add("--timeout", type=float, metavar="SECONDS", help="start no trial after that time")
    add("--backend", choices=("local", "ray"), help="where trials run (default: local)")
    add("--address", help="address of a Ray cluster (default: start a local one)")
    add("--cpus-per-trial", type=float, metavar="N", help="CPU cores per trial on Ray (default: 1)")
    add("--gpus-per-trial", type=float, metavar="N", help="GPUs per trial")
    add("--pruner", help="none, median or hyperband (default: hyperband with that method, else none)")
    add("--isolate", action="store_const", const=True, help="run trials in their own process even without --n-parallel")
    add("--no-resume", action="store_true", help="start over; an earlier sweep of this name is moved to previous/")
    add("--json", action="store_true", help="print the results as JSON")


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """`show` has its own options."""
    if words[:1] != ["show"]:
        args = parser.parse_args(words)
        args.show = False
        return args
    showing = argparse.ArgumentParser(
        prog="trainformer sweep show", description="Sweeps, or the trials of one.", allow_abbrev=False
    )
    showing.add_argument("sweep", metavar="SWEEP", nargs="?", help="a folder, or a name under sweeps/ (none: all)")
    showing.add_argument("--storage", metavar="URL", help="storage of its trials, if it is not in the folder")
    showing.add_argument("--json", action="store_true", help="print JSON")
    showing.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = showing.parse_args(words[1:])
    args.show = True
    return args


def _run(args: argparse.Namespace) -> int:
    if args.show:
        _show(args)
        return 0
    given = {name: value for name in _PASSED if (value := getattr(args, name)) is not None}
    with redirect_stdout(sys.stderr) if args.json else nullcontext():  # the script and its trials may print
        sweep = _sweep_of(_load(Path(args.script)), args.function)
        results = sweep.run(**given, resume=not args.no_resume)
    if args.json:
        print_json(results)
    else:
        from trainformer.sweep import Trial

        known = Trial.__dataclass_fields__
        _print_trials([Trial(**{key: value for key, value in row.items() if key in known}) for row in results])
    return 0 if any(row["status"] == "completed" for row in results) else 1


def _load(path: Path) -> ModuleType:
    """Import a script. Its `if __name__ == "__main__":` block does not run."""
    import importlib.util

    from trainformer.core.optional import require

    if not path.is_file():
        raise BadArgument(expected("a Python file that defines a sweep", str(path), "There is no such file."))
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise BadArgument(expected("a Python file that defines a sweep", str(path), "Its name does not end in .py."))
    # Modules beside it can be imported, as when it is run, but hide no installed package.
    sys.path.append(str(path.parent.absolute()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    # Other processes and machines cannot import it by that name.
    require("cloudpickle", "sweep", "to run trials in their own processes").register_pickle_by_value(module)
    return module


def _sweep_of(module: ModuleType, wanted: str | None) -> Any:
    from trainformer.sweep import Sweep

    found = {name: value for name, value in vars(module).items() if isinstance(value, Sweep)}
    names = f"It has {', '.join(found) or 'none'}."
    if wanted is not None:
        if wanted not in found:
            raise BadArgument(expected("a sweep of the script", wanted, did_you_mean(wanted, found) or names))
        return found[wanted]
    if len(found) != 1:
        do = "Choose by --function NAME." if found else "Decorate a function with @sweep(...)."
        raise BadArgument(f"Expected {module.__file__} to define one sweep. {names} {do}")
    return next(iter(found.values()))


def _print_trials(trials: list[Any]) -> None:
    from trainformer.sweep.spaces import format_setting

    settings = list(dict.fromkeys(name for trial in trials for name in trial.config))
    has_errors, has_runs = (any(getattr(trial, key) for trial in trials) for key in ("error", "run"))
    before = {"trial": "right", "status": "left", "metric": "right"}
    after = {"time": "right"} | ({"run": "left"} if has_runs else {}) | ({"error": "fold"} if has_errors else {})
    own = {f"config.{name}" if name in before | after else name: "right" for name in settings}
    rows = []
    for trial in trials:
        number = str(trial.number) if trial.attempt == 1 else f"{trial.number} (attempt {trial.attempt})"
        seconds = trial.seconds
        time = "" if seconds is None else f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
        cells = [
            number,
            trial.status,
            trial.metric,
            *(format_setting(mask(trial.config.get(name), name)) for name in settings),
        ]
        rows.append([*cells, time, *([trial.run] if has_runs else []), *([trial.error] if has_errors else [])])
    print_table(before | own | after, rows)


# -- show ------------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> None:
    from dataclasses import asdict

    from trainformer.sweep import read_sweep

    if args.sweep is None:
        _show_all(args)
        return
    record = read_sweep(args.sweep, storage=args.storage)
    if args.json:
        print_json(asdict(record))
        return
    best = record.best
    counts = [trial.status for trial in record.trials]
    about = {
        "sweep": f"{record.name} ({record.folder})",
        "method": f"{record.method}, {record.direction}, seed {record.seed}",
        "trials": ", ".join(f"{counts.count(status)} {status}" for status in dict.fromkeys(counts)) or "none yet",
        "best": None if best is None else f"{best.metric:.5g} (trial {best.number})",
        "matters": ", ".join(f"{name} {share:.0%}" for name, share in record.importances.items()) or None,
        **{f"  {name}": text for name, text in record.spaces.items()},
    }
    print("\n".join(lines_of({name: text for name, text in about.items() if text is not None})))
    if record.trials:
        _print_trials(record.trials)


def _show_all(args: argparse.Namespace) -> None:
    from trainformer.sweep import list_sweeps, read_sweep

    rows: list[dict[str, Any]] = []
    for path in list_sweeps():
        try:
            record = read_sweep(path, storage=args.storage, with_importances=False)
        except BadArgument as error:  # its storage may be gone; show the others
            note(f"{path}: {error}")
            continue
        best, ended = record.best, [t for t in record.trials if t.status in ("completed", "pruned", "failed")]
        rows.append({
            "sweep": record.name, "method": record.method, "direction": record.direction, "trials": len(record.trials),
            "ended": len(ended), "best": None if best is None else best.metric, "folder": str(record.folder),
        })  # fmt: skip
    if args.json:
        print_json(rows)
    elif not rows:
        note("there are no sweeps in sweeps/")
    else:
        sides = dict.fromkeys(rows[0], "left") | dict.fromkeys(("trials", "ended", "best"), "right")
        print_table(sides, [list(row.values()) for row in rows])


COMMANDS = {"sweep": Command(_add_arguments, _run, _parse)}

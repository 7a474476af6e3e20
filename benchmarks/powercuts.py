"""Cut the power ten thousand times while runs save checkpoints, and see whether one is lost.

Runs are recorded below Python (`tests/faults/powercut.c`): every write, rename, removal and fsync, in order. Then the
power fails at a random operation. A simulated disk, which keeps only what POSIX promises, drops, tears and reorders
what was not fsynced (`tests/faults/powercuts.py`). In every state the newest checkpoint whose save had returned must be
found, intact, with its metrics; some of the states are resumed to the end and compared with the recorded run, bitwise.

    python benchmarks/powercuts.py --cuts 10000
    python benchmarks/powercuts.py --cuts 500 --seed 7 --only jax
    python benchmarks/powercuts.py --cuts 500 --without "sync folder"     # a control: finds failures

A result file keeps what was done: the same command again continues it, `--restart` starts over.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))

from powercut_runs import RUNS, Recording, cut_power, recorded, resume
from powercuts import Tally, unavailable

PER_TURN = 100  # cuts before the next run has its turn, and the result is written
CONTROLS = ("sync file", "sync folder")

console = Console()
if not console.is_terminal:
    console = Console(width=140)  # of a file or a pipe rich assumes 80 columns, too few for the table


def record_all(names: list[str], folder: Path) -> dict[str, Recording]:
    """Record the runs: those of torch in one process, those of JAX in another, several ranks in several."""
    groups: dict[tuple[int, bool], list[str]] = {}
    for name in names:
        groups.setdefault((RUNS[name].processes, name.startswith("jax")), []).append(name)
    found: dict[str, Recording] = {}
    for number, group in enumerate(groups.values()):
        console.print(f"recording {', '.join(group)}")
        found |= recorded(group, folder / f"recorded-{number}")
    return found


def show(tallies: dict[str, Tally], seconds: float) -> Tally:
    """The tables; all tallies in one."""
    total = Tally()
    for tally in tallies.values():
        total += tally
    columns = (
        "cuts",
        "torn files",
        "lost names",
        "before first",
        "already next",
        "fell back",
        "resumed",
        "failures",
    )
    table = Table(title=f"Power cuts, {seconds:.0f} s")
    table.add_column("run", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right")
    for name, tally in [*tallies.items(), ("all", total)]:
        counts = tally.cuts, tally.torn, tally.lost, tally.before_first, tally.ahead, tally.fell_back, tally.resumed
        style = "red" if tally.failures else "bold green" if name == "all" else None
        table.add_row(name, *map(str, counts), str(len(tally.failures)), style=style)
    console.print(table)
    places = Table(title="Where they hit")
    places.add_column("while it was at", no_wrap=True)
    places.add_column("cuts", justify="right")
    for place, count in sorted(total.places.items(), key=lambda pair: -pair[1]):
        places.add_row(place, str(count))
    console.print(places)
    return total


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuts", type=int, default=10_000)
    parser.add_argument("--resumes", type=int, default=5, help="states to resume to the end, per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), metavar="RUN", help=f"some of: {', '.join(RUNS)}")
    parser.add_argument(
        "--without", nargs="+", choices=CONTROLS, default=[], help="ignore these: failures are expected"
    )
    parser.add_argument("--restart", action="store_true", help="do not continue an earlier result")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where results go")
    args = parser.parse_args()
    if args.cuts < 1:
        parser.error("--cuts must be at least 1")
    if (reason := unavailable()) is not None:
        parser.error(reason)
    return args


def main() -> None:
    args = parse_args()
    names = args.only or list(RUNS)
    path = args.out / "powercuts.json"
    command = {"seed": args.seed, "runs": names, "without": args.without}
    before = json.loads(path.read_text()) if path.exists() and not args.restart else {}
    if before.get("command") != command:
        before = {}
    tallies = {name: Tally(**before.get("tallies", {}).get(name, {})) for name in names}
    began = time.monotonic() - before.get("seconds", 0)

    def write() -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        content = {
            "what": "states of a simulated disk after power cuts, in which the newest saved checkpoint must be intact",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "seconds": round(time.monotonic() - began),
            "command": command,
            "tallies": {name: vars(tally) for name, tally in tallies.items()},
        }
        path.write_text(json.dumps(content, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        recordings = record_all(names, Path(scratch))
        turns = []
        for number in range(-(-args.cuts // PER_TURN)):
            turns.append((names[number % len(names)], number, min(PER_TURN, args.cuts - number * PER_TURN)))
        done = sum(tally.cuts for tally in tallies.values())
        for name, number, cuts in track(turns[-(-done // PER_TURN) :], "cutting the power", console=console):
            recording = recordings[name].without(*args.without)
            folder = Path(scratch, "cuts", str(number))
            folder.mkdir(parents=True)
            tallies[name] += cut_power(recording, cuts, random.Random(f"{args.seed} {number}"), folder)
            write()
        for name in track(
            [name for name in names if RUNS[name].resumes and not args.without], "resuming", console=console
        ):
            for number in range(tallies[name].resumed, args.resumes):
                rng = random.Random(f"{args.seed} resume {number}")
                tallies[name] += resume(recordings[name], rng, Path(scratch, "resumed", name, str(number)))
                write()
    total = show(tallies, time.monotonic() - began)
    for failure in total.failures[:20]:
        console.print(f"[red]{failure}", highlight=False)
    verdict = "no checkpoint was lost" if not total.failures else f"{len(total.failures)} failures"
    console.print(f"{total.cuts} power cuts, {total.torn} with torn files, {total.resumed} resumed: {verdict}")
    sys.exit(bool(total.failures) != bool(args.without))


if __name__ == "__main__":
    main()

"""Kill a training run a thousand times, at random moments, and see whether it notices.

Real processes are ended by SIGKILL: after a random time, in the middle of a save (which is slowed down), and just
before a random file operation, also those of the last moments. Each is started again until it finishes, then compared
with a run that was left in peace: weights, optimizer, averages, scaler, random numbers, metrics.jsonl, the samples of
every step, and which checkpoints were kept. The runs are those of the test suite (`tests/faults`).

    python benchmarks/chaos.py --kills 1000
    python benchmarks/chaos.py --kills 100 --seed 7 --only workers
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))

from harness import Tally, complete, kill_repeatedly
from test_kills import CASES

PER_TURN = 6  # kills before the next case has its turn

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # of a file or a pipe rich assumes 80 columns, too few for the table


def rage(names: list[str], kills: int, seed: int, minutes: float, root: Path) -> dict[str, Tally]:
    """Kill the cases in turn until there were so many kills, or the time is over."""
    rng, until = random.Random(seed), time.monotonic() + 60 * minutes
    references = {name: complete(CASES[name], root / name / "reference") for name in names}
    tallies = {name: Tally() for name in names}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("kills", total=kills)
        for turn, name in enumerate(cycle(names)):
            done = sum(tally.kills for tally in tallies.values())
            if done >= kills or time.monotonic() > until:
                return tallies
            wrong = sum(len(tally.differences) for tally in tallies.values())
            progress.update(bar, description=f"{name} ({wrong} differences)" if wrong else name)
            case = replace(CASES[name], pause=0.002)  # steps take a while, so that kills hit them too
            most = min(PER_TURN, kills - done)
            tallies[name] += kill_repeatedly(case, root / name / str(turn), references[name], rng, most, most)
            progress.update(bar, completed=sum(tally.kills for tally in tallies.values()))
    raise AssertionError("cycle() has no end")


def show(tallies: dict[str, Tally], seconds: float) -> Tally:
    """The table; all tallies in one."""
    total = Tally()
    table = Table(title=f"Killed and started again, {seconds:.0f} s")
    table.add_column("case", no_wrap=True)
    headings = "kills", "inside a save", "inside a deletion", "starts", "runs compared", "differences"
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, tally in tallies.items():
        total += tally
        table.add_row(name, *_cells(tally), style="red" if tally.differences else None)
    table.add_section()
    table.add_row("all", *_cells(total), style="bold red" if total.differences else "bold green")
    console.print(table)
    return total


def _cells(tally: Tally) -> list[str]:
    counts = tally.kills, tally.inside_saves, tally.inside_deletions, tally.starts, tally.runs, len(tally.differences)
    return [str(count) for count in counts]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where results go")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error("--kills must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tallies = rage(args.only or list(CASES), args.kills, args.seed, args.minutes, Path(folder))
    seconds = time.monotonic() - began
    total = show(tallies, seconds)
    for difference in total.differences[:20]:
        console.print(f"[red]{difference}", highlight=False)
    result = {
        "what": "training processes killed with SIGKILL, started again, and compared with runs left in peace",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seed": args.seed,
        "seconds": round(seconds),
        "total": vars(total),
        "cases": {name: vars(tally) for name, tally in tallies.items()},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "chaos.json").write_text(json.dumps(result, indent=2) + "\n")
    verdict = "every run ended as if it had never been killed" if not total.differences else "there are differences"
    console.print(f"{total.kills} kills, {total.inside_saves} of them inside a save: {verdict}")
    sys.exit(1 if total.differences else 0)


if __name__ == "__main__":
    main()

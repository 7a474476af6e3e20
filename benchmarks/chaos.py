"""Kill training runs a thousand times, at random moments, and see whether they notice.

Real processes are ended by SIGKILL: after a random time, at a random file operation, blocked at an fsync inside a save,
at a rename, a deletion or an evaluation, and in the first moments of a start or a resume. Each run is started again
until it finishes, then compared with a run that was left in peace: weights, optimizer, averages, scaler, random
numbers, metrics, the samples of every step, and the checkpoints that were kept. The runs are those of the test suite.

Every kill and every comparison is a line in a ledger. The command continues an existing ledger until it has so many
kills in compared runs, so it can be interrupted (and killed) itself, and several can share a ledger: `--jobs`.

    python benchmarks/chaos.py --kills 1000
    python benchmarks/chaos.py --kills 100 --seed 7 --only jax hf --ledger /tmp/chaos.jsonl
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "mini"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "jax_backend"))

from harness import complete, events_of, kill_group, kill_run
from jax_victim import JaxCase
from mini_victim import Case as MiniCase
from other_victims import FSDP, HF, PackedLoRA, SeveralOptimizers
from sweep_victim import SweepCase
from test_kills import CASES as NATIVE

from file_operations import PHASES

CASES: dict[str, Any] = {
    **NATIVE,
    "hf": HF(),
    "hf, with workers": HF(workers=2),
    "mini": MiniCase(),
    "jax": JaxCase(devices=1),
    "jax, asynchronous": JaxCase(devices=2, save_async=True),
    "jax, stream": JaxCase(devices=1, data="generator", epochs=2),
    "LoRA with packing": PackedLoRA(),
    "LoRA with packing, asynchronous": PackedLoRA(save_async=True),
    "WGAN": SeveralOptimizers(),
    "PPO": SeveralOptimizers(example="ppo", save_async=True),
    "distillation": SeveralOptimizers(example="distillation"),
    "FSDP, both ranks killed": FSDP(),
    "FSDP, rank 0 killed": FSDP(alone=True),
    "FSDP, rank 1 killed": FSDP(alone=True, victim=1, save_async=True),
    "sweep, in workers": SweepCase("local"),
    "sweep on Ray": SweepCase("ray"),
}
PER_TURN = 10  # kills of one run
SLOW = ("jax", "FSDP", "sweep")  # these have a third of the turns

console = Console()
if not console.is_terminal:
    console = Console(width=140)  # of a file or a pipe rich assumes 80 columns, too few for the table


class Ledger:
    """Lines of JSON, one per kill and per comparison. Several processes may write at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def lines(self) -> list[dict[str, Any]]:
        """All lines. The last one may be incomplete, if its writer was killed."""
        found = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def append(self, **line: Any) -> None:
        """Add a line."""
        with self._locked():
            self._write(line)

    def begin_turn(self, names: list[str], seed: int) -> dict[str, Any]:
        """Choose the case that was killed least so far, and a number for what is done to it."""
        with self._locked():
            turns = [line for line in self.lines() if line["what"] == "turn"]
            counts = Counter(line["case"] for line in turns)
            case = min(names, key=lambda name: counts[name] * (3 if name.startswith(SLOW) else 1))
            turn = {"turn": len(turns), "case": case, "seed": seed}
            self._write({"what": "turn", **turn})
            return turn

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _write(self, line: dict[str, Any]) -> None:
        content = self.path.read_bytes()
        separator = "" if not content or content.endswith(b"\n") else "\n"
        with self.path.open("a") as file:
            file.write(f"{separator}{json.dumps(line)}\n")

    def kills(self) -> list[dict[str, Any]]:
        """The kills of runs that were compared. Of one that was not, nothing is known."""
        lines = self.lines()
        compared = {line["turn"] for line in lines if line["what"] == "comparison"}
        return [line for line in lines if line["what"] == "kill" and line["turn"] in compared]

    def comparisons(self) -> list[dict[str, Any]]:
        """The runs that were compared."""
        return [line for line in self.lines() if line["what"] == "comparison"]


def rage(names: list[str], kills: int, seed: int, until: float, ledger: Ledger, root: Path) -> None:
    """Kill the cases in turn until there were so many kills, or the time is over."""
    references: dict[str, Path] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("kills", total=kills)
        while (done := len(ledger.kills())) < kills and time.time() < until:
            turn = ledger.begin_turn(names, seed)
            name = turn["case"]
            wrong = sum(bool(line["differences"]) for line in ledger.comparisons())
            progress.update(bar, completed=done, description=f"{name} ({wrong} runs differ)" if wrong else name)
            if name not in references:
                references[name] = complete(CASES[name], root / name / "reference")
            folder = root / name / str(turn["turn"])
            found = kill_and_compare(turn, references[name], folder, min(PER_TURN, kills - done), ledger)
            if found:
                shutil.copytree(folder, ledger.path.parent / f"chaos-{turn['turn']}", dirs_exist_ok=True)
            shutil.rmtree(folder)


def kill_and_compare(turn: dict[str, Any], reference: Path, folder: Path, most: int, ledger: Ledger) -> list[str]:
    """Kill one run again and again; what differs in the end."""
    case = replace(CASES[turn["case"]], pause=0.002)  # steps take a while, so that kills hit them too
    began = time.monotonic()
    rng, count = random.Random(f"{turn['seed']} {turn['turn']}"), 0
    try:
        for kill in kill_run(case, folder, rng, most, events_of(reference)):
            ledger.append(what="kill", **turn, kind=kill.way, phase=kill.phase, step=kill.step)
            count += 1
        found = case.differences(reference, folder)
    except (
        AssertionError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # it hung, failed, or left something unreadable
        found = [f"{type(error).__name__}: {error}"]
    seconds = round(time.monotonic() - began, 1)
    ledger.append(what="comparison", **turn, kills=count, seconds=seconds, differences=found)
    return found


def show(ledger: Ledger) -> int:
    """The table of a ledger; the number of differences."""
    kills, comparisons = ledger.kills(), ledger.comparisons()
    hits = Counter((kill["case"], kill["phase"]) for kill in kills)
    table = Table(title=f"Killed with SIGKILL and started again: {ledger.path}")
    table.add_column("case", no_wrap=True)
    for heading in ("kills", *PHASES, "runs compared", "differences"):
        table.add_column(heading, justify="right")

    def add(name: str, cases: list[str], bold: str = "") -> int:
        runs = [line for line in comparisons if line["case"] in cases]
        wrong = sum(len(line["differences"]) for line in runs)
        phases = [sum(hits[case, phase] for case in cases) for phase in PHASES]
        style = f"{bold}red" if wrong else bold + ("green" if bold else "")
        table.add_row(name, *map(str, (sum(phases), *phases, len(runs), wrong)), style=style or None)
        return wrong

    names = [name for name in CASES if any(line["case"] == name for line in comparisons)]
    for name in names:
        add(name, [name])
    table.add_section()
    wrong = add("all", names, "bold ")
    console.print(table)
    for line in comparisons:
        for difference in line["differences"]:
            console.print(
                f"turn {line['turn']}, {line['case']}: {difference}", style="red", highlight=False, markup=False
            )
    return wrong


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="continue the ledger until it has so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--ledger", type=Path, default=Path(__file__).parent / "results" / "chaos.jsonl")
    parser.add_argument("--jobs", type=int, default=1, help="so many processes at a time")
    args = parser.parse_args()
    if args.kills < 1 or args.jobs < 1:
        parser.error("--kills and --jobs must be at least 1")
    return args


def end_victims() -> None:
    """End the processes that are being tormented, and their children."""
    for victim in multiprocessing.active_children():
        kill_group(victim.pid)


def prepare() -> None:
    """Environment variables of the victims: no network, and JAX compiles fast and keeps the result."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir(), "trainformer-jax-cache")))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    args = parse_args()
    prepare()
    ledger, until = Ledger(args.ledger), time.time() + 60 * args.minutes
    command = [sys.executable, __file__, *sys.argv[1:], "--jobs", "1"]  # the last one wins
    others = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(args.jobs - 1)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            rage(args.only or list(CASES), args.kills, args.seed, until, ledger, Path(folder))
            for other in others:
                other.wait()
        except KeyboardInterrupt:  # those started by `--jobs` got it, too
            end_victims()
            console.print(f"interrupted; the same command continues {ledger.path}")
            show(ledger)
            sys.exit(130)
    wrong = show(ledger)
    verdict = "there are differences" if wrong else "every run ended as if it had never been killed"
    console.print(f"{len(ledger.kills())} kills: {verdict}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

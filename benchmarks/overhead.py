"""What a training loop costs: time per step of several frameworks on a model so small that the loop is all there is.

Owns how time is taken and what is made of it; who is measured, and on what, is in `contestants.py`. Each contestant
trains in a process of its own, and they take turns of 150 steps: one trains while all others wait. A turn lasts a
fraction of a second, and ratios are taken within a round of turns, so that what else the machine does meets all
alike. Set-up is not measured. The clock is read in the one function that every contestant calls once per step, the
loss, so that nothing is hooked into anybody's loop.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --only trainformer lightning --rounds 10
    python benchmarks/overhead.py --device cuda
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from contestants import BASELINE, CONTESTANTS, LOG_EVERY, Contestant, Job, make_samples, silence
from machines import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

LEAD = 50  # steps at the beginning of a turn that are not timed: caches are cold after the wait
SAME, ALIKE = 1e-3, 0.05  # how far a final loss may be off: where the arithmetic is the same, and where it is not

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # of a file or a pipe rich assumes 80 columns, too few for the table


@dataclass
class Times:
    """Microseconds per step, one number per round: on the wall, and while the process had a processor."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loss: float = math.nan


# -- measuring: in the contestant's process ----------------------------------------------------------------


class Pacer:
    """Called once per step by the training: waits for the contestant's turn, and times all of it but the lead."""

    def __init__(self, pipe: Any, device: torch.device, steps: int) -> None:
        self.turn = LEAD + steps
        self._pipe = pipe
        self._device = device
        self._step = 0
        self._began = 0.0, 0.0

    def __call__(self) -> None:
        place = self._step % self.turn
        self._step += 1
        if place == 0:
            wall, cpu = self._clocks()
            self._pipe.send((wall - self._began[0], cpu - self._began[1]))
            try:
                self._pipe.recv()
            except EOFError:
                raise SystemExit(1) from None  # the parent process is gone
        elif place == LEAD:
            self._began = self._clocks()

    def _clocks(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter(), time.process_time()


def serve(pipe: Any, key: str, device_name: str, threads: int, steps: int, rounds: int) -> None:
    """The life of a contestant's process: one training, turn by turn, then the loss it ended with."""
    silence()
    torch.set_num_threads(threads)
    contestant = next(c for c in CONTESTANTS if c.key == key)
    device, samples = torch.device(device_name), make_samples()
    pacer = Pacer(pipe, device, steps)
    with tempfile.TemporaryDirectory() as folder:
        # One turn to warm up, and one step to see the end of the last turn.
        model = contestant.run(Job((1 + rounds) * pacer.turn + 1, device, Path(folder), samples, pacer))
    pipe.send(final_loss(model, samples))


def final_loss(model: nn.Module, samples: tuple[Tensor, Tensor]) -> float:
    """The loss over all samples after training, wherever the framework has left the model."""
    x, y = (t.to(next(model.parameters()).device) for t in samples)
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


# -- measuring: in the process that leads ------------------------------------------------------------------


class Worker:
    """A process in which one contestant lives, and nobody else.

    Frameworks change the process that imports them. Lightning, for one, sets a variable that makes torch look for
    GPUs in every step of an optimizer: where there is none, that slows a hand-written loop next to it by a third.
    """

    def __init__(self, contestant: Contestant, args: argparse.Namespace) -> None:
        self.contestant = contestant
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        given = other, contestant.key, args.device, args.threads, args.steps, args.rounds
        # A daemon: it ends when this process does, however that comes about.
        self._process = context.Process(target=serve, args=given, daemon=True)
        self._process.start()
        other.close()
        self._answer()  # it stands before its first step

    def take_turn(self) -> Any:
        """Let it train until its turn is over, while everybody else waits; what it reports."""
        self._pipe.send("go")
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.contestant.title} failed; its error is above.") from None


def measure(chosen: Sequence[Contestant], args: argparse.Namespace) -> dict[str, Times]:
    """All rounds; at the end it is checked that everybody has trained."""
    times = {c.key: Times() for c in chosen}
    workers: list[Worker] = []
    with console.status("") as status:
        for contestant in chosen:
            status.update(f"warming up: {contestant.title}")
            workers.append(Worker(contestant, args))
            workers[-1].take_turn()
        for number in range(args.rounds):
            status.update(f"round {number + 1} of {args.rounds}")
            turn = number % len(workers)
            for worker in (*workers[turn:], *workers[:turn]):
                wall, cpu = worker.take_turn()
                times[worker.contestant.key].wall.append(wall / args.steps * 1e6)
                times[worker.contestant.key].cpu.append(cpu / args.steps * 1e6)
        for worker in workers:
            times[worker.contestant.key].loss = worker.take_turn()
            check_trains(worker.contestant, times)
    return times


def check_trains(contestant: Contestant, times: dict[str, Times]) -> None:
    """Nobody is fast by doing something else: the loss must end where that of the hand-written loop ends."""
    ours, theirs = times[contestant.key].loss, times[BASELINE].loss
    tolerance = SAME if contestant.exact else ALIKE
    if not math.isclose(ours, theirs, rel_tol=tolerance):
        raise SystemExit(
            f"{contestant.title} does not train as the hand-written loop does: expected a final loss of {theirs:.5f} "
            f"(to {tolerance:.1%}), received {ours:.5f}."
        )


# -- figures -----------------------------------------------------------------------------------------------


def figures(times: Times, baseline: Times, clock: str) -> dict[str, float]:
    """Medians, quartiles and minima of one contestant. Ratios are taken per round, then summarised."""
    own, other = getattr(times, clock), getattr(baseline, clock)
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "median_us": statistics.median(own),
        "min_us": min(own),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "ratio_of_minima": min(own) / min(other),
        "final_loss": times.loss,
    }


def report(chosen: Sequence[Contestant], times: dict[str, Times], args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, and on what."""
    return {
        "what": "microseconds per training step, and ratios to a hand-written PyTorch loop",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "rounds": args.rounds,
        "steps": args.steps,
        "threads": args.threads,
        "device": args.device,
        "clock": args.clock,
        "machine": machine(args.device),
        "versions": versions(),
        "contestants": {
            c.key: {
                "title": c.title,
                "main": c.main,
                **figures(times[c.key], times[BASELINE], args.clock),
                "rounds_wall_us": [round(t, 2) for t in times[c.key].wall],
                "rounds_cpu_us": [round(t, 2) for t in times[c.key].cpu],
            }
            for c in chosen
        },
    }


def versions() -> dict[str, str]:
    """Of everything that takes part."""
    import trainformer

    found = {"python": platform.python_version(), "torch": torch.__version__, "trainformer": trainformer.__version__}
    for name in ("accelerate", "transformers", "lightning", "pytorch-lightning"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


# -- showing -----------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title=f"Time per step on {_where(result)}, {result['rounds']} rounds, {result['clock']} clock")
    table.add_column("loop", no_wrap=True)
    for heading in ("µs, median", "µs, min", "ratio", "quartiles", "ratio of minima", "final loss"):
        table.add_column(heading, justify="right")
    rows = list(result["contestants"].values())
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            row["title"],
            f"{row['median_us']:.0f}",
            f"{row['min_us']:.0f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} – {row['ratio_high']:.3f}",
            f"{row['ratio_of_minima']:.3f}",
            f"{row['final_loss']:.4f}",
            style="bold green" if row["title"] == "trainformer" else None,
            end_section=following is not None and row["main"] != following["main"],
        )
    console.print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    """The chart: one bar per contestant, whiskers at the quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(result["contestants"].values())
    # A gap sets the side shows apart from the contest.
    places = [i + (0 if row["main"] else 0.5) for i, row in enumerate(rows)]
    ratios = [row["ratio"] for row in rows]
    errors = [[row["ratio"] - row["ratio_low"] for row in rows], [row["ratio_high"] - row["ratio"] for row in rows]]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.42 * len(rows)), dpi=160)
    axes.barh(places, ratios, height=0.68, color=[_colour(row) for row in rows], zorder=2)
    axes.errorbar(ratios, places, xerr=errors, fmt="none", ecolor="#222222", elinewidth=1.1, capsize=3, zorder=3)
    axes.axvline(1.0, color="#222222", linewidth=1, linestyle=(0, (4, 3)), zorder=4)
    for place, row in zip(places, rows, strict=True):
        weight = "bold" if row["title"] == "trainformer" else "normal"
        text = f"{row['ratio']:.2f}×   {row['median_us']:.0f} µs"
        # Beside the whisker, and never across the line at 1.
        axes.text(max(row["ratio_high"], 1.0) + 0.025, place, text, va="center", fontsize=9, fontweight=weight)
    axes.set_yticks(places, [row["title"] for row in rows], fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, max(row["ratio_high"] for row in rows) * 1.2)
    axes.set_xlabel("time per step, relative to the hand-written loop (shorter is better)", fontsize=9.5, labelpad=8)
    axes.tick_params(axis="both", length=0)
    axes.grid(axis="x", color="#e4e4e4", zorder=0)
    axes.spines[:].set_visible(False)
    figure.suptitle("What the training loop costs", x=0.02, ha="left", fontsize=14, fontweight="bold")
    figure.text(0.02, 1 - 0.52 / figure.get_figheight(), _subtitle(result), fontsize=9, color="#555555", va="top")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.28 / figure.get_figheight()))
    figure.savefig(path)
    plt.close(figure)


def _colour(row: dict[str, Any]) -> str:
    if row["title"].startswith("trainformer"):
        return "#1b9e77" if row["main"] else "#9fd8c5"
    if row["title"].startswith("hand-written"):
        return "#555555" if row["main"] else "#b5b5b5"
    return "#7b93b5" if row["main"] else "#c3cfdf"


def _subtitle(result: dict[str, Any]) -> str:
    torch_version = result["versions"]["torch"].partition("+")[0]
    return f"small MLP, batch 32, fused AdamW · {_where(result)} · torch {torch_version} · whiskers: quartiles"


def _where(result: dict[str, Any]) -> str:
    threads = "1 thread" if result["threads"] == 1 else f"{result['threads']} threads"
    return result["machine"].get("gpu", f"{result['machine']['cpu']}, {threads}")


# -- command line ------------------------------------------------------------------------------------------


def available(contestant: Contestant) -> bool:
    """Whether all packages are installed that a contestant needs (``a|b``: one of two)."""
    for need in contestant.needs:
        if not any(importlib.util.find_spec(name) for name in need.split("|")):
            console.print(f"[yellow]{contestant.title} is left out: {need.partition('|')[0]} is not installed[/]")
            return False
    return True


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    keys = [c.key for c in CONTESTANTS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="turns that every contestant gets")
    parser.add_argument("--steps", type=int, default=LOG_EVERY, help="timed steps of a turn")
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for machines that are not idle")
    parser.add_argument("--only", nargs="+", choices=keys, metavar="NAME", help=f"some of: {', '.join(keys)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where results go")
    args = parser.parse_args(argv)
    if min(args.rounds, args.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    if args.steps < 1 or args.steps % LOG_EVERY:
        parser.error(f"--steps must be a multiple of {LOG_EVERY}, so that every turn has its share of log points")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if args.device == "cuda" and args.clock == "cpu":
        parser.error("--clock cpu does not see what a GPU does; use --clock wall")
    return args


def main() -> None:
    args = parse_args()
    wanted = [c for c in CONTESTANTS if args.only is None or c.key in (BASELINE, *args.only)]
    chosen = [c for c in wanted if available(c)]
    times = measure(chosen, args)
    result = report(chosen, times, args)
    show(result)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "overhead.json").write_text(json.dumps(result, indent=2) + "\n")
    try:
        draw(result, args.out / "overhead.png")
    except ModuleNotFoundError:
        console.print("[yellow]no chart: matplotlib is not installed[/]")
    console.print(f"written to {args.out}")


if __name__ == "__main__":
    main()

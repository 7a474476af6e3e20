"""What a training loop costs: time per step of several frameworks on a model so small that the loop is all there is.

Owns how time is taken and what is made of it; who is measured, and on what, is in `contestants.py`. Every contestant
runs twice per round, for a few and for many steps, and the difference is divided by the difference in steps: set-up,
warm-up and tear-down cancel, and nothing has to be hooked into anybody's loop. Each contestant lives in a process of
its own, and they take turns. Rounds are interleaved, in rotating order, and ratios are taken within a round, so that
what else the machine does meets all alike.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --only trainformer lightning --rounds 5
    python benchmarks/overhead.py --device cuda
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
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
from contestants import BASELINE, CONTESTANTS, STEPS_PER_EPOCH, Contestant, Job, make_samples, silence
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

SHORT_RUN = 100  # steps of the run whose time is taken off: enough for every cache to be warm
SAME, ALIKE = 1e-3, 0.05  # how far a final loss may be off: where the order of samples is the same, and where not

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # of a file or a pipe rich assumes 80 columns, too few for the table


@dataclass
class Outcome:
    """One run: seconds on the wall, seconds that the process had a processor for, and the loss it ended with."""

    wall: float
    cpu: float
    loss: float


@dataclass
class Times:
    """Microseconds per step, one number per round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loss: float = math.nan


# -- measuring ---------------------------------------------------------------------------------------------


class Worker:
    """A process in which one contestant lives, and nobody else.

    Frameworks change the process that imports them. Lightning, for one, sets a variable that makes torch look for
    GPUs in every step of an optimizer: where there is none, that slows a hand-written loop next to it by a third.
    """

    def __init__(self, contestant: Contestant, device: str, threads: int) -> None:
        self.title = contestant.title
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        # A daemon: it ends when this process does, however that comes about.
        self._process = context.Process(target=serve, args=(other, contestant.key, device, threads), daemon=True)
        self._process.start()
        other.close()

    def run(self, steps: int) -> Outcome:
        """Train for so many steps while everybody else waits."""
        self._pipe.send(steps)
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.title} failed; its error is above.") from None


def serve(pipe: Any, key: str, device_name: str, threads: int) -> None:
    """The life of a worker: run what is asked for."""
    silence()
    torch.set_num_threads(threads)
    contestant = next(c for c in CONTESTANTS if c.key == key)
    device, samples = torch.device(device_name), make_samples()
    while True:
        try:
            steps = pipe.recv()
        except EOFError:
            return
        pipe.send(timed_run(contestant, steps, device, samples))


def timed_run(contestant: Contestant, steps: int, device: torch.device, samples: tuple[Tensor, Tensor]) -> Outcome:
    """One run from building to the last step, in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        wall, cpu = clocks(device)
        model = contestant.run(Job(steps, device, Path(folder), samples))
        wall_after, cpu_after = clocks(device)
    return Outcome(wall_after - wall, cpu_after - cpu, final_loss(model, samples))


def clocks(device: torch.device) -> tuple[float, float]:
    """Both clocks, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter(), time.process_time()


def measure(chosen: Sequence[Contestant], args: argparse.Namespace) -> dict[str, Times]:
    """All rounds. Before them each contestant runs once untimed, and it is checked that it trains."""
    times = {c.key: Times() for c in chosen}
    workers: dict[str, Worker] = {}
    with console.status("") as status:
        for contestant in chosen:
            status.update(f"warming up: {contestant.title}")
            workers[contestant.key] = Worker(contestant, args.device, args.threads)
            times[contestant.key].loss = workers[contestant.key].run(SHORT_RUN + args.steps).loss
            check_trains(contestant, times)
        for number in range(args.rounds):
            turn = number % len(chosen)
            for contestant in (*chosen[turn:], *chosen[:turn]):
                status.update(f"round {number + 1} of {args.rounds}: {contestant.title}")
                worker, found = workers[contestant.key], times[contestant.key]
                short, long = worker.run(SHORT_RUN), worker.run(SHORT_RUN + args.steps)
                found.wall.append((long.wall - short.wall) / args.steps * 1e6)
                found.cpu.append((long.cpu - short.cpu) / args.steps * 1e6)
    return times


def final_loss(model: nn.Module, samples: tuple[Tensor, Tensor]) -> float:
    """The loss over all samples after training, wherever the framework has left the model."""
    x, y = (t.to(next(model.parameters()).device) for t in samples)
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


def check_trains(contestant: Contestant, times: dict[str, Times]) -> None:
    """Nobody is fast by doing something else: the loss must end where that of the hand-written loop ends."""
    ours, theirs = times[contestant.key].loss, times[BASELINE].loss
    tolerance = SAME if contestant.same_order else ALIKE
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


def machine(device: str) -> dict[str, Any]:
    """The kind of machine; neither its name nor its paths."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    described = {"cpu": model, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}
    if device == "cuda":
        described["gpu"] = torch.cuda.get_device_name()
    return described


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
    where = result["machine"].get("gpu", result["machine"]["cpu"])
    table = Table(title=f"Time per step on {where}, {result['threads']} thread(s), {result['rounds']} rounds")
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
        axes.text(max(row["ratio_high"], row["ratio"]) + 0.025, place, text, va="center", fontsize=9, fontweight=weight)
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
    where = result["machine"].get("gpu", f"{result['machine']['cpu']}, {result['threads']} thread(s)")
    return f"small MLP, batch 32, fused AdamW, {where}, torch {result['versions']['torch']}; whiskers: quartiles"


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
    parser.add_argument("--rounds", type=int, default=15, help="how often every contestant is measured")
    parser.add_argument("--steps", type=int, default=2 * STEPS_PER_EPOCH, help="steps per measurement")
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for machines that are not idle")
    parser.add_argument("--only", nargs="+", choices=keys, metavar="NAME", help=f"some of: {', '.join(keys)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where results go")
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps, args.threads) < 1:
        parser.error("--rounds, --steps and --threads must be at least 1")
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

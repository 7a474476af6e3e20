"""Train a tiny task for a long time, and see whether anything grows.

Millions of steps with thousands of epochs, a hundred thousand log records, hundreds of evaluations and saves. Memory,
Python objects, open files, threads, checkpoint size, and the time of steps and saves are sampled a hundred times
into `soak.jsonl`. Exits with 1 if the last tenth of the run needs more of anything than the second tenth. (The first
warms up: the log history, for example, is full after it.) After an interruption the same command resumes.

    python benchmarks/soak.py --steps 2000000
    python benchmarks/soak.py --steps 200000 --save-async --folder /some/disk
    python benchmarks/soak.py --report          # of the steps so far, also while they run
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from machines import machine
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from trainformer import Trainer
from trainformer.engine.state import MAX_LOG_RECORDS
from trainformer.run import run_of
from trainformer.utils.processes import resident_bytes

SAMPLES, SAVES, EVALS = 100, 400, 200  # of a whole run, whatever its length
RECORDS = 10 * MAX_LOG_RECORDS  # the history is full after a tenth of the run

console = Console()
if not console.is_terminal:
    console = Console(width=140)  # of a file or a pipe rich assumes 80 columns, too few for the table


@dataclass(frozen=True)
class Quantity:
    """What is sampled, and how much more of it the last tenth may need than the second: a factor, and an offset."""

    key: str
    title: str
    factor: float
    offset: float = 0.0
    digits: int = 0


QUANTITIES = (
    Quantity("rss_mb", "RSS, MB", 1.05, 5, 1),
    Quantity("blocks", "Python blocks", 1.02, 2000),
    Quantity("open_files", "open files", 1, 1),
    Quantity("threads", "threads", 1),
    Quantity("checkpoint_kb", "checkpoint, KB", 1.01, 4, 1),
    Quantity("save_ms", "save, ms", 2, 0, 1),  # times depend on what else the machine does
    Quantity("step_cpu_us", "CPU per step, us", 2, 0, 1),
    Quantity("step_us", "time per step, us", float("inf"), 0, 1),
)


class Regression:
    """A task with five parameters."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 1)

    def train_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.model(x), y)

    def eval_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.train_step(batch)}


class Sampler:
    """A callback that writes a sample every `every` steps, at a save."""

    sets_control = False

    def __init__(self, path: Path, every: int) -> None:
        self.path = path
        self.every = every
        self._clocks: tuple[int, float, float] | None = None
        self._steps: list[tuple[float, float]] = []  # time and CPU time per step, between two log records
        self._saves: list[float] = []

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        now = trainer.state.step, time.perf_counter(), time.process_time()
        if self._clocks is not None:
            steps, wall, cpu = (b - a for a, b in zip(self._clocks, now, strict=True))
            self._steps.append((wall / steps, cpu / steps))
        self._clocks = now

    def on_save(self, trainer: Trainer, path: str) -> None:
        checkpointer = run_of(trainer).checkpointer
        assert checkpointer is not None
        self._saves.append(checkpointer.blocked_seconds)  # since the last log record, so of this save
        if trainer.state.step % self.every == 0 and self._steps:  # there are none right after a resume
            checkpointer.wait()
            with self.path.open("a") as file:
                file.write(json.dumps(self._sample(trainer.state.step, Path(path))) + "\n")
            self._steps, self._saves = [], []
        self._clocks = None

    def _sample(self, step: int, checkpoint: Path) -> dict[str, float]:
        wall, cpu = (statistics.median(times) for times in zip(*self._steps, strict=True))
        return {
            "step": step,
            "process": os.getpid(),
            "rss_mb": resident_bytes() / 1e6,
            "blocks": sys.getallocatedblocks(),
            "open_files": len(os.listdir("/dev/fd")),
            "threads": threading.active_count(),
            "checkpoint_kb": sum(file.stat().st_size for file in checkpoint.iterdir()) / 1e3,
            "save_ms": 1e3 * statistics.median(self._saves),
            "step_cpu_us": 1e6 * cpu,
            "step_us": 1e6 * wall,
        }


def train(args: argparse.Namespace) -> None:
    """Train to the end, from the newest checkpoint on."""
    x = torch.randn(4096, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :1].tanh()
    trainer = Trainer(
        Regression(),
        data=(x, y),
        val_data=(x[:64], y[:64]),
        max_steps=args.steps,
        batch_size=4,
        num_workers=0,
        device="cpu",
        lr=1e-3,
        log=args.log,
        log_every=args.steps // RECORDS,
        eval_every=f"{args.steps // EVALS}steps",
        save_every=args.steps // SAVES,
        save_async=args.save_async,
        run_dir=args.folder,
        callbacks=[Sampler(args.folder / "soak.jsonl", args.steps // SAMPLES)],
    )
    trainer.fit()


def read_samples(folder: Path) -> list[dict[str, float]]:
    """The samples by step; one that was taken again after a resume replaces the first."""
    lines = (folder / "soak.jsonl").read_text().splitlines()
    samples = {sample["step"]: sample for sample in map(json.loads, lines)}
    return [samples[step] for step in sorted(samples)]


def summarize(samples: list[dict[str, float]], planned: int) -> dict[str, Any]:
    """For each quantity: the medians of the tenths, the slope per million steps after the first, whether it grows."""
    size = SAMPLES // 10
    tenths = [[s for s in samples if i < s["step"] * 10 / planned <= i + 1] for i in range(10)]
    tenths = [tenth for tenth in tenths if tenth]
    if len(samples) < 3 * size:
        raise SystemExit(f"Expected at least {3 * size} samples, received {len(samples)}. Run the same command again.")
    later = [sample for tenth in tenths[1:] for sample in tenth]
    result = {}
    for q in QUANTITIES:
        medians = [statistics.median(s[q.key] for s in tenth) for tenth in (*tenths, samples[-size:])]
        slope = statistics.linear_regression([s["step"] / 1e6 for s in later], [s[q.key] for s in later]).slope
        result[q.key] = {
            "first": samples[0][q.key],
            "tenths": medians[:-1],
            "last": samples[-1][q.key],
            "slope_per_million_steps": slope,
            "last_tenth": medians[-1],
            "grows": medians[-1] > medians[1] * q.factor + q.offset,
        }
    return result


def show(result: dict[str, Any], planned: int, title: str) -> None:
    """The table: one row per tenth, and the slopes."""
    table = Table(title=title)
    table.add_column("steps", justify="right", no_wrap=True)
    for q in QUANTITIES:
        table.add_column(q.title, justify="right", style="red" if result[q.key]["grows"] else None)

    def cells(name: str, sign: str = "", tenth: int | None = None) -> list[str]:
        found = [(result[q.key][name] if tenth is None else result[q.key][name][tenth], q.digits) for q in QUANTITIES]
        return [f"{value:{sign},.{digits}f}" for value, digits in found]

    table.add_row("first sample", *cells("first"))
    for tenth in range(len(result["rss_mb"]["tenths"])):
        table.add_row(f"to {planned * (tenth + 1) // 10:,}", *cells("tenths", tenth=tenth))
    table.add_row("last sample", *cells("last"))
    table.add_section()
    table.add_row("per million", *cells("slope_per_million_steps", sign="+"))
    console.print(table)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--save-async", action="store_true", help="write checkpoints in the background")
    parser.add_argument("--log", default="none", help="console, tensorboard, ...; metrics.jsonl is always written")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="of the run, which resumes from it")
    parser.add_argument("--report", action="store_true", help="train nothing; report what the folder holds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where results go")
    args = parser.parse_args()
    if args.steps < RECORDS or args.steps % RECORDS:
        parser.error(f"--steps must be a multiple of {RECORDS:,}: the log history has to be full after a tenth of them")
    return args


def main() -> None:
    args = parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.report:
        train(args)
    samples = read_samples(args.folder)
    steps = int(samples[-1]["step"])
    quantities = summarize(samples, args.steps)
    growing = [q.title for q in QUANTITIES if quantities[q.key]["grows"]]
    processes = len({sample["process"] for sample in samples})
    saves = "asynchronous" if args.save_async else "synchronous"
    show(quantities, args.steps, f"{steps:,} steps, {saves} saves, {processes} process(es), {len(samples)} samples")
    result = {
        "what": "memory, open files, checkpoints and times of a long run",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "steps": steps,
        "planned": args.steps,
        "save_async": args.save_async,
        "log": args.log,
        "processes": processes,
        "machine": machine("cpu"),
        "torch": str(torch.__version__),
        "quantities": quantities,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "soak.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"grows: {', '.join(growing)}" if growing else "nothing grows")
    sys.exit(1 if growing else 0)


if __name__ == "__main__":
    main()

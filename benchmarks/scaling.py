"""What a strategy costs beside hand-written data parallelism, on the same work and in the same processes.

Every rank trains all contestants in turns of some steps, one after the other, round after round; times are taken
inside the steps, and ratios within a round, so that what else the machine does meets all alike. Set-up, saves and the
first steps of a turn are not measured.

    python benchmarks/scaling.py                      two processes over gloo, a small model: the loop is all there is
    python benchmarks/scaling.py --ranks 4 --width 512
    python benchmarks/scaling.py --device cuda        one process per GPU, over NCCL
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from machines import machine
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from turns import console, ratio_quartiles

LEAD = 10  # steps at the beginning of a turn that are not timed
BASELINE = "hand-written DDP"
BATCH = 32  # of each rank


class Clock:
    """Called when a step begins: the time from the end of the lead to the beginning of the last step of a turn."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device = device
        self._last = steps - 1
        self._steps = 0
        self._began = self._ended = 0.0

    def begin(self) -> None:
        """A turn begins."""
        self._steps = 0

    def tick(self) -> None:
        """A step begins."""
        if self._steps == LEAD:
            self._began = self._now()
        elif self._steps == self._last:
            self._ended = self._now()
        self._steps += 1

    def microseconds(self) -> float:
        """Per step of the turn."""
        return (self._ended - self._began) / (self._last - LEAD) * 1e6

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def make_model(width: int) -> nn.Sequential:
    """Six layers; the same weights everywhere."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def make_data(ranks: int) -> tuple[Tensor, Tensor]:
    """Noise with labels, for all ranks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * BATCH * ranks, 32, generator=generator)
    return x, x[:, :10].argmax(-1)


# -- contestants: each is a function that takes so many steps ------------------------------------------------


def by_hand(wrap: Callable[[nn.Module], nn.Module], width: int, clock: Clock, device: torch.device) -> Any:
    """The loop that everybody writes, with clipping and a log of the loss now and then."""
    model = wrap(make_model(width).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = make_data(dist.get_world_size())
    mine = range(dist.get_rank() * BATCH, len(x), BATCH * dist.get_world_size())
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in mine]
    total = torch.zeros((), device=device)
    done = 0

    def turn(steps: int) -> float:
        nonlocal done, total
        for _ in range(steps):
            clock.tick()
            images, labels = (part.to(device, non_blocking=True) for part in batches[done % len(batches)])
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            done += 1
        dist.all_reduce(total)
        last = total.item() / steps / dist.get_world_size()
        total.zero_()
        return last

    return turn


class Classify:
    """The same model and loss as a task."""

    def __init__(self, width: int, clock: Clock) -> None:
        self.model = make_model(width)
        self.clock = clock

    def train_step(self, batch: Any) -> Tensor:
        """The loss; the clock is read here, so that nothing is hooked into anybody's loop."""
        self.clock.tick()
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def eval_step(self, batch: Any) -> dict[str, Tensor]:
        """Not measured."""
        return {"loss": self.train_step(batch)}


def with_trainer(strategy: Any, width: int, clock: Clock, device: torch.device) -> Any:
    """`Trainer` with a strategy, called again for each turn."""
    from trainformer import Trainer

    world = dist.get_world_size()
    trainer = Trainer(
        Classify(width, clock), TensorDataset(*make_data(world)), max_steps=1, batch_size=BATCH * world, lr=1e-4,
        scheduler=None, precision="no", device=device.type, log="none", log_every=10**9, save_every=None, save_best=0,
        resume=None, strategy=strategy, run_dir=Path(tempfile.gettempdir()) / f"scaling-{os.getppid()}-{strategy}",
    )  # fmt: skip

    def turn(steps: int) -> float:
        trainer.max_steps = trainer.state.step + steps
        trainer.fit()
        return trainer.state.log_history[-1]["train/loss"]

    return turn


CONTESTANTS: dict[str, tuple[Callable[..., Any], Any]] = {
    BASELINE: (by_hand, DistributedDataParallel),
    "ddp": (with_trainer, "ddp"),
    "accelerate": (with_trainer, "accelerate"),
    "hand-written FSDP2": (by_hand, fully_shard),  # as a whole: layers this small are no blocks to us either
    "fsdp": (with_trainer, "fsdp"),
}


# -- measuring -----------------------------------------------------------------------------------------------


def measure(rank: int, options: argparse.Namespace, port: int, results: Any) -> None:
    """All contestants in this rank."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options.ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    on_cuda = options.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    clock = Clock(device, options.steps)
    chosen = [name for name in CONTESTANTS if name == BASELINE or not options.only or name in options.only]
    everybody = {}
    for name in chosen:
        make, what = CONTESTANTS[name]
        everybody[name] = make(what, options.width, clock, device)
    times: dict[str, list[float]] = {name: [] for name in everybody}
    losses: dict[str, float] = {}
    for _ in range(options.rounds + 1):  # the first round warms everything up
        for name, turn in everybody.items():
            dist.barrier()
            clock.begin()
            losses[name] = turn(options.steps)
            times[name].append(clock.microseconds())
    if rank == 0:
        results.put(({name: series[1:] for name, series in times.items()}, losses))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=None, help="processes (default: 2, or one per GPU)")
    parser.add_argument("--width", type=int, default=64, help="of the model's layers")
    parser.add_argument("--steps", type=int, default=60, help="of a turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), help="beside hand-written DDP")
    parser.add_argument("--output", type=Path, help="write every number here, as JSON")
    options = parser.parse_args()
    options.ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=measure, args=(rank, options, port, results)) for rank in range(options.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; see above")
    times, losses = results.get()
    show(times, losses, options)
    if options.output is not None:
        content = {
            "machine": machine(options.device),
            "time": datetime.now(UTC).isoformat(),
            "options": vars(options),
            "us": times,
        }
        options.output.write_text(json.dumps(content, indent=2, default=str))


def show(times: dict[str, list[float]], losses: dict[str, float], options: argparse.Namespace) -> None:
    """A table of medians, and of ratios within rounds."""
    table = Table(title=f"{options.ranks} ranks, width {options.width}: microseconds per step")
    for column in ("", "median", "times hand-written DDP", "lower quartile", "upper", "last loss"):
        table.add_column(column, justify="left" if not column else "right")
    for name, series in times.items():
        low, middle, high = (f"{ratio:.2f}" for ratio in ratio_quartiles(series, times[BASELINE]))
        table.add_row(name, f"{statistics.median(series):,.0f}", middle, low, high, f"{losses[name]:.4f}")
    console.print(table)


if __name__ == "__main__":
    main()

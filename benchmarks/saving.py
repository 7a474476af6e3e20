"""How long a save keeps the training loop waiting: in the loop's time, and behind its back.

A model of 100 million parameters (100 linear layers of 1000 x 1000) with the two moments of AdamW makes checkpoints of
1.2 GB. `Checkpointer.save` is called as the loop calls it; the time until it returns is the time the loop stands still.
Between two asynchronous saves the writer is given the time to finish, as training would; how long it took is shown as
well.

    python benchmarks/saving.py
    python benchmarks/saving.py --layers 10 --saves 3 --folder /some/disk
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from trainformer.checkpointing import Manifest, Retention, StateComponent
from trainformer.checkpointing.checkpointer import Checkpointer
from trainformer.checkpointing.torch_files import TorchFiles

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # of a file or a pipe rich assumes 80 columns, too few for the table


@dataclass
class Times:
    """Seconds, one number per save."""

    blocked: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


def make_components(layers: int, width: int, device: str) -> list[StateComponent]:
    """A model and an optimizer that has taken a step, so that its moments are there."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return [StateComponent("model", model, format="weights"), StateComponent("optimizer", optimizer)]


def measure(components: list[StateComponent], saves: int, asynchronous: bool, folder: Path, device: str) -> Times:
    """Save several times; the first save is not counted."""
    checkpointer = Checkpointer(folder, Retention(last=1), asynchronous, files=TorchFiles(on_device=device != "cpu"))
    times = Times()
    for step in range(saves + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        checkpointer.save(components, Manifest(step=step, components={}))
        blocked = time.perf_counter() - began
        checkpointer.finish()
        if step:
            times.blocked.append(blocked)
            times.total.append(time.perf_counter() - began)
    newest = checkpointer.store.newest()  # nobody is fast by writing nothing
    if checkpointer.failures or newest is None or newest.step != saves:
        raise SystemExit(f"The checkpoints were not written: is there enough room in {folder}?")
    return times


def figures(times: Times) -> dict[str, Any]:
    """Medians and extremes of one way of saving."""
    return {
        "blocked_median_s": statistics.median(times.blocked),
        "blocked_min_s": min(times.blocked),
        "blocked_max_s": max(times.blocked),
        "total_median_s": statistics.median(times.total),
        "blocked_s": [round(t, 4) for t in times.blocked],
        "total_s": [round(t, 4) for t in times.total],
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title=f"Saving {result['parameters'] / 1e6:.0f}M parameters with AdamW, {result['saves']} saves")
    table.add_column("save", no_wrap=True)
    for heading in ("loop blocked, median", "min", "max", "until on disk, median", "blocked, relative"):
        table.add_column(heading, justify="right")
    base = result["ways"]["synchronous"]["blocked_median_s"]
    for name, row in result["ways"].items():
        keys = "blocked_median_s", "blocked_min_s", "blocked_max_s", "total_median_s"
        table.add_row(name, *(f"{row[key]:.3f} s" for key in keys), f"{row['blocked_median_s'] / base:.1%}")
    console.print(table)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; a temporary folder if not given")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where results go")
    args = parser.parse_args()
    if min(args.layers, args.width, args.saves) < 1:
        parser.error("--layers, --width and --saves must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    components = make_components(args.layers, args.width, args.device)
    ways = {}
    for name, asynchronous in (("synchronous", False), ("asynchronous", True)):
        with console.status(name), tempfile.TemporaryDirectory(dir=args.folder) as folder:
            ways[name] = figures(measure(components, args.saves, asynchronous, Path(folder), args.device))
    result = {
        "what": "seconds that a save keeps the training loop waiting",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "parameters": args.layers * args.width**2,
        "saves": args.saves,
        "device": args.device,
        "machine": {"cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"},
        "torch": str(torch.__version__),
        "ways": ways,
    }
    show(result)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "saving.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written to {args.out}")


if __name__ == "__main__":
    main()

"""What benchmarks share in which contestants take turns: clock, rounds, ratios, command line, and what is written.

Ratios are taken within a round of turns, so that what else the machine does meets all alike. Who takes part, what a
turn is, and what is made of the figures is left to the benchmark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from machines import machine
from rich.console import Console
from rich.status import Status

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # of a file or a pipe rich assumes 80 columns, too few for the table


# -- measuring ---------------------------------------------------------------------------------------------


def make_clock(args: argparse.Namespace) -> Callable[[], float]:
    """Seconds by the clock that was asked for, when the device has done what it was given."""
    read = time.process_time if args.clock == "cpu" else time.perf_counter

    def clock() -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
        return read()

    return clock


def in_turn(chosen: Sequence[str], rounds: int, status: Status, what: str) -> Iterator[str]:
    """Whose turn it is, in all rounds; each begins with somebody else."""
    for number in range(rounds):
        status.update(f"{what}: round {number + 1} of {rounds}")
        first = number % len(chosen)
        yield from (*chosen[first:], *chosen[:first])


def ratio_quartiles(own: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the ratios, which are taken per round."""
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return low, middle, high


# -- figures -----------------------------------------------------------------------------------------------


def circumstances(args: argparse.Namespace) -> dict[str, Any]:
    """When, how and on what was measured."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "rounds": args.rounds,
        "threads": args.threads,
        "device": args.device,
        "clock": args.clock,
        "machine": machine(args.device),
    }


def where(result: dict[str, Any]) -> str:
    """The machine of a result, for titles."""
    return result["machine"].get("gpu", f"{result['machine']['cpu']}, threads: {result['threads']}")


def write(result: dict[str, Any], path: Path | None) -> None:
    """Write a result to a file, if there is to be one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"written to {path}")


# -- command line ------------------------------------------------------------------------------------------


def make_parser(doc: str, contestants: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """The arguments that all of these benchmarks have."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="turns that every contestant gets")
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for machines that are not idle")
    parser.add_argument("--only", nargs="+", choices=contestants, metavar="NAME", help="some of the contestants")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go, too")
    return parser


def refuse_bad_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message where the device cannot be measured, or not by that clock."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if args.device == "cuda" and args.clock == "cpu":
        parser.error("--clock cpu does not see what a GPU does; use --clock wall")

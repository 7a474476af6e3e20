"""What a language model's loss costs: time and peak memory of the output layer and its cross-entropy.

Forward and backward pass, down to the gradients by the hidden states and by the weight, four ways: with all logits in
memory (`plain`), chunk by chunk as the library does it (`chunked`), chunks under PyTorch's checkpointing, and with
PyTorch's own `linear_cross_entropy` (torch 2.13 and later). They take turns, and ratios are taken within a round of
turns, so that what else the machine does meets all alike. Peak memory is what is needed beyond the inputs. On a CPU it
is read from the system, in a fresh process each, and gradients, which all of them need, are part of it.

    python benchmarks/token_loss.py
    python benchmarks/token_loss.py --device cuda --json token_loss.json
    python benchmarks/token_loss.py --only plain chunked --chunks 64 128 256
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Some virtual machines report AMX and forbid its use: bf16 matrix products then end in an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.nn.functional as F
import turns
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from turns import console

from trainformer.losses.tokens import linear_cross_entropy, token_cross_entropy

MIB = 2**20


class Size(NamedTuple):
    """How many tokens, how wide their states, how many words to choose from."""

    tokens: int
    width: int
    words: int

    def __str__(self) -> str:
        return f"{self.tokens:,} × {self.width:,} → {self.words:,}"


CASES = {
    "cpu": (Size(1024, 256, 32_000), Size(512, 768, 50_257)),
    "cuda": (Size(8192, 2048, 32_000), Size(8192, 4096, 128_256)),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


# -- contestants -------------------------------------------------------------------------------------------


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """All logits, in single precision for the loss."""
    return token_cross_entropy(F.linear(hidden, weight), labels, shift=False).sum


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None = None) -> Tensor:
    """The library's."""
    return linear_cross_entropy(hidden, weight, labels, shift=False, chunk_tokens=chunk).sum


def checkpointed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What one writes without a library: a few tokens at a time, their logits made again in the backward pass."""
    step = max(1, len(hidden) // 8)

    def part(states: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(states, weight).float(), wanted, reduction="sum")

    pairs = zip(hidden.split(step), labels.split(step), strict=True)
    return torch.stack([checkpoint(part, h, y, use_reentrant=False) for h, y in pairs]).sum()


def fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


Loss = Callable[..., Tensor]
CONTESTANTS: dict[str, Loss] = {"plain": plain, "chunked": chunked, "checkpointed": checkpointed, "torch": fused}
TITLES = {
    "plain": "all logits",
    "chunked": "trainformer, chunked",
    "checkpointed": "8 chunks, checkpointed",
    "torch": "torch's linear_cross_entropy",
}


def title(key: str) -> str:
    name, _, chunk = key.partition(":")
    return f"{TITLES[name]}, {chunk} tokens" if chunk else TITLES[name]


def work(key: str, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """One step of a contestant, from nothing to gradients; the sum of the losses."""
    name, _, chunk = key.partition(":")
    hidden, weight, labels = inputs
    hidden.grad = weight.grad = None
    options = {"chunk": int(chunk)} if chunk else {}
    total = CONTESTANTS[name](hidden, weight, labels, **options)
    (total / len(labels)).backward()
    return total.detach()


def inputs_of(size: Size, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": DTYPES[device]}
    hidden = torch.randn(size.tokens, size.width, **options)
    weight = torch.randn(size.words, size.width, **options).mul_(size.width**-0.5)
    labels = torch.randint(0, size.words, (size.tokens,), generator=generator, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


# -- measuring ---------------------------------------------------------------------------------------------


def peak_memory(key: str, size: Size, device: str) -> int:
    """Bytes needed at most, beyond the inputs."""
    if device == "cpu":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_peak_of_this_process, (key, size))
    inputs = inputs_of(size, device)
    work(key, inputs)  # workspaces of the matrix products stay
    inputs[0].grad = inputs[1].grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work(key, inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_of_this_process(key: str, size: Size) -> int:
    """Reset the peak memory that Linux records, so that imports do not count."""
    torch.set_num_threads(1)
    inputs = inputs_of(size, "cpu")
    work(key, inputs_of(Size(16, size.width, 1000), "cpu"))  # libraries are loaded and buffers made
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work(key, inputs)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(size: Size, chosen: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Times of all rounds, and peak memory, of one size."""
    clock = turns.make_clock(args)
    with console.status("") as status:
        memory = {}
        for key in chosen:
            status.update(f"{size}: memory of {title(key)}")
            memory[key] = peak_memory(key, size, args.device)
        inputs = inputs_of(size, args.device)
        check(size, chosen, inputs)
        seconds: dict[str, list[float]] = {key: [] for key in chosen}
        for key in turns.in_turn(chosen, args.rounds, status, str(size)):
            began = clock()
            for _ in range(args.steps):
                work(key, inputs)
            seconds[key].append((clock() - began) / args.steps)
    gradients = sum(x.numel() * x.element_size() for x in inputs[:2])
    return {
        **size._asdict(),
        "gradients_mib": gradients / MIB,
        "contestants": {
            key: {"title": title(key), "peak_mib": memory[key] / MIB, **figures(seconds[key], seconds["plain"])}
            for key in chosen
        },
    }


def figures(seconds: list[float], plain_seconds: list[float]) -> dict[str, float]:
    """Medians; how the time compares with plain is taken per round, then summarised."""
    low, middle, high = turns.ratio_quartiles(seconds, plain_seconds)
    return {"ms": 1000 * statistics.median(seconds), "time_ratio": middle, "low": low, "high": high}


def check(size: Size, chosen: Sequence[str], inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Nobody is fast by computing something else."""
    want = work("plain", inputs).item()
    slope = inputs[1].grad.float().norm().item()
    for key in chosen:
        found = work(key, inputs).item()
        norm = inputs[1].grad.float().norm().item()
        if abs(found / want - 1) > 0.01 or abs(norm / slope - 1) > 0.01:
            raise SystemExit(f"{title(key)} at {size} finds {found:.6g} and a gradient of {norm:.6g}, not {want:.6g}.")


# -- figures -----------------------------------------------------------------------------------------------


def report(cases: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, and on what."""
    return {
        "what": "time and peak memory of output layer and cross-entropy, forward and backward",
        **turns.circumstances(args),
        "dtype": str(DTYPES[args.device]).removeprefix("torch."),
        "versions": {"torch": importlib.metadata.version("torch")},
        "cases": cases,
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title=f"Token losses, {result['dtype']}, on {turns.where(result)}, {result['rounds']} rounds")
    table.add_column("tokens × width → words", no_wrap=True)
    table.add_column("loss", no_wrap=True)
    for heading in ("peak MiB", "of plain", "ms", "of plain", "quartiles"):
        table.add_column(heading, justify="right")
    for case in result["cases"]:
        rows = case["contestants"]
        most = rows["plain"]["peak_mib"]
        for number, (key, row) in enumerate(rows.items()):
            table.add_row(
                str(Size(case["tokens"], case["width"], case["words"])) if number == 0 else "",
                row["title"],
                f"{row['peak_mib']:,.0f}",
                f"{row['peak_mib'] / most:.2f}×",
                f"{row['ms']:,.1f}",
                f"{row['time_ratio']:.2f}×",
                f"{row['low']:.2f} – {row['high']:.2f}" if number else "",
                style="bold green" if key.startswith("chunked") else None,
                end_section=number == len(rows) - 1,
            )
    console.print(table)
    shares = ", ".join(f"{case['gradients_mib']:,.0f}" for case in result["cases"])
    console.print(f"Gradients, which all of them need, are {shares} MiB of the peaks.")


# -- command line ------------------------------------------------------------------------------------------


def available(key: str) -> bool:
    if key != "torch" or hasattr(F, "linear_cross_entropy"):
        return True
    console.print(f"[yellow]{TITLES[key]} is left out: torch {torch.__version__} does not have it[/]")
    return False


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = turns.make_parser(__doc__, list(CONTESTANTS), rounds=10)
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn")
    parser.add_argument("--chunks", nargs="+", type=int, default=[], metavar="N", help="try these chunks, too")
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps, args.threads, *args.chunks, 1) < 1:
        parser.error("--rounds, --steps, --threads and --chunks must be at least 1")
    turns.refuse_bad_device(parser, args)
    if args.device == "cpu" and not Path("/proc/self/clear_refs").exists():
        parser.error("--device cpu: peak memory is read from Linux's /proc, which is not here")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    chosen = [key for key in CONTESTANTS if args.only is None or key in ("plain", *args.only)]
    chosen = [key for key in chosen if available(key)] + [f"chunked:{chunk}" for chunk in args.chunks]
    result = report([measure(size, chosen, args) for size in CASES[args.device]], args)
    show(result)
    turns.write(result, args.json)


if __name__ == "__main__":
    main()

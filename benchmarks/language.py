"""Training a Llama: `CausalLM` against a hand-written loop and transformers' Trainer, by time and peak memory.

Every contestant trains the same model on the same sequences of one length, with AdamW, clipping and a constant rate, in
bf16 on a GPU and fp32 on a CPU. A turn is a fresh run; its first steps are not counted. Run with
``python benchmarks/language.py --device cuda``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import turns
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers import Trainer as HFTrainer

from trainformer import Trainer
from trainformer.data import train_tokenizer
from trainformer.tasks import CausalLM

console = turns.console
LR, CLIP, WARM = 1e-4, 1.0, 4
TITLES = {"hand": "hand-written loop", "trainformer": "trainformer", "transformers": "transformers' Trainer"}


class Size(NamedTuple):
    """Of a model and its batches."""

    width: int
    layers: int
    words: int
    length: int
    batch: int


SIZES = {"cpu": Size(64, 2, 1024, 64, 4), "cuda": Size(768, 12, 32000, 1024, 16)}


@dataclass
class Work:
    """What all contestants do, and the clock they are timed with."""

    size: Size
    device: str
    steps: int
    clock: Callable[[], float]

    def model(self) -> nn.Module:
        """The model, with the same weights each time."""
        torch.manual_seed(0)
        width, layers, words, length, _ = self.size
        config = LlamaConfig(
            vocab_size=words, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
            num_attention_heads=width // 16 if width < 256 else width // 64, max_position_embeddings=length,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    def sequences(self) -> list[dict[str, list[int]]]:
        """Tokens for all steps of a turn."""
        generator = torch.Generator().manual_seed(1)
        count = self.size.batch * (self.steps + WARM)
        ids = torch.randint(0, self.size.words, (count, self.size.length), generator=generator).tolist()
        return [{"input_ids": row, "labels": row} for row in ids]


# -- contestants -------------------------------------------------------------------------------------------


def by_hand(work: Work) -> float:
    """The loop as one would write it."""
    model = work.model().to(work.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    rows = torch.tensor([row["input_ids"] for row in work.sequences()]).split(work.size.batch)
    began = 0.0
    for step, batch in enumerate(rows):
        if step == WARM:
            began = work.clock()
        ids = batch.to(work.device)
        with torch.autocast("cuda", torch.bfloat16) if work.device == "cuda" else nullcontext():
            logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return work.clock() - began


class Watch:
    """Reads the clock when the first steps are done, and after the last."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.times: list[float] = []

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if step in (WARM, WARM + self.work.steps):
            self.times.append(self.work.clock())


def with_trainformer(work: Work) -> float:
    """Ours, with default settings where they do not change what is computed."""
    watch = Watch(work)
    tokenizer = train_tokenizer(["a b c"], vocabulary=257)
    with tempfile.TemporaryDirectory() as folder:
        task = CausalLM(work.model(), max_length=work.size.length, tokenizer=tokenizer, cache_dir=folder)
        task.text_tokenizer.add_tokens([f"<{number}>" for number in range(work.size.words - len(tokenizer))])
        trainer = Trainer(
            task, work.sequences(), batch_size=work.size.batch, max_steps=work.steps + WARM, lr=LR, scheduler=None,
            gradient_clip=CLIP, precision="bf16" if work.device == "cuda" else "no", device=work.device, log="none",
            save_every=None, save_best=0, save_last=0, run_dir=f"{folder}/run", num_workers=0, callbacks=[watch],
        )  # fmt: skip
        trainer.fit()
    return watch.times[1] - watch.times[0]


def with_transformers(work: Work) -> float:
    """transformers' own."""

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (WARM, WARM + work.steps):
                self.times.append(work.clock())

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=work.size.batch, max_steps=work.steps + WARM, learning_rate=LR,
            lr_scheduler_type="constant", max_grad_norm=CLIP, bf16=work.device == "cuda", report_to=[],
            optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", use_cpu=work.device == "cpu",
            disable_tqdm=True,
        )  # fmt: skip
        data = [{name: torch.tensor(row) for name, row in record.items()} for record in work.sequences()]
        HFTrainer(work.model(), args, train_dataset=data, callbacks=[clock]).train()
    return clock.times[1] - clock.times[0]


CONTESTANTS = {"hand": by_hand, "trainformer": with_trainformer, "transformers": with_transformers}


# -- measuring ---------------------------------------------------------------------------------------------


def measure(chosen: Sequence[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds and peak memory of each turn, by contestant."""
    work = Work(SIZES[args.device], args.device, args.steps, turns.make_clock(args))
    seconds: dict[str, list[float]] = {key: [] for key in chosen}
    peaks: dict[str, float] = dict.fromkeys(chosen, 0.0)
    with console.status("") as status:
        for key in turns.in_turn(chosen, args.rounds, status, "training"):
            if args.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            seconds[key].append(CONTESTANTS[key](work))
            if args.device == "cuda":
                peaks[key] = max(peaks[key], torch.cuda.max_memory_allocated() / 2**30)
    tokens = work.size.batch * work.size.length * work.steps
    found = {}
    for key in chosen:
        low, middle, high = turns.ratio_quartiles(seconds[key], seconds[chosen[0]])
        found[key] = {
            "title": TITLES[key],
            "tokens_per_second": tokens / statistics.median(seconds[key]),
            "ratio": middle,
            "low": low,
            "high": high,
            "peak_gib": peaks[key],
        }
    return found


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title=f"A Llama of {result['parameters']} on {turns.where(result)}, {result['rounds']} rounds")
    table.add_column("", no_wrap=True)
    for heading in ("tokens/s", "time", "quartiles", "peak GiB"):
        table.add_column(heading, justify="right")
    for key, row in result["contestants"].items():
        table.add_row(
            row["title"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ratio']:.2f}×",
            f"{row['low']:.2f} – {row['high']:.2f}",
            f"{row['peak_gib']:.1f}" if row["peak_gib"] else "",
            style="bold green" if key == "trainformer" else None,
        )
    console.print(table)


def main() -> None:
    parser = turns.make_parser(__doc__, list(CONTESTANTS), rounds=5)
    parser.add_argument("--steps", type=int, default=30, help="steps in a turn that count")
    args = parser.parse_args()
    turns.refuse_bad_device(parser, args)
    torch.set_num_threads(args.threads)
    chosen = [key for key in CONTESTANTS if args.only is None or key in ("hand", *args.only)]
    size = sum(p.numel() for p in Work(SIZES[args.device], "cpu", 1, lambda: 0.0).model().parameters())
    result = {
        "what": "training steps of a causal language model",
        **turns.circumstances(args),
        "parameters": f"{size / 1e6:.1f}M",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "contestants": measure(chosen, args),
    }
    show(result)
    turns.write(result, args.json)


if __name__ == "__main__":
    main()

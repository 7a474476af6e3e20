"""From scratch on one GPU: a language model of GPT-2's size on Python code, here and under transformers' Trainer.

Every contestant trains the same model from the same weights on the same rows of tokens in the same order, with the same
schedule, in bf16 and compiled, in a process of its own:

    trainformer-muon    Muon for the hidden matrices, AdamW for the rest, warm-up / stable / decay
    trainformer-adamw   AdamW for all
    hf-muon, hf-adamw   the same optimizers and schedule, passed to transformers' Trainer
    trainformer-values  as trainformer-muon, with value embeddings (not among the defaults: --value-embeddings)

Run with ``python benchmarks/from_scratch.py --out runs/from-scratch``, or try it on a CPU with ``--smoke``. Each
contestant writes its figures to OUT/NAME.json whenever it evaluates; an interrupted benchmark continues with those that
are missing. The corpus (the Python sources of this installation) is prepared once: `python_corpus.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machines import machine
from python_corpus import prepare
from torch import Tensor, nn

WARM = 10  # steps before the clock starts: they compile
DEFAULTS = ("trainformer-muon", "hf-muon", "trainformer-adamw", "hf-adamw")
CONTESTANTS = (*DEFAULTS, "trainformer-values")
SMOKE = {
    "device": "cpu", "width": 64, "layers": 3, "heads": 4, "length": 128, "vocabulary": 1024, "batch": 8,
    "tokens": 48_000, "corpus_mb": 3.0, "tokenizer_mb": 0.5, "evals": 3, "val_rows": 16, "compile": False,
}  # fmt: skip
VALUE_LAYERS = 3  # at either end of the model, as in modded-nanogpt


# -- what all contestants share ----------------------------------------------------------------------------


def make_model(args: argparse.Namespace, values: bool = False) -> nn.Module:
    """A Llama with random weights, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=args.width, intermediate_size=8 * args.width // 3 // 64 * 64 or 64,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, max_position_embeddings=args.length,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(config)
    return add_value_embeddings(model) if values else model


class ValueEmbeddings(nn.Module):
    """A value projection plus an embedding of the token itself, which starts at zero (modded-nanogpt)."""

    def __init__(self, projection: nn.Linear, table: nn.Embedding, tokens: dict[str, Tensor]) -> None:
        super().__init__()
        self.projection, self.table, self.tokens = projection, table, tokens

    def forward(self, states: Tensor) -> Tensor:
        projected = self.projection(states)
        return projected + self.table(self.tokens["input_ids"]).to(projected.dtype)


def add_value_embeddings(model: Any) -> nn.Module:
    """Add value embeddings to the first and last layers, which share their tables in pairs."""
    layers, tokens = model.model.layers, {}
    for i in range(min(VALUE_LAYERS, len(layers) // 2)):
        width = layers[i].self_attn.v_proj.out_features
        table = nn.Embedding(model.config.vocab_size, width)
        nn.init.zeros_(table.weight)
        for layer in (layers[i], layers[-1 - i]):
            layer.self_attn.v_proj = ValueEmbeddings(layer.self_attn.v_proj, table, tokens)
    forward = model.forward

    def with_tokens(input_ids: Tensor, **options: Any) -> Any:
        tokens["input_ids"] = input_ids
        return forward(input_ids=input_ids, **options)

    model.forward = with_tokens
    return model


def rows_of(args: argparse.Namespace, name: str) -> np.ndarray:
    return np.load(args.out / "data" / f"{name}.npy", mmap_mode="r")


class Rows(torch.utils.data.Dataset):
    """Rows of tokens, in order, as records that both libraries read."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self.rows[index].astype(np.int64)
        return {"input_ids": row, "labels": row}


class Meter:
    """Evaluates at fixed numbers of tokens, times the steps in between, and writes everything down at once."""

    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
        self.args, self.model = args, model
        self.steps = steps_of(args)
        self.due = {round(self.steps * i / args.evals) for i in range(1, args.evals + 1)}
        self.val = torch.from_numpy(np.array(rows_of(args, "val")[: args.val_rows], dtype=np.int64))
        self.began = self.clock()
        self.found: dict[str, Any] = {
            "contestant": args.contestant, "finished": False, "steps": self.steps, "parameters": _size(model),
            "tokens_per_step": args.batch * args.length, "curve": [], "peak_gib": 0.0, "tokens_per_second": None,
            "versions": {name: _version(name) for name in ("torch", "transformers", "trainformer")},
            "machine": machine(args.device),
        }  # fmt: skip
        self.trained = 0.0  # seconds of steps that count
        self.counted = 0
        self.since: tuple[float, int] | None = None
        self.evaluate(0)

    def clock(self) -> float:
        if self.args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @property
    def is_late(self) -> bool:
        return time.perf_counter() - self.began > self.args.time_limit

    def step(self, step: int) -> None:
        """After each optimizer step."""
        if step == WARM:
            self.since = self.clock(), step
        if step in self.due:
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """The loss in nats per token of the validation rows, and the figures so far."""
        now = self.clock()
        if self.since is not None:
            self.trained += now - self.since[0]
            self.counted += step - self.since[1]
        if self.args.device == "cuda":
            self.found["peak_gib"] = max(self.found["peak_gib"], torch.cuda.max_memory_allocated() / 2**30)
        tokens = step * self.args.batch * self.args.length
        loss = validation_loss(self.model, self.val, self.args)
        seconds = self.clock() - self.began
        self.found["curve"].append({"tokens": tokens, "val_loss": loss, "seconds": seconds, "trained": self.trained})
        if self.counted:
            self.found["tokens_per_second"] = self.counted * self.args.batch * self.args.length / self.trained
        self.write()
        speed = self.found["tokens_per_second"]
        print(f"[{seconds:6.1f} s] {tokens:>12,} tokens  val loss {loss:.4f}  {speed or 0:,.0f} tokens/s", flush=True)
        if self.args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if self.since is not None:
            self.since = self.clock(), step

    def finish(self) -> None:
        self.found["finished"] = True
        self.found["seconds"] = self.clock() - self.began
        self.write()

    def write(self) -> None:
        draft = self.args.out / f"{self.args.contestant}.json.tmp"
        draft.write_text(json.dumps(self.found, indent=1))
        draft.replace(self.args.out / f"{self.args.contestant}.json")


@torch.no_grad()
def validation_loss(model: nn.Module, rows: Tensor, args: argparse.Namespace) -> float:
    """The mean over all predicted tokens, computed alike for all: uncompiled, with logits in fp32."""
    model.eval()
    total = 0.0
    with torch.autocast(args.device, torch.bfloat16) if args.device == "cuda" else nullcontext():
        for batch in rows.split(8):
            ids = batch.to(args.device)
            logits = model.to(args.device).forward(input_ids=ids, use_cache=False).logits
            total += F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").item()
    model.train()
    return total / (rows.shape[0] * (rows.shape[1] - 1))


def steps_of(args: argparse.Namespace) -> int:
    return max(1, int(args.tokens) // (args.batch * args.length))


def rate_of(args: argparse.Namespace) -> float:
    return args.adamw_lr if args.contestant.endswith("adamw") else args.lr


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- contestants -------------------------------------------------------------------------------------------


def with_trainformer(args: argparse.Namespace) -> None:
    """Everything by name."""
    from torch.utils.data import SequentialSampler

    from trainformer import Trainer
    from trainformer.tasks import CausalLM

    model = make_model(args, values=args.contestant == "trainformer-values")
    meter = Meter(args, model)

    class Watch:
        def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
            meter.step(step)
            if meter.is_late:
                trainer.stop("out of time")

    task = CausalLM(
        model, max_length=args.length, tokenizer=str(args.out / "data" / "tokenizer"), z_loss=args.z_loss,
        cache_dir=args.out / "data" / "rows",
    )  # fmt: skip
    name = "adamw" if args.contestant.endswith("adamw") else "muon"
    trainer = Trainer(
        task, Rows(rows_of(args, "train")[: args.batch * meter.steps]), batch_size=args.batch, max_steps=meter.steps,
        optimizer={"name": name, "betas": (0.9, 0.95)}, lr=rate_of(args), weight_decay=args.weight_decay,
        scheduler="wsd", warmup_ratio=args.warmup, gradient_clip=1.0, seed=args.seed, sampler=SequentialSampler,
        precision="bf16" if args.device == "cuda" else "no", compile=args.compile, device=args.device,
        matmul_precision="high", log="none", log_every=50, save_every=None, save_best=0, save_last=0,
        run_dir=args.out / "runs" / args.contestant, resume=None, callbacks=[Watch()],
    )  # fmt: skip
    trainer.fit()
    if not meter.is_late:
        meter.finish()


def with_transformers(args: argparse.Namespace) -> None:
    """transformers' Trainer, with the same optimizer and schedule passed to it."""
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    from trainformer.backends.schedules import wsd
    from trainformer.backends.torch.muon import Muon, split_for_muon
    from trainformer.backends.torch.optimizers import decay_groups

    model = make_model(args)
    meter = Meter(args, model)

    class Watch(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.step(state.global_step)
            control.should_training_stop = control.should_training_stop or meter.is_late

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    torch.set_float32_matmul_precision("high")
    groups = decay_groups(dict(model.named_parameters()), args.weight_decay)
    options: dict[str, Any] = {"lr": rate_of(args), "betas": (0.9, 0.95), "fused": True}
    if args.contestant.endswith("adamw"):
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **options)
    else:
        optimizer = Muon(split_for_muon(groups, model), weight_decay=args.weight_decay, **options)
    schedule = LambdaLR(optimizer, wsd(meter.steps, int(args.warmup * meter.steps)))
    settings = TrainingArguments(
        str(args.out / "runs" / args.contestant), per_device_train_batch_size=args.batch, max_steps=meter.steps,
        max_grad_norm=1.0, bf16=args.device == "cuda", torch_compile=args.compile, report_to=[], seed=args.seed,
        logging_strategy="no", save_strategy="no", use_cpu=args.device == "cpu", disable_tqdm=True,
    )  # fmt: skip
    data = Rows(rows_of(args, "train")[: args.batch * meter.steps])
    InOrder(
        model, settings, train_dataset=data, data_collator=default_data_collator, optimizers=(optimizer, schedule),
        callbacks=[Watch()],
    ).train()  # fmt: skip
    if not meter.is_late:
        meter.finish()


# -- all of them -------------------------------------------------------------------------------------------


def run_all(args: argparse.Namespace, given: list[str]) -> None:
    """Each contestant in its own process, unless its figures are there."""
    began = time.perf_counter()
    chosen = args.only or [*DEFAULTS, *(["trainformer-values"] if args.value_embeddings else [])]
    for name in chosen:
        if not args.again and (done := _read(args.out / f"{name}.json")) and done["finished"]:
            print(f"== {name}: done before", flush=True)
            continue
        left = args.total_limit - (time.perf_counter() - began)
        if left < 30:
            print(f"== {name}: no time left; run the same command again for it", flush=True)
            continue
        print(f"== {name}", flush=True)
        limit = min(left, args.time_limit + 60)
        command = [sys.executable, __file__, *given, "--contestant", name]
        try:
            code = subprocess.run(command, timeout=limit, check=False).returncode
            print(f"== {name}: exit code {code}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"== {name}: killed after {limit:.0f} s; its curve so far is kept", flush=True)
        report(args)


def report(args: argparse.Namespace) -> None:
    """The table, `results.json` and the plot, of all figures that are there."""
    found = {name: row for name in CONTESTANTS if (row := _read(args.out / f"{name}.json"))}
    corpus = json.loads((args.out / "data" / "corpus.json").read_text())
    settings = {key: value for key, value in vars(args).items() if isinstance(value, int | float | str | bool)}
    result = {"corpus": corpus, "settings": settings, "contestants": found}
    (args.out / "results.json").write_text(json.dumps(result, indent=1))
    print("\n| contestant | parameters | tokens | tokens/s | peak GiB | seconds of training | val loss |")
    print("|---|---|---|---|---|---|---|")
    for name, row in found.items():
        last = row["curve"][-1]
        print(
            f"| {name}{'' if row['finished'] else ' (not finished)'} | {row['parameters'] / 1e6:.2f}M "
            f"| {last['tokens'] / 1e6:.2f}M | {row['tokens_per_second'] or math.nan:,.0f} | {row['peak_gib']:.1f} "
            f"| {last['trained']:.0f} | {last['val_loss']:.4f} |"
        )
    print("\n| tokens | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    curves = {name: {point["tokens"]: point["val_loss"] for point in row["curve"]} for name, row in found.items()}
    for tokens in sorted({tokens for curve in curves.values() for tokens in curve}):
        values = (f"{curve[tokens]:.4f}" if tokens in curve else "" for curve in curves.values())
        print(f"| {tokens / 1e6:.2f}M | " + " | ".join(values) + " |")
    print(flush=True)
    plot(found, args.out / "loss.png")


def plot(found: dict[str, Any], path: Path) -> None:
    """Loss against tokens, and against the time that training took."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ModuleNotFoundError:
        print("matplotlib is not installed: no plot; --report makes it from the JSON files elsewhere", flush=True)
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, row in found.items():
        style = "--" if name.startswith("hf") else "-"
        points = row["curve"][1:]  # not the one before training, which would set the scale
        losses = [point["val_loss"] for point in points]
        axes[0].plot([point["tokens"] / 1e6 for point in points], losses, style, label=name)
        axes[1].plot([point["trained"] for point in points], losses, style, label=name)
    for axis, label in zip(axes, ("million tokens", "seconds of training, without compilation"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss, nats per token")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/from-scratch"), help="folder for the corpus and all figures")
    add("--smoke", action="store_true", help="a tiny model on the CPU, about a minute")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--only", nargs="+", choices=CONTESTANTS, help="run only these")
    add("--again", action="store_true", help="also those whose figures are there")
    add("--value-embeddings", action="store_true", help="also run trainformer-values")
    add("--prepare-only", action="store_true", help="prepare the corpus and stop")
    add("--report", action="store_true", help="table and plot of the figures that are there")
    add("--tokens", type=float, default=40e6, help="to train on")
    add("--batch", type=int, default=64, help="rows in a step")
    add("--length", type=int, default=1024, help="tokens in a row")
    add("--vocabulary", type=int, default=32_768)
    add("--width", type=int, default=768)
    add("--layers", type=int, default=12)
    add("--heads", type=int, default=12)
    add("--lr", type=float, default=2e-3, help="with Muon")
    add("--adamw-lr", type=float, default=1e-3, help="with AdamW alone")
    add("--weight-decay", type=float, default=0.1)
    add("--warmup", type=float, default=0.05, help="share of the steps")
    add("--z-loss", type=float, default=0.0, help="of trainformer's contestants; transformers has none")
    add("--evals", type=int, default=10)
    add("--val-rows", type=int, default=256)
    add("--corpus-mb", type=float, default=260.0, help="sources to read at most")
    add("--tokenizer-mb", type=float, default=40.0, help="of them, to train the tokenizer on")
    add("--time-limit", type=float, default=200.0, help="seconds for a contestant; it stops cleanly")
    add("--total-limit", type=float, default=900.0, help="seconds for all; those that do not fit are left out")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--seed", type=int, default=0)
    add("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    if parser.parse_known_args(given)[0].smoke:
        parser.set_defaults(**SMOKE)
    return parser.parse_args(given)


def main() -> None:
    given = sys.argv[1:]
    args = parse(given)
    if args.report:
        report(args)
        return
    if args.contestant is not None:
        (with_trainformer if args.contestant.startswith("trainformer") else with_transformers)(args)
        return
    corpus = prepare(
        args.out / "data", length=args.length, vocabulary=args.vocabulary, corpus_mb=args.corpus_mb,
        tokenizer_mb=args.tokenizer_mb, seed=args.seed,
    )  # fmt: skip
    needed = steps_of(args) * args.batch * args.length
    if corpus["tokens"]["train"] < needed:
        sys.exit(f"The corpus has {corpus['tokens']['train']:,} tokens, {needed:,} are needed: lower --tokens.")
    if not args.prepare_only:
        run_all(args, given)


if __name__ == "__main__":
    main()

"""What `trainformer.jax` costs beside a hand-written jitted step: the same model code, optimizer and batches.

All contestants live in one process, each in a thread of its own, and take turns: one trains while the others wait.
Ratios are taken within a round of turns, so that what else the machine does meets all alike. A turn ends with one log
record, whose time counts; its first steps do not, nor do compiling, set-up and saves. Two of the contestants read the
loss after every step, to show what that costs.

    python benchmarks/jax_step.py                                  a launch-bound MLP and a tiny Llama, on the CPU
    python benchmarks/jax_step.py --only mlp --rounds 40 --clock cpu
    python benchmarks/jax_step.py --device gpu --preset 135m       30 layers of width 576, bf16, 16 x 1024 tokens
    python benchmarks/jax_step.py --device gpu --preset 135m-wide --rows 32     12 layers of width 768
    python benchmarks/jax_step.py --device gpu --preset 135m --loop trainformer alone, for its peak memory
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import trainformer
from trainformer.backends.jax.precision import cast_floating, resolve_dtype, set_compute_dtype
from trainformer.backends.jax.sharding import make_mesh
from trainformer.callbacks import Callback
from trainformer.core.types import HostBatch
from trainformer.jax import BaseTrainer, TrainerConfigureDataloaderOutput, TrainingArguments
from trainformer.losses.jax.tokens import token_loss
from trainformer.models.jax import Decoder, DecoderConfig

TOGETHER = 10  # steps_per_execution of one of the contestants
BATCHES = 16  # different ones, over and over
SAME = 0.02  # how far the losses of contestants may be apart at the end: bf16 sums in another order

console = Console()
if not console.is_terminal:
    console = Console(width=120)  # of a file or a pipe rich assumes 80 columns, too few for the table


# -- what is trained ---------------------------------------------------------------------------------------


class MLP(nnx.Module):
    """So small that starting the computation is most of a step."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.second = nnx.Linear(64, 64, rngs=rngs)
        self.last = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Logits."""
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


@dataclass(frozen=True)
class Work:
    """A model, its loss and its batches, which are arrays of the host. `tokens` are those of a step."""

    title: str
    make_model: Callable[[], nnx.Module]
    loss: Callable[[Any, Any], Any]
    batches: list[dict[str, np.ndarray]]
    dtype: str
    tokens: int = 0
    steps: int = 100  # of a turn, unless somebody says otherwise

    @property
    def rows(self) -> int:
        """Of a batch."""
        return len(next(iter(self.batches[0].values())))


def mlp() -> Work:
    """Classifying noise."""
    random = np.random.default_rng(0)
    batches = []
    for _ in range(BATCHES):
        x = random.standard_normal((32, 32), np.float32)
        batches.append({"x": x, "y": x[:, :10].argmax(-1).astype(np.int32)})

    def loss(model: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    return Work("MLP", lambda: MLP(nnx.Rngs(0)), loss, batches, "fp32")


#: Hidden size, intermediate size, layers, heads, key/value heads, vocabulary; rows and length of a batch; format.
PRESETS = {
    "tiny": ((64, 128, 2, 4, 2, 256), (4, 32), "fp32"),
    "135m": ((576, 1536, 30, 9, 3, 49_152), (16, 1024), "bf16"),
    "135m-wide": ((768, 2048, 12, 12, 12, 65_536), (16, 1024), "bf16"),
}


def llama(preset: str, rows: int | None = None) -> Work:
    """Predicting random tokens."""
    (hidden, inner, layers, heads, groups, vocabulary), (usual, length), dtype = PRESETS[preset]
    rows = rows or usual
    chunks = max(1, rows * length * vocabulary >> 28)  # as the trainers for text choose it
    config = DecoderConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=True,
    )  # fmt: skip
    random = np.random.default_rng(0)
    batches = [{"input_ids": random.integers(0, vocabulary, (rows, length), np.int32)} for _ in range(BATCHES)]

    def loss(model: Any, batch: Any) -> Any:
        ids = batch["input_ids"]
        total = token_loss(model.hidden_states(ids), ids, model.head, chunks=chunks)
        return total.sum / total.weight

    title = f"Llama, {preset}, {rows} x {length}"
    return Work(title, lambda: Decoder(config, rngs=nnx.Rngs(0)), loss, batches, dtype, rows * length, steps=20)


# -- taking turns ------------------------------------------------------------------------------------------


class Pacer:
    """Called when a step begins: waits for the contestant's turn, and times all of it but the lead."""

    def __init__(self, steps: int, clock: Callable[[], float]) -> None:
        self.seconds: list[float] = []  # per step, one for each turn
        self.steps = steps
        self._lead = steps // 5
        self._clock = clock
        self._step = 0
        self._began = 0.0
        self._mine, self._over = threading.Semaphore(0), threading.Semaphore(0)

    def tick(self, state: Callable[[], Any]) -> None:
        """A step is about to be taken from this state."""
        place = self._step % self.steps
        self._step += 1
        if place == self._lead:
            self._began = self._now(state)
        elif place == 0:
            if self._step > 1:
                self.seconds.append((self._now(state) - self._began) / (self.steps - self._lead))
            self.give_way()
            self._mine.acquire()

    def take_turn(self) -> None:
        """Let the contestant go on until its turn is over."""
        self._mine.release()
        self._over.acquire()

    def give_way(self) -> None:
        """The turn is over."""
        self._over.release()

    def _now(self, state: Callable[[], Any]) -> float:
        jax.block_until_ready(state())
        return self._clock()


class Contestant:
    """One training in a thread of its own, which stands still unless it is its turn."""

    def __init__(self, run: Callable[[Pacer, int], float], steps: int, turns: int, clock: Callable[[], float]) -> None:
        self.pacer = Pacer(steps, clock)
        self.loss = math.nan
        self._error: BaseException | None = None
        # One step more than the turns have: it sees the end of the last one.
        self._thread = threading.Thread(target=self._run, args=(run, turns * steps + 1), daemon=True)
        self._thread.start()
        self.pacer._over.acquire()  # it stands before its first step
        self._check()

    def _run(self, run: Callable[[Pacer, int], float], steps: int) -> None:
        try:
            self.loss = run(self.pacer, steps)
        except BaseException as error:
            self._error = error
        finally:
            self.pacer.give_way()

    def take_turn(self) -> None:
        """Train for a turn, while the others wait. The turn after the last ends the training."""
        self.pacer.take_turn()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


# -- contestants -------------------------------------------------------------------------------------------


def arguments(
    steps: int, folder: str = "", log_every: int = 1, rows: int = 1, dtype: str = "fp32", together: int = 1
) -> TrainingArguments:
    """The same for everybody, also for who takes only the optimizer from them."""
    return TrainingArguments(
        output_dir=folder, max_steps=steps, total_batch_size=rows, learning_rate=1e-3, scheduler="constant",
        weight_decay=0.01, max_grad_norm=1.0, dtype=dtype, logging_steps=log_every, log="none", save_strategy="no",
        resume=None, steps_per_execution=together,
    )  # fmt: skip


def by_hand(work: Work, log_every: int) -> Callable[[Pacer, int], float]:
    """The loop that one writes: a jitted step that donates its state, and a look at the losses now and then."""

    def run(pacer: Pacer, steps: int) -> float:
        optimizer, _ = arguments(steps).get_optimizer_and_scheduler(steps)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
        dtype, model = resolve_dtype(work.dtype), work.make_model()
        if hasattr(model, "configure"):
            unroll = True if jax.default_backend() == "gpu" else 1
            model.configure(remat=None, unroll=unroll)
        graph, state = nnx.split(model)
        params = state.to_pure_dict()

        def loss_of(params: Any, batch: Any) -> Any:
            model = nnx.merge(graph, cast_floating(params, dtype))
            set_compute_dtype(model, dtype)
            return work.loss(model, batch)

        def step(params: Any, moments: Any, batch: Any) -> Any:
            loss, gradients = jax.value_and_grad(loss_of)(params, batch)
            updates, moments = optimizer.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments, loss

        jitted = jax.jit(step, donate_argnums=(0, 1))
        moments = jax.jit(optimizer.init)(params)
        losses: list[Any] = []
        records: list[tuple[int, float]] = []
        for number in range(steps):
            pacer.tick(lambda: params)  # noqa: B023
            params, moments, loss = jitted(params, moments, work.batches[number % BATCHES])
            losses.append(loss)
            if len(losses) == log_every:
                records.append((number + 1, statistics.fmean(map(float, jax.device_get(losses)))))
                losses.clear()
        return early(records, pacer.steps)

    return run


def early(records: Sequence[tuple[int, float]], steps: int) -> float:
    """The mean loss of the first steps, from means since the record before; later, rounding alone makes curves part."""
    total, last = 0.0, 0
    for step, loss in records:
        if step <= steps:
            total, last = total + loss * (step - last), step
    return total / last


class Prepared:
    """Batches that are there already."""

    batches_per_epoch = None

    def __init__(self, work: Work) -> None:
        self._batches = [HostBatch(batch, work.rows) for batch in work.batches]

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """Without end."""
        while True:
            yield from self._batches


class Tick(Callback):
    """Tells a pacer that a step begins."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer

    def on_step_begin(self, trainer: Any, step: int) -> None:
        self._pacer.tick(lambda: trainer.model_state)


def with_trainer(work: Work, log_every: int, together: int = 1) -> Callable[[Pacer, int], float]:
    """The same as a `BaseTrainer`, which dispatches so many steps together."""

    class Measured(BaseTrainer):
        def compute_loss(self, model: Any, batch: Any, key: Any) -> Any:
            return work.loss(model, batch)

        def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
            return TrainerConfigureDataloaderOutput(Prepared(work))

    def run(pacer: Pacer, steps: int) -> float:
        mesh = make_mesh((1, 1, 1, 1), jax.devices()[:1])
        with tempfile.TemporaryDirectory() as folder:
            chosen = arguments(steps, folder, log_every, work.rows, work.dtype, together)
            trainer = Measured(chosen, model=work.make_model(), mesh=mesh, callbacks=[Tick(pacer)])
            trainer.train()
        return early([(r["step"], r["train/loss"]) for r in trainer.state.log_history], pacer.steps)

    return run


BASELINE = "hand-written"


def contestants(work: Work, steps: int) -> dict[str, Callable[[Pacer, int], float]]:
    """By name; the first is what the others are compared with."""
    return {
        BASELINE: by_hand(work, steps),
        "trainformer": with_trainer(work, steps),
        f"trainformer, {TOGETHER} steps together": with_trainer(work, steps, TOGETHER),
        "hand-written, loss read each step": by_hand(work, 1),
        "trainformer, logged each step": with_trainer(work, 1),
    }


# -- measuring ---------------------------------------------------------------------------------------------


def measure(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one model; at the end it is checked that everybody has trained alike."""
    steps = options.steps or work.steps
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    everybody: dict[str, Contestant] = {}
    runs = contestants(work, steps)
    if options.loop:
        runs = {options.loop: runs[options.loop]}
    with console.status("") as status:
        for name, run in runs.items():
            status.update(f"{work.title}: warming up {name}")
            everybody[name] = Contestant(run, steps, 1 + options.rounds, clock)
            everybody[name].take_turn()
        order = list(everybody.values())
        for number in range(options.rounds):
            status.update(f"{work.title}: round {number + 1} of {options.rounds}")
            gc.collect()  # not in somebody's turn
            turn = number % len(order)
            for contestant in (*order[turn:], *order[:turn]):
                contestant.take_turn()
        status.update(f"{work.title}: ending")
        for contestant in order:
            contestant.take_turn()
    first = next(iter(everybody))
    expected = everybody[first].loss
    for name, contestant in everybody.items():
        if not math.isclose(contestant.loss, expected, rel_tol=SAME):
            raise SystemExit(f"{name} does not train alike: expected a loss of {expected}, received {contestant.loss}.")
    return figures({name: one.pacer.seconds[1:] for name, one in everybody.items()}, work, expected)


def figures(seconds: dict[str, list[float]], work: Work, loss: float) -> dict[str, Any]:
    """Medians, ratios to the first contestant, the hand-written step, with their quartiles, and peak memory of all."""
    found: dict[str, Any] = {}
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, next(iter(seconds.values())), strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        median = statistics.median(own)
        found[name] = {
            "median_us": median * 1e6, "min_us": min(own) * 1e6, "ratio": middle, "ratio_low": low, "ratio_high": high,
            "tokens_per_second": work.tokens / median, "rounds_us": [round(s * 1e6, 2) for s in own],
        }  # fmt: skip
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"loss": loss, "tokens_per_step": work.tokens, "contestants": found, "peak_bytes": memory}


def show(title: str, result: dict[str, Any], options: argparse.Namespace) -> None:
    """The table of one model."""
    where = jax.devices()[0].device_kind
    table = Table(title=f"{title} on {where}: time per step, {options.rounds} rounds, {options.clock} clock")
    table.add_column("loop", no_wrap=True)
    has_tokens = result["tokens_per_step"] > 0
    for heading in ("µs, median", "µs, min", "ratio", "quartiles", *(["tokens/s"] if has_tokens else [])):
        table.add_column(heading, justify="right")
    for name, row in result["contestants"].items():
        speed = [f"{row['tokens_per_second']:,.0f}"] if has_tokens else []
        table.add_row(
            name, f"{row['median_us']:,.1f}", f"{row['min_us']:,.1f}", f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} - {row['ratio_high']:.3f}", *speed,
            style="bold green" if name == "trainformer" else None,
        )  # fmt: skip
    console.print(table)
    if result["peak_bytes"]:
        console.print(f"Peak memory of all loops together: {result['peak_bytes'] / 2**30:.2f} GiB")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--preset", choices=list(PRESETS), default="tiny", help="the size of the Llama")
    parser.add_argument("--only", choices=["mlp", "llama"], help="one of the two models")
    parser.add_argument("--rows", type=int, help="of a batch of the Llama (16; tiny: 4)")
    parser.add_argument(
        "--loop", choices=list(contestants(mlp(), 1)), help="one of the loops; its peak memory is shown"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns that every contestant gets")
    parser.add_argument("--steps", type=int, help="of a turn; a log record is due after so many (100; Llama: 20)")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for machines that are not idle")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go, too")
    options = parser.parse_args(argv)
    if options.rounds < 1 or (options.steps or 10) < 10:
        parser.error("--rounds must be at least 1, and --steps at least 10")
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        parser.error("--device gpu: jax sees no GPU here")
    elif options.clock == "cpu":
        parser.error("--clock cpu does not see what a GPU does; use --clock wall")
    return options


def main() -> None:
    """Measure and print."""
    options = parse()
    chosen = [mlp()] if options.only != "llama" else []
    chosen += [llama(options.preset, options.rows)] if options.only != "mlp" else []
    results = {}
    for work in chosen:
        results[work.title] = measure(work, options)
        show(work.title, results[work.title], options)
    if options.json is not None:
        content = {
            "what": "time per training step, and ratios to a hand-written jitted step",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "rounds": options.rounds,
            "steps": options.steps,
            "clock": options.clock,
            "device": jax.devices()[0].device_kind,
            "machine": {"cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"},
            "versions": {"trainformer": trainformer.__version__} | {n: version(n) for n in ("jax", "flax", "optax")},
            "models": results,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=2) + "\n")
        console.print(f"written to {options.json}")


if __name__ == "__main__":
    main()

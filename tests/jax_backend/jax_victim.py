"""A JAX training process to be killed, with everything that could break an exact resume.

Random augmentation, shuffling, three micro-batches per step, a smaller last batch, dropout, batch statistics, Adam, an
average of the weights, early stopping, evaluations, and saves and logs at different steps. `tests/faults/harness.py`
kills it and compares the results.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from victim import enter, handlers, record_samples, write_end

from file_operations import Watch, block_in_save, mark
from trainformer.run import run_of

SAMPLES = 102  # as in the torch victim: 8 batches of 12 and one of 6
STEPS_PER_EPOCH = 9


@dataclass(frozen=True)
class JaxCase:
    """One command. The same case always gives the same training, whatever else happens."""

    data: str = "arrays"  # or grain, huggingface, generator
    save_async: bool = False
    epochs: int = 3
    save_steps: int = 4
    devices: int = 2
    width: int = 32
    dropout: float = 0.5
    resume: str | None = "auto"

    # What is done to it; none of this may change the result.
    pause: float = 0.0  # seconds that a step takes longer
    block_in_save: tuple[int, int] | None = None  # (save, fsync): block there until killed
    die_at: int | tuple[str, int] | None = None  # end by SIGKILL at this event, see `Watch`
    signals: tuple[tuple[int, int], ...] = ()  # (step, signal) that the process gets just after that step

    def start(self, folder):
        """The target of a forked process: train in a folder."""
        start(self, folder)

    def differences(self, reference, other, retention=True):
        """What differs between two finished runs."""
        from harness import differences

        return differences(reference, other, retention, final_state)


class Augmented:
    """Samples with random augmentation and an index."""

    def __init__(self, size=SAMPLES, random_too=True):
        self.x = np.random.default_rng(7).standard_normal((size, 8)).astype(np.float32)
        self.y = self.x[:, :4].argmax(-1).astype(np.int32)
        self.random_too = random_too

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if not self.random_too and Watch.current is not None and Watch.current.phase != "start-up":
            mark("evaluation")
        noise = 0.1 * np.random.standard_normal(8).astype(np.float32) if self.random_too else 0.0
        return {"x": self.x[index] + noise, "y": self.y[index], "index": np.int32(index)}


def training_data(kind):
    """The same samples as a map-style dataset, or as one of three kinds of streams."""
    plain = Augmented(random_too=False)
    plain = [plain[i] for i in range(SAMPLES)]
    if kind == "generator":
        return lambda: iter(plain)
    if kind == "grain":
        import grain

        return grain.MapDataset.source(plain).shuffle(seed=3).to_iter_dataset()
    if kind == "huggingface":
        import datasets

        rows = [{name: value.tolist() for name, value in row.items()} for row in plain]
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
    return Augmented()


class Recorder:
    """Records the samples of each step (one line per step, in one system call), then sends signals."""

    def __init__(self, path, case):
        self.path, self.signals, self.pause = path, dict(case.signals), case.pause
        self.rows = []

    def on_step_begin(self, trainer, step):
        mark("step")

    def on_after_optimizer_step(self, trainer, step):
        self.rows = np.asarray(run_of(trainer).backend.batch.data["index"]).tolist()

    def on_step_end(self, trainer, step, loss):
        record_samples(step, trainer.state.epoch, self.rows, self.path)
        mark("step", step)
        time.sleep(self.pause)
        if step in self.signals:
            os.kill(os.getpid(), self.signals[step])


def make_trainer(case, callbacks=()):
    """The trainer of a case."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from trainformer.backends.jax.sharding import make_mesh
    from trainformer.callbacks import EMA, EarlyStopping
    from trainformer.jax import BaseTrainer, TrainingArguments

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(8, case.width, rngs=rngs)
            self.norm = nnx.BatchNorm(case.width, rngs=rngs)
            self.drop = nnx.Dropout(case.dropout, rngs=rngs)
            self.outer = nnx.Linear(case.width, 4, rngs=rngs)

        def __call__(self, x):
            x = self.norm(self.inner(x)) if case.dropout else jnp.tanh(self.inner(x))
            return self.outer(self.drop(x))

    class Classes(BaseTrainer):
        def compute_loss(self, model, batch, key):
            return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    arguments = TrainingArguments(
        output_dir="run",
        num_train_epochs=case.epochs,
        total_batch_size=12 if case.dropout else 16,
        gradient_accumulation_steps=3 if case.dropout else 2,
        learning_rate=0.01,
        scheduler="constant",
        logging_steps=5,
        save_steps=case.save_steps,
        save_total_limit=3,
        save_async=case.save_async,
        evaluation_strategy="epoch",
        metric_for_best_model="loss",
        resume=case.resume,
        log="none",
        dtype="fp32",
    )
    return Classes(
        arguments,
        model=lambda rngs: Net(rngs),
        dataset_train=training_data(case.data),
        dataset_eval=Augmented(size=20, random_too=False),
        callbacks=[
            EarlyStopping(patience=10),
            EMA(decay=0.9),
            Recorder(Path("samples.jsonl").absolute(), case),
            *callbacks,
        ],
        mesh=make_mesh((1, -1, 1, 1), jax.devices()[: case.devices]),
    )


def train(case, callbacks=()):
    """Train to the end, with the faults that the case asks for."""
    if case.block_in_save is not None:
        block_in_save(case.block_in_save)
    watch, before = Watch(Path.cwd(), case.die_at), handlers()
    trainer = make_trainer(case, callbacks)
    try:
        trainer.train()
    finally:  # not reached after SIGKILL
        write_end(watch, before)


def start(case, folder, *callbacks):
    """The main function of a forked process: train in a folder, with output to a file."""
    import jax

    enter(folder)
    # Before jax initialises its devices. The last flag wins.
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={case.devices}"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # start fast
    train(case, callbacks)


def final_state(folder):
    """All components of the newest checkpoint as plain values, arrays as bytes, without timings."""
    from harness import output, run_folder, without_clock

    from trainformer.backends.jax.backend import root_logger_untouched
    from trainformer.checkpointing import CheckpointStore
    from trainformer.checkpointing.jax_files import JaxFiles, ocp

    newest = CheckpointStore(run_folder(folder) / "checkpoints").newest()
    assert newest is not None, f"there is no checkpoint in {folder}:\n{output(folder)}"
    found = {}
    for key, files in newest.manifest.components.items():
        if newest.manifest.formats.get(key) == "orbax":
            with root_logger_untouched(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                arrays = checkpointer.restore((newest.path / key).absolute())
            before = "" if key == "state" else f"{key}: "
            found |= {before + name: (str(array.dtype), np.asarray(array).tobytes()) for name, array in arrays.items()}
        elif key in newest.manifest.formats and key != "data":  # a position has several representations
            names = [file.name for file in files]
            found[key] = without_clock(JaxFiles().read(newest.path, names, newest.manifest.formats[key]))
    return found

"""Small trainers on JAX, their data, and a hand-written loop on one device for comparison."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainformer.backends.jax.sharding import make_mesh
from trainformer.core.types import Loss
from trainformer.jax import BaseTrainer, TrainerConfigureFunctionOutput, TrainingArguments
from trainformer.models.jax import Decoder, DecoderConfig
from trainformer.run import run_of

INPUTS, WIDTH, CLASSES, VOCABULARY = 6, 16, 3, 64


def samples(n=32, seed=0):
    """Samples with an index column."""
    x = np.random.default_rng(seed).standard_normal((n, INPUTS)).astype(np.float32)
    return {"x": x, "y": x[:, :CLASSES].argmax(-1).astype(np.int32), "index": np.arange(n, dtype=np.int32)}


def texts(n=32, length=8, seed=0):
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, (n, length)).astype(np.int32)
    return {"input_ids": ids, "weight": np.random.default_rng(seed + 1).uniform(0, 2, n).astype(np.float32)}


class Mlp(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.inner = nnx.Linear(INPUTS, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.outer = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(jnp.tanh(self.inner(x))))


def mean_loss(model, batch):
    """The mean over rows."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


class MeanTrainer(BaseTrainer):
    """Returns a scalar."""

    def compute_loss(self, model, batch, key):
        return mean_loss(model, batch)


def token_loss(model, batch):
    """Rows, and so micro-batches, have different weights."""
    logits = model(batch["input_ids"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["input_ids"][:, 1:])
    weights = jnp.broadcast_to(batch["weight"][:, None], losses.shape)
    return jnp.sum(losses * weights), jnp.sum(weights)


class TokenTrainer(BaseTrainer):
    """Returns a sum and a weight."""

    def compute_loss(self, model, batch, key):
        return Loss(*token_loss(model, batch))


def llama(rngs):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DecoderConfig(model_type="llama", vocab_size=VOCABULARY, num_key_value_heads=4, **sizes)
    return Decoder(config, rngs=rngs)


def mesh_on(dims, devices=4):
    return make_mesh(dims, jax.devices()[:devices])


def arguments(**options):
    """Arguments of a short run."""
    given = {"total_batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-2, "weight_decay": 0.0}
    given |= {"output_dir": "run", "log": "none", "logging_steps": 1, "dtype": "fp32"}
    given |= {} if "save_steps" in options else {"save_strategy": "no"}
    return TrainingArguments(**given | options)


def mlp_trainer(kind=MeanTrainer, data=None, model=None, **options):
    """An `Mlp` trainer on one device. Options that are not the trainer's are arguments."""
    own = {
        name: options.pop(name) for name in ("callbacks", "mesh", "dataset_eval", "data_collator") if name in options
    }
    own.setdefault("mesh", mesh_on((1, 1, 1, 1), 1))
    data = samples() if data is None else data
    return kind(arguments(**options), model=model or Mlp(nnx.Rngs(0)), dataset_train=data, **own)


def losses(trainer):
    return logged(trainer, "train/loss")


def logged(trainer, name):
    return [record[name] for record in trainer.state.log_history if name in record]


def by_hand(model, batches, loss, tx):
    """Losses and parameters of a plain jax loop on one device."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    opt_state, found = tx.init(params), []

    def value(params, batch):
        model = nnx.merge(graph, params, rest)
        model.eval()
        given = loss(model, batch)
        return given[0] / given[1] if isinstance(given, tuple) else given

    @jax.jit
    def step(params, opt_state, batch):
        now, grads = jax.value_and_grad(value)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, now

    for batch in batches:
        params, opt_state, now = step(params, opt_state, jax.tree.map(jnp.asarray, batch))
        found.append(float(now))
    return found, params.to_pure_dict()


def in_order(data, size, epochs):
    """Batches of unshuffled data; the last of an epoch may be smaller."""
    n = len(next(iter(data.values())))
    places = itertools.chain.from_iterable(range(0, n, size) for _ in range(epochs))
    return [{name: column[i : i + size] for name, column in data.items()} for i in places]


class StepsTrainer(BaseTrainer):
    """A trainer with user-written step functions."""

    def configure_functions(self, *args, **kwargs):
        def train_step(state, batch):
            def loss(params):
                return mean_loss(state.merge(params, state.variables, state.key), batch)

            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), {"loss": value}

        def eval_step(state, batch):
            return {"eval_loss": mean_loss(state.model, batch)}

        return TrainerConfigureFunctionOutput(train_step_fn=jax.jit(train_step), eval_step_fn=jax.jit(eval_step))


class Crash(Exception):
    """Raised by a test to end a run in the middle."""


class CrashAt:
    """A callback that raises `Crash` after a step."""

    def __init__(self, at):
        self.at = at

    def on_step_end(self, trainer, step, loss):
        if step == self.at:
            raise Crash


class SeenSamples:
    """Records the samples of each step: (epoch, indices of the rows)."""

    def __init__(self):
        self.steps = {}

    def on_after_optimizer_step(self, trainer, step):
        data = run_of(trainer).backend.batch.data
        rows = np.asarray(data["index"])[np.asarray(data["_valid"])] if "_valid" in data else np.asarray(data["index"])
        self.steps[step + 1] = (trainer.state.epoch, rows.tolist())

    def of_epoch(self, epoch):
        return [row for at, rows in self.steps.values() if at == epoch for row in rows]

"""A small network with stacked layers, its data, and a hand-written training loop on one device for comparison."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainformer.backends.jax.compilation import JittedStep
from trainformer.backends.jax.sharding import batch_sharding, copy_to_mesh, init_sharded, make_mesh
from trainformer.backends.jax.step import make_train_step
from trainformer.core.types import Loss

WIDTH, INPUTS, CLASSES, ROWS = 32, 8, 4, 16
TX = optax.adamw(1e-2, weight_decay=0.01)


class Stack(nnx.Module):
    """Stacked layers, run by a scan."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (2, WIDTH, WIDTH)) * 0.2)

    def __call__(self, x):
        return jax.lax.scan(lambda x, kernel: (x + jnp.tanh(x @ kernel), None), x, self.kernel[...])[0]


class Net(nnx.Module):
    partition_rules = (
        ("layers/kernel", ("fsdp", "tp")),
        ("inner/kernel", (None, ("fsdp", "tp"))),
        ("outer/kernel", ("fsdp", None)),
        (".*", ()),
    )

    def __init__(self, rngs):
        self.inner = nnx.Linear(INPUTS, WIDTH, rngs=rngs)
        self.layers = Stack(rngs)
        self.outer = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.layers(self.inner(x)))


class Noisy(nnx.Module):
    """A network with dropout and batch norm."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(INPUTS, WIDTH, use_bias=False, rngs=rngs)  # batch norm cancels a bias
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(self.norm(self.inner(x))))


def loss(model, batch, key):
    """Weighted, so that micro-batches have different weights."""
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    right = jnp.sum(logits.argmax(-1) == batch["y"])
    metrics = {"right": (right, batch["y"].shape[0]), "mean": losses.mean()}
    return Loss(jnp.sum(losses * batch["w"]), jnp.sum(batch["w"]), metrics)


def batches(n=3, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.standard_normal((rows, INPUTS)).astype(np.float32),
            "y": rng.integers(0, CLASSES, rows).astype(np.int32),
            "w": rng.uniform(0, 3, rows).astype(np.float32),
        }
        for _ in range(n)
    ]


def plain_loss(params, batch):
    """The loss of `Net` without flax."""
    x = batch["x"] @ params["inner"]["kernel"] + params["inner"]["bias"]
    for kernel in params["layers"]["kernel"]:
        x = x + jnp.tanh(x @ kernel)
    logits = x @ params["outer"]["kernel"] + params["outer"]["bias"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]
    return -jnp.sum(picked * batch["w"]) / jnp.sum(batch["w"])


def plain_training(params, data, tx=TX):
    """Losses, gradient norms and parameters of a hand-written loop on one device."""
    opt_state, losses, norms = tx.init(params), [], []

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(plain_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, optax.global_norm(grads)

    for batch in data:
        params, opt_state, value, norm = step(params, opt_state, batch)
        losses.append(float(value))
        norms.append(float(norm))
    return losses, norms, params


@functools.cache
def _new_state(dims, build, tx, frozen, seed):
    mesh = make_mesh(dims, jax.devices()[: int(np.prod(dims))])
    return mesh, *init_sharded(build, tx, seed, mesh, frozen=frozen)


def new_state(dims=(1, 1, 1, 1), build=Net, tx=TX, frozen=None, seed=0):
    """Mesh, state and shardings on the first devices. The state is a copy that a step may donate."""
    mesh, state, shardings = _new_state(dims, build, tx, frozen, seed)
    return mesh, copy_to_mesh(state, shardings), shardings


def put(mesh, batch):
    return jax.device_put(batch, batch_sharding(mesh))


def train(dims, data, build=Net, tx=TX, frozen=None, **options):
    """Losses, outputs and the last state of a run on a mesh."""
    mesh, state, shardings = new_state(dims, build, tx, frozen)
    step = JittedStep(make_train_step(loss, **options), mesh, shardings, train=True)
    outputs = []
    for batch in data:
        state, output = step(state, put(mesh, batch))
        outputs.append(output)
    return mean_losses(outputs), outputs, state


def mean_losses(outputs):
    return [float(total / weight) for total, weight in (output["loss"] for output in outputs)]


def on_host(tree):
    return jax.tree.map(np.array, tree)


def assert_close(tree, other, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), on_host(tree), on_host(other))


def are_equal(tree, other):
    return jax.tree.all(jax.tree.map(np.array_equal, on_host(tree), on_host(other)))

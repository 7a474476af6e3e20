"""Every mesh and gradient accumulation gives the loss curve of a hand-written loop on one device."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from backend_toys import assert_close
from flax import nnx
from jax_toys import (
    MeanTrainer,
    Mlp,
    TokenTrainer,
    arguments,
    by_hand,
    in_order,
    llama,
    logged,
    losses,
    mean_loss,
    mesh_on,
    samples,
    texts,
    token_loss,
)

# Axes are (dp, fsdp, tp, sp). Shapes of the shards on four devices of layers/attention/q_proj/kernel (2, 32, 32),
# layers/mlp/down_proj/kernel (2, 64, 32) and embed_tokens/embedding (64, 32).
MESHES = {
    (1, -1, 1, 1): [(2, 8, 32), (2, 64, 8), (64, 8)],
    (-1, 1, 1, 1): [(2, 32, 32), (2, 64, 32), (64, 32)],
    (1, 1, -1, 1): [(2, 32, 8), (2, 16, 32), (16, 32)],
    (2, 1, 2, 1): [(2, 32, 16), (2, 32, 32), (32, 32)],
    (1, 1, 1, -1): [(2, 32, 32), (2, 64, 32), (64, 32)],
}
CHECKED = (
    ("layers", "attention", "q_proj", "kernel"),
    ("layers", "mlp", "down_proj", "kernel"),
    ("embed_tokens", "embedding"),
)
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.cosine_decay_schedule(1e-2, 6)))
GIVEN = {"shuffle": False, "scheduler": "cosine", "max_grad_norm": 0.5, "total_batch_size": 16, "num_train_epochs": 2}


@pytest.fixture(scope="module")
def llama_by_hand():
    return by_hand(new_llama(), in_order(texts(48, 9), 16, 2), token_loss, TX)


def new_llama():
    return nnx.jit(lambda: llama(nnx.Rngs(jax.random.key(42))))()


def leaf(tree, path):
    for name in path:
        tree = tree[name]
    return tree


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "accumulation"), zip(MESHES, (2, 1, 1, 4, 1), strict=True))
def test_llama_on_every_mesh(dims, accumulation, llama_by_hand):
    given = arguments(**GIVEN, gradient_accumulation_steps=accumulation)
    trainer = TokenTrainer(given, model=new_llama(), mesh=mesh_on(dims), dataset_train=texts(48, 9))
    for path, shape in zip(CHECKED, MESHES[dims], strict=True):
        for tree in (trainer.model_state.params, first_moments(trainer.model_state.opt_state)):
            assert {shard.data.shape for shard in leaf(tree, path).addressable_shards} == {shape}
    state = trainer.train()
    wanted, params = llama_by_hand
    np.testing.assert_allclose(losses(trainer), wanted, rtol=2e-5)
    assert_close(state.params, params, atol=2e-4)
    for path, shape in zip(CHECKED, MESHES[dims], strict=True):
        assert {shard.data.shape for shard in leaf(state.params, path).addressable_shards} == {shape}
    assert logged(trainer, "train/recompilations")[-1] == 0


def first_moments(opt_state):
    return optax.tree_utils.tree_get(opt_state, "mu")


@pytest.fixture(scope="module")
def mlp_by_hand():
    """27 rows in batches of 8: the last batch of an epoch has 3, which is odd on every mesh."""
    return by_hand(Mlp(nnx.Rngs(0)), in_order(samples(27), 8, 2), mean_loss, optax.adam(1e-2))


@pytest.mark.parametrize(
    ("dims", "accumulation"),
    [((1, -1, 1, 1), 1), ((2, 1, 2, 1), 2)],
)
def test_an_mlp_with_an_uneven_last_batch(dims, accumulation, mlp_by_hand):
    given = {
        "shuffle": False,
        "scheduler": "constant",
        "max_grad_norm": None,
        "gradient_accumulation_steps": accumulation,
    }
    trainer = MeanTrainer(arguments(**given), model=Mlp(nnx.Rngs(0)), mesh=mesh_on(dims), dataset_train=samples(27))
    state = trainer.train()
    wanted, params = mlp_by_hand
    np.testing.assert_allclose(losses(trainer), wanted, rtol=1e-5)
    assert_close(state.params, params, atol=1e-5)
    assert trainer.state.samples == 54


def test_a_model_built_on_the_mesh_does_not_depend_on_the_mesh():
    found = []
    for dims in ((1, 1, 1, 1), (2, 1, 2, 1)):
        mesh = mesh_on(dims, 1 if dims == (1, 1, 1, 1) else 4)
        trainer = MeanTrainer(arguments(), model=lambda rngs: Mlp(rngs), mesh=mesh, dataset_train=samples(16))
        trainer.train()
        found.append(losses(trainer))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_sharding_array_uses_all_devices():
    trainer = MeanTrainer(arguments(sharding_array=(2, -1, 1, 1)), model=Mlp(nnx.Rngs(0)), dataset_train=samples(16))
    assert dict(trainer.mesh.shape) == {"dp": 2, "fsdp": 4, "ep": 1, "tp": 1, "sp": 1}
    assert trainer.mesh.size == len(jax.devices()) == 8


class MaskingTrainer(MeanTrainer):
    """Masks padding rows, so that all batches have one size."""

    masks_padding = True

    def compute_loss(self, model, batch, key):
        rows = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        return (rows * batch["_valid"]).sum() / batch["_valid"].sum()


def test_a_loss_that_masks_padding_is_compiled_once(mlp_by_hand):
    given = {"shuffle": False, "scheduler": "constant", "max_grad_norm": None}
    trainer = MaskingTrainer(
        arguments(**given), model=Mlp(nnx.Rngs(0)), mesh=mesh_on((1, -1, 1, 1)), dataset_train=samples(27)
    )
    trainer.train()
    np.testing.assert_allclose(losses(trainer), mlp_by_hand[0], rtol=1e-5)
    assert logged(trainer, "train/recompilations")[-1] == 0

"""What devices send each other in a train step of a decoder: compiled HLO, and the messages of XLA's partitioner."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax_model_toys import furthest

from trainformer.backends.jax.sharding import batch_sharding, init_sharded, make_mesh
from trainformer.backends.jax.step import make_train_step
from trainformer.losses.jax.tokens import row_sums
from trainformer.models.jax import Decoder, DecoderConfig

# Sizes that occur nowhere else in the HLO.
ROWS, LENGTH, WIDTH, VOCABULARY = 16, 24, 40, 96
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
POSITIONS = replace(CONFIG, rope=None, tie_word_embeddings=True, max_position_embeddings=32)
ODD = replace(CONFIG, vocab_size=VOCABULARY + 1)  # divides over no mesh


def loss(model, batch, key):
    return row_sums(model.hidden_states(batch["input_ids"]), batch["input_ids"], model.head).total()


def train_step(config, dims, capfd):
    """The parameters after a step of gradient descent, the HLO of the step, and what the compiler wrote."""
    mesh = make_mesh(dims, jax.devices()[: int(np.prod(dims))])
    state, shardings = init_sharded(lambda rngs: Decoder(config, rngs=rngs), optax.sgd(1.0), 0, mesh)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    batch = jax.device_put({"input_ids": ids}, batch_sharding(mesh))
    capfd.readouterr()
    with jax.set_mesh(mesh):
        compiled = jax.jit(make_train_step(loss), out_shardings=(shardings, None)).lower(state, batch).compile()
        after, _ = compiled(state, batch)
    return after.params, compiled.as_text(), capfd.readouterr().err


@pytest.fixture
def no_cache():
    """A step from the compilation cache is not compiled, so there are no messages."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()


def gathered(hlo):
    """Shape and source of all floating-point arrays that devices gather from each other."""
    found = re.findall(r"= f32\[([\d,]+)\]\S* all-gather(?:-start)?\(.*op_name=\"([^\"]*)\"", hlo)
    return [(tuple(map(int, shape.split(","))), source) for shape, source in found]


@pytest.mark.parametrize(
    ("dims", "config"),
    [((2, 2, 2, 1), CONFIG), ((1, 2, 2, 2), CONFIG), ((2, 2, 2, 1), ODD), ((1, 4, 2, 1), POSITIONS)],
    ids=["2221", "1222", "2221-odd", "1421-positions"],
)
def test_no_activation_is_replicated_on_a_mixed_mesh(dims, config, capfd, no_cache):
    wanted, _, _ = train_step(config, (1, 1, 1, 1), capfd)
    params, hlo, messages = train_step(config, dims, capfd)
    assert furthest(params, wanted) <= 1e-5
    assert "rematerialization" not in messages
    assert gathered(hlo)  # of weights
    rows, length = ROWS // (dims[0] * dims[1]), LENGTH // dims[3]
    for shape, source in gathered(hlo):
        assert "_take" not in source, source
        assert np.prod(shape) < rows * length * VOCABULARY, source
        # Keys and values are gathered over the sequence: the heads of this device.
        assert len(shape) < 3 or np.prod(shape) <= rows * LENGTH * WIDTH // 2, (shape, source)

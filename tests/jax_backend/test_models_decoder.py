"""The decoder against transformers: logits of every family, padding, packing, dropout, bf16, invalid input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax_model_toys import configs, furthest, logits, pairs_of, tokens, torch_logits

import trainformer.models.jax.layers as layers
from trainformer.core.errors import BadArgument
from trainformer.models.jax import DecoderConfig, apply_lora, load_model, model_from_config
from trainformer.models.jax.block import Block, BlockConfig, Execution, run_layers

CONFIGS = configs()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return pairs_of(CONFIGS, tmp_path_factory)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_transformers(name, pair):
    theirs, ours, _ = pair(name)
    ids = tokens()
    wanted = torch_logits(theirs, ids)
    got = logits(ours, ids)
    assert np.abs(wanted).max() > 1.0  # else a tolerance of 1e-4 would mean little
    assert furthest(wanted, got) <= 1e-4


@pytest.mark.parametrize(("name", "side"), [("llama3", "left"), ("mistral", "right"), ("gpt2", "left")])
def test_padding_does_not_change_the_logits_of_real_tokens(name, side, pair):
    theirs, ours, _ = pair(name)
    ids, mask = tokens(), np.ones((2, 12), np.int64)
    mask[1, slice(0, 5) if side == "left" else slice(7, None)] = 0
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    wanted = torch_logits(theirs, ids, attention_mask=mask, position_ids=positions)
    got = logits(ours, ids, attention_mask=mask)
    alone = logits(ours, ids[1:, mask[1] == 1])
    assert furthest(wanted[mask == 1], got[mask == 1]) <= 1e-4
    assert furthest(alone[0], got[1, mask[1] == 1]) <= 1e-5
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_packed_texts_have_the_logits_of_separate_texts(name, pair):
    _, ours, _ = pair(name)
    ids = jnp.asarray(tokens(rows=1, length=14))
    segments = jnp.asarray([[3] * 5 + [1] * 6 + [0] * 3])
    packed = logits(ours, ids, segment_ids=segments)
    # The same shape for all three, so that it is compiled once.
    for start, end in ((0, 5), (5, 11), (11, 14)):
        alone = logits(ours, jnp.roll(ids, -start, axis=1))[:, : end - start]
        assert furthest(packed[:, start:end], alone) <= 1e-5


def test_an_attention_mask_hides_padding_inside_segments(pair):
    _, ours, _ = pair("llama")
    ids = jnp.asarray(tokens(rows=1, length=10))
    mask = jnp.asarray([[0, 0] + [1] * 8])
    hidden = logits(ours, ids, attention_mask=mask, segment_ids=jnp.ones_like(ids))
    alone = logits(ours, ids[:, 2:])
    assert furthest(hidden[:, 2:], alone) <= 1e-5


def test_position_ids_are_used(pair):
    theirs, ours, _ = pair("llama")
    ids, positions = tokens(), np.arange(12)[None] * 3 + np.asarray([[0], [5]])
    wanted = torch_logits(theirs, ids, position_ids=positions)
    assert furthest(wanted, logits(ours, ids, position_ids=positions)) <= 1e-4
    assert furthest(wanted, logits(ours, ids)) > 1e-2


def test_the_head_maps_hidden_states_to_logits(pair):
    for name in ("llama", "gpt2"):
        _, ours, _ = pair(name)
        ids = jnp.asarray(tokens())
        states = nnx.jit(lambda model, ids: model.hidden_states(ids))(ours, ids)
        assert states.shape == (2, 12, 32)
        assert furthest(ours.head(states[:, 3:5]), logits(ours, ids)[:, 3:5]) <= 1e-6


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bf16_is_as_accurate_as_transformers_in_bf16(name, pair):
    theirs, ours, folder = pair(name)
    low = load_model(folder, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(low))} == {jnp.dtype(jnp.bfloat16)}
    ids = tokens()
    exact = logits(ours, ids)
    got = logits(low, ids)
    wanted = torch_logits(theirs.to(torch.bfloat16), ids)
    theirs.to(torch.float32)
    theirs.load_state_dict(type(theirs).from_pretrained(folder).state_dict())
    assert got.dtype == jnp.bfloat16
    assert furthest(exact, got) <= 2 * furthest(exact, wanted)


def test_dropout_needs_a_key_and_depends_on_it(pair):
    _, ours, _ = pair("gpt2")
    ids = jnp.asarray(tokens())

    @jax.jit
    def run(key):
        return ours(ids, deterministic=False, key=key)

    plain = logits(ours, ids)
    first, again, other = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    assert furthest(plain, logits(ours, ids, key=jax.random.key(0))) == 0.0
    assert furthest(plain, run(None)) <= 1e-5
    assert furthest(first, again) == 0.0
    assert furthest(first, other) > 0.1
    assert furthest(first, plain) > 0.1


def test_each_layer_has_its_own_dropout_mask():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BlockConfig(**sizes, output_bias=True, hidden_dropout=0.5)

    @jax.jit
    def run(key):
        layers = Block(config, nnx.Rngs(0), (2,))
        # Each layer adds one to everything.
        layers.attention.o_proj.bias[...] = jnp.ones((2, 8))
        for linear in (layers.attention.o_proj, layers.mlp.down_proj):
            linear.kernel[...] = jnp.zeros_like(linear.kernel[...])
        return run_layers(layers, jnp.zeros((1, 16, 8)), None, None, Execution(), key)

    assert set(np.unique(run(None))) == {2.0}
    assert set(np.unique(run(jax.random.key(0)))) == {0.0, 2.0, 4.0}


def _attention_dropped(rate):
    """Outputs of attention with known weights for 400 keys."""
    from trainformer.models.jax.attention import attend

    q = jnp.zeros((1, 4, 2, 8))
    v = jnp.broadcast_to(jnp.arange(1.0, 5.0)[None, :, None, None], (1, 4, 1, 8))

    def one(key):
        return attend(q, jnp.zeros((1, 4, 1, 8)), v, rate=rate, key=key)[0, :, 0, 0]

    return np.asarray(jax.vmap(one)(jax.random.split(jax.random.key(0), 400)))


def test_dropout_on_attention_keeps_the_mean():
    # All keys are equal, so row t is the mean of 1..t+1; dropout doubles or drops each term.
    got = _attention_dropped(0.5)
    assert np.abs(got.mean(0) - [1.0, 1.5, 2.0, 2.5]).max() < 0.2
    assert set(np.unique(got[:, 0])) == {0.0, 2.0}
    assert furthest(_attention_dropped(0.0)[:1], np.asarray([[1.0, 1.5, 2.0, 2.5]])) < 1e-6


@pytest.mark.parametrize(("window", "causal"), [(3, True), (None, False)])
def test_attention_with_negligible_dropout_matches_attention_without(window, causal):
    from trainformer.models.jax.attention import attend

    q, k, v = (jax.random.normal(jax.random.key(n), (2, 7, h, 8)) for n, h in ((0, 4), (1, 2), (2, 2)))
    segments = jnp.asarray([[0, 0, 1, 1, 1, 1, 2], [1] * 7])
    options = {"causal": causal, "window": window}
    plain = attend(q, k, v, segments, **options)
    # A rate this small drops nothing but takes the dropout path.
    assert furthest(plain, attend(q, k, v, segments, **options, rate=1e-9, key=jax.random.key(0))) <= 1e-5


def test_random_weights_depend_on_the_seed(pair):
    config = pair("qwen3")[1].config
    one, same, other = (nnx.state(model_from_config(config, seed=seed)) for seed in (1, 1, 2))
    assert furthest(one, same) == 0.0
    assert furthest(one, other) > 0.01
    spread = float(jnp.std(one["layers"]["mlp"]["up_proj"]["kernel"][...]))
    assert spread == pytest.approx(0.02, rel=0.1)
    low = model_from_config(config, seed=1, dtype=jnp.bfloat16)
    assert low.lm_head.kernel.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gleu"}, "Did you mean 'gelu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads to divide 4"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "multiple of num_attention_heads"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 4.0}}, "rotary scaling.*'proportional'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "lama"}, "Did you mean 'llama'"),
        ({"model_type": "mamba"}, "supported model_type"),
        ({"vocab_size": None}, "'vocab_size' in the configuration"),
    ],
)
def test_unsupported_configs_are_refused(changes, message):
    with pytest.raises(BadArgument, match=message):
        model_from_config({**CONFIGS["llama"].to_dict(), **changes})


def test_gpt2_variants_are_refused():
    with pytest.raises(BadArgument, match="scale_attn_by_inverse_layer_idx"):
        model_from_config({**CONFIGS["gpt2"].to_dict(), "scale_attn_by_inverse_layer_idx": True})
    with pytest.raises(BadArgument, match="a configuration"):
        model_from_config("folder")


def test_configs_of_older_transformers_versions_are_read():
    new = CONFIGS["llama3"].to_dict()
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    scaling = {name: value for name, value in new["rope_parameters"].items() if name != "rope_theta"}
    old |= {"rope_theta": 77.0, "rope_scaling": {**scaling, "type": scaling.pop("rope_type")}}
    rope = model_from_config(old).config.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_positions) == ("llama3", 77.0, 8.0, 16)


def test_invalid_input_is_refused(pair):
    _, ours, _ = pair("gpt2")
    with pytest.raises(BadArgument, match="at most 64 tokens"):
        ours(jnp.zeros((1, 65), jnp.int32))
    with pytest.raises(BadArgument, match="integer input_ids"):
        ours(jnp.zeros((1, 5)))
    with pytest.raises(BadArgument, match="integer input_ids"):
        ours(jnp.zeros(5, jnp.int32))
    segments = jnp.arange(70)[None] // 35
    assert np.isfinite(logits(ours, np.zeros((1, 70), int), segment_ids=segments)).all()


def test_configure_checks_its_arguments():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = model_from_config(DecoderConfig(vocab_size=8, **sizes))
    model.configure(unroll=True)
    assert model.execution.unroll == 3
    for options, message in (
        ({"attention": "flash"}, "one of auto, xla, cudnn"),
        ({"remat": "dots"}, "checkpoint policy"),
        ({"unroll": 0}, "positive integer or True"),
    ):
        with pytest.raises(BadArgument, match=message):
            model.configure(**options)


def test_projections_in_one_product_change_neither_logits_nor_gradients(pair, monkeypatch):
    """As on a single GPU. Layers with LoRA stay separate products."""
    graph, state = nnx.split(pair("qwen2")[1])  # with biases on queries, keys and values
    ids = jnp.asarray(tokens())

    def loss(state):
        return jnp.sum(jnp.square(nnx.merge(graph, state)(ids)))

    def products(of):
        return str(jax.make_jaxpr(lambda state: loss(state))(of)).count("dot_general")  # traced anew

    separate, whole = products(state), jax.value_and_grad(loss)(state)
    monkeypatch.setattr(layers, "platform", lambda: "gpu")
    assert products(state) == separate - 3  # queries, keys and values in one, gate and up in one
    for mine, wanted in zip(*map(jax.tree.leaves, (jax.value_and_grad(loss)(state), whole)), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5 * np.abs(wanted).max())
    adapted = load_model(pair("qwen2")[2])
    apply_lora(adapted, targets=["q_proj", "up_proj"])
    with_lora = nnx.split(adapted)
    graph = with_lora[0]
    assert products(with_lora[1]) == separate + 4  # two for each layer with LoRA

"""Configs of decoders: read as transformers does, unsupported values refused by name; rotary tables; layer patterns."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax_family_toys import FULL, LAYER_ROPES, LONGROPE, SLIDING, YARN, family_configs
from jax_model_toys import furthest
from transformers import AutoConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainformer.core.errors import BadArgument
from trainformer.models.jax import Decoder, DecoderConfig, model_from_config
from trainformer.models.jax.families.family import family_of
from trainformer.models.jax.huggingface import check_family
from trainformer.models.jax.rope import Rope, read_rope, rotate, text_lengths
from trainformer.models.jax.scan import LayerKind, layer_groups

CONFIGS = {name: config.to_dict() for name, config in family_configs().items()}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
LINEAR = {"type": "linear", "factor": 8.0}
# What older versions of transformers wrote, or what is missing in a file.
WRITTEN_EARLIER = {
    **{
        kind: {"model_type": kind}
        for kind in ("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "olmo2", "olmo3")
    },
    **{kind: {"model_type": kind} for kind in ("phi3", "granite", "gemma", "gemma2", "gemma3_text", "gpt_neox")},
    "olmo3_hub": {
        "model_type": "olmo3",
        "rope_theta": 500_000,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    },
    "mistral_mixed": {"model_type": "mistral", "layer_types": [SLIDING, FULL] * 4, "sliding_window": 3},
    "qwen_window": {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 5, "rope_theta": 77.0},
    "smollm3_window": {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9},
    "null_heads": {"model_type": "smollm3", "num_key_value_heads": None},
    "gemma_gelu": {"model_type": "gemma", "hidden_act": "gelu"},
    "gemma3_hub": {
        "model_type": "gemma3_text",
        "sliding_window_pattern": 3,
        "rope_theta": 77.0,
        "rope_local_base_freq": 55.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3_local": {"model_type": "gemma3_text", "layer_types": [SLIDING] * 8, "rope_local_base_freq": 55.0},
    "neox_hub": {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 77, "rope_scaling": LINEAR},
    "phi3_su": {
        "model_type": "phi3",
        "max_position_embeddings": 131_072,
        "rope_scaling": {
            "type": "su",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 4096,
        },
    },
    "yarn_hub": {
        "model_type": "qwen2",
        "rope_theta": 77.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "llama3_outer": {
        "model_type": "llama",
        "original_max_position_embeddings": 32,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


def read(config):
    return family_of(config["model_type"]).read_config(config)


@pytest.mark.parametrize("name", WRITTEN_EARLIER)
def test_old_and_short_configs_are_read_as_by_transformers(name):
    given = {**SIZES, **WRITTEN_EARLIER[name]}
    kind = "ministral" if name == "mistral_mixed" else given["model_type"]
    theirs = AutoConfig.for_model(**{**given, "model_type": kind}).to_dict()
    ours, wanted = (replace(read(config), source="") for config in (given, theirs))
    # Files of transformers always have the number of key-value heads, with defaults for a certain size of model.
    assert replace(ours, num_key_value_heads=None) == replace(wanted, num_key_value_heads=None, head_dim=ours.head_dim)
    assert ours.head_width == wanted.head_width


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=False"),
        ("gemma2", {"layer_types": [FULL] * 3 + ["chunked_attention"]}, "layer_types of 4 layers.*'chunked_attention'"),
        ("gemma2", {"sliding_window": None}, "a sliding_window"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=None"),
        ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters for 'sliding_attention'"),
        ("gemma3", {"rope_parameters": {**LAYER_ROPES, FULL: {"rope_type": "dynamic"}}}, "'dynamic'.*'yarn'"),
        ("qwen2", {"use_sliding_window": False}, "a sliding_window.*use_sliding_window"),
        ("qwen2", {"layer_types": [FULL]}, "layer_types of 3 layers"),
        ("qwen3", {"rope_parameters": LAYER_ROPES}, "rope_parameters without layer types"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers of 4 layers"),
        ("olmo2", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("olmo2", {"hidden_act": "gleu"}, "Did you mean 'gelu'"),
        ("olmo3", {"rope_parameters": {FULL: YARN}}, "truncate=True"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 77.0}, "rope_theta=500000"),
        ("phi3", {"embd_pdrop": 0.1}, "embd_pdrop=0.0"),
        ("phi3", {"rope_parameters": {**LONGROPE, "long_factor": [1.0]}}, "long_factor with 2 numbers"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "'long_factor'"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.01}}, "partial_rotary_factor to rotate"),
        ("gpt_neox", {"rope_parameters": {"rope_type": "proportional"}}, "rotary scaling.*'proportional'"),
    ],
)
def test_unsupported_values_are_refused_by_name(name, changes, message):
    with pytest.raises(BadArgument, match=message):
        model_from_config({**CONFIGS[name], **changes})


def test_options_of_a_config_are_checked():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    for options, message in (
        ({"norm_placement": "after"}, "one of pre, post, both"),
        ({"layer_types": (SLIDING, FULL)}, "a sliding_window"),
        ({"layer_types": (FULL, "local")}, "layer_types of 2 layers"),
    ):
        with pytest.raises(BadArgument, match=message):
            DecoderConfig(vocab_size=8, **sizes, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 4}, "layer_kinds=.*window=4"),
        (
            {"final_logit_softcapping": 30.0, "embedding_scale": 2.0},
            "embedding_scale=2.0, final_logit_softcapping=30.0",
        ),
        ({"model_type": "gpt_neox"}, "differs in"),
        ({"rope": Rope(partial=0.5)}, "partial_rotary_factor"),
    ],
)
def test_options_that_the_model_type_cannot_express_are_not_dropped_silently(options, message, tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = DecoderConfig(vocab_size=8, **sizes, **options)
    with pytest.raises(BadArgument, match=message):
        check_family(config)
    if "model_type" not in options:
        with pytest.raises(BadArgument, match=message):
            Decoder(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
        assert not any(tmp_path.iterdir())


# -- rotary embeddings -----------------------------------------------------------------------------------------------

ROPES = {
    "yarn": YARN,
    "yarn_plain": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn_given": {**YARN, "attention_factor": 1.25, "truncate": True},
    "yarn_ratio": {**YARN, "factor": None},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_tables_match_transformers(name):
    config = LlamaConfig(**SIZES, head_dim=32, max_position_embeddings=1024, rope_parameters=dict(ROPES[name]))
    frequencies, factor = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config)
    rope = read_rope({"max_position_embeddings": 1024, "rope_parameters": ROPES[name]})
    assert np.abs(frequencies.numpy() / np.asarray(rope.frequencies(32)) - 1).max() <= 1e-5
    assert rope.attention_factor == pytest.approx(factor, rel=1e-6)
    cos, sin = rope.tables(jnp.asarray([[0, 1, 7]]), 32)
    assert furthest(cos[0, :, 0], torch.cos(torch.tensor([[0.0], [1.0], [7.0]]) * frequencies) * factor) <= 1e-5
    assert furthest(sin[0, :, 0], torch.sin(torch.tensor([[0.0], [1.0], [7.0]]) * frequencies) * factor) <= 1e-5


def test_longrope_has_the_frequencies_of_each_text_by_its_length():
    given = {**LONGROPE, "rope_type": "longrope"}
    config = Phi3Config(
        **SIZES,
        pad_token_id=None,
        rope_parameters=dict(given),
        original_max_position_embeddings=4,
        max_position_embeddings=64,
    )
    rope = read_rope(config.to_dict(), partial=1.0)
    short, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=4)
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=5)
    # A text of four tokens, one of five, and padding.
    positions = jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 3, 4, 4]])
    assert text_lengths(positions)[0].tolist() == [4] * 4 + [5] * 6
    cos, _ = rope.tables(positions, 8)
    assert cos.shape == (1, 10, 1, 2)
    assert furthest(cos[0, 3, 0], torch.cos(3 * short) * factor) <= 1e-6
    assert furthest(cos[0, 7, 0], torch.cos(3 * long) * factor) <= 1e-6
    assert factor > 1.0
    assert furthest(short, long) > 0.1


def test_features_that_are_not_rotated_stay_as_they_are():
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
    rope = read_rope({"rope_parameters": {"partial_rotary_factor": 0.5}}, partial=1.0)
    turned = rotate(x, rope.tables(jnp.arange(3)[None], 8))
    assert furthest(turned[..., 4:], x[..., 4:]) == 0.0
    assert furthest(turned[:, 1:, :, :4], x[:, 1:, :, :4]) > 0.1
    assert furthest(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1)) <= 1e-5


# -- layers of different kinds ---------------------------------------------------------------------------------------

A, B, C = LayerKind(window=4), LayerKind(), LayerKind(rope=None)


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ([A] * 5, [((A,), 5)]),
        ([A, B] * 4, [((A, B), 4)]),
        ([A, A, B] * 3 + [A, A], [((A, A, B), 3), ((A,), 2)]),
        ([B] * 6 + [A] * 3, [((B,), 6), ((A,), 3)]),
        ([A, B, B, C], [((A,), 1), ((B,), 2), ((C,), 1)]),
        ([A], [((A,), 1)]),
    ],
)
def test_layers_are_grouped_into_the_fewest_patterns(kinds, groups):
    assert layer_groups(kinds) == groups
    assert [kind for pattern, count in groups for kind in pattern * count] == kinds


def test_the_size_of_the_program_does_not_depend_on_the_number_of_layers():
    def lowered(depth, unroll=1):
        given = {**CONFIGS["gemma3"], "num_hidden_layers": depth, "layer_types": ([SLIDING] * 5 + [FULL]) * 20}
        model = nnx.eval_shape(lambda: Decoder(read(given), rngs=nnx.Rngs(0)))
        model.configure(unroll=unroll)
        graph, state = nnx.split(model)
        run = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))
        return run.lower(state, jax.ShapeDtypeStruct((1, 8), jnp.int32)).as_text()

    one, six, short, long = (lowered(depth).count("stablehlo.dot_general") for depth in (1, 6, 26, 62))
    assert six > one
    # Six layers of the pattern and one for the two that are left; the head is in each program.
    assert short == long <= 7 * one
    assert "stablehlo.while" not in lowered(26, unroll=True)

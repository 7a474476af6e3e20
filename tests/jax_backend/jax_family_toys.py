"""Small decoders of every family, with other values of their options than the defaults."""

from __future__ import annotations

from jax_model_toys import VOCABULARY
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

SLIDING, FULL = "sliding_attention", "full_attention"
# Padding tokens have no gradient in torch, and by default other ids than these models have.
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_SHARED = {**_SIZES, **_IDS, "num_key_value_heads": 2, "max_position_embeddings": 64}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8,
    "beta_slow": 0.5,
    "mscale": 1.5,
    "mscale_all_dim": 0.7,
    "truncate": False,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 9.0],
}
LAYER_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 50.0},
    FULL: {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
}


def family_configs() -> dict[str, PretrainedConfig]:
    """Windows are shorter than the sequence, and most heads are wider than hidden_size / heads."""
    wide = {**_SHARED, "head_dim": 16, "rms_norm_eps": 1e-3}
    window = {"sliding_window": 4, "use_sliding_window": True}
    return {
        "llama_yarn": LlamaConfig(**wide, num_hidden_layers=2, rope_parameters=YARN),
        "ministral": MinistralConfig(
            **wide, num_hidden_layers=4, sliding_window=3, layer_types=[SLIDING, FULL, FULL, SLIDING]
        ),
        "qwen2": Qwen2Config(**_SHARED, num_hidden_layers=3, **window, max_window_layers=1, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**wide, num_hidden_layers=2, **window, layer_types=[SLIDING, FULL], attention_bias=True),
        "smollm3": SmolLM3Config(
            **_SHARED,
            **window,
            num_hidden_layers=4,
            no_rope_layer_interval=2,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
        "olmo2": Olmo2Config(**_SHARED, num_hidden_layers=2, attention_bias=True, rope_parameters={"rope_theta": 99.0}),
        "olmo3": Olmo3Config(
            **_SHARED,
            num_hidden_layers=2,
            sliding_window=4,
            layer_types=[FULL, SLIDING],
            rope_parameters={**LAYER_ROPES, FULL: {**YARN, "truncate": True}},
        ),
        "granite": GraniteConfig(
            **_SHARED,
            num_hidden_layers=2,
            embedding_multiplier=3.0,
            logits_scaling=0.5,
            residual_multiplier=0.7,
            attention_multiplier=0.3,
            attention_bias=True,
            mlp_bias=True,
        ),
        "phi3": Phi3Config(
            **_SHARED,
            num_hidden_layers=2,
            sliding_window=5,
            rope_parameters=LONGROPE,
            original_max_position_embeddings=8,
        ),
        "gemma": GemmaConfig(**wide, num_hidden_layers=2, attention_bias=True, rope_parameters={"rope_theta": 500.0}),
        "gemma2": Gemma2Config(
            **wide,
            num_hidden_layers=4,
            sliding_window=4,
            query_pre_attn_scalar=9,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=5.0,
            tie_word_embeddings=False,
        ),
        "gemma3": Gemma3TextConfig(
            **wide,
            num_hidden_layers=5,
            layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING],
            sliding_window=4,
            query_pre_attn_scalar=9,
            final_logit_softcapping=7.0,
            rope_parameters=LAYER_ROPES,
        ),
        "gpt_neox": GPTNeoXConfig(
            **_SIZES, **_IDS, num_hidden_layers=2, max_position_embeddings=64, hidden_act="relu",
            rope_parameters={"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5, "rope_theta": 100.0},
        ),
        "gpt_neox_serial": GPTNeoXConfig(
            **_SIZES, **_IDS, num_hidden_layers=2, max_position_embeddings=64,
            use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True,
        ),
    }  # fmt: skip

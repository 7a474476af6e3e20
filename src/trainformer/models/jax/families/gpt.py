"""HF configs and weight names of GPT-2 and GPT-NeoX (Pythia)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainformer.models.jax.decoder import Decoder, DecoderConfig
from trainformer.models.jax.families.family import (
    Family,
    Weight,
    hf_fields,
    layer_norm,
    linear,
    read_fields,
    refuse_unsupported,
)
from trainformer.models.jax.families.llama import write_decoder
from trainformer.models.jax.rope import Rope, read_rope, write_rope

# -- GPT-2: its linear layers are stored (in, out), as ours ----------------------------------------------------------

_GPT2_FIXED = {"add_cross_attention": False, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
_GPT2_FIELDS = hf_fields(
    *("vocab_size", "initializer_range", "tie_word_embeddings"),
    n_embd="hidden_size",
    n_inner="intermediate_size",
    n_layer="num_hidden_layers",
    n_head="num_attention_heads",
    n_positions="max_position_embeddings",
    activation_function="hidden_act",
    layer_norm_epsilon="norm_eps",
    embd_pdrop="embedding_dropout",
    attn_pdrop="attention_dropout",
    resid_pdrop="hidden_dropout",
)
# Where transformers' GPT-2 differs from `DecoderConfig`.
_GPT2_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    **dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), 0.1),
}


def read_gpt2(config: Mapping[str, Any]) -> DecoderConfig:
    refuse_unsupported(config, _GPT2_FIXED)
    fields = read_fields(config, _GPT2_FIELDS, intermediate_size=None, **_GPT2_DEFAULTS)
    fields["intermediate_size"] = fields["intermediate_size"] or 4 * fields["hidden_size"]
    always: dict[str, Any] = dict.fromkeys(("fused_qkv", "qkv_bias", "output_bias", "mlp_bias"), True)
    return DecoderConfig(**fields, **always, model_type="gpt2", norm="layer", gated=False, rope=None)


def write_gpt2(config: DecoderConfig) -> dict[str, Any]:
    fields = {name: getattr(config, own) for name, own in _GPT2_FIELDS.items()}
    kind = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    return {**fields, **kind, "bos_token_id": None, "eos_token_id": None}


def gpt2_weights(config: DecoderConfig) -> list[Weight]:
    layer = "transformer.h.{}"
    found = [
        Weight("embed_tokens/embedding", "transformer.wte.weight"),
        Weight("embed_positions/embedding", "transformer.wpe.weight"),
    ]
    parts = {
        "attention/qkv_proj": "attn.c_attn",
        "attention/o_proj": "attn.c_proj",
        "mlp/up_proj": "mlp.c_fc",
        "mlp/down_proj": "mlp.c_proj",
    }
    for path, name in parts.items():
        found += linear(f"layers/{path}", f"{layer}.{name}", bias=True, transposed=False)
    found += layer_norm("layers/input_norm", f"{layer}.ln_1")
    found += layer_norm("layers/post_norm", f"{layer}.ln_2")
    found += layer_norm("norm", "transformer.ln_f")
    if not config.tie_word_embeddings:
        found += linear("lm_head", "lm_head", bias=False)
    return found


GPT2 = Family(
    read_config=read_gpt2,
    write_config=write_gpt2,
    weights=gpt2_weights,
    build=Decoder,
    task_type="CAUSAL_LM",
    prefix="transformer.",
    ignored=(r"\.attn\.(masked_)?bias$",),
    fan_in_fan_out=True,
)


# -- GPT-NeoX: fused queries, keys and values, head by head ----------------------------------------------------------

_NEOX_FIELDS = hf_fields(
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("attention_dropout", "hidden_dropout", "initializer_range", "max_position_embeddings", "tie_word_embeddings"),
    layer_norm_eps="norm_eps",
    use_parallel_residual="parallel_residual",
)


def read_neox(config: Mapping[str, Any]) -> DecoderConfig:
    defaults = {"hidden_act": "gelu", "norm_eps": 1e-5, "parallel_residual": True}
    fields = read_fields(config, _NEOX_FIELDS, **defaults)
    bias = bool(config.get("attention_bias", True))
    theta, partial = config.get("rotary_emb_base") or 10_000.0, config.get("rotary_pct") or 0.25
    rope = read_rope({"max_position_embeddings": 2048, **config}, theta=theta, partial=partial)
    return DecoderConfig(
        **fields,
        model_type="gpt_neox",
        norm="layer",
        gated=False,
        fused_qkv=True,
        qkv_interleaved=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        embedding_dropout=fields.get("hidden_dropout", 0.0),
        rope=rope,
    )


def write_neox(config: DecoderConfig) -> dict[str, Any]:
    rope = config.rope or Rope()
    written = write_decoder(config, _NEOX_FIELDS, "GPTNeoXForCausalLM")
    del written["num_key_value_heads"], written["head_dim"]
    # Written even if 1: transformers' default is 0.25.
    parameters = {"partial_rotary_factor": rope.partial, **write_rope(rope)}
    return {**written, "attention_bias": config.output_bias, "rope_parameters": parameters}


def neox_weights(config: DecoderConfig) -> list[Weight]:
    layer = "gpt_neox.layers.{}"
    found = [Weight("embed_tokens/embedding", "gpt_neox.embed_in.weight")]
    found += linear("layers/attention/qkv_proj", f"{layer}.attention.query_key_value", bias=config.qkv_bias)
    found += linear("layers/attention/o_proj", f"{layer}.attention.dense", bias=config.output_bias)
    found += linear("layers/mlp/up_proj", f"{layer}.mlp.dense_h_to_4h", bias=True)
    found += linear("layers/mlp/down_proj", f"{layer}.mlp.dense_4h_to_h", bias=True)
    found += layer_norm("layers/input_norm", f"{layer}.input_layernorm")
    found += layer_norm("layers/post_norm", f"{layer}.post_attention_layernorm")
    found += layer_norm("norm", "gpt_neox.final_layer_norm")
    if not config.tie_word_embeddings:
        found += linear("lm_head", "embed_out", bias=False)
    return found


NEOX = Family(
    read_config=read_neox,
    write_config=write_neox,
    weights=neox_weights,
    build=Decoder,
    task_type="CAUSAL_LM",
    prefix="gpt_neox.",
    ignored=(r"\.attention\.(masked_)?bias$", r"\.rotary_emb\.inv_freq$", r"^embed_out\.weight$"),
    modules={"lm_head": "lm_head"},
)

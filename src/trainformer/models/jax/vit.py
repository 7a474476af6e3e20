"""A Vision Transformer for classification, compatible with HF's `ViTForImageClassification`.

Patches, class token, positions and classifier, and the weight names of HF's ViT. The blocks are those of the decoder,
with bidirectional attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.block import BLOCK_RULES, Block, BlockConfig, Model, Rules, run_layers
from trainformer.models.jax.families.family import (
    Family,
    Weight,
    hf_fields,
    label_fields,
    layer_norm,
    linear,
    read_fields,
    read_labels,
)
from trainformer.models.jax.layers import Key, LayerNorm, Linear, constrain, dropout, key_source

POOLINGS = ("cls", "mean")


@dataclass(frozen=True, kw_only=True)
class ViTConfig(BlockConfig):
    """Configuration of a Vision Transformer. HF has no ``pooling="mean"``: only `load_model` opens such a model."""

    hidden_size: int = 192
    intermediate_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 3
    hidden_act: str = "gelu"
    norm: str = "layer"
    norm_eps: float = 1e-12
    gated: bool = False
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    causal: bool = False
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    num_labels: int = 2
    pooling: str = "cls"
    model_type: str = "vit"
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in POOLINGS:
            raise BadArgument(expected(f"pooling to be one of {', '.join(POOLINGS)}", self.pooling))
        if self.image_size % self.patch_size:
            what = f"image_size to be a multiple of patch_size ({self.patch_size})"
            raise BadArgument(expected(what, self.image_size))


class ViT(Model):
    """``model(pixel_values)`` returns logits (batch, labels); images are (batch, height, width, channels).

    Channels-first images, as in torch, are transposed.
    """

    partition_rules: Rules = (
        *BLOCK_RULES,
        (r"patches/kernel$", (None, None, None, "fsdp")),
        (r"classifier/kernel$", ("fsdp", "tp")),
        (r".*", ()),
    )

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config)
        scale, width = config.initializer_range, config.hidden_size
        self.patches = Patches(config, rngs)
        self.cls_token = nnx.Param(scale * jax.random.normal(rngs.params(), (1, 1, width)))
        count = (config.image_size // config.patch_size) ** 2
        self.positions = nnx.Param(scale * jax.random.normal(rngs.params(), (1, count + 1, width)))
        self.layers = Block(config, rngs, (config.num_hidden_layers,))
        self.norm = LayerNorm(width, config.norm_eps)
        self.classifier = Linear(width, config.num_labels, rngs=rngs, bias=True, scale=scale)

    def __call__(self, pixel_values: jax.Array, *, deterministic: bool = True, key: Key = None) -> jax.Array:
        return self.classifier(self.features(pixel_values, deterministic=deterministic, key=key))

    def features(self, pixel_values: jax.Array, *, deterministic: bool = True, key: Key = None) -> jax.Array:
        """The input of the classifier (batch, hidden_size)."""
        states = self.hidden_states(pixel_values, deterministic=deterministic, key=key)
        return states[:, 0] if self.config.pooling == "cls" else jnp.mean(states[:, 1:], axis=1)

    def hidden_states(self, pixel_values: jax.Array, *, deterministic: bool = True, key: Key = None) -> jax.Array:
        """The output of the last norm (batch, 1 + patches, hidden_size), class token first."""
        config, keys = self.config, key_source(None if deterministic else key)
        x = self.patches(self._channels_last(pixel_values))
        token = jnp.broadcast_to(self.cls_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        x = jnp.concatenate([token, x], axis=1) + self.positions[...].astype(x.dtype)
        x = constrain(dropout(x, config.hidden_dropout, next(keys)), "batch", "sequence", None)
        return self.norm(run_layers(self.layers, x, None, None, self.execution, next(keys)))

    def _channels_last(self, pixels: jax.Array) -> jax.Array:
        side, channels = self.config.image_size, self.config.num_channels
        if pixels.shape[1:] == (channels, side, side) and channels != side:
            return jnp.moveaxis(pixels, 1, -1)
        if pixels.shape[1:] != (side, side, channels):
            what = f"images of shape (batch, {side}, {side}, {channels})"
            raise BadArgument(expected(what, tuple(pixels.shape), "Resize them, or set image_size and num_channels."))
        return pixels


class Patches(nnx.Module):
    """Patch embedding. The kernel (height, width, channels, out) is that of a convolution."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        shape = (config.patch_size, config.patch_size, config.num_channels, config.hidden_size)
        self.kernel = nnx.Param(config.initializer_range * jax.random.normal(rngs.params(), shape))
        self.bias = nnx.Param(jnp.zeros(config.hidden_size))

    def __call__(self, pixels: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        side, channels, width = kernel.shape[0], kernel.shape[2], kernel.shape[3]
        rows, columns = pixels.shape[1] // side, pixels.shape[2] // side
        patches = pixels.astype(kernel.dtype).reshape(-1, rows, side, columns, side, channels)
        flat = patches.swapaxes(2, 3).reshape(-1, rows * columns, side * side * channels)
        return flat @ kernel.reshape(-1, width) + self.bias[...]


_FIELDS = hf_fields(
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("qkv_bias", "initializer_range", "image_size", "patch_size", "num_channels"),
    layer_norm_eps="norm_eps",
    attention_probs_dropout_prob="attention_dropout",
    hidden_dropout_prob="hidden_dropout",
)


def read_config(config: Mapping[str, Any]) -> ViTConfig:
    return ViTConfig(**read_fields(config, {**_FIELDS, "pooling": "pooling"}), num_labels=read_labels(config))


def write_config(config: ViTConfig) -> dict[str, Any]:
    """Mean pooling gets its own model_type, so that transformers does not read it as class-token pooling."""
    written = {
        **{name: getattr(config, own) for name, own in _FIELDS.items()},
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        **label_fields(config.num_labels),
    }
    if config.pooling == "cls":
        return written
    return {**written, "model_type": "trainformer_vit", "pooling": config.pooling}


# Our layers, HF's names in files, and HF's module names since version 5.
_LAYERS = {
    "attention/q_proj": ("attention.attention.query", "attention.q_proj"),
    "attention/k_proj": ("attention.attention.key", "attention.k_proj"),
    "attention/v_proj": ("attention.attention.value", "attention.v_proj"),
    "attention/o_proj": ("attention.output.dense", "attention.o_proj"),
    "mlp/up_proj": ("intermediate.dense", "mlp.fc1"),
    "mlp/down_proj": ("output.dense", "mlp.fc2"),
}


def weights(config: ViTConfig) -> list[Weight]:
    layer = "vit.encoder.layer.{}"
    found = [
        Weight("patches/kernel", "vit.embeddings.patch_embeddings.projection.weight", (2, 3, 1, 0)),
        Weight("patches/bias", "vit.embeddings.patch_embeddings.projection.bias"),
        Weight("cls_token", "vit.embeddings.cls_token"),
        Weight("positions", "vit.embeddings.position_embeddings"),
    ]
    for path, (name, _) in _LAYERS.items():
        bias = config.qkv_bias or path[-6] not in "qkv"
        found += linear(f"layers/{path}", f"{layer}.{name}", bias=bias)
    found += layer_norm("layers/input_norm", f"{layer}.layernorm_before")
    found += layer_norm("layers/post_norm", f"{layer}.layernorm_after")
    found += layer_norm("norm", "vit.layernorm")
    found += linear("classifier", "classifier", bias=True)
    return found


VIT = Family(
    read_config=read_config,
    write_config=write_config,
    weights=weights,
    build=ViT,
    prefix="vit.",
    ignored=(r"(^|\.)pooler\.",),
    modules={f"layers/{path}": f"vit.layers.{{}}.{name}" for path, (_, name) in _LAYERS.items()},
)

"""ConvNeXt for classification, compatible with HF's `ConvNextForImageClassification`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.block import Model, Rules
from trainformer.models.jax.convolution import (
    Conv,
    call_block,
    channels_last,
    check_stages,
    conv_weights,
)
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
from trainformer.models.jax.layers import ACTIVATIONS, Key, LayerNorm, Linear, check_activation, key_source

_EPS = 1e-6  # of all norms but the last
_KERNEL = 7


@dataclass(frozen=True, kw_only=True)
class ConvNextConfig:
    """Configuration of a ConvNeXt, with the defaults of ConvNeXt-T.

    >>> ConvNextConfig(drop_path_rate=0.1).num_hidden_layers
    18
    """

    num_channels: int = 3
    patch_size: int = 4
    hidden_sizes: tuple[int, ...] = (96, 192, 384, 768)
    depths: tuple[int, ...] = (3, 3, 9, 3)
    hidden_act: str = "gelu"
    initializer_range: float = 0.02
    norm_eps: float = 1e-12
    layer_scale_init_value: float = 1e-6
    drop_path_rate: float = 0.0
    num_labels: int = 2
    model_type: str = "convnext"
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_activation(self.hidden_act)
        check_stages(self.hidden_sizes, self.depths)
        if not 0 <= self.drop_path_rate < 1:
            raise BadArgument(expected("drop_path_rate of at least 0 and below 1", self.drop_path_rate))
        if not isinstance(self.patch_size, int):
            raise BadArgument(expected("patch_size to be an integer", self.patch_size, "Patches are square."))

    @property
    def num_hidden_layers(self) -> int:
        return sum(self.depths)


class ConvNextBlock(nnx.Module):
    """Depthwise convolution, norm and feed-forward layer beside a shortcut, which `drop_path` rows take alone."""

    def __init__(self, config: ConvNextConfig, width: int, drop_path: float, rngs: nnx.Rngs) -> None:
        scale, initial = config.initializer_range, config.layer_scale_init_value
        self.act, self.drop_path = config.hidden_act, drop_path
        self.conv = Conv(width, width, _KERNEL, rngs=rngs, groups=width, bias=True, padding=_KERNEL // 2, scale=scale)
        self.norm = LayerNorm(width, _EPS)
        self.up_proj = Linear(width, 4 * width, rngs=rngs, bias=True, scale=scale)
        self.down_proj = Linear(4 * width, width, rngs=rngs, bias=True, scale=scale)
        self.layer_scale = nnx.data(nnx.Param(jnp.full(width, initial)) if initial > 0 else None)

    def __call__(self, x: jax.Array, key: Key) -> jax.Array:
        y = self.norm(self.conv(x))
        y = self.down_proj(ACTIVATIONS[self.act](self.up_proj(y)))
        if self.layer_scale is not None:
            y = y * self.layer_scale[...].astype(y.dtype)
        if key is not None and self.drop_path > 0:
            kept = jax.random.bernoulli(key, 1 - self.drop_path, (x.shape[0], 1, 1, 1))
            y = jnp.where(kept, y / (1 - self.drop_path), jnp.zeros((), y.dtype))
        return x + y


class Downsampling(nnx.Module):
    """Norm and a convolution that halves height and width."""

    def __init__(self, inputs: int, outputs: int, scale: float, rngs: nnx.Rngs) -> None:
        self.norm = LayerNorm(inputs, _EPS)
        self.conv = Conv(inputs, outputs, 2, rngs=rngs, stride=2, bias=True, scale=scale)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(self.norm(x))


class ConvNext(Model):
    """``model(pixel_values)`` returns logits (batch, labels); images are (batch, height, width, channels).

    Channels-first images, as in torch, are transposed.

    >>> from trainformer.models.jax import model_from_config
    >>> config = ConvNextConfig(hidden_sizes=(8, 16), depths=(1, 1), num_labels=3)
    >>> model_from_config(config)(jnp.zeros((2, 16, 16, 3))).shape
    (2, 3)
    """

    partition_rules: Rules = (
        (r"conv/kernel$", (None, None, None, "fsdp")),
        (r"up_proj/kernel$", ("fsdp", "tp")),
        (r"down_proj/kernel$", ("tp", "fsdp")),
        (r"up_proj/bias$", ("tp",)),
        (r"classifier/kernel$", ("fsdp", "tp")),
        (r".*", ()),
    )

    def __init__(self, config: ConvNextConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        scale, size, widths = config.initializer_range, config.patch_size, config.hidden_sizes
        self.patches_conv = Conv(config.num_channels, widths[0], size, rngs=rngs, stride=size, bias=True, scale=scale)
        self.patches_norm = LayerNorm(widths[0], _EPS)
        self.downsampling = nnx.List(
            [Downsampling(widths[n], widths[n + 1], scale, rngs) for n in range(len(widths) - 1)]
        )
        rates = iter(np.linspace(0, config.drop_path_rate, config.num_hidden_layers).tolist())
        self.stages = nnx.List(
            [
                nnx.List([ConvNextBlock(config, width, next(rates), rngs) for _ in range(depth)])
                for width, depth in zip(widths, config.depths, strict=True)
            ]
        )
        self.norm = LayerNorm(widths[-1], config.norm_eps)
        self.classifier = Linear(widths[-1], config.num_labels, rngs=rngs, bias=True, scale=scale)

    def __call__(self, pixel_values: jax.Array, *, deterministic: bool = True, key: Key = None) -> jax.Array:
        return self.classifier(self.features(pixel_values, deterministic=deterministic, key=key))

    def features(self, pixel_values: jax.Array, *, deterministic: bool = True, key: Key = None) -> jax.Array:
        """The input of the classifier (batch, channels)."""
        states = self.hidden_states(pixel_values, deterministic=deterministic, key=key)
        return self.norm(jnp.mean(states, axis=(1, 2)))

    def hidden_states(self, pixel_values: jax.Array, *, deterministic: bool = True, key: Key = None) -> jax.Array:
        """The output of the last stage (batch, height, width, channels)."""
        keys = key_source(None if deterministic else key)
        x = self.patches_norm(self.patches_conv(channels_last(pixel_values, self.config.num_channels)))
        for number, blocks in enumerate(self.stages):
            if number:
                x = self.downsampling[number - 1](x)
            for block in blocks:
                x = call_block(block, self.execution.remat, x, next(keys))
        return x


_FIELDS = hf_fields(
    *("num_channels", "patch_size", "hidden_sizes", "depths", "hidden_act", "initializer_range"),
    *("layer_scale_init_value", "drop_path_rate"),
    layer_norm_eps="norm_eps",
)


def read_config(config: Mapping[str, Any]) -> ConvNextConfig:
    found = read_fields(config, _FIELDS, patch_size=4)
    found |= {name: tuple(found[name]) for name in ("hidden_sizes", "depths") if name in found}
    return ConvNextConfig(**found, num_labels=read_labels(config))


def write_config(config: ConvNextConfig) -> dict[str, Any]:
    return {
        **{name: getattr(config, own) for name, own in _FIELDS.items()},
        "num_stages": len(config.depths),
        "architectures": ["ConvNextForImageClassification"],
        "model_type": "convnext",
        **label_fields(config.num_labels),
    }


def weights(config: ConvNextConfig) -> list[Weight]:
    stem = "convnext.embeddings"
    found = conv_weights("patches_conv", f"{stem}.patch_embeddings", bias=True)
    found += layer_norm("patches_norm", f"{stem}.layernorm")
    for stage, depth in enumerate(config.depths):
        name = f"convnext.encoder.stages.{stage}"
        if stage:
            found += layer_norm(f"downsampling/{stage - 1}/norm", f"{name}.downsampling_layer.0")
            found += conv_weights(f"downsampling/{stage - 1}/conv", f"{name}.downsampling_layer.1", bias=True)
        for block in range(depth):
            path, layer = f"stages/{stage}/{block}", f"{name}.layers.{block}"
            found += conv_weights(f"{path}/conv", f"{layer}.dwconv", bias=True)
            found += layer_norm(f"{path}/norm", f"{layer}.layernorm")
            found += linear(f"{path}/up_proj", f"{layer}.pwconv1", bias=True)
            found += linear(f"{path}/down_proj", f"{layer}.pwconv2", bias=True)
            if config.layer_scale_init_value > 0:
                found.append(Weight(f"{path}/layer_scale", f"{layer}.layer_scale_parameter"))
    found += layer_norm("norm", "convnext.layernorm")
    return [*found, *linear("classifier", "classifier", bias=True)]


CONVNEXT = Family(
    read_config=read_config, write_config=write_config, weights=weights, build=ConvNext, prefix="convnext."
)

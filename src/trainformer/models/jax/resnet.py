"""ResNet for classification, compatible with HF's `ResNetForImageClassification`.

The running statistics of its batch norms are `nnx.BatchStat` variables: training updates them, checkpoints and folders
contain them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.block import Model, Rules
from trainformer.models.jax.convolution import (
    BatchNorm,
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
from trainformer.models.jax.layers import ACTIVATIONS, Key, Linear, check_activation

LAYER_TYPES = ("basic", "bottleneck")
_REDUCTION = 4  # of the channels inside a bottleneck


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Configuration of a ResNet, with the defaults of a ResNet-50.

    >>> ResNetConfig(layer_type="basic", hidden_sizes=(64, 128), depths=(2, 2)).num_hidden_layers
    4
    """

    num_channels: int = 3
    embedding_size: int = 64
    hidden_sizes: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (3, 4, 6, 3)
    layer_type: str = "bottleneck"
    hidden_act: str = "relu"
    downsample_in_first_stage: bool = False
    downsample_in_bottleneck: bool = False
    num_labels: int = 2
    model_type: str = "resnet"
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_activation(self.hidden_act)
        check_stages(self.hidden_sizes, self.depths)
        if self.layer_type not in LAYER_TYPES:
            raise BadArgument(expected(f"layer_type to be one of {', '.join(LAYER_TYPES)}", self.layer_type))

    @property
    def num_hidden_layers(self) -> int:
        return sum(self.depths)


class ConvLayer(nnx.Module):
    """Convolution, batch norm and activation."""

    def __init__(
        self, inputs: int, outputs: int, rngs: nnx.Rngs, *, size: int = 3, stride: int = 1, act: str | None = "relu"
    ) -> None:
        self.conv = Conv(inputs, outputs, size, rngs=rngs, stride=stride, padding=size // 2)
        self.norm = BatchNorm(outputs)
        self.act = act

    def __call__(self, x: jax.Array, deterministic: bool, valid: Any) -> jax.Array:
        y = self.norm(self.conv(x), deterministic, valid)
        return y if self.act is None else ACTIVATIONS[self.act](y)


class ResidualBlock(nnx.Module):
    """Two or three convolutions beside a shortcut, which is a convolution if the shapes differ."""

    def __init__(self, config: ResNetConfig, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        self.act = config.hidden_act
        is_projected = inputs != outputs or stride != 1
        self.shortcut = nnx.data(
            ConvLayer(inputs, outputs, rngs, size=1, stride=stride, act=None) if is_projected else None
        )
        if config.layer_type == "basic":
            layers = [ConvLayer(inputs, outputs, rngs, stride=stride), ConvLayer(outputs, outputs, rngs, act=None)]
        else:
            inner = outputs // _REDUCTION
            first, second = (stride, 1) if config.downsample_in_bottleneck else (1, stride)
            layers = [
                ConvLayer(inputs, inner, rngs, size=1, stride=first),
                ConvLayer(inner, inner, rngs, stride=second),
                ConvLayer(inner, outputs, rngs, size=1, act=None),
            ]
        self.layer = nnx.List(layers)

    def __call__(self, x: jax.Array, deterministic: bool, valid: Any) -> jax.Array:
        y = x
        for layer in self.layer:
            y = layer(y, deterministic, valid)
        if self.shortcut is not None:
            x = self.shortcut(x, deterministic, valid)
        return ACTIVATIONS[self.act](x + y)


class ResNet(Model):
    """``model(pixel_values)`` returns logits (batch, labels); images are (batch, height, width, channels).

    Channels-first images, as in torch, are transposed. With ``deterministic=False`` batch norms use the statistics of
    the batch, without the rows that `valid` excludes, and update their running statistics.

    >>> from trainformer.models.jax import model_from_config
    >>> config = ResNetConfig(embedding_size=4, hidden_sizes=(8,), depths=(1,), num_labels=3)
    >>> model_from_config(config)(jnp.zeros((2, 16, 16, 3))).shape
    (2, 3)
    """

    partition_rules: Rules = (
        (r"conv/kernel$", (None, None, None, "fsdp")),
        (r"classifier/kernel$", ("fsdp", "tp")),
        (r".*", ()),
    )

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self.stem = ConvLayer(config.num_channels, config.embedding_size, rngs, size=7, stride=2, act=config.hidden_act)
        width, stages = config.embedding_size, []
        for number, (outputs, depth) in enumerate(zip(config.hidden_sizes, config.depths, strict=True)):
            stride = 2 if number or config.downsample_in_first_stage else 1
            blocks = [ResidualBlock(config, width, outputs, stride, rngs)]
            blocks += [ResidualBlock(config, outputs, outputs, 1, rngs) for _ in range(depth - 1)]
            stages.append(nnx.List(blocks))
            width = outputs
        self.stages = nnx.List(stages)
        self.classifier = Linear(width, config.num_labels, rngs=rngs, bias=True, scale=width**-0.5)

    def __call__(
        self, pixel_values: jax.Array, *, deterministic: bool = True, key: Key = None, valid: jax.Array | None = None
    ) -> jax.Array:
        return self.classifier(self.features(pixel_values, deterministic=deterministic, key=key, valid=valid))

    def features(
        self, pixel_values: jax.Array, *, deterministic: bool = True, key: Key = None, valid: jax.Array | None = None
    ) -> jax.Array:
        """The input of the classifier (batch, channels)."""
        states = self.hidden_states(pixel_values, deterministic=deterministic, key=key, valid=valid)
        return jnp.mean(states, axis=(1, 2))

    def hidden_states(
        self, pixel_values: jax.Array, *, deterministic: bool = True, key: Key = None, valid: jax.Array | None = None
    ) -> jax.Array:
        """The output of the last stage (batch, height, width, channels). Nothing is random: `key` is not used."""
        x = self.stem(channels_last(pixel_values, self.config.num_channels), deterministic, valid)
        pads = ((0, 0), (1, 1), (1, 1), (0, 0))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)
        for blocks in self.stages:
            for block in blocks:
                x = call_block(block, self.execution.remat, x, deterministic, valid)
        return x


_FIELDS = hf_fields(
    *("num_channels", "embedding_size", "hidden_sizes", "depths", "layer_type", "hidden_act"),
    *("downsample_in_first_stage", "downsample_in_bottleneck"),
)


def read_config(config: Mapping[str, Any]) -> ResNetConfig:
    found = read_fields(config, _FIELDS)
    found |= {name: tuple(found[name]) for name in ("hidden_sizes", "depths") if name in found}
    return ResNetConfig(**found, num_labels=read_labels(config))


def write_config(config: ResNetConfig) -> dict[str, Any]:
    return {
        **{name: getattr(config, own) for name, own in _FIELDS.items()},
        "architectures": ["ResNetForImageClassification"],
        "model_type": "resnet",
        **label_fields(config.num_labels),
    }


def _conv_layers(config: ResNetConfig) -> list[tuple[str, str]]:
    """Our paths of all `ConvLayer`s and HF's names."""
    found = [("stem", "resnet.embedder.embedder")]
    width = config.embedding_size
    for stage, (outputs, depth) in enumerate(zip(config.hidden_sizes, config.depths, strict=True)):
        stride = 2 if stage or config.downsample_in_first_stage else 1
        for block in range(depth):
            path, name = f"stages/{stage}/{block}", f"resnet.encoder.stages.{stage}.layers.{block}"
            if block == 0 and (width != outputs or stride != 1):
                found.append((f"{path}/shortcut", f"{name}.shortcut"))
            for layer in range(2 if config.layer_type == "basic" else 3):
                found.append((f"{path}/layer/{layer}", f"{name}.layer.{layer}"))
        width = outputs
    return found


def weights(config: ResNetConfig) -> list[Weight]:
    found: list[Weight] = []
    for path, name in _conv_layers(config):
        found += conv_weights(f"{path}/conv", f"{name}.convolution", bias=False)
        found += layer_norm(f"{path}/norm", f"{name}.normalization")
        found.append(Weight(f"{path}/norm/mean", f"{name}.normalization.running_mean"))
        found.append(Weight(f"{path}/norm/var", f"{name}.normalization.running_var"))
        found.append(Weight(f"{path}/norm/count", f"{name}.normalization.num_batches_tracked", dtype="int64"))
    return [*found, *linear("classifier", "classifier.1", bias=True)]


RESNET = Family(
    read_config=read_config,
    write_config=write_config,
    weights=weights,
    build=ResNet,
    prefix="resnet.",
)

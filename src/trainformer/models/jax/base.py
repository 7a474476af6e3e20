"""What all models here offer beside their call: how they compute, and folders in and out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx

from trainformer.models.jax.block import BlockConfig, Rules, Running, running


@dataclass(frozen=True)
class LoraSettings:
    """What `apply_lora` did to a model, as an adapter folder tells it; layers by their paths."""

    r: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()


class Model(nnx.Module):
    """A network of stacked blocks with a configuration. `partition_rules` are for the weights of one layer."""

    partition_rules: Rules = ()
    config: Any

    def __init__(self, config: BlockConfig) -> None:
        self.config = config
        self.running = Running()
        self.lora: LoraSettings | None = None

    def configure(
        self, remat: Callable[..., Any] | None = None, attention: str = "xla", unroll: int | bool = 1
    ) -> None:
        """How to compute: what the backward pass computes again, the attention kernel, layers per turn of the scan."""
        self.running = running(self.config.num_hidden_layers, remat, attention, unroll)

    def save_pretrained(self, folder: str | os.PathLike[str], params: Mapping[str, Any] | None = None) -> Path:
        """Write ``config.json`` and ``model.safetensors``, which transformers opens; `params` instead of its own."""
        from trainformer.models.jax.huggingface import save_model

        return save_model(self, folder, params)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], dtype: Any = jnp.float32, **options: Any) -> Self:
        """The model of an HF folder or hub name; the options are those of `load_model`."""
        from trainformer.models.jax.huggingface import load_model

        return load_model(folder, dtype, kind=cls, **options)

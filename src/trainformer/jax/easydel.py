"""Further names that programs for EasyDeL import: optimizers and schedules, and models from HuggingFace folders."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from trainformer.core.errors import BadArgument, expected


class EasyDeLOptimizers(StrEnum):
    """Optimizers by name.

    >>> from trainformer.jax import TrainingArguments
    >>> TrainingArguments(optimizer=EasyDeLOptimizers.LION).optimizer
    'lion'
    """

    ADAFACTOR = "adafactor"
    ADAM = "adam"
    ADAMW = "adamw"
    LION = "lion"
    MUON = "muon"
    SGD = "sgd"


class EasyDeLSchedulers(StrEnum):
    """Learning-rate schedules by name; `NONE` is a constant learning rate.

    >>> EasyDeLSchedulers.COSINE.value
    'cosine'
    """

    NONE = "none"
    LINEAR = "linear"
    COSINE = "cosine"


class AutoEasyDeLModelForCausalLM:
    """Opens causal language models in HuggingFace format."""

    @staticmethod
    def from_pretrained(
        folder: str | Path, *, dtype: Any = jnp.float32, param_dtype: Any = None, quantization_config: Any = None
    ) -> Any:
        """The model of a folder or hub name, with its weights in `param_dtype` (default: `dtype`).

        The dtype of the computation is that of the training arguments.

        >>> AutoEasyDeLModelForCausalLM.from_pretrained("my-model")  # doctest: +SKIP
        """
        from trainformer.models.jax import load_model

        if quantization_config is not None:
            do = "The trainer quantizes weights: SFTTrainer(SFTConfig(quantization='nf4'), model=folder, lora=...)."
            raise BadArgument(expected("no quantization_config", quantization_config, do))
        return load_model(folder, dtype=dtype if param_dtype is None else param_dtype)

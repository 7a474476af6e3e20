"""``trainer.json`` in every checkpoint of a JAX run: what it takes, besides the weights, to build its model again.

Owns the record, and how a model is built from it and the arrays of a checkpoint. Nothing in the file is executed: it
has values, and names a trainer of `trainformer.jax`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from flax import nnx

from trainformer.checkpointing import Checkpoint
from trainformer.checkpointing.jax_files import read_arrays
from trainformer.checkpointing.tools.choosing import choose_ema
from trainformer.checkpointing.tools.listing import JAX_STATE
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.models.jax.families.family import family_of
from trainformer.models.jax.huggingface import described_family, flat_params, saved_config
from trainformer.models.jax.lora import apply_lora, quantization_of, quantize_frozen
from trainformer.utils.files import decode_json

FILE = "trainer.json"
_VERSION = 1
_WEIGHTS = ("params/", "variables/")  # parameters and batch statistics


@dataclass(frozen=True)
class TrainerRecord:
    """What is recorded of a trainer on JAX.

    `options` are arguments of its constructor, `opaque` those that are no plain values, by their type. `config` is the
    content of a ``config.json``, and None for a module that is not ours. `learned` is what the trainer learned from
    the training data.
    """

    trainer: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    lora: dict[str, Any] | None = None
    quantization: str | None = None  # of the frozen weights, with LoRA
    base: str | None = None  # the folder or hub name that the model was loaded from
    learned: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trainer: Any) -> Self:
        """What is to be recorded of a trainer."""
        options, opaque = {}, {}
        for name, value in trainer.recorded_options().items():
            if _is_plain(value):
                options[name] = value
            else:
                opaque[name] = type(value).__name__
        model: Any = getattr(trainer.model_state, "model", None)
        settings = getattr(model, "lora", None)
        return cls(
            trainer=type(trainer).__name__,
            module=type(trainer).__module__,
            options=options,
            opaque=opaque,
            config=_config_of(model),
            lora=None if settings is None else dataclasses.asdict(settings),
            quantization=None if settings is None else quantization_of(model),
            base=getattr(trainer, "base_folder", None),
            learned=trainer.learned(),
        )

    def write(self, folder: Path) -> str:
        """Write the file; returns its name."""
        (folder / FILE).write_text(json.dumps({"version": _VERSION, **dataclasses.asdict(self)}, indent=1))
        return FILE

    @property
    def task_type(self) -> str | None:
        """What the model is for, as peft names it; None if that is not known."""
        return None if self.config is None else described_family(self.config).task_type

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The record in the folder of a checkpoint, from anybody."""
        file = folder / FILE
        if not file.is_file():
            do = "An older version wrote it: run its program again, and load it there."
            raise DataError(expected(f"{FILE} in {folder}, which describes the trainer", "none", do))
        try:
            content = decode_json(file.read_bytes())
            if content.pop("version") != _VERSION:
                do = "Use the trainformer that wrote it."
                raise BadArgument(expected(f"{file} of version {_VERSION}", "another", do))
            return cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, BadArgument):
                raise
            raise DataError(expected(f"the record of a trainer in {file}", f"something else ({error})")) from error

    def build_model(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """The model with the parameters and batch statistics of `arrays`, on the host; LoRA is not merged."""
        if self.config is None:
            raise BadArgument(
                f"Expected a model of trainformer.models.jax, which its configuration describes; this {self.trainer} "
                "trained a module of its own, which no file can build again."
            )
        family = described_family(self.config)
        config = family.read_config(self.config)

        def build() -> Any:
            model = family.build(config, rngs=nnx.Rngs(params=0))
            if self.lora is not None:
                apply_lora(model, **{**self.lora, "targets": list(self.lora["targets"])})
            if self.quantization is not None:
                quantize_frozen(model, self.quantization)
            return model

        try:
            graph, state = nnx.split(nnx.eval_shape(build))
        except (TypeError, KeyError) as error:
            raise DataError(f"Expected the configuration of a model in {FILE}, received others ({error}).") from error
        filled = []
        for parts, variable in nnx.to_flat_state(state):
            name = "/".join(map(str, parts))
            array = arrays.get(name)
            if array is None or array.shape != variable.shape:
                received = "none" if array is None else list(array.shape)
                raise DataError(expected(f"weights {name} of shape {list(variable.shape)}", received))
            filled.append((parts, variable.replace(array)))
        return nnx.merge(graph, nnx.from_flat_state(filled))


def read_weights(checkpoint: Checkpoint, ema: bool | str | None = False) -> tuple[str | None, dict[str, np.ndarray]]:
    """Parameters and batch statistics of a checkpoint by path, on the host, and which average they are of, if any.

    `ema` is as in `checkpoint.finalize`. The averages, in float32, get the dtypes of the trained weights.
    """
    weights, key = _arrays_of(checkpoint, JAX_STATE), choose_ema(checkpoint.manifest.components, ema)
    if key is not None:
        averages = _arrays_of(checkpoint, key.replace("callback.", "average.", 1))
        weights |= {name: array.astype(weights[name].dtype) for name, array in averages.items()}
    return key, weights


def _arrays_of(checkpoint: Checkpoint, key: str) -> dict[str, np.ndarray]:
    """Parameters and batch statistics of a component by path."""
    if key not in checkpoint.manifest.components:
        raise DataError(
            expected(f"the component {key} in {checkpoint.path}", ", ".join(checkpoint.manifest.components))
        )
    records = checkpoint.manifest.components[key]
    dataclasses.replace(checkpoint.manifest, components={key: records}).verify(checkpoint.path)
    arrays = read_arrays(checkpoint.path / key, _WEIGHTS)
    return {name.partition("/")[2]: array for name, array in arrays.items()}


def _config_of(model: Any) -> dict[str, Any] | None:
    config: Any = getattr(model, "config", None)
    if not isinstance(getattr(config, "model_type", None), str):
        return None
    dtype = str(next(iter(flat_params(model).values())).dtype)
    return saved_config(config, family_of(config.model_type), dtype)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)

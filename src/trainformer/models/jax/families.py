"""What a family of HF checkpoints is to the rest of this package: its configuration and the names of its weights.

Owns the table between our paths and HF's names. The families themselves are in `llama_family`, `gpt2` and `vit`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from trainformer.core.errors import BadArgument, did_you_mean, expected

# Which module of this package knows a `model_type`.
_HOMES = {
    "llama": "llama_family",
    "mistral": "llama_family",
    "qwen2": "llama_family",
    "qwen3": "llama_family",
    "gpt2": "gpt2",
    "vit": "vit",
    "trainformer_vit": "vit",
}


class Weight(NamedTuple):
    """One of our parameters and its name at HF, with ``{}`` for the number of the layer if it is stacked here.

    `axes` permutes HF's axes into ours: (1, 0) for torch's linear layers, None where they are the same.
    """

    path: str
    name: str
    axes: tuple[int, ...] | None = None

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    def ours(self, array: np.ndarray) -> np.ndarray:
        return array if self.axes is None else array.transpose(self.axes)

    def theirs(self, array: np.ndarray) -> np.ndarray:
        return array if self.axes is None else array.transpose(np.argsort(self.axes))


@dataclass(frozen=True)
class Family:
    """`prefix` is what the body's names begin with in a model that has a head; a file of the body alone lacks it.

    `ignored` are names (regular expressions) that files may hold and nobody needs. `modules` are layers by path whose
    names in transformers differ from those in its files.
    """

    read_config: Callable[[Mapping[str, Any]], Any]
    write_config: Callable[[Any], dict[str, Any]]
    weights: Callable[[Any], Sequence[Weight]]
    build: Callable[..., Any]
    prefix: str
    ignored: tuple[str, ...] = ()
    fan_in_fan_out: bool = False  # peft's word for linear layers whose kernels are stored (in, out)
    task_type: str | None = None  # peft's word for what a model is for
    modules: Mapping[str, str] = field(default_factory=dict)

    def module_name(self, weight: Weight) -> str:
        """The name of a linear layer in transformers, not always as in its files; with ``{}`` if stacked."""
        return self.modules.get(weight.path.removesuffix("/kernel"), weight.name.removesuffix(".weight"))


def family_of(model_type: Any) -> Family:
    if model_type not in _HOMES:
        do = did_you_mean(str(model_type), _HOMES) or f"The JAX models are {', '.join(_HOMES)}."
        raise BadArgument(expected("a supported model_type in config.json", model_type, do))
    return importlib.import_module(f"trainformer.models.jax.{_HOMES[model_type]}").FAMILY


def linear(path: str, name: str, *, bias: bool, transposed: bool = True) -> Iterable[Weight]:
    """The weights of a linear layer; torch stores them (out, in), transformers' Conv1D as we do."""
    yield Weight(f"{path}/kernel", f"{name}.weight", (1, 0) if transposed else None)
    if bias:
        yield Weight(f"{path}/bias", f"{name}.bias")


def layer_norm(path: str, name: str) -> Iterable[Weight]:
    yield Weight(f"{path}/scale", f"{name}.weight")
    yield Weight(f"{path}/bias", f"{name}.bias")


def needed(config: Mapping[str, Any], name: str, *others: str) -> Any:
    """A field of a configuration that must be there, under one of its names."""
    for candidate in (name, *others):
        if config.get(candidate) is not None:
            return config[candidate]
    do = did_you_mean(name, config) or "Is this the config.json of the model?"
    raise BadArgument(expected(f"{name!r} in the configuration", sorted(config), do))


def refuse(config: Mapping[str, Any], unsupported: Mapping[str, Any]) -> None:
    """An error for fields that are set to anything but what the models here compute."""
    for name, supported in unsupported.items():
        if config.get(name, supported) not in (supported, None):
            do = "The JAX models do not compute this; ignoring it would give other logits."
            raise BadArgument(expected(f"{name}={supported!r} in the configuration", config[name], do))

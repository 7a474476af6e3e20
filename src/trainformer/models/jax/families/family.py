"""`Family`: how HF checkpoints of a model type map to our models (config, weight names, axes).

The families are in the other files of this package, those of image classifiers in the files of their models.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from trainformer.core.errors import BadArgument, did_you_mean, expected

# Module (in `models.jax`) and name of the family of a `model_type`.
_FAMILIES = {
    "llama": ("families.llama", "LLAMA"),
    "mistral": ("families.llama", "LLAMA"),
    "ministral": ("families.llama", "LLAMA"),
    "qwen2": ("families.llama", "LLAMA"),
    "qwen3": ("families.llama", "LLAMA"),
    "smollm3": ("families.llama", "LLAMA"),
    "olmo2": ("families.llama", "LLAMA"),
    "olmo3": ("families.llama", "LLAMA"),
    "granite": ("families.llama", "LLAMA"),
    "phi3": ("families.llama", "LLAMA"),
    "gemma": ("families.gemma", "GEMMA"),
    "gemma2": ("families.gemma", "GEMMA"),
    "gemma3_text": ("families.gemma", "GEMMA"),
    "mixtral": ("families.moe", "MOE"),
    "qwen2_moe": ("families.moe", "MOE"),
    "qwen3_moe": ("families.moe", "MOE"),
    "olmoe": ("families.moe", "MOE"),
    "gpt2": ("families.gpt", "GPT2"),
    "gpt_neox": ("families.gpt", "NEOX"),
    "bert": ("families.bert", "BERT"),
    "roberta": ("families.bert", "ROBERTA"),
    "distilbert": ("families.bert", "DISTILBERT"),
    "t5": ("families.t5", "T5_FAMILY"),
    "mt5": ("families.t5", "T5_FAMILY"),
    "vit": ("vit", "VIT"),
    "trainformer_vit": ("vit", "VIT"),
    "resnet": ("resnet", "RESNET"),
    "convnext": ("convnext", "CONVNEXT"),
}

#: Suffix of the `model_type` of a decoder with a head of one output; see `reward`.
SCORED = "/score"


class Weight(NamedTuple):
    """Our path of a parameter and its HF name, with ``{}`` for the layer index if it is stacked here.

    A ``*`` in the name is the index of an expert, whose arrays are stacked along the first axis.

    `axes` permutes HF's axes into ours: (1, 0) for torch's linear layers, None if they are the same. `dtype` is that
    in files if it is fixed. `layers` is the number of stacked layers if it is not `num_hidden_layers`.
    """

    path: str
    name: str
    axes: tuple[int, ...] | None = None
    dtype: str | None = None
    layers: int | None = None

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    def from_hf(self, array: np.ndarray) -> np.ndarray:
        return array if self.axes is None else array.transpose(self.axes)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        array = array if self.dtype is None else array.astype(self.dtype)
        return array if self.axes is None else array.transpose(np.argsort(self.axes))


@dataclass(frozen=True)
class Family:
    """A family of HF models. `prefix` is the prefix of the base model's weights, absent in files without a head.

    `ignored` are regexes of weights in files that are not needed. `modules` are layers by path whose module names in
    transformers differ from the names in its files. `head` names the parameters that are new if a model is loaded with
    another head. `renamed` are regexes of names in older files and the current names. `read_files` adapts the weights
    in files to the names here, or the config to the weights; it returns the config.
    """

    read_config: Callable[[Mapping[str, Any]], Any]
    write_config: Callable[[Any], dict[str, Any]]
    weights: Callable[[Any], Sequence[Weight]]
    build: Callable[..., Any]
    prefix: str
    ignored: tuple[str, ...] = ()
    fan_in_fan_out: bool = False  # peft: linear kernels are stored (in, out)
    task_type: str | None = None  # of peft
    modules: Mapping[str, str] = field(default_factory=dict)
    head: Callable[[Any], tuple[str, ...]] = lambda config: ("classifier/kernel", "classifier/bias")
    renamed: tuple[tuple[str, str], ...] = ()
    read_files: Callable[[Any, Any], Any] = lambda config, weights: config

    def module_name(self, weight: Weight) -> str:
        """The module name of a linear layer in transformers, with ``{}`` if stacked."""
        return self.modules.get(weight.path.removesuffix("/kernel"), weight.name.removesuffix(".weight"))


def family_of(model_type: Any) -> Family:
    if isinstance(model_type, str) and model_type.endswith(SCORED):
        reward = importlib.import_module("trainformer.models.jax.reward")
        return reward.scored_family(family_of(model_type.removesuffix(SCORED)))
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        do = did_you_mean(str(model_type), _FAMILIES) or f"The JAX models are {', '.join(_FAMILIES)}."
        raise BadArgument(expected("a supported model_type in config.json", model_type, do))
    module, name = _FAMILIES[model_type]
    return getattr(importlib.import_module(f"trainformer.models.jax.{module}"), name)


def linear(path: str, name: str, *, bias: bool, transposed: bool = True) -> Iterable[Weight]:
    """The weights of a linear layer; torch stores (out, in), transformers' Conv1D (in, out) as we do."""
    yield Weight(f"{path}/kernel", f"{name}.weight", (1, 0) if transposed else None)
    if bias:
        yield Weight(f"{path}/bias", f"{name}.bias")


def layer_norm(path: str, name: str) -> Iterable[Weight]:
    yield Weight(f"{path}/scale", f"{name}.weight")
    yield Weight(f"{path}/bias", f"{name}.bias")


# Fields by our names that have no default unless the family gives one.
_REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("image_size", "patch_size"),
)


def hf_fields(*same: str, **renamed: str) -> dict[str, str]:
    """HF's names of config fields, mapped to ours."""
    return {**{name: name for name in same}, **renamed}


def read_fields(config: Mapping[str, Any], fields: Mapping[str, str], **defaults: Any) -> dict[str, Any]:
    """Fields of a ``config.json`` by our names. HF reads them under its own name or the general one, which is ours."""
    found = {**defaults, "source": json.dumps(dict(config))}
    for name, own in fields.items():
        value = config.get(name) if config.get(name) is not None else config.get(own)
        if value is not None:
            found[own] = value
        elif own in _REQUIRED and own not in found:
            required(config, name)
    return found


def required(config: Mapping[str, Any], name: str) -> Any:
    """A required field of a config."""
    if config.get(name) is not None:
        return config[name]
    do = did_you_mean(name, config) or "Is this the config.json of the model?"
    raise BadArgument(expected(f"{name!r} in the configuration", sorted(config), do))


def refuse_unsupported(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise for config fields with a value that the models here do not implement."""
    for name, supported in fixed.items():
        if config.get(name, supported) not in (supported, None):
            do = "The JAX models do not support this; ignoring it would change the logits."
            raise BadArgument(expected(f"{name}={supported!r} in the configuration", config[name], do))


def read_labels(config: Mapping[str, Any]) -> int:
    """The number of classes in a ``config.json``."""
    return config.get("num_labels") or len(config.get("id2label") or ()) or 2


def label_fields(count: int, names: Sequence[str] | None = None) -> dict[str, Any]:
    """The classes as in a ``config.json``.

    >>> label_fields(1)
    {'id2label': {'0': 'LABEL_0'}, 'label2id': {'LABEL_0': 0}}
    """
    names = names or [f"LABEL_{number}" for number in range(count)]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def check_outputs(config: Mapping[str, Any]) -> None:
    """Raise if the ``config.json`` of a classifier has another number of outputs than one."""
    labels = config.get("id2label")
    outputs = len(labels) if labels is not None else config.get("num_labels", 2)
    if outputs != 1:
        do = "Models with a decoder and several classes are not supported."
        raise BadArgument(expected("a reward model, with one output", f"{outputs} outputs", do))

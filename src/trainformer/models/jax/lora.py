"""LoRA: trainable low-rank matrices on frozen linear layers, in peft's file format.

`apply_lora` adds them, `merge_lora` merges them into the kernels, `save_lora` and `load_lora` write and read folders
that `peft.PeftModel` opens on the same transformers model. The frozen parameters are returned as a regex over paths,
for the caller to freeze.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.models.jax.block import LoraSettings, Model
from trainformer.models.jax.families.family import Family, Weight, family_of
from trainformer.models.jax.huggingface import find_folder, flat_params, flat_paths, read_json, to_host
from trainformer.models.jax.layers import Linear
from trainformer.models.jax.quantization import check_quantization
from trainformer.models.jax.weight_files import Weights, open_weights, write_file

logger = logging.getLogger("trainformer")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# As in peft: queries and values.
DEFAULT_TARGETS = ("q_proj", "v_proj", "qkv_proj")
_HEADS = ("lm_head", "classifier", "output/classifier", "score")
# Options of peft adapters that are not supported.
_VARIANTS = (
    *("rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication"),
    *("target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
)
_PREFIX = "base_model.model."
_LAYER = re.compile(r"^.*\.\{\}\.")

Targets = str | Sequence[str] | None
AnyFolder = str | os.PathLike[str]


def apply_lora(
    model: Model,
    r: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    targets: Targets = None,
    *,
    modules_to_save: Sequence[str] = (),
    seed: int = 0,
) -> str:
    """Add LoRA to linear layers of `model`, in place. Returns the regex of the frozen parameters.

    `targets` are layer names, ours or HF's (``["q_proj", "v_proj"]``, ``["c_attn"]``), a regex over paths
    (``"layers/mlp/.*"``), or "all-linear" for all but the head. `modules_to_save` names layers outside the stack that
    are trained in full, such as a new ``classifier``. The output of the model does not change until it is trained.
    """
    if not isinstance(r, int) or r < 1:
        raise BadArgument(expected("r to be a positive integer", r))
    if not 0.0 <= dropout < 1.0:
        raise BadArgument(expected("dropout to be at least 0 and below 1", dropout))
    _check_no_lora(model)
    layers = _linear_layers(model)
    chosen = _select_layers(model, layers, targets)
    full = tuple(_layers_by_name(model, layers, name, "modules_to_save")[0] for name in modules_to_save)
    chosen = [path for path in chosen if targets != ALL_LINEAR or path not in full]
    settings = LoraSettings(r, float(alpha), float(dropout), tuple(chosen), full)
    for number, path in enumerate(chosen):
        kernel = layers[path].kernel[...]
        key = jax.random.fold_in(jax.random.key(seed), number)
        bound = 1.0 / math.sqrt(kernel.shape[-2])
        a = jax.random.uniform(key, (*kernel.shape[:-1], r), jnp.float32, -bound, bound)
        b = jnp.zeros((*kernel.shape[:-2], r, kernel.shape[-1]), jnp.float32)
        _attach(layers[path], a, b, settings.alpha / r, settings.dropout)
    model.lora = settings
    return frozen_pattern(model)


def frozen_pattern(model: Model) -> str:
    """A regex that matches the path of every frozen parameter."""
    full = "".join(f"|{re.escape(path)}/(?:kernel|bias)" for path in (model.lora.modules_to_save if model.lora else ()))
    return rf"^(?!(?:.*/lora_[ab]{full})$).*$"


def quantize_frozen(model: Model, kind: str) -> None:
    """Store the frozen kernels of the layers in 8 or 4 bits ("int8", "int4", "nf4"), in place, as in QLoRA.

    Embeddings, norms, biases and the head keep their dtype.
    """
    check_quantization(kind)
    settings = model.lora
    if settings is None:
        raise BadArgument(expected("a model with LoRA", type(model).__name__, "Quantized weights cannot be trained."))
    for path, layer in _linear_layers(model).items():
        if path not in (*_HEADS, *settings.modules_to_save):
            layer.quantize(kind)


def quantization_of(model: Model) -> str | None:
    """How the frozen kernels of a model are stored; None if they are not quantized."""
    found = (layer.quantization for layer in _linear_layers(model).values() if layer.quantization is not None)
    return next((quantization.kind for quantization in found), None)


def merge_lora(model: Model) -> Model:
    """Merge LoRA into the kernels and remove it, in place. Returns the model. Quantized kernels are dequantized."""
    layers = _linear_layers(model).values()
    kinds = {layer.quantization.kind for layer in layers if layer.quantization is not None}
    if kinds:
        # The adapter was trained on the rounded weights, so these are what belongs to it.
        logger.info("the merged weights are those of the base model rounded to %s, plus the adapter", *kinds)
    for layer in layers:
        layer.dequantize()
        if layer.lora_a is None:
            continue
        kernel = layer.kernel[...]
        added = layer.lora_a[...].astype(jnp.float32) @ layer.lora_b[...].astype(jnp.float32) * layer.lora_scale
        layer.kernel[...] = (kernel.astype(jnp.float32) + added).astype(kernel.dtype)
        layer.lora_a = layer.lora_b = nnx.data(None)
        layer.lora_scale = layer.lora_dropout = 0.0
    model.lora = None
    return model


def save_lora(
    model: Model, folder: AnyFolder, params: Mapping[str, Any] | None = None, *, base_model: str | None = None
) -> Path:
    """Write the adapter as a peft folder; `base_model` is recorded as the name or path of the base model.

    `params` (a nested dict) replace the model's own parameters.
    """
    settings = model.lora
    if settings is None:
        raise BadArgument(expected("a model with LoRA", type(model).__name__, "Call apply_lora first."))
    flat = flat_params(model) if params is None else flat_paths(params)
    family, names = family_of(model.config.model_type), _module_names(model)
    arrays: dict[str, np.ndarray] = {}
    for path in settings.targets:
        for own, hf in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            array = to_host(flat[f"{path}/{own}"])
            stacked = "{}" in names[path]
            for number, layer in enumerate(array if stacked else [array]):
                arrays[f"{_PREFIX}{names[path].format(number)}.{hf}.weight"] = np.ascontiguousarray(layer.T)
    for weight in _full_weights(family, model, settings.modules_to_save):
        array = weight.to_hf(to_host(flat[weight.path]))
        arrays[f"{_PREFIX}{weight.name}"] = np.ascontiguousarray(array)
    target = Path(folder)
    if jax.process_index() == 0:
        target.mkdir(parents=True, exist_ok=True)
        write_file(arrays, target / WEIGHTS)
        text = json.dumps(_peft_config(family, settings, names, base_model), indent=2, sort_keys=True)
        (target / CONFIG).write_text(text + "\n", encoding="utf-8")
    return target


def load_lora(model: Model, folder: AnyFolder) -> str:
    """Add the adapter of a peft folder to a plain model, in place. Returns the regex of the frozen parameters."""
    _check_no_lora(model)
    path = find_folder(folder)
    config = read_json(path / CONFIG)
    _check_config(config)
    alpha, r = float(config["lora_alpha"]), int(config["r"])
    scale = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
    layers, names, family = _linear_layers(model), _module_names(model), family_of(model.config.model_type)
    saved = config.get("modules_to_save") or ()
    full = tuple(_layers_by_name(model, layers, name, "modules_to_save")[0] for name in saved)
    settings = LoraSettings(r, scale * r, float(config.get("lora_dropout") or 0.0), (), full)
    with open_weights(path, WEIGHTS) as weights:
        left, found = set(weights), []
        for own, name in names.items():
            count = layers[own].kernel.shape[0] if "{}" in name else 1
            pair = [_stacked_matrix(weights, count, name, letter, left) for letter in "AB"]
            if pair[0] is not None and pair[1] is not None:
                _attach(layers[own], jnp.asarray(pair[0]), jnp.asarray(pair[1]), scale, settings.dropout)
                found.append(own)
                # For output layers peft also writes the base layer, which the model already has.
                left.discard(f"{_PREFIX}{name}.base_layer.weight")
        for weight in _full_weights(family, model, full):
            key = f"{_PREFIX}{weight.name}"
            if key not in weights:
                raise DataError(f"Expected {key} in {path / WEIGHTS}, since modules_to_save names it.")
            left.discard(key)
            layer = layers[weight.path.rsplit("/", 1)[0]]
            variable: Any = layer.kernel if weight.path.endswith("kernel") else layer.bias
            variable[...] = jnp.asarray(weight.from_hf(weights[key])).astype(variable.dtype)
    if left or not found:
        what = f"an adapter for this {type(model).__name__} in {path}"
        raise DataError(expected(what, sorted(left)[:3], "These weights belong to no linear layer of the model."))
    model.lora = replace(settings, targets=tuple(found))
    return frozen_pattern(model)


# -- layers and their names --------------------------------------------------------------------------------


def _linear_layers(model: Model) -> dict[str, Linear]:
    found = ((path, module) for path, module in nnx.iter_graph(model) if isinstance(module, Linear))
    return {"/".join(map(str, path)): module for path, module in sorted(found, key=lambda pair: str(pair[0]))}


def _select_layers(model: Model, layers: Mapping[str, Linear], targets: Targets) -> list[str]:
    if targets is None:
        return [path for path in layers if path.rsplit("/", 1)[-1] in DEFAULT_TARGETS]
    if targets == ALL_LINEAR:
        return [path for path in layers if path not in _HEADS]
    if isinstance(targets, str):
        matched = [path for path in layers if re.fullmatch(targets, path)]
        return matched or _layers_by_name(model, layers, targets, "targets")
    wanted = [path for name in targets for path in _layers_by_name(model, layers, name, "targets")]
    if not wanted:
        what = "targets to name at least one layer"
        raise BadArgument(expected(what, list(targets), "Leave it out for the defaults."))
    return [path for path in layers if path in wanted]


def _layers_by_name(model: Model, layers: Mapping[str, Linear], name: str, argument: str) -> list[str]:
    """Layers by the last parts of our path or of the HF name."""
    hf_names = {path: _LAYER.sub("", full) for path, full in _module_names(model).items()}
    suffix = name.replace(".", "/")
    found = [path for path in layers if f"/{path}".endswith(f"/{suffix}") or f".{hf_names[path]}".endswith(f".{name}")]
    if not found:
        known = sorted(
            {path.rsplit("/", 1)[-1] for path in layers} | {full.rsplit(".", 1)[-1] for full in hf_names.values()}
        )
        do = did_you_mean(name, known) or f"It has {', '.join(known)}."
        if hasattr(model.config, "num_experts"):
            do += " The weights of routers and experts are not adapted."
        raise BadArgument(expected(f"{argument} to name linear layers of this {type(model).__name__}", name, do))
    return found


def _module_names(model: Model) -> dict[str, str]:
    family = family_of(model.config.model_type)
    table = {weight.path: weight for weight in family.weights(model.config)}
    return {path: family.module_name(table[f"{path}/kernel"]) for path in _linear_layers(model)}


def _full_weights(family: Family, model: Model, modules: Sequence[str]) -> list[Weight]:
    chosen = [weight for weight in family.weights(model.config) if weight.path.rsplit("/", 1)[0] in modules]
    for weight in chosen:
        if weight.stacked:
            what = "modules_to_save outside the stacked layers"
            raise BadArgument(expected(what, weight.path, "Use LoRA for those."))
    return chosen


def _attach(layer: Linear, a: jax.Array, b: jax.Array, scale: float, dropout: float) -> None:
    kernel = layer.kernel[...].shape
    if a.shape[:-1] != kernel[:-1] or b.shape[-1] != kernel[-1]:
        what = f"LoRA matrices for a kernel of shape {list(kernel)}"
        raise DataError(expected(what, [list(a.shape), list(b.shape)], "Is it an adapter for this model?"))
    layer.lora_a, layer.lora_b = nnx.Param(a), nnx.Param(b)
    layer.lora_scale, layer.lora_dropout = scale, dropout


def _check_no_lora(model: Model) -> None:
    if not isinstance(model, Model):
        raise BadArgument(expected("a model of trainformer.models.jax", type(model).__name__))
    if model.lora is not None:
        raise BadArgument(expected("a model without LoRA", model.lora, "Call merge_lora first."))


# -- peft's files ------------------------------------------------------------------------------------------


def _stacked_matrix(weights: Weights, count: int, name: str, letter: str, left: set[str]) -> np.ndarray | None:
    """The A or B matrices of all layers, stacked; None if no layer has one. Some layers without LoRA are an error."""
    keys = [f"{_PREFIX}{name.format(number)}.lora_{letter}.weight" for number in range(count)]
    present = [key for key in keys if key in weights]
    if not present:
        return None
    if len(present) < count:
        missing = next(key for key in keys if key not in weights)
        raise DataError(f"Expected LoRA on every layer or on none, received none for {missing}.")
    left.difference_update(keys)
    arrays = [weights[key].T.astype(np.float32) for key in keys]
    return np.stack(arrays) if "{}" in name else arrays[0]


def _peft_config(
    family: Family, settings: LoraSettings, names: Mapping[str, str], base_model: str | None
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": family.task_type,
        "base_model_name_or_path": base_model,
        "r": settings.r,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": [_LAYER.sub("", names[path]) for path in settings.targets],
        "modules_to_save": [names[path] for path in settings.modules_to_save] or None,
        "fan_in_fan_out": family.fan_in_fan_out,
        "bias": "none",
        "inference_mode": True,
    }


def _check_config(config: Mapping[str, Any]) -> None:
    for name in ("r", "lora_alpha"):
        if name not in config:
            raise DataError(expected(f"{name!r} in {CONFIG}", sorted(config)[:6], "Is it a LoRA adapter?"))
    if config.get("peft_type", "LORA") != "LORA" or config.get("bias", "none") != "none":
        received = {name: config.get(name) for name in ("peft_type", "bias")}
        raise DataError(expected("a LoRA adapter without trained biases", received))
    for name in _VARIANTS:
        if config.get(name):
            do = "The JAX models support plain LoRA only; ignoring this would change the logits."
            raise DataError(expected(f"an adapter without {name}", config[name], do))

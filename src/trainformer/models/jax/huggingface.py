"""Load models from HF folders and save them: ``config.json`` and ``model.safetensors``, compatible with transformers.

Converts between the separate layers of a file and our stacked layers. Weight names are in the families, files in
`weight_files`. Hub names are resolved by huggingface_hub; torch and transformers are never imported.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.models.jax.families.family import SCORED, Family, Weight, check_outputs, family_of
from trainformer.models.jax.weight_files import Weights, open_weights, write_weights
from trainformer.utils.files import decode_json

logger = logging.getLogger("trainformer")

CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
Place = Callable[[str, np.ndarray], jax.Array]
AnyFolder = str | os.PathLike[str]


def load_model(
    folder: AnyFolder,
    dtype: Any = jnp.float32,
    *,
    place: Place | None = None,
    num_labels: int | None = None,
    head: str | None = None,
    seed: int = 0,
    kind: type | None = None,
) -> Any:
    """Load a model from an HF folder or hub name, with its weights in `dtype` (None: as saved).

    `place(path, array)` puts a parameter onto the devices, so that no device ever holds more than its shard.
    `num_labels` gives a classifier a new head if the saved one is missing or has another size; 1 opens a decoder as a
    reward model. `head` loads an encoder with another head (masked_lm, sequence_classification, token_classification),
    which is new if it was not saved.
    """
    path = find_folder(folder)
    family, ours = read_model_config(path, scored=num_labels == 1)
    if kind is not None and family.build is not kind:
        raise BadArgument(expected(f"a model for {kind.__name__}", ours.model_type, "Use load_model instead."))
    new_head: tuple[str, ...] = ("score/kernel",)
    if head is not None or num_labels not in (None, 1) or not ours.model_type.endswith(SCORED):
        ours, new_head = _with_head(ours, family, head, num_labels)
    place = place or (lambda _, array: jnp.asarray(array))
    initial = cache(lambda: _initial_weights(family.build, ours, new_head, jnp.float32, jax.random.key(seed)))
    with open_weights(path) as weights:
        for pattern, name in family.renamed:
            weights.rename(pattern, name)
        ours = family.read_files(ours, weights)
        graph, state = nnx.split(nnx.eval_shape(lambda: family.build(ours, rngs=nnx.Rngs(params=seed))))
        shapes = nnx.to_flat_state(state)
        read = _reader(weights, family, ours, new_head, dtype)
        filled = []
        for parts, variable in shapes:
            name = "/".join(map(str, parts))
            array = read(name, variable)
            filled.append(
                (parts, variable.replace(place(name, np.asarray(initial()[name]) if array is None else array)))
            )
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _with_head(config: Any, family: Family, head: str | None, num_labels: int | None) -> tuple[Any, tuple[str, ...]]:
    """The config with another head or number of labels, and the parameters that may then be new."""
    changes: dict[str, Any] = {"head": head, "num_labels": num_labels}
    changes = {name: value for name, value in changes.items() if value is not None}
    for name in changes:
        is_masked = name == "num_labels" and (head or getattr(config, "head", None)) == "masked_lm"
        if not hasattr(config, name) or is_masked:
            if name == "head":
                what = f"an encoder (BERT, RoBERTa or DistilBERT) for head={head!r}"
                raise BadArgument(expected(what, config.model_type))
            raise BadArgument(expected(f"a classifier for {name}", config.model_type, "Leave it out."))
    if num_labels is not None and num_labels != config.num_labels and hasattr(config, "label_names"):
        changes["label_names"] = None
    return replace(config, **changes), family.head(replace(config, **changes)) if changes else ()


def _reader(
    weights: Weights, family: Family, config: Any, new_head: tuple[str, ...], dtype: Any
) -> Callable[[str, Any], np.ndarray | None]:
    """A function that reads a parameter by our path; it returns None for a head that does not fit."""
    table = {weight.path: weight for weight in family.weights(config)}
    has_prefix = any(name.startswith(family.prefix) for name in weights)
    prefix = "" if has_prefix else family.prefix  # a base model without a head (GPT-2 on the hub) has none
    names = {
        path: [
            weight.name.format(number).removeprefix(prefix)
            for number in range((weight.layers or config.num_hidden_layers) if weight.stacked else 1)
        ]
        for path, weight in table.items()
    }
    missing = [name for path, found in names.items() for name in found if name not in weights and path not in new_head]
    known = {name for found in names.values() for name in found}
    # Files of tied models may contain the embedding twice.
    ignored = [*family.ignored, *([r"^lm_head\.weight$"] if getattr(config, "tie_word_embeddings", False) else [])]
    extra = [name for name in weights if name not in known and not any(re.search(rule, name) for rule in ignored)]
    if missing or extra:
        raise DataError(_mismatch(weights.folder, missing, extra))
    new = [names[path][0] for path in new_head if names[path][0] not in weights]
    if new:
        logger.warning("%s has no %s: newly initialized", weights.folder, ", ".join(new))

    def read(path: str, variable: Any) -> np.ndarray | None:
        weight, shape = table[path], variable.shape
        if path in new_head:
            saved = names[path][0]
            if saved not in weights or weight.from_hf(weights[saved]).shape != shape:
                return None
        return _read(weights, weight, names[path], shape, dtype if weight.dtype is None else variable.dtype)

    return read


def _read(weights: Weights, weight: Weight, names: list[str], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    out: np.ndarray | None = None
    for number, name in enumerate(names):
        array = weight.from_hf(weights[name])
        wanted = shape[1:] if weight.stacked else shape
        if array.shape != wanted:
            what = f"{name} of shape {list(weight.to_hf(np.broadcast_to(0, wanted)).shape)}, as in config.json"
            do = "Do config.json and the weights belong together?"
            raise DataError(expected(what, list(weights[name].shape), do))
        if out is None:
            out = np.empty(shape, array.dtype if dtype is None else dtype)
        out[number if weight.stacked else ...] = array
    assert out is not None
    return out


def _mismatch(folder: Path, missing: list[str], extra: list[str]) -> str:
    parts = []
    for what, names in (("missing", missing), ("unexpected", extra)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{what}: {', '.join(names[:3])}{more}")
    hint = did_you_mean(missing[0], extra) if missing and extra else ""
    text = f"The weights in {folder} do not match its {CONFIG} ({'; '.join(parts)})."
    return f"{text} {hint}".rstrip()


def model_from_config(config: Any, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    """A model with random weights, from the content of a ``config.json`` (a dict) or a config such as `ViTConfig`."""
    if isinstance(config, Mapping):
        config = family_of(config.get("model_type")).read_config(config)
    elif not hasattr(config, "model_type"):
        do = "Pass the content of a config.json, a DecoderConfig or a ViTConfig; for a folder use load_model."
        raise BadArgument(expected("a configuration", config, do))
    build = family_of(config.model_type).build
    graph, _ = nnx.split(nnx.eval_shape(lambda: build(config, rngs=nnx.Rngs(params=seed))))
    return nnx.merge(graph, _init_weights(build, config, jnp.dtype(dtype), jax.random.key(seed)))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _initial_weights(
    build: Callable[..., Any], config: Any, paths: tuple[str, ...], dtype: Any, key: jax.Array
) -> dict[str, jax.Array]:
    """Random weights of some parameters. XLA does not compute the others."""
    flat = flat_weights(build(config, rngs=nnx.Rngs(params=key)))
    return {path: flat[path].astype(dtype) for path in paths}


@partial(jax.jit, static_argnums=(0, 1, 2))
def _init_weights(build: Callable[..., Any], config: Any, dtype: Any, key: jax.Array) -> Any:
    """Jitted: op by op it takes seconds even for a small model."""
    state = nnx.state(build(config, rngs=nnx.Rngs(params=key)))
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, state)


def save_model(
    model: Any, folder: AnyFolder, params: Mapping[str, Any] | None = None, *, largest_shard: int | None = None
) -> Path:
    """Write a folder that transformers and `load_model` open; `params` (a nested dict) replace the model's own.

    Weights keep their dtype. LoRA must be merged first. All processes must call this; process 0 writes.
    """
    statistics = flat_paths(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))
    flat = statistics | (flat_params(model) if params is None else flat_paths(params))
    lora = [path for path in flat if path.endswith(("/lora_a", "/lora_b"))]
    if lora:
        do = "Call merge_lora first for a plain model, or save_lora for the adapter alone."
        raise BadArgument(expected("a model without LoRA", lora[0], do))
    config, family = model.config, family_of(model.config.model_type)
    table = family.weights(config)
    unknown = sorted({weight.path for weight in table} ^ set(flat))
    if unknown:
        what = f"the parameters of this {type(model).__name__}"
        raise BadArgument(expected(what, f"missing or unknown ones: {unknown[:4]}"))
    _check_fields(config, family)
    target, first = Path(folder), jax.process_index() == 0
    options = {} if largest_shard is None else {"largest": largest_shard}
    if first:
        target.mkdir(parents=True, exist_ok=True)
    write_weights(_hf_weights(table, flat), target, write=first, **options)
    if first:
        text = json.dumps(saved_config(config, family, str(flat[table[0].path].dtype)), indent=2, sort_keys=True)
        (target / CONFIG).write_text(text + "\n", encoding="utf-8")
    return target


def check_family(config: Any) -> None:
    """Raise if a model of this config lacks parameters of its `model_type`: it could not be saved."""
    family = family_of(config.model_type)
    shape = nnx.eval_shape(lambda: family.build(config, rngs=nnx.Rngs(params=0)))
    unknown = sorted({weight.path for weight in family.weights(config)} ^ set(flat_weights(shape)))
    if unknown:
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        kind = config.model_type
        what = f"a configuration with the parameters of {kind!r}"
        do = f"Pass model_from_config({{'model_type': {kind!r}, ...}}), which reads a config.json."
        raise BadArgument(expected(what, f"one that differs in {', '.join(unknown[:4])}{more}", do))
    _check_fields(config, family)


# Fields without influence on the logits, and those that `layer_kinds`, `kv_heads` and `head_width` stand for.
_NOT_COMPARED = (
    *("source", "model_type", "initializer_range", "embedding_dropout", "attention_dropout", "hidden_dropout"),
    *("num_key_value_heads", "head_dim", "sliding_window", "layer_types", "no_rope_layers", "local_rope"),
)


def _check_fields(config: Any, family: Family) -> None:
    """Raise if a decoder's config has options that HF configs of its `model_type` cannot express."""
    if not hasattr(config, "ropes"):
        return
    again = family.read_config(decode_json(json.dumps(family.write_config(config))))
    names = [item.name for item in fields(config) if item.name not in _NOT_COMPARED]
    names += ["layer_kinds", "kv_heads", "head_width", "ropes"]
    lost = [name for name in names if getattr(config, name) != getattr(again, name)]
    if lost:
        what = f"a configuration that a config.json of {config.model_type!r} can describe"
        received = ", ".join(f"{name}={getattr(config, name)}" for name in lost[:4])
        raise BadArgument(expected(what, received, "The saved model would give other logits; change the model_type."))


def _hf_weights(table: Sequence[Weight], flat: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """HF names and arrays, with one parameter on the host at a time."""
    for weight in table:
        array = to_host(flat[weight.path])
        if not weight.stacked:
            yield weight.name, weight.to_hf(array)
            continue
        for number, layer in enumerate(array):
            name, saved = weight.name.format(number), weight.to_hf(layer)
            if "*" not in name:
                yield name, saved
                continue
            for expert, part in enumerate(saved):
                yield name.replace("*", str(expert)), part


def saved_config(config: Any, family: Family, dtype: str) -> dict[str, Any]:
    """The original config with all its fields, updated with what has changed since."""
    own = described = family.write_config(config)
    if config.source:
        source = decode_json(config.source)
        before = family.write_config(family.read_config(source))
        described = {**source, **{name: value for name, value in own.items() if before.get(name) != value}}
    dtypes: dict[str, str] = {name: dtype for name in ("dtype", "torch_dtype") if name == "dtype" or name in described}
    return {**described, "architectures": own["architectures"], **dtypes}


def to_host(array: Any) -> np.ndarray:
    """The whole array as NumPy, gathered if it is sharded over processes."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        from jax.experimental import multihost_utils

        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def flat_params(model: nnx.Module) -> dict[str, jax.Array]:
    """Parameters by path, as in sharding rules and frozen patterns: ``layers/attention/q_proj/kernel``."""
    return flat_paths(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def flat_weights(model: nnx.Module) -> dict[str, jax.Array]:
    """What a folder contains by path: the parameters and the running statistics of batch norms."""
    return flat_paths(nnx.to_pure_dict(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))))


def flat_paths(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A nested dict by path; the layers of a list have numbers."""
    return {"/".join(map(str, path)): value for path, value in flatten_dict(dict(tree)).items()}


def find_folder(source: AnyFolder) -> Path:
    """A local folder, or else the download (or cache) of a hub name."""
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists() or not _HUB_NAME.fullmatch(str(source)):
        raise DataError(expected("a model folder, or a model name on the Hugging Face hub", str(source)))
    hub = require("huggingface_hub", "jax", "to download a model by name")
    try:
        return Path(hub.snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # network, hub or file system: many types
        raise DataError(
            f"Expected a folder or a model of the Hugging Face hub, received {str(source)!r} "
            f"({type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}). Check the name and the connection "
            "to the hub. A cached model is found offline."
        ) from error


def read_model_config(folder: Path, scored: bool = False) -> tuple[Family, Any]:
    """The family of a model and its configuration, from the ``config.json`` in its folder.

    With `scored`, that of the reward model with this decoder.
    """
    config = read_json(folder / CONFIG)
    family = described_family(config, scored)
    try:
        return family, family.read_config(config)
    except BadArgument as error:
        raise BadArgument(f"{folder / CONFIG}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        what = f"a configuration of a {config['model_type']}"
        raise DataError(f"{folder / CONFIG} is not {what} ({type(error).__name__}: {error}).") from error


def described_family(config: Mapping[str, Any], scored: bool = False) -> Family:
    """The family of the model that the content of a ``config.json`` describes, which may be a reward model."""
    family = family_of(config.get("model_type"))
    if family.task_type != "CAUSAL_LM":
        return family
    if str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification"):
        check_outputs(config)
        scored = True
    return family_of(config["model_type"] + SCORED) if scored else family


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = decode_json(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} instead of an object")
        return content
    except FileNotFoundError as error:
        raise DataError(f"Expected {path.name} in {path.parent}, which has none. Is this a model folder?") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); the file is damaged.") from error

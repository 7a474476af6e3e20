"""Folders of saved adapters: one adapter as peft writes it, or several that make up one model.

The model is its base, with the adapters in `merged` merged in that order, and those in `active` applied together; one
of these was trained. An adapter that is the whole difference to its base lies in the folder itself, where
`PeftModel.from_pretrained` finds it. Otherwise each lies in a folder of its own, so that nobody opens one of them as if
it were all. ``adapters.json`` describes what peft's own files do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainformer.adapters.base import adapted_model
from trainformer.adapters.export import merge_adapter
from trainformer.adapters.lora import LoRA
from trainformer.adapters.qlora import QLoRA, is_quantised, prepare_quantised
from trainformer.adapters.state import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    active_adapters,
    adapter_state_dict,
    base_name,
    load_adapter,
    save_adapter,
    save_adapter_beside,
    trained_adapter,
)
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.utils.files import decode_json
from trainformer.utils.tensor_files import read_weights

FILE = "adapters.json"
_DEFAULT = "default"
_VERSION = 1
_POSITIONS = ("rope_parameters", "max_position_embeddings", "head_dim")  # that the base was loaded with: `models.rope`
_LABELS = ("id2label", "label2id", "problem_type", "pad_token_id")  # of the configuration of a classifier
_CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS")
_MERGED, _FROZEN = "_merged_adapters", "_frozen_adapters"


@dataclass(frozen=True)
class SavedAdapters:
    """The adapters in a folder."""

    folder: Path
    merged: tuple[str, ...] = ()
    active: tuple[str, ...] = (_DEFAULT,)
    trained: str = _DEFAULT
    inactive: tuple[str, ...] = ()
    model_config: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> SavedAdapters | None:
        """Those in a folder, from us or from peft; None if there are none."""
        if not (folder / FILE).is_file():
            return cls(folder) if (folder / CONFIG_FILE).is_file() else None
        try:
            content = decode_json((folder / FILE).read_bytes())
            if content.pop("version") != _VERSION:
                raise ValueError("another version; use the trainformer that it is from")
            names: dict[str, Any] = {key: tuple(content.pop(key)) for key in ("merged", "active", "inactive")}
            every = [content["trained"], *(name for given in names.values() for name in given)]
            if any(not isinstance(name, str) or Path(name).name != name or name == ".." for name in every):
                raise ValueError("a name that is no name of a folder")
            if content["trained"] not in names["active"]:
                raise ValueError("a trained adapter that is not active")
            # They become arguments of `from_pretrained`, of which some execute code.
            for key, known in (
                ("model_config", (*_LABELS, *_POSITIONS)),
                ("quantization", ("quant_type", "double_quant")),
            ):
                if odd := {*(content[key] or ())} - {*known}:
                    raise ValueError(f"{sorted(odd)[0]} in {key}")
            return cls(folder, **names, **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(expected(f"the description of adapters in {folder / FILE}", str(error))) from error

    def place(self, name: str) -> Path:
        """The folder of one of the adapters."""
        return self.folder / name if (self.folder / name / CONFIG_FILE).is_file() else self.folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the trained adapter in peft."""
        return _config_in(self.place(self.trained))

    @property
    def base(self) -> str | None:
        """The name or folder of the base model, if it is known."""
        configs = (_config_in(self.place(name)) for name in (*self.merged, *self.active))
        return next((found for config in configs if (found := config.get("base_model_name_or_path"))), None)

    def load_options(self, kind: str | None = None) -> dict[str, Any]:
        """Arguments for `from_pretrained` of the base: classes, and 4 bits if the adapter was trained on them."""
        options = dict(self.model_config) or self._head()
        if self.quantization is not None:
            full = self.config.get("modules_to_save")
            options |= QLoRA(**self.quantization, modules_to_save=full).load_options(kind)
        return options

    def _head(self) -> dict[str, Any]:
        """The number of classes of an adapter that peft saved, from the weights of its head."""
        config = self.config
        if config.get("task_type") not in _CLASSIFIERS:
            return {}
        heads = tuple(config.get("modules_to_save") or ())
        rows = 0
        with safe_open(self.place(self.trained) / WEIGHTS_FILE, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                if any(f".{head}." in key for head in heads) and key.endswith("weight") and ".lora_" not in key:
                    rows = file.get_slice(key).get_shape()[0]
        return {"num_labels": rows} if rows else {}


@dataclass(frozen=True)
class AdapterCopy:
    """The configuration and weights of an adapter that was merged into a model, or is frozen in it."""

    config: dict[str, Any]
    state: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> AdapterCopy:
        """The adapter in a folder."""
        return cls(_config_in(folder), read_weights(folder, [WEIGHTS_FILE]))

    @classmethod
    def of(cls, model: nn.Module, name: str) -> AdapterCopy:
        """An adapter of a model."""
        inner = adapted_model(model)
        config = {**inner.peft_config[name].to_dict(), "inference_mode": True}
        config["base_model_name_or_path"] = config.get("base_model_name_or_path") or base_name(inner)
        state = {key: tensor.cpu().clone() for key, tensor in adapter_state_dict(model, name=name).items()}
        return cls(json.loads(json.dumps(config, default=_as_list)), state)

    def write(self, folder: Path) -> None:
        """Write it as peft does."""
        folder.mkdir(exist_ok=True)
        save_file(
            {key: tensor.contiguous() for key, tensor in self.state.items()}, folder / WEIGHTS_FILE, {"format": "pt"}
        )
        (folder / CONFIG_FILE).write_text(json.dumps(self.config, indent=2, sort_keys=True))


# -- opening -----------------------------------------------------------------------------------------------


def open_adapters(model: nn.Module, saved: SavedAdapters) -> nn.Module:
    """Add saved adapters to their base model; the trained one can be trained on."""
    if is_quantised(model):
        prepare_quantised(model)
    for name in saved.merged:
        model = _with_record(merge_adapter(load_adapter(model, saved.place(name))), model, [saved.place(name)])
    for name in (*saved.active, *saved.inactive):
        model = load_adapter(model, saved.place(name), name)
    activate(model, saved.active, saved.trained)
    _check_complete(model, saved)
    return model


def _check_complete(model: nn.Module, saved: SavedAdapters) -> None:
    """Reject adapters whose base has random weights that they do not bring along."""
    new = getattr(adapted_model(model).get_base_model(), "new_weights", ())
    parts = [part for name in saved.active for part in _config_in(saved.place(name)).get("modules_to_save") or ()]
    lost = [key for key in new if not any(f".{part}." in f".{key}" for part in parts)]
    if lost:
        what = f"all weights of the model in its base or in the adapter in {saved.folder}"
        do = "The adapter was saved without a part of the model that was new. Train it again from its base."
        raise BadArgument(expected(what, f"neither for {', '.join(lost[:3])}", do))


def merge_adapters(model: nn.Module) -> nn.Module:
    """Merge what is active in a model into its base, which then can get another adapter. The record is kept."""
    inner = adapted_model(model)
    merged = [AdapterCopy.of(inner, name) for name in active_adapters(inner)]
    base = inner.get_base_model()
    return _with_record(merge_adapter(inner), base, merged)


def stack_adapter(model: nn.Module, adapter: Any, kind: str | None = None) -> nn.Module:
    """Add a new LoRA to a model with adapters, which stay active and are frozen."""
    inner = adapted_model(model)
    active = active_adapters(inner)
    if not isinstance(adapter, LoRA):
        raise BadArgument(expected("a LoRA to stack on another adapter", type(adapter).__name__, _MERGE))
    config = adapter.peft_config(_skeleton(inner.get_base_model()), kind)
    for name, part in (*((name, inner.peft_config[name]) for name in active), ("the new adapter", config)):
        why = _unstackable(part)
        if why is not None:
            raise BadArgument(expected("LoRA layers alone in adapters that are stacked", f"{why} in {name}", _MERGE))
    new = next(name for n in count(2) if (name := f"adapter_{n}") not in inner.peft_config)
    inner.add_adapter(new, config)
    activate(inner, (*active, new), new)
    return model


_MERGE = "Pass on_adapter='merge'."


def activate(model: nn.Module, active: tuple[str, ...], trained: str) -> None:
    """Apply these adapters together, and train one of them."""
    inner = adapted_model(model)
    if inner.peft_config[trained].is_prompt_learning:
        return
    inner.set_adapter(trained)
    if len(active) > 1:
        inner.base_model.set_adapter(list(active))
        for name, parameter in inner.named_parameters():
            if any(f".{other}." in f"{name}." for other in active if other != trained):
                parameter.requires_grad_(False)


def merged_into(model: nn.Module) -> list[AdapterCopy]:
    """The adapters that were merged into a plain model before it got another one."""
    return list(getattr(model, _MERGED, ()))


def remember_frozen(model: nn.Module) -> None:
    """Copy the adapters that are not trained, for checkpoints: a strategy may shard the model over processes."""
    inner = adapted_model(model)
    others = [name for name in inner.peft_config if name != trained_adapter(inner)]
    setattr(inner.get_base_model(), _FROZEN, {name: AdapterCopy.of(inner, name) for name in others})


def frozen_in(model: nn.Module) -> dict[str, AdapterCopy]:
    """The copies of `remember_frozen`."""
    copies: dict[str, AdapterCopy] = getattr(adapted_model(model).get_base_model(), _FROZEN, {})
    return copies


def check_one_trainable(model: nn.Module) -> None:
    """Reject a `PeftModel` with several trainable adapters. One without any may be evaluated."""
    inner = adapted_model(model)
    trainable = {name for name, parameter in inner.named_parameters() if parameter.requires_grad}
    names = [name for name in inner.peft_config if any(f".{name}." in f"{key}." for key in trainable)]
    if len(names) > 1:
        do = "Freeze all but one (requires_grad_(False)); the others stay active."
        raise BadArgument(expected("one adapter to train", f"trainable weights in {', '.join(names)}", do))


def check_trainable(model: nn.Module) -> None:
    """Reject a `PeftModel` that cannot be trained."""
    if not any(parameter.requires_grad for parameter in adapted_model(model).parameters()):
        do = "Load it with PeftModel.from_pretrained(..., is_trainable=True), or pass the folder of the adapter."
        raise BadArgument(expected("an adapter that can be trained", "a PeftModel without trainable weights", do))


# -- writing -----------------------------------------------------------------------------------------------


def write_adapters(model: nn.Module, weights: Path) -> list[str]:
    """Complete a folder whose file `weights` has the trained adapter; without it, write that too (as one file).

    Returns the names of the new files.
    """
    inner, folder = adapted_model(model), weights.parent
    base, trained, active = inner.get_base_model(), trained_adapter(inner), active_adapters(inner)
    merged = merged_into(base)
    names = [f"merged_{number}" for number in range(1, len(merged) + 1)]
    others = [name for name in inner.peft_config if name != trained]
    alone = not merged and active == (_DEFAULT,)
    if weights.is_file():
        written = save_adapter_beside(inner, weights, None if alone else trained)
    else:
        inside = "" if alone else f"{trained}/"
        written = [f"{inside}{file}" for file in save_adapter(inner, folder / inside)]
    for name, adapter in zip(names, merged, strict=True):
        adapter.write(folder / name)
    for name in others:
        (frozen_in(inner).get(name) or AdapterCopy.of(inner, name)).write(folder / name)
    written += [f"{name}/{file}" for name in (*names, *others) for file in (CONFIG_FILE, WEIGHTS_FILE)]
    content = {
        "merged": names,
        "active": active,
        "trained": trained,
        "inactive": [name for name in others if name not in active],
        "model_config": {**_labels(inner, trained), **getattr(base, "config_overrides", {})},
        "quantization": _quantization(base),
    }
    if alone and not any(content[key] for key in ("inactive", "model_config", "quantization")):
        return written  # peft's own file says it all
    (folder / FILE).write_text(json.dumps({"version": _VERSION, **content}, indent=1))
    return [*written, FILE]


def _labels(model: Any, name: str) -> dict[str, Any]:
    config = getattr(model.get_base_model(), "config", None)
    if model.peft_config[name].task_type not in _CLASSIFIERS:
        return {}
    return {key: getattr(config, key) for key in _LABELS if getattr(config, key, None) is not None}


def _quantization(base: nn.Module) -> dict[str, Any] | None:
    config: Any = getattr(getattr(base, "config", None), "quantization_config", None)
    if config is None or not is_quantised(base):
        return None
    return {"quant_type": config.bnb_4bit_quant_type, "double_quant": config.bnb_4bit_use_double_quant}


# -- helpers -----------------------------------------------------------------------------------------------


def _config_in(folder: Path) -> dict[str, Any]:
    try:
        config = decode_json((folder / CONFIG_FILE).read_bytes())
        if not isinstance(config, dict):
            raise TypeError("no mapping")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(expected(f"the configuration of an adapter in {folder / CONFIG_FILE}", str(error))) from error
    return config


def _with_record(plain: nn.Module, before: nn.Module, new: list[Any]) -> nn.Module:
    """A merged model that knows what was merged: `new` after what `before` knows."""
    read = [AdapterCopy.read(adapter) if isinstance(adapter, Path) else adapter for adapter in new]
    setattr(plain, _MERGED, [*merged_into(before), *read])
    return plain


def _unstackable(config: Any) -> str | None:
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        return f"{config.peft_type}"
    for name in ("use_dora", "modules_to_save", "trainable_token_indices"):
        if getattr(config, name, None):
            return name
    return f"bias={config.bias!r}" if config.bias != "none" else None


def _skeleton(model: nn.Module) -> nn.Module:
    """The same model without adapters and without memory, to find the layers by name."""
    config = getattr(model, "config", None)
    if config is None:
        raise BadArgument(expected("a model of transformers to stack adapters on", type(model).__name__, _MERGE))
    with torch.device("meta"):
        return type(model)(config)


def _as_list(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)

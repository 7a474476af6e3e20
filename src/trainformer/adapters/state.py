"""Adapter checkpoints: the weights of the adapter alone, under peft's names.

New rows of a resized vocabulary are in no base checkpoint, so they are saved with the adapter. peft asks the hub
whether the vocabulary has grown; here only local files are read.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainformer.adapters.base import FolderPath, adapted_model, is_adapted, peft, unwrap_model
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.utils.tensor_files import read_weights

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_DEFAULT = "default"
# Parts of the names of an adapter's own weights; the rest of an adapted layer is frozen.
_TRAINED = (".lora_", ".trainable_tokens_")


def adapter_state_dict(model: nn.Module, embeddings: bool | None = None, name: str | None = None) -> dict[str, Tensor]:
    """The weights of a model's adapter, and of modules and token rows that are trained in full.

    `name` chooses one of several adapters; default: the one that is trained.

    Frozen weights are not included, with one exception: embeddings whose vocabulary size differs from the model on
    disk, unless `trainable_token_indices` covers every new row; `embeddings` overrides this. Names are peft's; tied
    embeddings appear once. Tensors share memory with the model, as in `state_dict()`.
    """
    inner = adapted_model(model)
    adapter = name or trained_adapter(inner)
    whole = _embeddings_resized(inner, adapter) if embeddings is None else embeddings
    # Embeddings are collected here: peft omits a resized output layer if the input layer is adapted.
    state = dict(peft().get_peft_model_state_dict(inner, adapter_name=adapter, save_embedding_layers=False))
    if whole:
        seen = {tensor.data_ptr() for tensor in state.values()}
        for key, tensor in _embedding_weights(inner).items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                state[key] = tensor
    return {key: tensor.detach() for key, tensor in state.items()}


def saved_adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`adapter_state_dict` for a file that peft reads: tied embeddings that are trained in full are in it twice.

    A file of ours has them once, and the other name in its metadata, which peft does not know.
    """
    state: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in adapter_state_dict(model).items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        state[name] = tensor.clone() if place in seen and tensor.numel() else tensor
        seen.add(place)
    return state


def load_adapter_state_dict(model: nn.Module, state: Mapping[str, Tensor], name: str | None = None) -> None:
    """Load all weights of a model's adapter. Any mismatch of names or shapes is an error that changes nothing.

    `name` chooses one of several adapters; default: the one that is trained.
    """
    inner = adapted_model(model)
    adapter = name or trained_adapter(inner)
    needed = adapter_state_dict(inner, embeddings=False, name=adapter)
    own = needed | adapter_state_dict(inner, embeddings=True, name=adapter)
    own |= {
        key: tensor for key, tensor in _embedding_weights(inner).items() if key in state
    }  # peft has tied ones twice
    wrong = [key for key, tensor in state.items() if key in own and own[key].shape != tensor.shape]
    problems = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (
            ("missing", [key for key in needed if key not in state]),
            ("not in the model", [key for key in state if key not in own]),
            ("of another shape", [f"{key} {tuple(state[key].shape)}/{tuple(own[key].shape)}" for key in wrong]),
        )
        if names
    ]
    if problems:
        do = "Use the adapter, with the same settings, that the weights were saved from."
        for key in wrong:
            if "embed" in key or "wte" in key or "shared" in key:
                rows = state[key].shape[0]
                do = f"The vocabulary was resized: call model.resize_token_embeddings({rows}) first."
        raise DataError(expected("the weights of an adapter like that of the model", "; ".join(problems), do))
    peft().set_peft_model_state_dict(inner, dict(state), adapter_name=adapter)


def save_adapter(
    model: nn.Module, folder: FolderPath, embeddings: bool | None = None, name: str | None = None
) -> list[str]:
    """Write a model's adapter for `load_adapter` and `PeftModel.from_pretrained`. Returns the names of the files.

    `embeddings` and `name` as in `adapter_state_dict`.
    """
    from safetensors.torch import save_file

    inner = adapted_model(model)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    found = adapter_state_dict(inner, embeddings, name)
    save_file({k: t.cpu().contiguous().clone() for k, t in found.items()}, target / WEIGHTS_FILE, {"format": "pt"})
    (target / WEIGHTS_FILE).chmod(0o644)  # safetensors makes it readable by its owner alone
    save_adapter_config(inner, target, name)
    return [CONFIG_FILE, WEIGHTS_FILE]


def save_adapter_config(model: nn.Module, folder: FolderPath, name: str | None = None) -> None:
    """Write the adapter's configuration, without its weights."""
    inner = adapted_model(model)
    config = copy.deepcopy(inner.peft_config[name or trained_adapter(inner)])
    config.inference_mode = True  # for peft; load_adapter sets it to False
    if not config.base_model_name_or_path:  # peft leaves it out for a second adapter
        config.base_model_name_or_path = base_name(inner)
    base = type(inner.get_base_model())
    # Without a task type, peft's Auto classes need the class of the base model.
    mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=None if config.task_type else mapping)


def base_name(model: Any) -> str | None:
    """The name or folder that the base of an adapted model was loaded from."""
    return getattr(model.get_base_model(), "name_or_path", None) or None


def save_adapter_beside(model: nn.Module, weights: Path, subfolder: str | None = None) -> list[str]:
    """Make a checkpoint folder readable for `PeftModel.from_pretrained`: add the configuration and link `weights`.

    As with peft, an adapter with another name than "default" gets a folder of that name; `subfolder` asks for one in
    any case. Links the checkpoint's own file, because the model may have trained on while it was written in the
    background. Returns the names of the files.
    """
    name = trained_adapter(adapted_model(model))
    folder, inside = weights.parent, ""
    if subfolder is not None or (name != _DEFAULT and folder.name != name):
        inside = f"{subfolder or name}/"
        folder = folder / (subfolder or name)
    folder.mkdir(exist_ok=True)
    save_adapter_config(model, folder)
    if weights != folder / WEIGHTS_FILE:
        try:
            os.link(weights, folder / WEIGHTS_FILE)
        except OSError:  # no hard links
            shutil.copyfile(weights, folder / WEIGHTS_FILE)
    return [f"{inside}{CONFIG_FILE}", f"{inside}{WEIGHTS_FILE}"]


def adapter_file(model: nn.Module) -> str:
    """Where peft stores the weights of a model's adapter, relative to the folder of a checkpoint."""
    name = trained_adapter(adapted_model(model))
    return WEIGHTS_FILE if name == _DEFAULT else f"{name}/{WEIGHTS_FILE}"


def trained_adapter(model: Any) -> str:
    """The name of the adapter that is trained.

    peft calls it the active one also if others are active with it. A user may have activated several at once: then it
    is the one with trainable weights.
    """
    active = model.active_adapter
    if isinstance(active, str):
        return active
    trainable = [f"{name}." for name, parameter in model.named_parameters() if parameter.requires_grad]
    return next((name for name in active if any(f".{name}." in key for key in trainable)), active[-1])


def active_adapters(model: nn.Module) -> tuple[str, ...]:
    """The names of the adapters that a model applies."""
    inner = adapted_model(model)
    active = getattr(inner.base_model, "active_adapters", None)
    if inner.peft_config[inner.active_adapter].is_prompt_learning or not isinstance(active, list):
        return (inner.active_adapter,)
    return tuple(active)


def load_adapter(model: nn.Module, folder: FolderPath, name: str | None = None) -> nn.Module:
    """Load weights into an adapted model, in place, or add the saved adapter to a plain model.

    With a `name` that an adapted model does not have yet, add the saved adapter under it. Returns the adapted model,
    ready to train. A resized vocabulary must already have its new size.
    """
    source = Path(folder)
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (source / file).is_file():
            pickled = " but adapter_model.bin, which may hold code" if (source / "adapter_model.bin").is_file() else ""
            raise DataError(expected(f"the folder of an adapter, with {file}", f"'{source}', which has none{pickled}"))
    state = read_weights(source, [WEIGHTS_FILE])
    if not is_adapted(model) or (name is not None and name not in adapted_model(model).peft_config):
        config = peft().PeftConfig.from_pretrained(str(source))
        if getattr(config, "megatron_config", None) is not None:
            do = "peft would import any module that it names."
            raise DataError(expected(f"an adapter without megatron_config in '{source}'", config.megatron_config, do))
        config.inference_mode = False
        try:
            if is_adapted(model):
                adapted_model(model).add_adapter(name, config)
            else:
                model = peft().get_peft_model(unwrap_model(model), config, adapter_name=name or _DEFAULT)
        except ValueError as error:
            what = f"the model that the adapter in '{source}' was made for"
            raise BadArgument(expected(what, f"a {type(model).__name__}: {error}")) from error
    load_adapter_state_dict(model, state, name)
    return model


def _embeddings_resized(model: Any, name: str) -> bool:
    """Whether embeddings must be saved: the vocabulary size differs from disk, and new rows are not saved separately.

    False for a model that did not come from disk, or whose folder is gone. `trainable_token_indices` saves new rows
    separately if it covers all of them, in the input and, unless tied, in the output.
    """
    base = model.get_base_model()
    rows, before = vocabulary_size(base), base_vocabulary_size(base)
    if rows is None or before is None or rows == before:
        return False
    indices = getattr(model.peft_config[name], "trainable_token_indices", None)
    if not indices or rows < before:
        return True
    lists = list(indices.values()) if isinstance(indices, dict) else [indices]
    tied = bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
    enough = len(lists) >= (1 if tied or base.get_output_embeddings() is None else 2)
    return not (enough and all(set(range(before, rows)) <= set(given) for given in lists))


def vocabulary_size(model: nn.Module) -> int | None:
    """Rows of a model's input embeddings; None if it has none."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.ndim == 2 else None


def base_vocabulary_size(model: nn.Module) -> int | None:
    """Vocabulary size of the model on disk that this one was loaded from; None if unknown."""
    config, source = getattr(model, "config", None), getattr(model, "name_or_path", None)
    if not source or not hasattr(type(config), "from_pretrained"):
        return None
    try:
        stored = type(config).from_pretrained(source, local_files_only=True)  # type: ignore[union-attr]
    except (OSError, ValueError):  # moved or deleted since
        return None
    size = getattr(stored.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def _embedding_weights(model: Any) -> dict[str, Tensor]:
    """The frozen weights of input and output embeddings, except those with a trained copy, which is saved anyway."""
    base = model.get_base_model()
    if vocabulary_size(base) is None:
        return {}
    layers = [layer for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if layer is not None]
    weights: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if any(module is layer for layer in layers) and not hasattr(module, "modules_to_save"):
            weights.update(module.state_dict(prefix=f"{name}."))
    return {name: w for name, w in weights.items() if not any(part in name for part in _TRAINED)}

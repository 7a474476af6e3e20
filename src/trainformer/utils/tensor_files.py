"""Tensors as files: weights as safetensors, other trees as torch files. Reading executes nothing."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainformer.core.errors import DataError
from trainformer.utils.files import check_archive, decode_json

_MOST_PER_SHARD = 5_000_000_000
_ALIASES = "trainformer_aliases"


def write_weights(folder: Path, stem: str, state: Mapping[str, Tensor], most: int = _MOST_PER_SHARD) -> list[str]:
    """Write weights under their own names, in several files if they are large (with the index that HF reads).

    Tied weights are written once; the other names are kept in the file's metadata.
    """
    tensors, aliases = untied(state)
    shards = _shards(tensors, most)
    metadata = {"format": "pt", _ALIASES: json.dumps(aliases)}
    if len(shards) == 1:
        return [save(shards[0], folder, f"{stem}.safetensors", metadata)]
    names: list[str] = []
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        names.append(save(shard, folder, name, metadata))
        index |= dict.fromkeys(shard, name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    name = f"{stem}.safetensors.index.json"
    (folder / name).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2))
    return [*names, name]


def read_weights(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Read weights back, tied names included."""
    state: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name in names:
        if not name.endswith(".safetensors"):
            continue
        try:
            with safe_open(folder / name, framework="pt") as file:
                aliases |= decode_json((file.metadata() or {}).get(_ALIASES, "{}"))
                state |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
            tied = {alias: state[key] for alias, key in aliases.items()}
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{folder / name} cannot be read as safetensors: it is damaged. ({error})") from error
        state |= tied
    return state


def write_tensors(folder: Path, stem: str, state: Any) -> list[str]:
    """Write a tree of tensors and plain values."""
    torch.save(state, folder / f"{stem}.pt")
    return [f"{stem}.pt"]


def read_tensors(path: Path) -> Any:
    """Read such a tree. Nothing in the file is executed: what is not tensors and plain values is refused."""
    check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path} holds objects other than tensors and plain values, and loading them could execute code; "
            f"it was not loaded. ({str(error).splitlines()[0]})"
        ) from error
    except Exception as error:
        raise DataError(f"{path} cannot be read as a checkpoint: it is damaged or not one. ({error})") from error


def save(tensors: dict[str, Tensor], folder: Path, name: str, metadata: dict[str, str]) -> str:
    """Write tensors that share no memory to one file of safetensors; its name."""
    save_file(tensors, folder / name, metadata)
    (folder / name).chmod(0o644)  # safetensors makes it readable by its owner alone, unlike every other file here
    return name


def untied(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that share no memory, and which names are the same tensor as another."""
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        tensor = tensor.detach()
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in first:
            aliases[name] = first[place]
            continue
        first[place] = name
        storage = tensor.untyped_storage().data_ptr()
        # A view of another tensor's memory (a slice of a fused matrix) becomes a tensor of its own.
        shared = storage in storages
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()
        storages.add(storage)
    return tensors, aliases


def _shards(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if shards[-1] and size + bytes_ > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += bytes_
    return shards

"""The states inside checkpoints and files, one component at a time, and exporting their weights.

Nothing that is read is executed. jax is imported only for checkpoints of JAX runs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from trainformer.checkpointing import Checkpoint
from trainformer.checkpointing.multi_rank import files_for_rank
from trainformer.checkpointing.tools.listing import JAX_STATE, AnyPath, find
from trainformer.checkpointing.torch_files import read_component, read_single_file
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.distributed.strategy import unsharded
from trainformer.utils.files import sync
from trainformer.utils.tensor_files import read_tensors, read_weights
from trainformer.utils.tree_files import read_tree

_PARAMS = "params/"


class States(Mapping[str, Any]):
    """The components of a checkpoint or file by key. Those of a checkpoint are verified and read on access."""

    def __init__(self, source: Checkpoint | Path) -> None:
        self._source = source
        if isinstance(source, Checkpoint):
            self._keys = [key for key in source.manifest.components if key in source.manifest.formats]
        else:
            self._loaded = read_file(source)
            self._keys = list(self._loaded)

    @property
    def path(self) -> Path:
        """The path of the checkpoint or file."""
        return self._source.path if isinstance(self._source, Checkpoint) else self._source

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys  # without reading it

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        source = self._source
        if not isinstance(source, Checkpoint):
            return self._loaded[key]
        records = source.manifest.components[key]
        dataclasses.replace(source.manifest, components={key: records}).verify(source.path)
        names = files_for_rank([r.name for r in records], rank=0)
        format = source.manifest.formats[key]
        if format == "orbax":
            return read_arrays(source.path / key)
        if format == "tree":
            return read_tree(source.path, names)
        return unsharded(read_component(source.path, names, format))


def read_file(path: Path) -> dict[str, Any]:
    """The components of a file that `Trainer.save` wrote; of a file of weights, the one component ``model``."""
    if path.suffix == ".safetensors":
        return {"model": read_weights(path.parent, [path.name])}
    content = read_tensors(path)
    if isinstance(content, dict) and "components" in content and "format" in content:
        return read_single_file(path)
    if isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values()):
        return {"model": dict(content)}
    raise DataError(expected("a file written by Trainer.save, or one of weights by name", f"{path} with other content"))


def read_arrays(folder: Path) -> dict[str, Any]:
    """The train state of a JAX run by name, as tensors."""
    require("orbax.checkpoint", "jax", "to read a checkpoint of a run on JAX")
    from trainformer.checkpointing.jax_files import read_arrays

    return {name: _tensor(array) for name, array in read_arrays(folder).items()}


def parameters_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the model."""
    return {name.removeprefix(_PARAMS): value for name, value in state.items() if name.startswith(_PARAMS)}


def _tensor(array: np.ndarray) -> Any:
    if array.dtype.name == "bfloat16":  # NumPy knows it by name only
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    if array.dtype == np.uint32:  # PRNG keys; torch supports few operations on uint32
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(np.array(array))


def export_weights(path: AnyPath, out: AnyPath, ema: bool | str = False) -> Path:
    """Export the weights alone, under the model's own names and in their dtypes; returns the path.

    The suffix of `out` selects the format: ``.safetensors``, or ``.pt`` for a state dict. ``ema=True`` exports the
    weights of the EMA callback instead; if a run had several, pass the component's key (``"callback.EMA-2"``).
    """
    target = Path(out)
    if target.suffix not in (".safetensors", ".pt"):
        raise BadArgument(expected("a file that ends in .safetensors or .pt", str(out)))
    states = States(find(path))
    weights = _average(states, ema) if ema else _model(states)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if target.suffix == ".pt":
            torch.save(dict(weights), draft)
        else:
            # Under all names, so that readers need not know which weights are tied; safetensors forbids shared memory.
            save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, draft, {"format": "pt"})
        sync(draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def _model(states: States) -> Mapping[str, Tensor]:
    if JAX_STATE in states:
        return parameters_of(states[JAX_STATE])
    if "model" not in states:
        raise DataError(f"{states.path} has no weights of a model; it has {', '.join(states)}.")
    weights: Mapping[str, Tensor] = states["model"]
    return weights


def _average(states: States, ema: bool | str) -> Mapping[str, Tensor]:
    averages = [key for key in states if key.removeprefix("callback.").split("-")[0] == "EMA"]
    if isinstance(ema, str):
        averages = [key for key in states if key == ema]
    if len(averages) != 1:
        kept = ", ".join(averages or states)
        raise DataError(
            f"Expected one EMA in {states.path}, received {len(averages)} ({kept}). "
            + ("Pass the key of one of them as ema." if averages else "Was the run trained with the EMA callback?")
        )
    key = averages[0]
    if JAX_STATE in states:  # of a JAX run: the arrays are a component of their own, without frozen parameters
        return {**parameters_of(states[JAX_STATE]), **parameters_of(states[key.replace("callback.", "average.", 1)])}
    weights: Mapping[str, Tensor] = states[key]["model"]
    return weights

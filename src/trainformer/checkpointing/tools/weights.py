"""The weights of a checkpoint as a file that needs no trainformer to be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainformer.checkpointing.tools.arrays import STATE, parameters_of
from trainformer.checkpointing.tools.places import AnyPath, find
from trainformer.checkpointing.tools.reading import States
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.utils.files import sync


def export_weights(path: AnyPath, out: AnyPath, ema: bool | str = False) -> Path:
    """Write the weights alone, under the model's own names and in the types they have; where they were written.

    The ending of `out` decides: ``.safetensors``, or ``.pt`` for a state dict. ``ema=True`` takes the average that the
    EMA callback keeps instead; if a run had several, its component's key says which (``"callback.EMA-2"``).
    """
    target = Path(out)
    write = _WRITERS.get(target.suffix)
    if write is None:
        raise BadArgument(expected(f"a file that ends in {' or '.join(_WRITERS)}", str(out)))
    states = States(find(path))
    weights = _average(states, ema) if ema else _model(states)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(weights, draft)
        sync(draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def _model(states: States) -> Mapping[str, Tensor]:
    if STATE in states:
        return parameters_of(states[STATE])
    if "model" not in states:
        raise DataError(f"{states.path} has no weights of a model; it has {', '.join(states)}.")
    return states["model"]


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
    return states[averages[0]]["model"]


def _write_safetensors(weights: Mapping[str, Tensor], path: Path) -> None:
    # Under all names: whoever reads the file need not know which weights are tied. They must not share memory there.
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})


def _write_state_dict(weights: Mapping[str, Tensor], path: Path) -> None:
    torch.save(dict(weights), path)


_WRITERS: dict[str, Callable[[Mapping[str, Tensor], Path], None]] = {
    ".safetensors": _write_safetensors,
    ".pt": _write_state_dict,
}

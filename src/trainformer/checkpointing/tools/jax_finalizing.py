"""`finalize` for runs on JAX: LoRA merged, weights in the format of HuggingFace, compared with the trained model.

The trained model is built from the record and the arrays of the checkpoint, with LoRA unmerged. The files that were
written are read back, and must give the same outputs. Imports no torch, but for GGUF.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from trainformer.checkpointing import Checkpoint
from trainformer.checkpointing.tools.choosing import settings_in
from trainformer.checkpointing.tools.finalized import GGUF, REPORT, Finalized, drafting, publish, weights_size
from trainformer.checkpointing.tools.jax_models import FILE as RECORD
from trainformer.checkpointing.tools.jax_models import TrainerRecord, read_weights
from trainformer.checkpointing.tools.model_card import write_card
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.models.jax.huggingface import load_model, save_model
from trainformer.models.jax.lora import merge_lora
from trainformer.models.jax.reward import RewardModel
from trainformer.models.jax.t5 import T5

_ARGUMENTS = "training_arguments.json"
_TOKENS = 16
_WEIGHTS = "model.safetensors"
_ADVICE = {
    "quantize": "Nothing quantises a run on JAX: finalize it without.",
    "base": "The checkpoint of a run on JAX holds the base model too.",
    "device": "Set JAX_PLATFORMS before the program starts.",
}


def finalize_jax(
    checkpoint: Checkpoint,
    target: Path,
    note: str | None,
    given: Mapping[str, Any],
    gguf: str | None,
    ema: bool | str | None,
) -> Finalized:
    """`finalize` of a checkpoint of a run on JAX. `given` are options that only runs on torch take."""
    for name, value in given.items():
        if value is not None:
            raise BadArgument(expected(f"no {name} for a run on JAX", str(value), _ADVICE[name]))
    record, settings = TrainerRecord.read(checkpoint.path), settings_in(checkpoint)
    average, weights = read_weights(checkpoint, ema)
    kind = record.task_type
    if gguf is not None and kind != "CAUSAL_LM":
        raise BadArgument(expected("a causal language model to write as GGUF", record.trainer, "Leave gguf out."))
    with drafting(target) as draft:
        folder = draft / "whole"
        folder.mkdir()
        made = _weights_alone(weights, folder) if record.config is None else _merged(record, weights, folder)
        for asset in checkpoint.manifest.components.get("assets", []):
            name = Path(asset.name).name
            if name not in (RECORD, _ARGUMENTS) and not name.endswith(".safetensors") and not (folder / name).exists():
                shutil.copyfile(checkpoint.path / asset.name, folder / name)
        if gguf is not None:
            from trainformer.checkpointing.tools.gguf_files import write_gguf

            write_gguf(folder, gguf)
        facts: dict[str, Any] = {
            "name": target.name,
            "kind": None if kind is None else kind.lower(),
            "base": record.base,
        }
        facts |= {"adapter": made.get("adapter"), "ema": average, "step": checkpoint.step}
        write_card(folder, checkpoint, settings, facts)
        result = Finalized(
            out=target,
            checkpoint=checkpoint.path,
            step=checkpoint.step,
            files=tuple(sorted([*(path.name for path in folder.iterdir()), REPORT])),
            size=weights_size(folder),
            ema=average,
            gguf=gguf,
            notes=(note,) if note else (),
            **made,
        )
        assert GGUF in result.files or gguf is None
        (folder / REPORT).write_text(json.dumps(result.as_dict(), indent=2))
        publish(folder, target)
    return result


def _merged(record: TrainerRecord, weights: Mapping[str, np.ndarray], folder: Path) -> dict[str, Any]:
    """Write the model with LoRA merged, and compare what is read back with the model as it was trained."""
    model = record.build_model(weights)
    model.eval()
    size = sum(array.nbytes for array in weights.values())
    wanted, adapter = _outputs(model), None if record.lora is None else "LoRA"
    save_model(merge_lora(model) if adapter else model, folder)
    found = load_model(folder, dtype=None)
    found.eval()
    _check_equal(wanted, _outputs(found), folder, is_merged=adapter is not None)
    return {"size_before": size, "adapter": adapter}


def _weights_alone(weights: Mapping[str, np.ndarray], folder: Path) -> dict[str, Any]:
    """Of a module that no file can build again: its weights by path."""
    file = folder / _WEIGHTS
    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, file)
    found = load_file(file)
    if found.keys() != weights.keys() or not all(np.array_equal(found[name], weights[name]) for name in weights):
        raise DataError(f"{file} was read back with other weights than were written.")
    return {"size_before": weights_size(folder), "compared": "weights"}


def _outputs(model: Any) -> np.ndarray:
    """The outputs of a model for random tokens or for a random image, in float32."""
    random, config = np.random.default_rng(0), model.config
    if hasattr(config, "vocab_size"):
        length = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
        inputs = jnp.asarray(random.integers(0, config.vocab_size, (2, length)), jnp.int32)
    else:
        side = getattr(config, "image_size", None) or 64
        inputs = jnp.asarray(random.standard_normal((2, side, side, config.num_channels)), jnp.float32)
    options: dict[str, Any] = {}
    if isinstance(model, T5):
        options["decoder_input_ids"] = inputs
    elif isinstance(model, RewardModel):
        options["last"] = jnp.full(len(inputs), inputs.shape[1] - 1)
    return np.asarray(jax.jit(lambda x: model(x, **options).astype(jnp.float32))(inputs))


def _check_equal(wanted: np.ndarray, found: np.ndarray, folder: Path, is_merged: bool) -> None:
    # A merge rounds every weight to the dtype of the base, and its sums come in another order.
    rounding = (1e-4 if is_merged else 1e-5) * float(np.abs(wanted).max())
    difference = float(np.abs(wanted - found).max()) if wanted.shape == found.shape else float("inf")
    if not difference <= rounding:
        what = f"{folder.name} to give the outputs of the trained model when it is read back"
        raise DataError(expected(what, f"a difference of {difference:.3g}", "Nothing is kept."))

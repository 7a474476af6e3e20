"""`finalize` for runs on torch: which weights are meant, and what goes into the folder.

How a model of transformers is loaded, merged, quantised and compared is in `deployable`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainformer.adapters.saved import FILE as ADAPTERS
from trainformer.adapters.saved import SavedAdapters
from trainformer.adapters.state import CONFIG_FILE as ADAPTER_CONFIG
from trainformer.adapters.state import WEIGHTS_FILE as ADAPTER_WEIGHTS
from trainformer.backends.torch.quantize import RECIPES, Recipe, recipe_named
from trainformer.checkpointing import Checkpoint
from trainformer.checkpointing.tools.choosing import choose_ema
from trainformer.checkpointing.tools.deployable import MODEL_CONFIGS, WEIGHTS, Request, make, quiet
from trainformer.checkpointing.tools.finalized import (
    GGUF,
    NO_QUANTISATION,
    REPORT,
    Finalized,
    drafting,
    publish,
    weights_size,
)
from trainformer.checkpointing.tools.gguf_files import check_gguf, write_gguf
from trainformer.checkpointing.tools.listing import AnyPath
from trainformer.checkpointing.tools.model_card import base_model, write_card
from trainformer.checkpointing.tools.ollama import write_modelfile
from trainformer.checkpointing.tools.states import States, export_weights
from trainformer.core.errors import BadArgument, DataError, expected


def finalize_torch(
    checkpoint: Checkpoint,
    target: Path,
    note: str | None,
    *,
    quantize: str | None,
    base: AnyPath | None,
    ema: bool | str | None,
    device: str | None,
    gguf: str | None,
) -> Finalized:
    """`finalize` of a checkpoint of a run on torch; `note` is what is to be told about the choice of it."""
    if gguf is not None:
        check_gguf(gguf)
    states = States(checkpoint)
    settings = states["context"]["config"] if "context" in states else {}
    request = Request(checkpoint, settings, _recipe(quantize, settings), base, choose_ema(states, ema), device)
    if base is not None and not request.is_adapter:
        raise BadArgument(expected("a base for an adapter's run alone", str(base), "This run holds a whole model."))
    _check_gguf_fits(request, gguf)
    with drafting(target) as draft:
        folder = draft / "whole"
        folder.mkdir()
        made = _weights_alone(request, quantize, folder) if request.kind is None else make(request, draft)
        # The tokenizer and whatever else the task put beside the weights; the model's own files are new.
        for record in checkpoint.manifest.components.get("assets", []):
            if Path(record.name).name not in {*MODEL_CONFIGS, ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTERS}:
                shutil.copyfile(request.folder / record.name, folder / record.name)
        notes = (*made.pop("notes", ()), *([note] if note else []), *_for_runtimes(request, folder, gguf))
        _describe(request, folder, target.name, made.get("adapter"))
        result = Finalized(
            out=target,
            checkpoint=request.folder,
            step=checkpoint.step,
            files=tuple(sorted([*(path.name for path in folder.iterdir()), REPORT])),
            size=weights_size(folder),
            ema=request.ema,
            trained_for=request.trained_for,
            gguf=gguf,
            notes=notes,
            **made,
        )
        (folder / REPORT).write_text(json.dumps(result.as_dict(), indent=2))
        publish(folder, target)
    return result


def _describe(request: Request, folder: Path, name: str, adapter: str | None) -> None:
    """Write the model card."""
    saved = SavedAdapters.read(request.folder)
    base = base_model(folder, str(request.base) if request.base else None if saved is None else saved.base)
    recipe = None if request.recipe is None or request.kind is None else request.recipe.name
    facts: dict[str, Any] = {"name": name, "kind": request.kind, "base": base, "adapter": adapter, "recipe": recipe}
    facts |= {"ema": request.ema, "step": request.checkpoint.step}
    write_card(folder, request.checkpoint, request.settings, facts)


def _check_gguf_fits(request: Request, gguf: str | None) -> None:
    if gguf is None:
        return
    if request.kind != "causal_lm":
        what = request.settings.get("task_type", "a task")
        raise BadArgument(expected("a causal language model to write as GGUF", what, "Leave gguf out."))
    if request.recipe is not None:
        do = "Pass quantize='none', and gguf='q8_0' for weights of 8 bits."
        raise BadArgument(expected("a model in full precision to write as GGUF", request.recipe.name, do))


def _for_runtimes(request: Request, folder: Path, gguf: str | None) -> list[str]:
    """Write what llama.cpp and Ollama need besides; returns notes."""
    if request.kind != "causal_lm" or request.recipe is not None:
        return []
    with quiet():
        if gguf is not None:
            write_gguf(folder, gguf)
        note = write_modelfile(folder, f"./{GGUF}" if gguf is not None else ".")
    return [note] if note else []


def _recipe(quantize: str | None, settings: Mapping[str, Any]) -> Recipe | None:
    trained_for = settings.get("qat_recipe")
    if quantize == NO_QUANTISATION or (quantize is None and trained_for is None):
        return None
    if quantize is None:
        return RECIPES.get(str(trained_for))
    recipe = recipe_named(quantize, "quantize")
    if trained_for not in (None, quantize):
        what = f"quantize to be {trained_for!r}, for which the run was trained"
        do = "The weights suit that rounding and no other. Pass 'none' for a model that is not quantised."
        raise BadArgument(expected(what, quantize, do))
    return recipe


def _weights_alone(request: Request, quantize: str | None, folder: Path) -> dict[str, Any]:
    """Of a model that nothing on disk can build again: its weights under its own names."""
    wanted = request.recipe is not None and quantize is not None
    if wanted or request.is_adapter:
        raise BadArgument(
            f"Expected a model of transformers to {'quantise' if wanted else 'merge an adapter into'}, received the "
            f"weights of a {request.settings.get('task_type', 'task')}: they do not say how to build the model again. "
            "Do it where the model is: see docs/quantization.md, 'Other models'."
        )
    export_weights(request.folder, folder / WEIGHTS, ema=request.ema or False)
    states = States(request.checkpoint)
    meant = states["model"] if request.ema is None else states[request.ema]["model"]
    found = States(folder / WEIGHTS)["model"]
    if found.keys() != meant.keys() or not all(torch.equal(found[name], meant[name]) for name in meant):
        raise DataError(f"{folder / WEIGHTS} was read back with other weights than were written.")
    recipe = request.recipe
    note = () if recipe is None else (f"trained for {recipe.name}, and not quantised: see docs/quantization.md",)
    return {"size_before": weights_size(folder), "compared": "weights", "notes": note}

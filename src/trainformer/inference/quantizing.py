"""Quantize a loaded model in memory, with the recipes of `finalize`."""

from __future__ import annotations

from typing import Any

from trainformer.adapters.export import merge_adapter
from trainformer.backends.torch.quantize import Recipe, layers_for, torchao
from trainformer.core.errors import BadArgument, expected


def quantize_model(task: Any, recipe: Recipe) -> None:
    """Merge the adapter of a task's model, and quantize its linear layers; it is for inference only afterwards."""
    model = merge_adapter(task.model).eval()
    layers = layers_for(model, recipe)
    if not layers.chosen:
        raise BadArgument(f"Expected linear layers to quantize to {recipe.name!r}, received a model with {layers}.")
    chosen = set(layers.chosen)
    try:
        torchao().quantize_(model, recipe.base(), filter_fn=lambda _, name: name in chosen)
    except Exception as error:  # missing kernels, an old GPU: torchao raises all sorts
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"a machine that can quantize to {recipe.name!r}" + (" (a recent GPU)" if recipe.needs_gpu else "")
        raise BadArgument(expected(what, first, "Choose another recipe.")) from error
    task.model = model

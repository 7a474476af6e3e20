"""Merge any adapter into its model, and export the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from trainformer.adapters.base import FolderPath, adapted_model, is_adapted, unwrap_model
from trainformer.adapters.lora import LoRA
from trainformer.adapters.prefix import PrefixTuning
from trainformer.adapters.qlora import QLoRA, is_quantised
from trainformer.adapters.state import trained_adapter

WEIGHTS_FILE = "model.safetensors"


def merge_adapter(model: nn.Module) -> nn.Module:
    """Merge the adapter of a model. Returns a plain model; a model without an adapter is returned unchanged."""
    if not is_adapted(model):
        return unwrap_model(model)
    inner = adapted_model(model)
    if inner.peft_config[trained_adapter(inner)].is_prompt_learning:
        return PrefixTuning().merge(inner)
    return (QLoRA if is_quantised(inner) else LoRA)().merge(inner)


def merge_and_export(model: nn.Module, folder: FolderPath, tokenizer: Any = None) -> list[str]:
    """Merge the adapter and write the plain model. Returns the names of the files; the adapted model is consumed.

    A transformers model is written with `save_pretrained`, so `AutoModel...from_pretrained` opens the folder; any other
    module as ``model.safetensors``. `tokenizer` is a tokenizer or processor to save along. A QLoRA model is dequantised
    first.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    plain = merge_adapter(model)
    save = getattr(plain, "save_pretrained", None)
    if callable(save):
        save(str(target))
    else:
        from safetensors.torch import save_model

        save_model(plain, str(target / WEIGHTS_FILE))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(target))
    return sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())

"""From an adapted model to a folder that anybody opens without knowing of the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from trainformer.adapters.base import AnyFolder, adapted_model, is_adapted, unwrapped
from trainformer.adapters.lora import LoRA
from trainformer.adapters.prefix import PrefixTuning
from trainformer.adapters.qlora import QLoRA, is_quantised

WEIGHTS_FILE = "model.safetensors"


def merge(model: nn.Module) -> nn.Module:
    """The plain model that an adapted one stands for, whatever its adapter; a plain model as it is."""
    if not is_adapted(model):
        return unwrapped(model)
    inner = adapted_model(model)
    if inner.peft_config["default"].is_prompt_learning:
        return PrefixTuning().merge(inner)
    return (QLoRA if is_quantised(inner) else LoRA)().merge(inner)


def merge_and_export(model: nn.Module, folder: AnyFolder, tokenizer: Any = None) -> list[str]:
    """Merge the adapter and write the plain model; the names of the files. The adapted model is used up.

    A model of transformers is written by its own `save_pretrained` (configuration and generation settings beside the
    weights), so that `AutoModel...from_pretrained` opens the folder; any other module as ``model.safetensors`` under
    its own names. `tokenizer` is anything with `save_pretrained`: a tokenizer or a processor. A QLoRA model is
    dequantised first.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    plain = merge(model)
    save = getattr(plain, "save_pretrained", None)
    if callable(save):
        save(str(target))
    else:
        from safetensors.torch import save_model

        save_model(plain, str(target / WEIGHTS_FILE))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(target))
    return sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())

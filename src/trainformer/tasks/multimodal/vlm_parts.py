"""The parts of a vision-language model: which are trained, and which parameters could never be.

Owns the names of the parts. A parameter that wants a gradient and never gets one stops distributed training, which
waits for it: LLaVA reads its vision tower before the last layer, so that layer is of no use.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.adapters.base import unwrap_model
from trainformer.adapters.targets import language_model_name
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.models.modes import eval_mode

PARTS = ("vision", "projector", "language")
_TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower")  # as transformers calls them
_BETWEEN = ("projector", "merger", "connector", "aligner")  # in names of what leads from images to words


def check_parts(freeze: str | Sequence[str]) -> tuple[str, ...]:
    """Names of parts, checked.

    >>> check_parts("vision")
    ('vision',)
    """
    names = (freeze,) if isinstance(freeze, str) else tuple(freeze)
    for name in names:
        if name not in PARTS:
            what = f"freeze to be 'auto' or some of {', '.join(PARTS)}"
            raise BadArgument(expected(what, name, did_you_mean(str(name), [*PARTS, "auto"])))
    if set(names) == set(PARTS):
        raise BadArgument(expected("freeze to leave something to train", list(names), "Leave one of them out."))
    return names


def parts_of(model: nn.Module) -> dict[str, str]:
    """The part that each parameter of a model belongs to, by name.

    What is neither the language model nor the vision tower leads from one to the other. In Qwen-VL that is inside of
    the vision tower.
    """
    language = language_model_name(model)
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    in_head = {id(parameter) for parameter in head.parameters()} if isinstance(head, nn.Module) else set()
    return {
        name: "language" if name.startswith(f"{language}.") or id(parameter) in in_head else _part(name)
        for name, parameter in model.named_parameters()
    }


def _part(name: str) -> str:
    if "prompt_encoder" in name.split("."):  # peft's prefix, which is put before the words
        return "language"
    if any(word in name for word in _BETWEEN):
        return "projector"
    return "vision" if any(step in _TOWERS for step in name.split(".")) else "projector"


def freeze_parts(model: nn.Module, names: Sequence[str]) -> None:
    """Take parts of a model out of training."""
    parts = parts_of(model) if names else {}
    for name, parameter in model.named_parameters():
        if parts.get(name) in names:
            parameter.requires_grad_(False)


def seeing_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters that only images give gradients to: those of vision tower and projector."""
    parts = parts_of(model)
    return {n: p for n, p in model.named_parameters() if p.requires_grad and parts[n] != "language"}


def parameters_without_gradient(model: nn.Module, pixels: Mapping[str, Tensor]) -> list[str]:
    """Names of trainable parameters that get no gradient from an image, found by one backward pass."""
    seeing = seeing_parameters(model)
    look: Any = getattr(unwrap_model(model), "get_image_features", None)
    if not seeing or look is None:
        return []
    device = next(iter(seeing.values())).device
    known = inspect.signature(look).parameters
    inputs = {name: value.to(device) for name, value in pixels.items() if name in known}
    with eval_mode(model), torch.enable_grad():
        features = look(**inputs)
        features = getattr(features, "pooler_output", features)
        features = features if isinstance(features, Tensor) else torch.cat([part.flatten() for part in features])
        gradients = torch.autograd.grad(features.float().sum(), list(seeing.values()), allow_unused=True)
    return [name for name, gradient in zip(seeing, gradients, strict=True) if gradient is None]

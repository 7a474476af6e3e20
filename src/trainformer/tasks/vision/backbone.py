"""Backbones by name: finding, building and describing timm models.

Owns every call into timm. What a task needs to know of a model beside its weights (the size and statistics of the
images it was made for) is a `BackboneConfig`; a module that says nothing of itself gets ImageNet's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require


@dataclass(frozen=True)
class BackboneConfig:
    """The images a backbone was made for."""

    size: tuple[int, int] = (224, 224)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"
    fixed_size: bool = False  # position embeddings and the like: other sizes must be asked for when building


class Unbuilt(nn.Module):
    """Stands for a model as long as the number of its classes is unknown."""

    def forward(self, images: Tensor) -> Tensor:
        """Say what is missing."""
        raise BadArgument(
            "Expected a model, received none: the number of classes is not known yet. Pass num_classes, or call "
            "configure(info) with what the data say (Trainer does)."
        )


def check_backbone(name: str) -> None:
    """Refuse a name that timm does not know, with those it may have been meant to be."""
    timm = _timm()
    if ":" in name:  # 'hf-hub:...' and 'local-dir:...' are looked up when building
        return
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        hint = did_you_mean(architecture, timm.list_models()) or "timm.list_models() lists them all."
        raise BadArgument(expected("backbone to be the name of a timm model", name, hint))
    tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", pretrained=True)]
    if tag and tag not in tags:
        known = f"Known for {architecture}: {', '.join(tags)}." if tags else f"{architecture} has no such variants."
        raise BadArgument(expected("backbone to name weights that timm knows", name, known))


def build_backbone(
    name: str, *, num_classes: int, in_chans: int, pretrained: bool, image_size: tuple[int, int] | None, options: Any
) -> nn.Module:
    """A timm model with a head of `num_classes`."""
    options = dict(options)
    if image_size is not None and "img_size" not in options and _has_fixed_size(name):
        options["img_size"] = image_size
    try:
        return _timm().create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_chans, **options)
    except TypeError as error:
        given = ", ".join(sorted(options)) or "none"
        raise BadArgument(
            f"Expected arguments that {name!r} takes, received one it does not ({error}). Look through image_size, "
            f"drop_rate, drop_path_rate and model_kwargs (passed on: {given})."
        ) from error
    except Exception as error:  # whatever a download, a hub or a file may raise
        if not pretrained:
            raise
        raise BadArgument(
            f"Expected to find the pretrained weights of {name!r}, received {type(error).__name__}: {error} "
            "Pass pretrained=False to start from random weights, or name a file with "
            "model_kwargs={'pretrained_cfg_overlay': {'file': path}}."
        ) from error


def describe(model: nn.Module) -> BackboneConfig:
    """The images a model was made for, by its own account where it gives one."""
    own = getattr(model, "pretrained_cfg", None)
    if not isinstance(own, Mapping) or not own:
        return BackboneConfig()
    config = require("timm.data", "vision", "for backbones by name").resolve_model_data_config(model)
    return BackboneConfig(
        size=tuple(config["input_size"][1:]),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"] if config["interpolation"] != "random" else "bilinear",
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
        fixed_size=bool(own.get("fixed_input_size", False)),
    )


def outputs_of(model: nn.Module) -> int | None:
    """Number of logits a module says it gives; None if it does not say."""
    number = getattr(model, "num_classes", None)
    return number if isinstance(number, int) else None


def _has_fixed_size(name: str) -> bool:
    config = _timm().get_pretrained_cfg(name) if ":" not in name else None
    return bool(config is not None and config.fixed_input_size)


def _timm() -> ModuleType:
    return require("timm", "vision", "for backbones by name")

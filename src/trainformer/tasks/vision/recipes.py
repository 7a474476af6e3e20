"""Training recipes: named sets of task arguments and trainer settings. Explicit arguments take precedence.

`modern` combines DeiT (Touvron et al. 2021), Swin (Liu et al. 2021), ConvNeXt (Liu et al. 2022) and "ResNet strikes
back" (Wightman et al. 2021), which agree on most values. They come from runs of 300 epochs on a million images; small
images get gentler values.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from trainformer.core.errors import check_choice
from trainformer.core.optional import require
from trainformer.models.backbones import timm_name

NAMES = ("modern",)

_ARGUMENTS: dict[str, Any] = {
    "augment": "randaugment",
    "mixup": 0.8,
    "cutmix": 1.0,
    "mixup_off_last": 0.1,  # the last tenth of the run trains on unmixed images, as in evaluation
    "random_erasing": 0.25,
    "label_smoothing": 0.1,
}

# Small images leave little to crop, and their datasets are mostly small: shifts instead of crops, little mixup, no
# color augmentation, no flips (they may be digits or letters).
_SMALL_SIDE = 64
_SMALL: dict[str, Any] = {"augment": "crop", "mixup": 0.2, "cutmix": 0.0, "random_erasing": 0.0}

# Stochastic depth by timm module. Other models keep timm's default.
_DROP_PATH = {
    "vision_transformer": 0.1,
    "deit": 0.1,
    "beit": 0.1,
    "eva": 0.1,
    "cait": 0.1,
    "xcit": 0.1,
    "convnext": 0.1,
    "swin_transformer": 0.2,
    "swin_transformer_v2": 0.2,
    "maxxvit": 0.2,
    "efficientnet": 0.2,
    "resnet": 0.05,
}
_TRANSFORMERS = (
    "vision_transformer",
    "deit",
    "beit",
    "eva",
    "cait",
    "xcit",
    "swin_transformer",
    "swin_transformer_v2",
    "maxxvit",
)

# AdamW's learning rate at batch size 1024. It scales with the square root of the batch size, as gradient noise does:
# with linear scaling (for SGD) a batch of 64 would get a quarter of the rate it can use.
_LR_TRANSFORMER, _LR_OTHER, _LR_BATCH = 1e-3, 3e-3, 1024
# All we know of a custom module is its size. The best learning rate falls with the model's width: a model with 40,000
# parameters reaches 99 % on digits at four times the rate, and 73 % without the factor.
_PARAMETERS, _MOST_FASTER = 25e6, 4.0
# Pretrained weights: layer-wise decay for transformers, a lower learning rate for other models.
_LAYER_DECAY, _LR_FINE_TUNE = 0.75, 0.2


def check_recipe(recipe: str | None) -> None:
    """Check the name of a recipe."""
    if recipe is not None:
        check_choice("recipe", recipe, NAMES)


def recipe_arguments(recipe: str | None, backbone: Any, size: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the task arguments of a recipe; `size` is the image size, if known.

    >>> recipe_arguments("modern", "resnet50", size=(224, 224))["augment"]
    'randaugment'
    >>> recipe_arguments("modern", "resnet50", size=(28, 28))["augment"]
    'crop'
    """
    if recipe is None:
        return {}
    small = size is not None and max(size) <= _SMALL_SIDE
    rate = _DROP_PATH.get(family(backbone) or "")
    return _ARGUMENTS | (_SMALL if small else {}) | ({} if rate is None else {"drop_path_rate": rate})


def recipe_settings(recipe: str | None, backbone: Any, pretrained: bool, batch_size: int) -> dict[str, Any]:
    """Return the trainer settings of a recipe; `batch_size` is that of an optimizer step over all ranks.

    >>> recipe_settings("modern", "vit_small_patch16_224", pretrained=False, batch_size=1024)["lr"]
    0.001
    """
    if recipe is None:
        return {}
    kind = family(backbone)
    lr = (_LR_TRANSFORMER if kind in _TRANSFORMERS else _LR_OTHER) * math.sqrt(batch_size / _LR_BATCH)
    if isinstance(backbone, nn.Module):
        count = sum(p.numel() for p in backbone.parameters())
        lr *= min(max(math.sqrt(_PARAMETERS / max(count, 1)), 1.0), _MOST_FASTER)
    settings = {
        "optimizer": "adamw",
        "weight_decay": 0.05,
        "scheduler": "cosine",
        "warmup_ratio": 0.05,
        "gradient_clip": 1.0,
        # EMA warm-up makes this work for short runs too: after n steps it averages over the last n / 10.
        "ema": 0.9999,
    }
    if not pretrained or isinstance(backbone, nn.Module):  # a custom module may or may not be pretrained
        return settings | {"lr": lr}
    if kind in _TRANSFORMERS:
        return settings | {"lr": lr, "layer_decay": _LAYER_DECAY}
    return settings | {"lr": lr * _LR_FINE_TUNE}


def family(backbone: Any) -> str | None:
    """Return the timm module that defines a model, or None for a custom module.

    >>> family("resnet18"), family("vit_small"), family(object())
    ('resnet', 'vision_transformer', None)
    """
    if not isinstance(backbone, str) or ":" in backbone:
        return None
    timm = require("timm", "vision", "for backbones by name")
    return timm.model_entrypoint(timm_name(backbone).partition(".")[0]).__module__.rpartition(".")[2]

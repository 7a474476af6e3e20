"""Recipes: one word for many settings that go well together.

Owns the tables. A recipe has two halves: arguments of the task, and settings of the run. Both count only where the user
chose nothing. The numbers of `modern` are those of DeiT (Touvron et al. 2021), Swin (Liu et al. 2021), ConvNeXt (Liu et
al. 2022) and "ResNet strikes back" (Wightman et al. 2021), which agree on most of them. They were found in runs of 300
epochs on a million images; what they do to small images is at the end.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.models.backbones import timm_name

NAMES = ("modern",)

_ARGUMENTS: dict[str, Any] = {
    "augment": "randaugment",
    "mixup": 0.8,
    "cutmix": 1.0,
    "mixup_off_last": 0.1,  # the last tenth of the run sees whole images, as those it will be asked about
    "random_erasing": 0.25,
    "label_smoothing": 0.1,
}

# Images of at most so many pixels a side have little to cut out of, and their data sets are mostly small: shifts
# instead of crops, gentle blends, no colours, no flips (they may be digits or letters).
_SMALL_SIDE = 64
_SMALL: dict[str, Any] = {"augment": "crop", "mixup": 0.2, "cutmix": 0.0, "random_erasing": 0.0}

# Stochastic depth by kind of model: the modules in which timm keeps them. Others are left as timm has them.
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

# AdamW's rate at a batch of 1024. It grows with the square root of the batch, as the noise of a gradient falls: in
# proportion (which is for SGD) a batch of 64 would get a quarter of what it can use.
_LR_TRANSFORMER, _LR_OTHER, _LR_BATCH = 1e-3, 3e-3, 1024
# Of a module that the user brings nothing is known but its size. The best rate falls with the width of a model: one of
# 40,000 parameters learns digits to 99 % at four times the rate, and in the same time to 73 % without that.
_PARAMETERS, _MOST_FASTER = 25e6, 4.0
# Weights that know something already: in transformers, layers far from the head move less; other models all in all.
_LAYER_DECAY, _LR_FINE_TUNE = 0.75, 0.2


def check_recipe(recipe: str | None) -> None:
    """Refuse a name that is none."""
    if recipe is not None and recipe not in NAMES:
        known = f"recipe to be {' or '.join(map(repr, NAMES))}, or None"
        raise BadArgument(expected(known, recipe, did_you_mean(str(recipe), NAMES)))


def recipe_arguments(recipe: str | None, backbone: Any, size: tuple[int, ...] | None) -> dict[str, Any]:
    """Arguments of the task; `size` are the sides of the images, as far as they are known.

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
    """Settings of the run; `batch_size` is that of an optimizer step over all ranks.

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
        # The average's own warm-up makes this fit short runs too: after n steps it spans the last n / 10.
        "ema": 0.9999,
    }
    if not pretrained or isinstance(backbone, nn.Module):  # of which nobody knows what it knows
        return settings | {"lr": lr}
    if kind in _TRANSFORMERS:
        return settings | {"lr": lr, "layer_decay": _LAYER_DECAY}
    return settings | {"lr": lr * _LR_FINE_TUNE}


def family(backbone: Any) -> str | None:
    """The kind of a model that is given by name: timm's module for it.

    >>> family("resnet18"), family("vit_small"), family(object())
    ('resnet', 'vision_transformer', None)
    """
    if not isinstance(backbone, str) or ":" in backbone:
        return None
    timm = require("timm", "vision", "for backbones by name")
    return timm.model_entrypoint(timm_name(backbone).partition(".")[0]).__module__.rpartition(".")[2]

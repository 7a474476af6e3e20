"""Options of the self-supervised methods with the defaults of their papers, and the papers' training settings.

An option that the method does not have is an error, since it would be ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trainformer.core.errors import BadArgument, check_choice, expected

# None: derived from the backbone; see `SSL`.
DEFAULTS: dict[str, dict[str, Any]] = {
    "simclr": {"proj_dim": 128, "hidden_dim": None, "temperature": 0.1},
    "moco": {
        "proj_dim": 128,
        "hidden_dim": None,
        "temperature": 0.2,
        "momentum": 0.999,
        "momentum_end": 0.999,
        "queue_size": 65536,
    },
    "moco_v3": {
        "proj_dim": 256,
        "hidden_dim": 4096,
        "temperature": None,  # 0.2 for a ViT, 1.0 for a convolutional network
        "momentum": 0.99,
        "momentum_end": 1.0,
        "freeze_patch_embed": True,
    },
    "byol": {"proj_dim": 256, "hidden_dim": 4096, "momentum": 0.996, "momentum_end": 1.0},
    "dino": {
        "out_dim": 65536,
        "hidden_dim": 2048,
        "bottleneck_dim": 256,
        "norm_last_layer": True,
        "momentum": 0.996,
        "momentum_end": 1.0,
        "student_temp": 0.1,
        "teacher_temp": 0.07,
        "warmup_teacher_temp": 0.04,
        "warmup_teacher_temp_epochs": 30,
        "center_momentum": 0.9,
        "freeze_last_layer": 1,
        "koleo": 0.0,
        "num_local": 8,
        "local_size": None,  # 96 for images of 224 pixels, proportional for others
        "global_scale": (0.4, 1.0),
        "local_scale": (0.05, 0.4),
    },
    "mae": {
        "mask_ratio": 0.75,
        "decoder_dim": 512,
        "decoder_depth": 8,
        "decoder_heads": 16,
        "norm_pix": True,
    },
}

CROPS = ("num_local", "local_size", "global_scale", "local_scale")  # options of DINO's views, not of its networks

# Ranges of options whose errors would only show later.
_SIZES = (
    "proj_dim", "hidden_dim", "queue_size", "out_dim", "bottleneck_dim", "local_size", "decoder_dim", "decoder_depth",
    "decoder_heads",
)  # fmt: skip
_COUNTS = ("warmup_teacher_temp_epochs", "freeze_last_layer", "num_local")
_POSITIVE = ("temperature", "student_temp", "teacher_temp", "warmup_teacher_temp")
_SHARES = ("momentum", "momentum_end", "center_momentum", "mask_ratio")
_WEIGHTS = ("koleo",)
_ALLOWED: tuple[tuple[tuple[str, ...], tuple[type, ...], Callable[[Any], bool], str], ...] = (
    (_SIZES, (int,), lambda value: value > 0, "a whole number of at least 1"),
    (_COUNTS, (int,), lambda value: value >= 0, "a whole number of at least 0"),
    (_POSITIVE, (int, float), lambda value: 0 < value < math.inf, "a positive number"),
    (_SHARES, (int, float), lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    (_WEIGHTS, (int, float), lambda value: 0 <= value < math.inf, "a number of at least 0"),
)


def check_method(method: str, version: str | None) -> str:
    """Return the full name of a method, e.g. moco_v3 for ("moco", "v3")."""
    allowed = {"moco": (None, "v2", "v3"), "moco_v3": (None, "v3")}.get(method, (None,))
    if version not in allowed:
        if method == "moco":
            raise BadArgument(expected("version to be 'v2' or 'v3'", version))
        raise BadArgument(expected("version with method 'moco' only", f"{version!r} with {method!r}"))
    if version == "v3":
        return "moco_v3"
    check_choice("method", method, DEFAULTS)
    return method


def resolve(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a method: those given (not None), otherwise the paper's."""
    known = DEFAULTS[method]
    for name, value in given.items():
        if value is None:
            continue
        if name not in known:
            raise BadArgument(f"{method} has no option {name} (received {value!r}). It has: {', '.join(known)}.")
        for names, kinds, fits, words in _ALLOWED:
            if name in names and (isinstance(value, bool) or not isinstance(value, kinds) or not fits(value)):
                raise BadArgument(expected(f"{name} to be {words}", value))
    return {name: default if given.get(name) is None else given[name] for name, default in known.items()}


def paper_settings(method: str, is_vit: bool, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
    """Return the paper's training settings for the run's batch size and epochs.

    Optimizer, learning rate and weight decay belong together: if the user passed one of the first two, none is set.
    """
    batch = settings.batch_size * settings.accumulation_steps
    optimizer, lr, decay, warmup, clip = _RECIPES[method if method != "moco_v3" or is_vit else "moco_v3_conv"]
    wanted: dict[str, Any] = {
        "scheduler": "cosine",
        "warmup_ratio": round(min(warmup / settings.epochs, 0.3), 4) if settings.max_steps is None else 0.1,
        "gradient_clip": clip,
    }
    if not {"lr", "optimizer"} & set(chosen):
        wanted |= {"optimizer": optimizer, "lr": lr * batch / 256, "weight_decay": decay}
        if method == "dino" and "weight_decay" not in chosen:
            wanted["weight_decay_end"] = 0.4
    return wanted


# optimizer, learning rate at batch size 256, weight decay, warm-up epochs, gradient clip
_RECIPES: dict[str, tuple[Any, float, float, int, float | None]] = {
    "simclr": ("lars", 0.3, 1e-6, 10, None),
    "moco": ("sgd", 0.03, 1e-4, 0, None),
    "moco_v3": ("adamw", 1.5e-4, 0.1, 40, None),
    "moco_v3_conv": ("lars", 0.6, 1e-6, 10, None),
    "byol": ("lars", 0.2, 1.5e-6, 10, None),
    "dino": ("adamw", 5e-4, 0.04, 10, 3.0),
    "mae": ({"name": "adamw", "betas": (0.9, 0.95)}, 1.5e-4, 0.05, 40, None),
}

"""Backbones by name: finding, building, filling with weights and describing timm models.

Owns every call into timm that concerns a model. What a task needs to know of a model beside its weights (the size and
statistics of the images it was made for) is a `BackboneConfig`; a module that says nothing of itself gets ImageNet's.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError, TrainformerError, did_you_mean, expected
from trainformer.core.optional import require

logger = logging.getLogger("trainformer")

# Short names that papers use; timm has only names with patch and image size.
_ALIASES = {
    "vit_tiny": "vit_tiny_patch16_224",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
    "vit_large": "vit_large_patch16_224",
    "vit_huge": "vit_huge_patch14_224",
}

# Where checkpoints of metric learning and of self-supervised methods keep a backbone.
_PREFIXES = ("backbone.", "online.backbone.", "autoencoder.backbone.")

Weights = str | Path | Mapping[str, Tensor]


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
    """Stands for a model as long as something about it (the number of classes, of channels) is unknown."""

    def forward(self, images: Tensor) -> Tensor:
        """Say what is missing."""
        raise BadArgument(
            "Expected a model, received none: the number of classes is not known yet. Pass num_classes, or call "
            "configure(info) with what the data say (Trainer does)."
        )


def full_name(name: str) -> str:
    """The name timm has for a model.

    >>> full_name("vit_small"), full_name("resnet18")
    ('vit_small_patch16_224', 'resnet18')
    """
    return _ALIASES.get(name, name)


def check_backbone(name: str) -> None:
    """Refuse a name that timm does not know, with those it may have been meant to be."""
    timm = _timm()
    if ":" in name:  # 'hf-hub:...' and 'local-dir:...' are looked up when building
        return
    architecture, _, tag = full_name(name).partition(".")
    if not timm.is_model(architecture):
        hint = did_you_mean(architecture, [*_ALIASES, *timm.list_models()]) or "timm.list_models() lists them all."
        raise BadArgument(expected("backbone to be the name of a timm model", name, hint))
    tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", pretrained=True)]
    if tag and tag not in tags:
        known = f"Known for {architecture}: {', '.join(tags)}." if tags else f"{architecture} has no such variants."
        raise BadArgument(expected("backbone to name weights that timm knows", name, known))


def build_backbone(
    name: str,
    *,
    num_classes: int,
    in_chans: int,
    pretrained: bool = False,
    checkpoint: Weights | None = None,
    image_size: tuple[int, int] | None = None,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A timm model with a head of `num_classes` (0: features). Weights in a file take the place of the hub's."""
    name, options = full_name(name), dict(options or {})
    if image_size is not None and "img_size" not in options and has_fixed_size(name):
        options["img_size"] = image_size
    pretrained = pretrained and checkpoint is None
    try:
        model = _timm().create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_chans, **options)
    except (TypeError, AssertionError) as error:  # timm asserts what it takes, mostly without a word
        given = ", ".join(f"{option}={value!r}" for option, value in sorted(options.items())) or "none"
        raise BadArgument(
            f"Expected arguments that {name!r} takes, received one it does not ({error or 'it does not say which'}). "
            f"Look through image_size, pooling, drop_rate, drop_path_rate and model_kwargs (passed on: {given})."
        ) from error
    except Exception as error:  # whatever a download, a hub or a file may raise
        if not pretrained:
            raise
        raise BadArgument(
            f"Expected to find the pretrained weights of {name!r}, received {type(error).__name__}: {error} "
            "Pass pretrained=False to start from random weights, or checkpoint=path to take them from a file."
        ) from error
    if checkpoint is not None:
        load_weights(model, checkpoint)
    return model


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


def dtype_of(model: nn.Module) -> torch.dtype:
    """The type of a model's weights, and of the images it takes; float32 where it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def feature_shape(model: nn.Module, channels: int, size: tuple[int, ...]) -> torch.Size:
    """Shape of what a model gives for one image, by a run without data or arithmetic (on torch's meta device).

    timm's `num_features` is not the width of every model: mobilenetv3_small has 576 and gives 1024.
    """
    dtype = dtype_of(model)
    try:
        ghost = copy.deepcopy(model).to("meta").eval()
        with torch.no_grad():
            return ghost(torch.empty(1, channels, *size, device="meta", dtype=dtype)).shape
    except Exception:  # a part that looks at values, whatever that raises: then on real, black images
        modes = {part: part.training for part in model.modules()}
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        try:
            with torch.no_grad():
                return model.eval()(torch.zeros(1, channels, *size, device=device, dtype=dtype)).shape
        except TrainformerError:
            raise
        except Exception as error:
            raise BadArgument(
                f"Expected a backbone that takes images of shape {(channels, *size)}, received {type(error).__name__}: "
                f"{error}. Pass image_size and in_chans as it wants them, or a backbone for images of any size."
            ) from error
        finally:
            for part, training in modes.items():
                part.training = training


def feature_width(model: nn.Module, channels: int = 3, size: tuple[int, int] | None = None) -> int:
    """Width of the features a model gives, which must be one row per image.

    >>> feature_width(nn.Sequential(nn.Flatten(), nn.Linear(48, 7)), channels=3, size=(4, 4))
    7
    """
    shape = feature_shape(model, channels, size or describe(model).size)
    if len(shape) != 2:
        raise BadArgument(
            expected(
                "backbone to give one row of features per image",
                f"a tensor of shape {tuple(shape)} for one image",
                "Build it with num_classes=0 and with pooling.",
            )
        )
    return int(shape[1])


def load_weights(model: nn.Module, weights: Weights) -> list[str]:
    """Fill a model from a file: safetensors, or a torch file of tensors alone (nothing in it is executed).

    A state_dict will do as well.

    Weights saved under `backbone.` (a checkpoint of a self-supervised or metric-learning run) are found there, position
    embeddings of another image size are resampled, and a head of another shape is left as it is. Anything else that
    does not fit is an error. The names left as they were are returned.
    """
    where = "the weights given" if isinstance(weights, Mapping) else f"'{weights}'"
    given = dict(weights) if isinstance(weights, Mapping) else _read_weights(Path(weights))
    own = model.state_dict()
    for prefix in _PREFIXES:
        if not set(own) & set(given):
            inner = {n.removeprefix(prefix): value for n, value in given.items() if n.startswith(prefix)}
            given = inner or given
    head = _head_names(model, own)
    given = {name: value for name, value in given.items() if name in own or name not in head}
    if "pos_embed" in given and "pos_embed" in own and given["pos_embed"].shape != own["pos_embed"].shape:
        given["pos_embed"] = _resampled(model, given["pos_embed"])
    kept = [n for n in head if n not in given or given[n].shape != own[n].shape]
    missing = [n for n in own if n not in given and n not in kept]
    wrong = [n for n in own if n in given and n not in kept and given[n].shape != own[n].shape]
    foreign = [n for n in given if n not in own and not n.startswith(("head.", "fc.", "classifier."))]
    if missing or wrong or foreign:
        problems = [
            f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for what, names in (("missing", missing), ("of another shape", wrong), ("not in the model", foreign))
            if names
        ]
        raise DataError(
            expected(f"the weights of a {type(model).__name__} like this one in {where}", "; ".join(problems))
        )
    model.load_state_dict({n: given[n] for n in own if n not in kept}, strict=False)
    if kept:
        logger.info("%s: no weights for %s, left as they were", where, ", ".join(kept))
    return kept


def _read_weights(path: Path) -> dict[str, Tensor]:
    path = path.expanduser()
    if path.is_dir():  # a checkpoint
        path = path / "model.safetensors"
    if not path.is_file():
        raise DataError(expected("a file of weights", f"'{path}', which does not exist"))
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model", "teacher", "state_dict_ema"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
            break
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise DataError(expected(f"'{path}' to hold a state_dict", f"a {type(state).__name__} of something else"))
    return dict(state)


def _head_names(model: nn.Module, own: Mapping[str, Tensor]) -> list[str]:
    """Parameters of the classifier, which another task has in another size."""
    prefix = getattr(model, "default_cfg", {}).get("classifier") if hasattr(model, "default_cfg") else None
    prefixes = (prefix,) if isinstance(prefix, str) else tuple(prefix or ())
    return [name for name in own if any(name.startswith(f"{p}.") for p in prefixes)]


def _resampled(model: nn.Module, positions: Tensor) -> Tensor:
    """Position embeddings for the grid that the model has."""
    layers = require("timm.layers", "vision", "for backbones by name")
    patches: Any = model.patch_embed
    prefix = 0 if getattr(model, "no_embed_class", False) else getattr(model, "num_prefix_tokens", 1)
    return layers.resample_abs_pos_embed(positions, new_size=list(patches.grid_size), num_prefix_tokens=prefix)


def has_fixed_size(name: str) -> bool:
    """Whether a model is built for one image size (position embeddings and the like)."""
    name = full_name(name)
    config = _timm().get_pretrained_cfg(name) if ":" not in name else None
    return bool(config is not None and config.fixed_input_size)


def _timm() -> ModuleType:
    return require("timm", "vision", "for backbones by name")

"""Backbones by name: look up, build, load weights into, and describe timm models.

Owns all calls into timm that concern a model. `BackboneConfig` holds the image size and normalisation a model expects,
by default those of ImageNet.
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
from trainformer.models.modes import eval_mode
from trainformer.utils.tensor_files import read_tensors, read_weights

logger = logging.getLogger("trainformer")

# Short names as used in papers; names in timm include patch and image size.
_ALIASES = {
    "vit_tiny": "vit_tiny_patch16_224",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
    "vit_large": "vit_large_patch16_224",
    "vit_huge": "vit_huge_patch14_224",
}

# Prefixes of the backbone in checkpoints of metric learning and of self-supervised methods.
_PREFIXES = ("backbone.", "online.backbone.", "autoencoder.backbone.")

Weights = str | Path | Mapping[str, Tensor]


@dataclass(frozen=True)
class BackboneConfig:
    """The images a backbone expects."""

    size: tuple[int, int] = (224, 224)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"
    fixed_size: bool = False  # e.g. position embeddings: other sizes must be requested when building


class UnbuiltModel(nn.Module):
    """Placeholder for a model that cannot be built yet: the number of classes or channels is unknown."""

    def forward(self, images: Tensor) -> Tensor:
        raise BadArgument(
            "Expected a model, received none: the number of classes is not known yet. Pass num_classes, or call "
            "configure(info) with the metadata of the dataset (Trainer does)."
        )


def timm_name(name: str) -> str:
    """timm's name of a model.

    >>> timm_name("vit_small"), timm_name("resnet18")
    ('vit_small_patch16_224', 'resnet18')
    """
    return _ALIASES.get(name, name)


def check_backbone(name: str) -> None:
    """Reject a name that timm does not know, with suggestions."""
    timm = _timm()
    if not isinstance(name, str):
        received = f"the class {name.__name__}" if isinstance(name, type) else type(name).__name__
        raise BadArgument(expected("backbone to be the name of a timm model", received))
    if ":" in name:  # 'hf-hub:...' and 'local-dir:...' are resolved when building
        return
    architecture, _, tag = timm_name(name).partition(".")
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
    """A timm model with a head of `num_classes` (0: features). `checkpoint` overrides pretrained weights."""
    name, options = timm_name(name), dict(options or {})
    for key in ("pretrained_cfg", "pretrained_cfg_overlay"):
        own = options.get(key)
        if (own.get("url") if isinstance(own, Mapping) else getattr(own, "url", None)) is not None:
            do = "timm may execute what is in a file from a URL. Download it, and pass checkpoint=path."
            raise BadArgument(expected(f"no URL in {key}", own, do))
    if image_size is not None and "img_size" not in options and has_fixed_size(name):
        options["img_size"] = image_size
    pretrained = pretrained and checkpoint is None
    try:
        model = _timm().create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_chans, **options)
    except (TypeError, AssertionError) as error:  # timm checks arguments with bare asserts
        given = ", ".join(f"{option}={value!r}" for option, value in sorted(options.items())) or "none"
        raise BadArgument(
            f"Expected arguments that {name!r} takes, received one it does not ({error or 'it does not say which'}). "
            f"Look through image_size, pooling, drop_rate, drop_path_rate and model_kwargs (passed on: {given})."
        ) from error
    except Exception as error:  # anything that a download or a file may raise
        if not pretrained:
            raise
        raise BadArgument(
            f"Expected to find the pretrained weights of {name!r}, received {type(error).__name__}: {error} "
            "Pass pretrained=False to start from random weights, or checkpoint=path to take them from a file."
        ) from error
    if checkpoint is not None:
        load_weights(model, checkpoint)
    return model


def backbone_config(model: nn.Module) -> BackboneConfig:
    """The images a model expects, from its own timm config if it has one."""
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


def num_outputs(model: nn.Module) -> int | None:
    """The number of logits that a module reports; None if it does not."""
    number = getattr(model, "num_classes", None)
    return number if isinstance(number, int) else None


def model_dtype(model: nn.Module) -> torch.dtype:
    """dtype of a model's weights; float32 if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def feature_shape(model: nn.Module, channels: int, size: tuple[int, ...]) -> torch.Size:
    """Output shape of a model for one image, from a dry run on torch's meta device.

    timm's `num_features` is not always the width: mobilenetv3_small reports 576 and returns 1024.
    """
    dtype = model_dtype(model)
    try:
        ghost = copy.deepcopy(model).to("meta").eval()
        with torch.no_grad():
            return ghost(torch.empty(1, channels, *size, device="meta", dtype=dtype)).shape
    except Exception:  # a module that reads values: fall back to real, black images
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        try:
            with eval_mode(model), torch.no_grad():
                return model(torch.zeros(1, channels, *size, device=device, dtype=dtype)).shape
        except TrainformerError:
            raise
        except Exception as error:
            raise BadArgument(
                f"Expected a backbone that takes images of shape {(channels, *size)}, received {type(error).__name__}: "
                f"{error}. Pass image_size and in_chans as it wants them, or a backbone for images of any size."
            ) from error


def feature_width(model: nn.Module, channels: int = 3, size: tuple[int, int] | None = None) -> int:
    """Width of a model's features, which must be one row per image.

    >>> feature_width(nn.Sequential(nn.Flatten(), nn.Linear(48, 7)), channels=3, size=(4, 4))
    7
    """
    shape = feature_shape(model, channels, size or backbone_config(model).size)
    if len(shape) != 2:
        received = f"a tensor of shape {tuple(shape)} for one image"
        do = "Build it with num_classes=0 and with pooling."
        raise BadArgument(expected("backbone to give one row of features per image", received, do))
    return int(shape[1])


def load_weights(model: nn.Module, weights: Weights) -> list[str]:
    """Load weights into a model from a state dict, a safetensors file, or a torch file (opened with weights_only=True).

    Finds weights saved under `backbone.` (checkpoints of self-supervised and metric-learning runs), resamples position
    embeddings of another image size, and skips a head of another shape. Any other mismatch is an error. Returns the
    names of the skipped parameters.
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
        what = f"the weights of a {type(model).__name__} like this one in {where}"
        raise DataError(expected(what, "; ".join(problems)))
    model.load_state_dict({n: given[n] for n in own if n not in kept}, strict=False)
    if kept:
        logger.info("%s: no weights for %s, kept the initial ones", where, ", ".join(kept))
    return kept


def _read_weights(path: Path) -> dict[str, Tensor]:
    path = path.expanduser()
    if path.is_dir():  # a checkpoint
        path = path / "model.safetensors"
    if not path.is_file():
        raise DataError(expected("a file of weights", f"'{path}', which does not exist"))
    if path.suffix == ".safetensors":
        return read_weights(path.parent, [path.name])
    state = read_tensors(path)
    for key in ("state_dict", "model", "teacher", "state_dict_ema"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
            break
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise DataError(expected(f"'{path}' to hold a state_dict", f"a {type(state).__name__} of something else"))
    return dict(state)


def _head_names(model: nn.Module, own: Mapping[str, Tensor]) -> list[str]:
    """Parameters of the classifier, whose size depends on the task."""
    prefix = getattr(model, "default_cfg", {}).get("classifier") if hasattr(model, "default_cfg") else None
    prefixes = (prefix,) if isinstance(prefix, str) else tuple(prefix or ())
    return [name for name in own if any(name.startswith(f"{p}.") for p in prefixes)]


def _resampled(model: nn.Module, positions: Tensor) -> Tensor:
    """Position embeddings resampled to the model's grid."""
    layers = require("timm.layers", "vision", "for backbones by name")
    patches: Any = model.patch_embed
    prefix = 0 if getattr(model, "no_embed_class", False) else getattr(model, "num_prefix_tokens", 1)
    return layers.resample_abs_pos_embed(positions, new_size=list(patches.grid_size), num_prefix_tokens=prefix)


def has_fixed_size(name: str) -> bool:
    """Whether a model is built for one image size (e.g. position embeddings)."""
    name = timm_name(name)
    config = _timm().get_pretrained_cfg(name) if ":" not in name else None
    return bool(config is not None and config.fixed_input_size)


def _timm() -> ModuleType:
    return require("timm", "vision", "for backbones by name")

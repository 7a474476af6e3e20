"""Segmentation networks: torchvision's by name, and a feature pyramid on any timm backbone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.models.backbones import Weights, build_backbone, load_weights

logger = logging.getLogger("trainformer")

SEGMENTATION_MODELS = (
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet50",
    "deeplabv3_resnet101",
    "fcn_resnet50",
    "fcn_resnet101",
    "lraspp_mobilenet_v3_large",
)
_FINEST = 4  # least stride of a feature map in the pyramid
_WIDTH = 128  # channels of the pyramid, as in "Panoptic feature pyramid networks" (Kirillov et al. 2019)


class FeaturePyramid(nn.Module):
    """A timm backbone with a top-down pathway: features of all scales are merged at the finest and classified there.

    `backbone` returns a list of feature maps, from fine to coarse. The first `skip` are not used, the others have
    `widths` channels. GroupNorm, so the head does not depend on the batch.
    """

    def __init__(
        self, backbone: nn.Module, widths: Sequence[int], num_classes: int, width: int = _WIDTH, skip: int = 0
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.skip = skip
        self.pretrained_cfg = getattr(backbone, "pretrained_cfg", None)
        self.num_classes = num_classes
        self.lateral = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in widths)
        self.smooth = nn.ModuleList(_smoothing(width) for _ in widths)
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, classes, H, W) in the size of the images."""
        found = self.backbone(images)[self.skip :]
        maps = [project(features) for project, features in zip(self.lateral, found, strict=True)]
        for finer in range(len(maps) - 2, -1, -1):
            maps[finer] = maps[finer] + F.interpolate(maps[finer + 1], size=maps[finer].shape[-2:], mode="nearest")
        size = maps[0].shape[-2:]
        merged = sum(resize_logits(smooth(features), size) for smooth, features in zip(self.smooth, maps, strict=True))
        return resize_logits(self.classifier(merged), images.shape[-2:])


def _smoothing(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width), nn.ReLU())


def resize_logits(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Logits (N, C, h, w) interpolated to another size."""
    if tuple(logits.shape[-2:]) == tuple(size):
        return logits
    return F.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)


def build_segmentation(
    name: str,
    *,
    num_classes: int,
    in_chans: int = 3,
    pretrained: bool = False,
    checkpoint: Weights | None = None,
    image_size: tuple[int, int] | None = None,
    aux_loss: bool = False,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A segmentation network: one of torchvision's, or a feature pyramid on the timm backbone of this name.

    >>> model = build_segmentation("resnet10t", num_classes=4)
    >>> import torch
    >>> model(torch.zeros(1, 3, 32, 48)).shape
    torch.Size([1, 4, 32, 48])
    """
    if name in SEGMENTATION_MODELS:
        return _torchvision_model(name, num_classes, pretrained, checkpoint, aux_loss, dict(options or {}))
    given = {"features_only": True, **(options or {})}
    backbone = build_backbone(
        name,
        num_classes=num_classes,  # timm drops the classifier of a feature extractor
        in_chans=in_chans,
        pretrained=pretrained,
        image_size=image_size,
        options=given,
    )
    if checkpoint is not None:
        load_weights(backbone, checkpoint)
    info: Any = backbone.feature_info
    # Maps at half the size of the image cost four times as much as those at a quarter, for little gain.
    skip = next((index for index, stride in enumerate(info.reduction()) if stride >= _FINEST), 0)
    return FeaturePyramid(backbone, info.channels()[skip:], num_classes, skip=skip)


def _torchvision_model(
    name: str, classes: int, pretrained: bool, checkpoint: Weights | None, aux_loss: bool, options: dict[str, Any]
) -> nn.Module:
    module = _torchvision()
    if "aux_classifier" in options or "aux_loss" in options:
        raise BadArgument("Expected the aux_loss of the task, received it in model_kwargs. Pass aux_loss=0.4.")
    if not name.startswith("lraspp"):
        options["aux_loss"] = aux_loss
    elif aux_loss:
        raise BadArgument(expected("aux_loss=0 with lraspp, which has no auxiliary classifier", "another"))
    make = getattr(module, name)
    model = make(weights=None, weights_backbone=None, num_classes=classes, **options)
    if checkpoint is not None:
        load_weights(model, checkpoint)
    elif pretrained:
        load_published(model, name)
    return model


def load_published(model: nn.Module, name: str) -> None:
    """Load torchvision's weights of a model; layers of another shape (the classes) keep their initial weights."""
    models = require("torchvision.models", "vision", "for torchvision's models")
    try:
        published = models.get_model_weights(name).DEFAULT.get_state_dict(check_hash=True, weights_only=True)
    except Exception as error:  # anything that a download may raise
        raise BadArgument(
            f"Expected to find the pretrained weights of {name!r}, received {type(error).__name__}: {error} "
            "Pass pretrained=False to start from random weights, or checkpoint=path to take them from a file."
        ) from error
    own = model.state_dict()
    other = {key for key, value in published.items() if key in own and own[key].shape != value.shape}
    # torchvision renames the weights of older files while it loads them.
    missing, unused = model.load_state_dict({k: v for k, v in published.items() if k not in other}, strict=False)
    kept = sorted(missing)
    # Counters of batches are missing in old files; an auxiliary classifier may be in one of the two alone.
    odd = {key for key in (*missing, *unused) if "num_batches_tracked" not in key and "aux" not in key} - other
    if odd:
        raise DataError(expected(f"the published weights of {name!r} under the names of the model", sorted(odd)[:3]))
    if kept:
        logger.info("%s: no pretrained weights for %s, kept the initial ones", name, ", ".join(kept))


def _torchvision() -> ModuleType:
    return require("torchvision.models.segmentation", "vision", "for torchvision's segmentation models")

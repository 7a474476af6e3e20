"""Detectors: torchvision's by name, FCOS on any timm backbone, and the loss of each image of a batch.

torchvision's detectors normalise their losses by what a whole batch contains (objects, proposals), so a batch in two
halves has another loss. `image_losses` computes the loss of each image as if it were alone, on features of the whole
batch: their sum does not depend on how images are grouped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.models.backbones import Weights, backbone_config, build_backbone, load_weights
from trainformer.models.segmentation import load_published

DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_resnet50_fpn",
    "fasterrcnn_resnet50_fpn_v2",
    "fcos_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "retinanet_resnet50_fpn_v2",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)
#: Sizes of detectors that take no other.
FIXED_SIZES = {"ssd300_vgg16": (300, 300), "ssdlite320_mobilenet_v3_large": (320, 320)}
_WIDTH = 128  # channels of the pyramid on a timm backbone
_COARSEST = 5  # feature maps of the pyramid at most

Targets = list[dict[str, Tensor]]


class PyramidBackbone(nn.Module):
    """Feature maps of a timm backbone in a feature pyramid, as torchvision's detectors take them."""

    def __init__(self, features: nn.Module, widths: list[int], skip: int, width: int = _WIDTH) -> None:
        super().__init__()
        ops = require("torchvision.ops", "vision", "for detectors")
        blocks = require("torchvision.ops.feature_pyramid_network", "vision", "for detectors")
        self.features, self.skip, self.out_channels = features, skip, width
        self.fpn = ops.FeaturePyramidNetwork(widths, width, extra_blocks=blocks.LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Maps by name, from fine to coarse."""
        maps = self.features(images)[self.skip :]
        return self.fpn(OrderedDict((str(place), one) for place, one in enumerate(maps)))


def build_detector(
    name: str,
    *,
    num_classes: int,
    image_size: tuple[int, int],
    pretrained: bool = False,
    checkpoint: Weights | None = None,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A detector for `num_classes` classes, background not counted: one of torchvision's, or FCOS on a timm backbone.

    >>> detector = build_detector("resnet10t", num_classes=3, image_size=(64, 64)).eval()
    >>> sorted(detector([torch.zeros(3, 64, 64)])[0])
    ['boxes', 'labels', 'scores']
    """
    module = _torchvision()
    sizes: dict[str, Any] = {"min_size": min(image_size), "max_size": max(image_size)}
    options = dict(options or {})
    if name not in DETECTORS:
        backbone = _timm_pyramid(name, pretrained, checkpoint, image_size, options)
        config = backbone_config(backbone.features)
        generator = require("torchvision.models.detection.anchor_utils", "vision", "for detectors").AnchorGenerator
        sides = tuple((8 * 2**place,) for place in range(len(backbone.fpn.layer_blocks) + 1))
        anchors = generator(sides, ((1.0,),) * len(sides))
        pixels = {"image_mean": list(config.mean), "image_std": list(config.std)}
        return module.FCOS(backbone, num_classes, anchor_generator=anchors, **sizes, **pixels)
    own = {} if name in FIXED_SIZES else sizes
    classes = num_classes + label_offset_of(name)
    model = getattr(module, name)(weights=None, weights_backbone=None, num_classes=classes, **{**own, **options})
    if checkpoint is not None:
        load_weights(model, checkpoint)
    elif pretrained:
        if not name.endswith("_v2") and name not in FIXED_SIZES:
            _freeze_batchnorm(model.backbone)  # as torchvision does for these
        load_published(model, name)
    return model


def _timm_pyramid(
    name: str, pretrained: bool, checkpoint: Weights | None, size: tuple[int, int], options: dict[str, Any]
) -> PyramidBackbone:
    given = {"features_only": True, **options}
    features = build_backbone(name, num_classes=0, in_chans=3, pretrained=pretrained, image_size=size, options=given)
    if checkpoint is not None:
        load_weights(features, checkpoint)
    info: Any = features.feature_info
    skip = next((place for place, stride in enumerate(info.reduction()) if stride >= 8), 0)
    return PyramidBackbone(features, info.channels()[skip:][:_COARSEST], skip)


def label_offset_of(detector: str | nn.Module) -> int:
    """1 for detectors that count the background as class 0 (Faster R-CNN, SSD), else 0."""
    if isinstance(detector, str):
        return int(detector.startswith(("fasterrcnn", "ssd")))
    module = _torchvision()
    return int(isinstance(detector, (module.faster_rcnn.FasterRCNN, module.ssd.SSD)))


def set_limits(detector: nn.Module, score_threshold: float | None, max_detections: int | None) -> None:
    """Set the least score and the number of detections per image."""
    owner: Any = getattr(detector, "roi_heads", detector)
    for name, value in (("score_thresh", score_threshold), ("detections_per_img", max_detections)):
        if value is None:
            continue
        if not hasattr(owner, name):
            do = "Leave score_threshold and max_detections out."
            raise BadArgument(expected(f"a detector of torchvision, with {name}", type(detector).__name__, do))
        setattr(owner, name, value)


def image_losses(detector: nn.Module, images: Tensor, targets: Targets) -> list[dict[str, Tensor]] | None:
    """The losses of each image, by name; None for a detector that is none of torchvision's."""
    module = _torchvision()
    rcnn = module.generalized_rcnn.GeneralizedRCNN
    kinds = (rcnn, module.retinanet.RetinaNet, module.fcos.FCOS, module.ssd.SSD)
    if not isinstance(detector, kinds):
        return None
    model: Any = detector
    batch, targets = model.transform(list(images), targets)
    features = model.backbone(batch.tensors)
    if isinstance(features, Tensor):
        features = OrderedDict([("0", features)])
    if isinstance(detector, rcnn):
        return [_rcnn_losses(model, batch, features, targets, place) for place in range(len(images))]
    maps = list(features.values())
    outputs, anchors = model.head(maps), model.anchor_generator(batch, maps)
    losses = []
    for place, target in enumerate(targets):
        mine = {name: output[place : place + 1] for name, output in outputs.items()}
        compute = partial(model.compute_loss, [target], mine, [anchors[place]])
        if isinstance(detector, module.fcos.FCOS):
            losses.append(compute([one.shape[2] * one.shape[3] for one in maps]))
        elif isinstance(detector, module.ssd.SSD):
            losses.append(compute([_matched(model, target, anchors[place])]))
        else:
            losses.append(compute())
    return losses


def _rcnn_losses(
    model: Any, batch: Any, features: Mapping[str, Tensor], targets: Targets, place: int
) -> dict[str, Tensor]:
    lists = require("torchvision.models.detection.image_list", "vision", "for detectors")
    sizes = [batch.image_sizes[place]]
    mine = OrderedDict((name, one[place : place + 1]) for name, one in features.items())
    proposals, first = model.rpn(lists.ImageList(batch.tensors[place : place + 1], sizes), mine, [targets[place]])
    _, second = model.roi_heads(mine, proposals, sizes, [targets[place]])
    return {**first, **second}


def _matched(model: Any, target: dict[str, Tensor], anchors: Tensor) -> Tensor:
    """Which object each anchor of SSD belongs to; -1: none."""
    if not len(target["boxes"]):
        return torch.full((len(anchors),), -1, dtype=torch.int64, device=anchors.device)
    boxes = require("torchvision.ops", "vision", "for detectors")
    return model.proposal_matcher(boxes.box_iou(target["boxes"], anchors))


def _freeze_batchnorm(module: nn.Module) -> None:
    frozen = require("torchvision.ops", "vision", "for detectors").FrozenBatchNorm2d
    for name, child in list(module.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, frozen(child.num_features, child.eps))
        else:
            _freeze_batchnorm(child)


def _torchvision() -> ModuleType:
    return require("torchvision.models.detection", "vision", "for detectors")

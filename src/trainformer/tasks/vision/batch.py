"""Operations on batches of images on the device: normalisation, random erasing, mixup and its losses, TTA views.

Random numbers are drawn on the CPU per sample and copied asynchronously, so a run is the same on every device and no
step waits for a transfer. Erasing draws from the sample's key. Mixup and cutmix, which combine two samples, draw from
torch's global generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.data.augment import ops
from trainformer.data.augment.draws import Keys, uniforms


class Normalize(nn.Module):
    """Normalise uint8 pixels; float images pass through unchanged, so applying it twice is safe.

    Images that do not have three channels use the averaged statistics.

    >>> images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    >>> Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))(images).flatten().tolist()
    [-1.0, 1.0]
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # (pixel / 255 - mean) / std as one multiply-add. Not persistent: the constants are no weights.
        self.register_buffer("scale", _per_channel([1 / (255 * s) for s in std]), persistent=False)
        self.register_buffer("shift", _per_channel([-m / s for m, s in zip(mean, std, strict=True)]), persistent=False)
        gray_mean, gray_std = sum(mean) / len(mean), sum(std) / len(std)
        self.gray_scale, self.gray_shift = 1 / (255 * gray_std), -gray_mean / gray_std

    def forward(self, images: Tensor) -> Tensor:
        """Normalise a batch (N, C, H, W) or a single image."""
        if images.dtype != torch.uint8:
            return images
        if images.shape[-3] != len(self.scale):
            return images.float() * self.gray_scale + self.gray_shift
        return torch.addcmul(self.shift.to(images.device), images.float(), self.scale.to(images.device))

    def pixels(self, images: Tensor) -> Tensor:
        """Normalise images that are known to be pixels: uint8, or floats from 0 to 1."""
        if images.dtype == torch.uint8:
            return self(images)
        if images.shape[-3] != len(self.scale):
            return images * (255 * self.gray_scale) + self.gray_shift
        return torch.addcmul(self.shift.to(images), images, 255 * self.scale.to(images))


class RandomErasing(nn.Module):
    """Set a random rectangle of each image to 0 (the mean, after normalisation) with probability `p`.

    `first` is applied before. Draws are functions of the samples' keys, if there are any.
    """

    takes_keys = True

    def __init__(self, p: float, first: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.p = p
        self.first = first

    def forward(self, images: Tensor, keys: Keys | None = None) -> Tensor:
        """Erase a rectangle of some images."""
        if self.first is not None:
            images = self.first(images)
        draws = uniforms(keys, 5, samples=len(images)).numpy()
        boxes = ops.erase_boxes(draws[:, 1:], (images.shape[-2], images.shape[-1]))
        boxes[:, 1] = np.where(draws[:, 0] < self.p, boxes[:, 1], boxes[:, 0])  # an empty one erases nothing
        return ops.erase(images, send(torch.from_numpy(boxes), images.device))


class Mixed(NamedTuple):
    """A batch in which each image is mixed as ``share * image + (1 - share) * image[partner]``, or cut accordingly."""

    images: Tensor
    partner: Tensor
    share: Tensor


def mix(images: Tensor, mixup: float, cutmix: float, prob: float = 1.0) -> Mixed:
    """Apply mixup or cutmix with these alphas to a fraction `prob` of the samples.

    Each sample has its own partner and share and, if both alphas are positive, its own choice between the two.

    >>> mixed = mix(torch.rand(4, 3, 8, 8), mixup=0.8, cutmix=1.0, prob=0.5)
    >>> mixed.images.shape, mixed.share.shape
    (torch.Size([4, 3, 8, 8]), torch.Size([4]))
    """
    count, (height, width) = len(images), images.shape[-2:]
    partner = torch.randperm(count)
    chosen, coin = torch.rand(2, count)
    whole = chosen >= prob
    cut = coin < (0.5 if mixup > 0 else 1.0) if cutmix > 0 else torch.zeros(count, dtype=torch.bool)
    alpha = torch.where(cut, float(cutmix), float(mixup))
    share = torch.distributions.Beta(alpha, alpha, validate_args=False).sample().masked_fill(whole, 1.0)
    blends, cuts = bool((~cut & ~whole).any()), bool((cut & ~whole).any())  # on the CPU: no sync
    box = _cut_boxes(share.masked_fill(~cut, 1.0), height, width)
    # Boxes are clipped at the border: use the area that is really replaced.
    share = torch.where(cut, 1 - (box[1] - box[0]) * (box[3] - box[2]) / (height * width), share)
    there = send(partner, images.device)
    others, result = images[there], images
    if blends:
        kept = send(share.masked_fill(cut, 1.0), images.device).to(images.dtype)
        result = torch.lerp(others, images, kept.reshape(-1, *[1] * (images.ndim - 1)))
    if cuts:
        result = torch.where(_inside(box, images), others, result)
    return Mixed(result, there, send(share, images.device))


class ClassLoss(NamedTuple):
    """The summed loss of a batch and its weight; with ``reduction="none"``, those of each sample."""

    sum: Tensor
    weight: Tensor | int


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mixed: Mixed | None = None,
    *,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "sum",
) -> ClassLoss:
    """Cross-entropy of (mixed) labels. ``sum / weight`` equals the mean of `torch.nn.CrossEntropyLoss`.

    The loss is linear in the target, so the loss of a mixture is a mixture of two losses without soft labels.
    """
    if mixed is None:
        found = F.cross_entropy(logits, labels, class_weights, reduction=reduction, label_smoothing=label_smoothing)
        return ClassLoss(found, _weight(None if class_weights is None else class_weights[labels], labels, reduction))
    own, other = (
        F.cross_entropy(logits, target, class_weights, reduction="none", label_smoothing=label_smoothing)
        for target in (labels, labels[mixed.partner])
    )
    share = mixed.share.to(logits.dtype)
    found = torch.lerp(other, own, share)
    weights = None
    if class_weights is not None:
        weights = torch.lerp(class_weights[labels[mixed.partner]], class_weights[labels], share)
    return ClassLoss(found if reduction == "none" else found.sum(), _weight(weights, labels, reduction))


def _weight(weights: Tensor | None, labels: Tensor, reduction: str) -> Tensor | int:
    if weights is None:
        return torch.ones_like(labels) if reduction == "none" else len(labels)
    return weights if reduction == "none" else weights.sum()


def binary_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mixed: Mixed | None = None,
    *,
    label_smoothing: float = 0.0,
    target_threshold: float | None = None,
    sum_classes: bool = False,
    reduction: str = "sum",
) -> ClassLoss:
    """Binary cross-entropy per class, as in "ResNet strikes back" (Wightman et al. 2021).

    The loss of an image is the mean over classes, or the sum with `sum_classes`. With `target_threshold`, (mixed,
    smoothed) targets above it become 1 and all others 0.

    >>> loss = binary_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 2]))
    >>> round((loss.sum / loss.weight).item(), 4)
    0.6931
    """
    classes = torch.arange(logits.shape[-1], device=logits.device)
    target = (labels.unsqueeze(-1) == classes).to(logits.dtype)
    if mixed is not None:
        other = (labels[mixed.partner].unsqueeze(-1) == classes).to(logits.dtype)
        target = torch.lerp(other, target, mixed.share.to(logits.dtype).unsqueeze(-1))
    target = target * (1 - label_smoothing) + label_smoothing / logits.shape[-1]
    if target_threshold is not None:
        target = (target > target_threshold).to(logits.dtype)
    found = F.binary_cross_entropy_with_logits(logits, target, reduction=reduction)
    found = found.sum(-1) if reduction == "none" else found
    return ClassLoss(found if sum_classes else found / logits.shape[-1], _weight(None, labels, reduction))


def correct(predictions: Tensor, labels: Tensor, mixed: Mixed | None = None) -> Tensor:
    """Count correct predictions; for mixed samples each label counts by its share."""
    right = predictions == labels
    if mixed is None:
        return right.sum()
    return torch.lerp((predictions == labels[mixed.partner]).float(), right.float(), mixed.share).sum()


def tta_views(images: Tensor, count: int, flip: bool) -> Iterator[Tensor]:
    """Yield the images and `count` - 1 further views for test-time augmentation.

    With `flip`, every second view is flipped. All but the first (pair) are shifted by a sixteenth of their sides in
    different directions, and every other shift also zooms in by a tenth.

    >>> [view.shape[0] for view in tta_views(torch.zeros(2, 3, 8, 8), 3, flip=True)]
    [2, 2, 2]
    """
    for number in range(count):
        shift, flipped = divmod(number, 2) if flip else (number, 0)
        view = images if shift == 0 else _shifted(images, shift)
        yield view.flip(-1) if flipped else view


def average_logits(scores: Sequence[Tensor], binary: bool) -> Tensor:
    """Average the probabilities of several views (softmax, or sigmoid if `binary`) and return them as logits."""
    if len(scores) == 1:
        return scores[0]
    stacked = torch.stack(list(scores))
    if binary:
        return F.logsigmoid(stacked).logsumexp(0) - F.logsigmoid(-stacked).logsumexp(0)
    return stacked.log_softmax(-1).logsumexp(0) - math.log(len(scores))


def feature_spread(features: Tensor) -> Tensor:
    """Measure how evenly features cover the sphere: 1 for all directions alike, 0 for a complete collapse.

    >>> feature_spread(torch.eye(4)) > 0.8, feature_spread(torch.ones(4, 4))
    (tensor(True), tensor(0.))
    """
    unit = F.normalize(features.detach().float(), dim=-1)
    return unit.std(0, correction=0).mean() * math.sqrt(features.shape[-1])


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)


def _cut_boxes(share: Tensor, height: int, width: int) -> Tensor:
    """Boxes of about (1 - share) of the area around random centers: top, bottom, left, right, each (N,)."""
    edges = []
    for length in (height, width):
        side = (length * (1 - share).sqrt()).floor()
        centre = (torch.rand(len(share)) * length).floor()
        edges += [(centre - side // 2).clamp(0, length), (centre + (side + 1) // 2).clamp(0, length)]
    return torch.stack(edges)


def _inside(box: Tensor, images: Tensor) -> Tensor:
    """Mask (N, 1, H, W) of the pixels in a box per image, given as top, bottom, left, right."""
    top, bottom, left, right = send(box, images.device).unsqueeze(-1)
    y = torch.arange(images.shape[-2], device=images.device)
    x = torch.arange(images.shape[-1], device=images.device)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
    return (rows.unsqueeze(-1) & columns.unsqueeze(-2)).unsqueeze(1)


def _shifted(images: Tensor, number: int) -> Tensor:
    """Shift in direction `number`. Directions turn by the golden angle, so any few of them are evenly spread."""
    angle, size = number * math.pi * (3 - math.sqrt(5)), 1 / 1.1 if number % 2 == 0 else 1.0
    shift = 2 / 16  # of coordinates from -1 to 1
    table = [[size, 0.0, shift * math.cos(angle)], [0.0, size, shift * math.sin(angle)]]
    theta = send(torch.tensor(table), images.device).to(images.dtype).expand(images.shape[0], 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to the device asynchronously."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)

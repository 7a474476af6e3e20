"""What is done to a whole batch of images on the device: normalising, erasing, mixing, and the loss of what was mixed.

Random numbers are drawn on the CPU from torch's global generator, one per sample, and sent over without waiting: a run
is the same on every device, and no step waits for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Normalize(nn.Module):
    """uint8 pixels to normalised floats; float images are taken as ready and passed through.

    Going through it twice is the same as once. Images without three channels get the average of the three statistics.

    >>> images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    >>> Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))(images).flatten().tolist()
    [-1.0, 1.0]
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # (pixel / 255 - mean) / std as one multiply-add. The constants belong to the input, not to the weights, and
        # are left out of checkpoints.
        self.register_buffer("scale", _per_channel([1 / (255 * s) for s in std]), persistent=False)
        self.register_buffer("shift", _per_channel([-m / s for m, s in zip(mean, std, strict=True)]), persistent=False)
        gray_mean, gray_std = sum(mean) / len(mean), sum(std) / len(std)
        self.gray_scale, self.gray_shift = 1 / (255 * gray_std), -gray_mean / gray_std

    def forward(self, images: Tensor) -> Tensor:
        """Batches (N, C, H, W) and single images alike."""
        if images.dtype != torch.uint8:
            return images
        if images.shape[-3] != len(self.scale):
            return images.float() * self.gray_scale + self.gray_shift
        return torch.addcmul(self.shift.to(images.device), images.float(), self.scale.to(images.device))


class RandomErasing(nn.Module):
    """With probability `p`, each image of its own accord, set a random rectangle to 0: the mean, after normalising."""

    def __init__(self, p: float, area: tuple[float, float] = (0.02, 1 / 3), aspect: float = 0.3) -> None:
        super().__init__()
        self.p = p
        self.area = area
        self.aspect = aspect

    def forward(self, images: Tensor) -> Tensor:
        """The batch with rectangles erased."""
        count, height, width = len(images), *images.shape[-2:]
        chosen, size, shape, y, x = torch.rand(5, count)
        pixels = (self.area[0] + size * (self.area[1] - self.area[0])) * height * width
        ratio = self.aspect ** (2 * shape - 1)  # height over width, from aspect to 1 / aspect, even in logarithm
        tall = (pixels * ratio).sqrt().round().clamp(1, height)
        wide = (pixels / ratio).sqrt().round().clamp(1, width)
        top, left = (y * (height - tall + 1)).floor(), (x * (width - wide + 1)).floor()
        tall = torch.where(chosen < self.p, tall, 0)
        box = torch.stack([top, top + tall, left, left + wide])
        return images.masked_fill(_inside(box, images), 0)


class Mixed(NamedTuple):
    """A batch in which each image holds `share` of itself and the rest of image `partner`."""

    images: Tensor
    partner: Tensor
    share: Tensor


def mix(images: Tensor, mixup: float, cutmix: float) -> Mixed:
    """Mixup or cutmix with these alphas, chosen per batch where both are above 0; each sample has its own share."""
    cut = cutmix > 0 and (mixup <= 0 or bool(torch.rand(()) < 0.5))
    alpha = torch.tensor(cutmix if cut else mixup)
    partner = torch.randperm(len(images))
    share = torch.distributions.Beta(alpha, alpha, validate_args=False).sample((len(images),))
    if not cut:
        partner, share = _send(partner, images.device), _send(share, images.device)
        per_image = share.to(images.dtype).reshape(-1, *[1] * (images.ndim - 1))
        return Mixed(torch.lerp(images[partner], images, per_image), partner, share)
    height, width = images.shape[-2:]
    box = _cut_boxes(share, height, width)
    # The border may cut a box off: what counts is the area that was really replaced.
    share = 1 - (box[1] - box[0]) * (box[3] - box[2]) / (height * width)
    partner, share = _send(partner, images.device), _send(share, images.device)
    return Mixed(torch.where(_inside(box, images), images[partner], images), partner, share)


class ClassLoss(NamedTuple):
    """Sum of the cross-entropy over a batch, and the weight it is to be divided by."""

    sum: Tensor
    weight: Tensor | int


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mixed: Mixed | None = None,
    *,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> ClassLoss:
    """Cross-entropy of (mixed) labels. Sum over weight is what `torch.nn.CrossEntropyLoss` calls the mean.

    The loss is linear in the target, so that of a mixture is the mixture of two losses: no soft labels are needed.
    """
    if mixed is None:
        total = F.cross_entropy(logits, labels, class_weights, reduction="sum", label_smoothing=label_smoothing)
        return ClassLoss(total, len(labels) if class_weights is None else class_weights[labels].sum())
    own, other = (
        F.cross_entropy(logits, target, class_weights, reduction="none", label_smoothing=label_smoothing)
        for target in (labels, labels[mixed.partner])
    )
    share = mixed.share.to(logits.dtype)
    total = torch.lerp(other, own, share).sum()
    if class_weights is None:
        return ClassLoss(total, len(labels))
    return ClassLoss(total, torch.lerp(class_weights[labels[mixed.partner]], class_weights[labels], share).sum())


def correct(predictions: Tensor, labels: Tensor, mixed: Mixed | None = None) -> Tensor:
    """How many predictions are right; of a mixture, each label counts by its share."""
    right = predictions == labels
    if mixed is None:
        return right.sum()
    return torch.lerp((predictions == labels[mixed.partner]).float(), right.float(), mixed.share).sum()


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)


def _cut_boxes(share: Tensor, height: int, width: int) -> Tensor:
    """Boxes of about (1 - share) of the area around random centres: top, bottom, left, right, each (N,)."""
    edges = []
    for length in (height, width):
        side = (length * (1 - share).sqrt()).floor()
        centre = (torch.rand(len(share)) * length).floor()
        edges += [(centre - side // 2).clamp(0, length), (centre + (side + 1) // 2).clamp(0, length)]
    return torch.stack(edges)


def _inside(box: Tensor, images: Tensor) -> Tensor:
    """Mask (N, 1, H, W) of the pixels in a box per image, given as top, bottom, left, right."""
    top, bottom, left, right = _send(box, images.device).unsqueeze(-1)
    y = torch.arange(images.shape[-2], device=images.device)
    x = torch.arange(images.shape[-1], device=images.device)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
    return (rows.unsqueeze(-1) & columns.unsqueeze(-2)).unsqueeze(1)


def _send(values: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)

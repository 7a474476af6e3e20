"""What is done to a whole batch of images on the device: normalising, erasing, mixing and its loss, several views.

Random numbers are drawn on the CPU, for every sample its own, and sent over without waiting: a run is the same on every
device, and no step waits for one. Those of erasing belong to the sample (its key); those of mixing, which makes one
sample of two, come from torch's global generator.
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

    def pixels(self, images: Tensor) -> Tensor:
        """The same for images that are pixels for certain: floats are from 0 to 1 then, and are normalised too."""
        if images.dtype == torch.uint8:
            return self(images)
        if images.shape[-3] != len(self.scale):
            return images * (255 * self.gray_scale) + self.gray_shift
        return torch.addcmul(self.shift.to(images), images, 255 * self.scale.to(images))


class RandomErasing(nn.Module):
    """With probability `p`, each image of its own accord, set a random rectangle to 0: the mean, after normalising.

    `first` is done to the images before. Draws are functions of the samples' keys, where there are any.
    """

    takes_keys = True

    def __init__(self, p: float, first: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.p = p
        self.first = first

    def forward(self, images: Tensor, keys: Keys | None = None) -> Tensor:
        """The batch with rectangles erased."""
        if self.first is not None:
            images = self.first(images)
        draws = uniforms(keys, 5, samples=len(images)).numpy()
        boxes = ops.erase_boxes(draws[:, 1:], (images.shape[-2], images.shape[-1]))
        boxes[:, 1] = np.where(draws[:, 0] < self.p, boxes[:, 1], boxes[:, 0])  # an empty one erases nothing
        return ops.erase(images, send(torch.from_numpy(boxes), images.device))


class Mixed(NamedTuple):
    """A batch in which each image holds `share` of itself and the rest of image `partner`."""

    images: Tensor
    partner: Tensor
    share: Tensor


def mix(images: Tensor, mixup: float, cutmix: float, prob: float = 1.0) -> Mixed:
    """Mixup or cutmix with these alphas, `prob` being the share of samples that are mixed at all.

    Each sample has its own partner, its own share and, where both alphas are above 0, its own choice between the two.

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
    blends, cuts = bool((~cut & ~whole).any()), bool((cut & ~whole).any())  # on the CPU: nothing waits
    box = _cut_boxes(share.masked_fill(~cut, 1.0), height, width)
    # The border may cut a box off: what counts is the area that was really replaced.
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
    """Sum of the loss over a batch, and the weight it is to be divided by."""

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


def binary_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mixed: Mixed | None = None,
    *,
    label_smoothing: float = 0.0,
    target_threshold: float | None = None,
    sum_classes: bool = False,
) -> ClassLoss:
    """Every class as a yes or no of its own, as in "ResNet strikes back" (Wightman et al. 2021).

    The loss of an image is averaged over the classes, or summed with `sum_classes`. With a threshold, (mixed, smoothed)
    targets above it are 1 and all others 0.

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
    total = F.binary_cross_entropy_with_logits(logits, target, reduction="sum")
    return ClassLoss(total if sum_classes else total / logits.shape[-1], len(labels))


def correct(predictions: Tensor, labels: Tensor, mixed: Mixed | None = None) -> Tensor:
    """How many predictions are right; of a mixture, each label counts by its share."""
    right = predictions == labels
    if mixed is None:
        return right.sum()
    return torch.lerp((predictions == labels[mixed.partner]).float(), right.float(), mixed.share).sum()


def views(images: Tensor, count: int, mirror: bool) -> Iterator[Tensor]:
    """The images as they are, and `count` - 1 other looks at them.

    With `mirror` every second one is mirrored. All but the first (pair) are moved by a sixteenth of their sides, each
    in a direction of its own, by turns also enlarged by a tenth.

    >>> [view.shape[0] for view in views(torch.zeros(2, 3, 8, 8), 3, mirror=True)]
    [2, 2, 2]
    """
    for number in range(count):
        place, mirrored = divmod(number, 2) if mirror else (number, 0)
        look = images if place == 0 else _moved(images, place)
        yield look.flip(-1) if mirrored else look


def averaged(scores: Sequence[Tensor], binary: bool) -> Tensor:
    """Logits of the averaged probabilities of several views (N, classes): of one class in all, or of each by itself."""
    if len(scores) == 1:
        return scores[0]
    stacked = torch.stack(list(scores))
    if binary:
        return F.logsigmoid(stacked).logsumexp(0) - F.logsigmoid(-stacked).logsumexp(0)
    return stacked.log_softmax(-1).logsumexp(0) - math.log(len(scores))


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
    top, bottom, left, right = send(box, images.device).unsqueeze(-1)
    y = torch.arange(images.shape[-2], device=images.device)
    x = torch.arange(images.shape[-1], device=images.device)
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
    return (rows.unsqueeze(-1) & columns.unsqueeze(-2)).unsqueeze(1)


def _moved(images: Tensor, place: int) -> Tensor:
    """Look number `place`. From one to the next the direction turns by the golden angle: any few spread evenly."""
    angle, size = place * math.pi * (3 - math.sqrt(5)), 1 / 1.1 if place % 2 == 0 else 1.0
    shift = 2 / 16  # of coordinates from -1 to 1
    table = [[size, 0.0, shift * math.cos(angle)], [0.0, size, shift * math.sin(angle)]]
    theta = send(torch.tensor(table), images.device).to(images.dtype).expand(len(images), 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def send(values: Tensor, device: torch.device) -> Tensor:
    """A small tensor to the device, without waiting for it."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)

"""Losses of segmentation: cross-entropy and Dice over the valid pixels, as a sum and its weight."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from trainformer.losses.numerics import upcast


class PixelLoss(NamedTuple):
    """The summed loss of a batch, and the weight of its pixels."""

    sum: Tensor
    weight: Tensor


def pixel_loss(
    logits: Tensor,
    masks: Tensor,
    *,
    ce: float = 1.0,
    dice: float = 0.0,
    ignore_index: int = 255,
    class_weights: Tensor | None = None,
) -> PixelLoss:
    """Cross-entropy plus Dice of logits (N, C, H, W) and masks (N, H, W), weighted by `ce` and `dice`.

    ``sum / weight`` of the cross-entropy is the mean of `torch.nn.CrossEntropyLoss` over all valid pixels. The Dice
    loss of an image counts with the weight of its pixels, so that the sum over several batches is that of one batch.

    >>> import torch
    >>> logits = torch.tensor([[[[9.0, -9.0]], [[-9.0, 9.0]]]])
    >>> loss = pixel_loss(logits, torch.tensor([[[0, 255]]]), dice=1.0)
    >>> round((loss.sum / loss.weight).item(), 4), loss.weight.item()
    (0.0, 1.0)
    """
    logits, masks = upcast(logits), masks.long()
    valid = masks != ignore_index
    if class_weights is None:
        weights = valid.flatten(1).sum(1).to(logits.dtype)
    else:
        weights = (class_weights.to(logits)[masks.masked_fill(~valid, 0)] * valid).flatten(1).sum(1)
    total = logits.new_zeros(())
    if ce:
        given = None if class_weights is None else class_weights.to(logits)
        total = ce * F.cross_entropy(logits, masks, given, ignore_index=ignore_index, reduction="sum")
    if dice:
        total = total + dice * (dice_losses(logits, masks, ignore_index) * weights).sum()
    return PixelLoss(total, weights.sum())


def dice_losses(logits: Tensor, masks: Tensor, ignore_index: int = 255, smooth: float = 1.0) -> Tensor:
    """Soft Dice loss of each image: one minus the mean Dice coefficient of the classes that occur in its mask.

    An image without valid pixels has the loss 0.
    """
    valid = (masks != ignore_index).unsqueeze(1)
    shares = (logits.softmax(1) * valid).flatten(2)
    target = F.one_hot(masks.masked_fill(~valid[:, 0], 0), logits.shape[1]).movedim(-1, 1).to(shares.dtype)
    target = (target * valid).flatten(2)
    overlap, sizes = (shares * target).sum(2), shares.sum(2) + target.sum(2)
    present = (target.sum(2) > 0).to(shares.dtype)
    losses = (1 - (2 * overlap + smooth) / (sizes + smooth)) * present
    return losses.sum(1) / present.sum(1).clamp(min=1)

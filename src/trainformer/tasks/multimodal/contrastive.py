"""Losses of images and texts that belong together: the softmax loss of CLIP and the sigmoid loss of SigLIP.

Owns the losses, in float32. With several processes the negatives are those of all of them, and each computes the loss
of its own rows: averaged over ranks, gradients are those of one process with the whole batch.

Where two pairs have one and the same caption, neither's image is wrong for the other's text: as negatives they are left
out. (To share the target among them instead would change nothing: as their texts are equal, the sum of the softmax loss
over such pairs stays what it is.)

Radford et al., CLIP, 2021; Zhai et al., SigLIP, 2023.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.losses.numerics import Reduction, check_rows, l2_normalize, no_autocast, reduce_loss, upcast
from trainformer.utils.distributed import RowCounts, gather_row_counts, gather_rows


def clip_loss(
    images: Tensor,
    texts: Tensor,
    log_scale: Tensor,
    captions: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    gather: bool = True,
) -> Tensor:
    """Each image (B, D) shall find its text (B, D) among all texts, and each text its image; the mean of both ways.

    `log_scale` is the logarithm of what cosines are multiplied with. `captions` (B,) are numbers, equal for equal
    texts: other pairs of the same number are no negatives. Without, all pairs but one's own are.

    >>> rows = torch.eye(4)
    >>> clip_loss(rows, rows, torch.tensor(10.0).log())
    tensor(0.0001)
    """
    check_rows(("images", images), ("texts", texts))
    with no_autocast(images):
        scale = upcast(log_scale).exp()
        images, texts = l2_normalize(images), l2_normalize(texts)
        shares = gather_row_counts(images) if gather else None
        every_image, every_text = _gathered(images, texts, shares)
        to_text, to_image = (scale * images) @ every_text.T, (scale * texts) @ every_image.T
        own = _own(images, shares)
        left_out = _left_out(captions, own, shares)
        if left_out is not None:
            to_text, to_image = (logits.masked_fill(left_out, -torch.inf) for logits in (to_text, to_image))
        both = [F.cross_entropy(logits, own, reduction="none") for logits in (to_text, to_image)]
        return reduce_loss((both[0] + both[1]) / 2, reduction)


def siglip_loss(
    images: Tensor,
    texts: Tensor,
    log_scale: Tensor,
    bias: Tensor,
    captions: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    gather: bool = True,
) -> Tensor:
    """Every image with every text as a yes or no of its own; one value per text, the sum over all images.

    >>> rows = torch.eye(4)
    >>> siglip_loss(rows, rows, torch.tensor(20.0).log(), torch.tensor(-10.0))
    tensor(0.0002)
    """
    check_rows(("images", images), ("texts", texts))
    with no_autocast(images):
        images, texts = l2_normalize(images), l2_normalize(texts)
        shares = gather_row_counts(images) if gather else None
        every_image = images if shares is None else gather_rows(images, shares)
        logits = (upcast(log_scale).exp() * texts) @ every_image.T + upcast(bias)
        own = _own(texts, shares)
        right = own.unsqueeze(1) == torch.arange(logits.shape[1], device=logits.device)
        losses = -F.logsigmoid(torch.where(right, logits, -logits))
        left_out = _left_out(captions, own, shares)
        return reduce_loss((losses if left_out is None else losses.masked_fill(left_out, 0.0)).sum(1), reduction)


def _gathered(images: Tensor, texts: Tensor, shares: RowCounts | None) -> tuple[Tensor, Tensor]:
    """Images and texts of all ranks, with one message. Without `shares` nothing is gathered, here and below."""
    if shares is None:
        return images, texts
    every_image, every_text = gather_rows(torch.cat([images, texts], dim=1), shares).chunk(2, dim=1)
    return every_image, every_text


def _own(rows: Tensor, shares: RowCounts | None) -> Tensor:
    """The places of one's own rows among all."""
    return torch.arange(len(rows), device=rows.device) + (0 if shares is None else shares.first)


def _left_out(captions: Tensor | None, own: Tensor, shares: RowCounts | None) -> Tensor | None:
    """Which of all rows (columns) have the caption of one's own rows, and are not those themselves."""
    if captions is None:
        return None
    same = captions.unsqueeze(1) == (captions if shares is None else gather_rows(captions, shares))
    return same.scatter(1, own.unsqueeze(1), False)

"""Image-text matching: the losses of CLIP (softmax) and SigLIP (sigmoid), and retrieval metrics of a dataset.

The losses run in float32. Negatives come from all ranks, and each rank computes the loss of its own rows; averaged over
ranks, the gradients equal those of one process with the whole batch.

Pairs with equal captions are not negatives of each other. (Sharing the target among them instead would change nothing:
their texts are equal, so the summed softmax loss would be the same.)

Radford et al., CLIP, 2021; Zhai et al., SigLIP, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.losses.contrastive import info_nce
from trainformer.losses.numerics import Reduction, check_rows, l2_normalize, no_autocast, reduce_loss, upcast
from trainformer.utils.distributed import RowCounts, gather_row_counts, gather_rows

_CELLS = 1 << 22  # similarities in memory at a time: 16 MiB, plus as much for each of three masks


def clip_loss(
    images: Tensor,
    texts: Tensor,
    log_scale: Tensor,
    captions: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    gather: bool = True,
) -> Tensor:
    """The symmetric cross-entropy of images (B, D) and texts (B, D).

    `log_scale` is the logarithm of the inverse temperature. `captions` (B,) are ids, equal for equal texts: pairs with
    the same id are not negatives of each other. Without them, all other pairs are negatives.

    >>> rows = torch.eye(4)
    >>> clip_loss(rows, rows, torch.tensor(10.0).log())
    tensor(0.0001)
    """
    check_rows(("images", images), ("texts", texts))
    with no_autocast(images):
        scale = upcast(log_scale).exp()
        images, texts = l2_normalize(images), l2_normalize(texts)
        counts = gather_row_counts(images) if gather else None
        every_image, every_text = images, texts
        if counts is not None:  # in one message
            every_image, every_text = gather_rows(torch.cat([images, texts], dim=1), counts).chunk(2, dim=1)
        first, same = _first_and_equal(captions, counts)
        to_text = info_nce(scale * images, every_text, first, same)
        return reduce_loss((to_text + info_nce(scale * texts, every_image, first, same)) / 2, reduction)


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
    """Binary cross-entropy of each image-text combination; one value per text, summed over all images.

    >>> rows = torch.eye(4)
    >>> siglip_loss(rows, rows, torch.tensor(20.0).log(), torch.tensor(-10.0))
    tensor(0.0002)
    """
    check_rows(("images", images), ("texts", texts))
    with no_autocast(images):
        images, texts = l2_normalize(images), l2_normalize(texts)
        counts = gather_row_counts(images) if gather else None
        every_image = images if counts is None else gather_rows(images, counts)
        logits = (upcast(log_scale).exp() * texts) @ every_image.T + upcast(bias)
        first, same = _first_and_equal(captions, counts)
        own = torch.arange(len(texts), device=logits.device).unsqueeze(1) + first
        matching = own == torch.arange(logits.shape[1], device=logits.device)
        losses = -F.logsigmoid(torch.where(matching, logits, -logits))
        return reduce_loss((losses if same is None else losses.masked_fill(same & ~matching, 0.0)).sum(1), reduction)


def _first_and_equal(captions: Tensor | None, counts: RowCounts | None) -> tuple[int, Tensor | None]:
    """The position of this rank's first row among all, and a mask of the pairs (columns) with the caption of a row."""
    first = 0 if counts is None else counts.first
    if captions is None:
        return first, None
    return first, captions.unsqueeze(1) == (captions if counts is None else gather_rows(captions, counts))


# -- retrieval metrics -------------------------------------------------------------------------------------


class Matches(NamedTuple):
    """Normalised images (N, D), distinct normalised texts (M, D), and index pairs (P, 2) that belong together."""

    images: Tensor
    texts: Tensor
    pairs: Tensor


def find_matches(images: Tensor, texts: Tensor, captions: Tensor) -> Matches:
    """Match images (N, D) with texts (N, C, D) by caption ids (N, C), which are 0 for a missing caption.

    Equal texts are one text: an image with several captions may find any of them, a caption any of its images.

    >>> found = find_matches(torch.eye(2), torch.eye(2).unsqueeze(1), torch.tensor([[7], [7]]))
    >>> found.texts.shape, found.pairs.tolist()
    (torch.Size([1, 2]), [[0, 0], [1, 0]])
    """
    image, place = captions.nonzero(as_tuple=True)
    ids, text = captions[image, place].unique(return_inverse=True)
    first = torch.full((len(ids),), len(text)).scatter_reduce(0, text, torch.arange(len(text)), "amin")
    pairs = torch.stack([image, text], dim=1).unique(dim=0)  # an image may have the same caption twice
    return Matches(l2_normalize(images), l2_normalize(texts[image[first], place[first]]), pairs)


def retrieval_metrics(
    found: Matches, recall_at: Sequence[int], scale: float = 1.0, bias: float | None = None
) -> dict[str, float]:
    """Recall at each k and the median rank in both directions, and the loss: SigLIP's with a bias, else CLIP's.

    Ties count as misses, so a collapsed model has a recall of 0.
    """
    metrics: dict[str, float] = {}
    losses = []
    reverse = Matches(found.texts, found.images, found.pairs.flip(1))
    for name, direction in (("image_to_text", found), ("text_to_image", reverse)):
        ranks, loss = _ranks_and_loss(direction, scale, bias)
        metrics |= {f"{name}_recall@{k}": (ranks <= k).double().mean().item() for k in recall_at}
        metrics[f"{name}_median_rank"] = ranks.double().quantile(0.5).item()
        losses.append(loss)
    # The sigmoid loss is the same sum in both directions; it is normalised per text.
    return metrics | {"loss": sum(losses) / 2 if bias is None else losses[1]}


def _ranks_and_loss(found: Matches, scale: float, bias: float | None) -> tuple[Tensor, float]:
    """The rank (from 1) of the best match of each query, and the mean of their losses."""
    order = found.pairs[:, 0].argsort(stable=True)
    queries, candidates = found.pairs[order].T.contiguous()
    ranks, total = [], 0.0
    size = max(1, _CELLS // len(found.texts))
    for start in range(0, len(found.images), size):
        rows = found.images[start : start + size]
        similarity = rows @ found.texts.T
        low, high = torch.searchsorted(queries, torch.tensor([start, start + len(rows)])).tolist()
        matching = torch.zeros_like(similarity, dtype=torch.bool)
        matching[queries[low:high] - start, candidates[low:high]] = True
        best = similarity.masked_fill(~matching, -torch.inf).amax(1, keepdim=True)
        ranks.append(1 + ((similarity >= best) & ~matching).sum(1))
        logits = upcast(similarity) * scale
        if bias is None:
            target = matching.to(logits.dtype) / matching.sum(1, keepdim=True)
            losses = F.cross_entropy(logits, target, reduction="none")
        else:
            losses = -F.logsigmoid(torch.where(matching, logits + bias, -logits - bias))
        total += float(losses.double().sum())
    return torch.cat(ranks), total / len(found.images)

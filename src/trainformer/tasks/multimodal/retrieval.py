"""How well images and texts find each other over a whole set.

Owns the ranks of what is to be found, the recalls they give, and the loss of the set as one batch. Equal texts are one
text: an image with several captions shall find any of them, a caption any of the images it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.losses.numerics import l2_normalize, upcast

_CELLS = 1 << 22  # similarities in memory at a time: 16 MiB, and as much again for each of three masks


@dataclass(frozen=True)
class Matches:
    """Images (N, D), different texts (M, D), both of length one, and pairs (P, 2) of those that belong together."""

    images: Tensor
    texts: Tensor
    pairs: Tensor

    def reversed(self) -> Matches:
        """The same with texts in the place of images."""
        return Matches(self.texts, self.images, self.pairs.flip(1))


def matches(images: Tensor, texts: Tensor, captions: Tensor) -> Matches:
    """From images (N, D), texts (N, C, D) and the numbers of their captions (N, C), which are 0 where there is none.

    >>> found = matches(torch.eye(2), torch.eye(2).unsqueeze(1), torch.tensor([[7], [7]]))
    >>> found.texts.shape, found.pairs.tolist()
    (torch.Size([1, 2]), [[0, 0], [1, 0]])
    """
    image, place = captions.nonzero(as_tuple=True)
    numbers, text = captions[image, place].unique(return_inverse=True)
    first = torch.full((len(numbers),), len(text)).scatter_reduce(0, text, torch.arange(len(text)), "amin")
    pairs = torch.stack([image, text], dim=1).unique(dim=0)  # an image may say the same twice
    return Matches(l2_normalize(images), l2_normalize(texts[image[first], place[first]]), pairs)


def retrieval_metrics(
    found: Matches, recall_at: Sequence[int], scale: float = 1.0, bias: float | None = None
) -> dict[str, float]:
    """Recall at each k and the median rank both ways, and the loss: CLIP's, or SigLIP's where there is a bias.

    Of equally similar candidates the wrong ones count as first: where everything looks alike, nothing is found.
    """
    metrics: dict[str, float] = {}
    losses = []
    for name, way in (("image_to_text", found), ("text_to_image", found.reversed())):
        ranks, loss = _ranks_and_loss(way, scale, bias)
        metrics |= {f"{name}_recall@{k}": (ranks <= k).double().mean().item() for k in recall_at}
        metrics[f"{name}_median_rank"] = ranks.double().quantile(0.5).item()
        losses.append(loss)
    # The sigmoid loss is a sum over all pairs, whichever way it is taken; one value per text.
    return metrics | {"loss": sum(losses) / 2 if bias is None else losses[1]}


def _ranks_and_loss(way: Matches, scale: float, bias: float | None) -> tuple[Tensor, float]:
    """The rank (from 1) of the best match of each query, and the mean of their losses."""
    order = way.pairs[:, 0].argsort(stable=True)
    queries, candidates = way.pairs[order].T.contiguous()
    ranks, total = [], 0.0
    size = max(1, _CELLS // len(way.texts))
    for start in range(0, len(way.images), size):
        rows = way.images[start : start + size]
        similarity = rows @ way.texts.T
        low, high = torch.searchsorted(queries, torch.tensor([start, start + len(rows)])).tolist()
        right = torch.zeros_like(similarity, dtype=torch.bool)
        right[queries[low:high] - start, candidates[low:high]] = True
        best = similarity.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        ranks.append(1 + ((similarity >= best) & ~right).sum(1))
        total += _loss(upcast(similarity) * scale, right, bias)
    return torch.cat(ranks), total / len(way.images)


def _loss(logits: Tensor, right: Tensor, bias: float | None) -> float:
    if bias is not None:
        return float(-F.logsigmoid(torch.where(right, logits + bias, -logits - bias)).double().sum())
    share = right.to(logits.dtype) / right.sum(1, keepdim=True)
    return float(F.cross_entropy(logits, share, reduction="none").double().sum())

"""Margin softmax losses: ArcFace, CosFace, sub-center ArcFace, and NormFace (no margin).

Owns the class weights and the margin, in float32 for embeddings of any dtype. The angular margin needs no acos, whose
gradient is infinite at a cosine of one: cos(a + m) = cos a cos m - sin a sin m.

Deng et al., ArcFace, 2019; Wang et al., CosFace, 2018; Deng et al., Sub-center ArcFace, 2020; Wang et al., NormFace,
2017.
"""

from __future__ import annotations

import math
from typing import ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError, check_choice, check_count, expected
from trainformer.losses.numerics import Reduction, check_positive, l2_normalize, no_autocast


class _CosineSoftmax(nn.Module):
    """Cross-entropy over scaled cosines to class weights; subclasses apply the margin to the true class.

    `weight` holds the `centers` rows of class 0, then those of class 1, and so on; a class scores by its nearest.
    """

    per_sample: ClassVar[bool] = True

    def __init__(self, embedding_dim: int, num_classes: int, scale: float, centers: int = 1) -> None:
        super().__init__()
        check_count("embedding_dim", embedding_dim)
        check_count("num_classes", num_classes)
        check_count("sub_centers", centers)
        check_positive("scale", scale)
        self.embedding_dim = embedding_dim
        self.num_classes = num_classes
        self.scale = float(scale)
        self.sub_centers = centers
        self.weight = nn.Parameter(torch.empty(num_classes * centers, embedding_dim))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, embeddings: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The loss of embeddings (B, D), normalised here, with class indices (B,)."""
        check_choice("reduction", reduction, get_args(Reduction))
        self._check(embeddings, labels)
        with no_autocast(embeddings):
            cosine = self._cosine(embeddings)
            index = labels.long()
            column = index.unsqueeze(1)
            # Only the cosine of the true class changes, so no one-hot mask as large as the logits is needed.
            logits = self.scale * cosine.scatter(1, column, self._with_margin(cosine.gather(1, column)))
            return F.cross_entropy(logits, index, reduction=reduction)

    def logits(self, embeddings: Tensor) -> Tensor:
        """Scaled cosines (B, classes) without the margin, for evaluation."""
        with no_autocast(embeddings):
            return self.scale * self._cosine(embeddings)

    def extra_repr(self) -> str:
        names = ("embedding_dim", "num_classes", "margin", "scale", "sub_centers")
        return ", ".join(f"{name}={getattr(self, name):g}" for name in names if hasattr(self, name))

    def _with_margin(self, cosine: Tensor) -> Tensor:
        return cosine

    def _cosine(self, embeddings: Tensor) -> Tensor:
        rows = l2_normalize(embeddings)
        cosines = F.linear(rows, l2_normalize(self.weight).to(rows.dtype))
        if self.sub_centers == 1:
            return cosines
        return cosines.unflatten(1, (self.num_classes, self.sub_centers)).max(dim=2).values

    def _check(self, embeddings: Tensor, labels: Tensor) -> None:
        if embeddings.ndim != 2 or embeddings.shape[1] != self.embedding_dim:
            what = f"embeddings of shape (B, {self.embedding_dim})"
            raise BadArgument(expected(what, tuple(embeddings.shape), "embedding_dim is the width of the embeddings."))
        if labels.shape != embeddings.shape[:1] or labels.is_floating_point():
            received = f"{labels.dtype} of shape {tuple(labels.shape)}"
            do = "Mixed or smoothed labels do not fit a margin loss."
            raise BadArgument(expected(f"{len(embeddings)} class indices", received, do))
        # On a GPU, reading the labels would be a device sync in every step.
        if labels.device.type == "cpu" and labels.numel() and not torch.compiler.is_compiling():
            lowest, highest = (int(x) for x in labels.aminmax())
            if lowest < 0 or highest >= self.num_classes:
                wrong = lowest if lowest < 0 else highest
                do = "Pass the right num_classes, or number the labels from 0."
                raise DataError(expected(f"labels from 0 to {self.num_classes - 1}", wrong, do))


class NormFaceLoss(_CosineSoftmax):
    """NormFace: softmax over scaled cosines, without a margin.

    >>> loss = NormFaceLoss(embedding_dim=8, num_classes=3)
    >>> loss(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]), reduction="none").shape
    torch.Size([4])
    """

    def __init__(self, embedding_dim: int, num_classes: int, scale: float = 64.0) -> None:
        super().__init__(embedding_dim, num_classes, scale)


class CosFaceLoss(_CosineSoftmax):
    """CosFace: subtracts `margin` from the cosine to the true class.

    >>> loss = CosFaceLoss(embedding_dim=8, num_classes=3)
    >>> loss(torch.randn(4, 8), torch.tensor([0, 1, 2, 0])).shape
    torch.Size([])
    """

    def __init__(self, embedding_dim: int, num_classes: int, margin: float = 0.35, scale: float = 64.0) -> None:
        super().__init__(embedding_dim, num_classes, scale)
        self.margin = _checked_margin(margin, 1.0, "It is subtracted from a cosine; 0.35 is usual.")

    def _with_margin(self, cosine: Tensor) -> Tensor:
        return cosine - self.margin


class _AngularMargin(_CosineSoftmax):
    def __init__(self, embedding_dim: int, num_classes: int, margin: float, scale: float, centers: int = 1) -> None:
        super().__init__(embedding_dim, num_classes, scale, centers)
        do = "It is an angle in radians; 0.5 is usual, which is 28.6 degrees."
        self.margin = _checked_margin(margin, math.pi / 2, do)

    def _with_margin(self, cosine: Tensor) -> Tensor:
        shifted = cosine * math.cos(self.margin) - _sine(cosine) * math.sin(self.margin)
        past_pi = cosine - self.margin * math.sin(self.margin)
        return torch.where(cosine >= -math.cos(self.margin), shifted, past_pi)


class ArcFaceLoss(_AngularMargin):
    """ArcFace: adds `margin` (in radians) to the angle between embedding and true class.

    Past theta + margin = pi the cosine would rise again; there cos(theta) - margin * sin(margin) takes its place. The
    gradient is finite at a cosine of exactly one or minus one.

    >>> loss = ArcFaceLoss(embedding_dim=8, num_classes=3)
    >>> loss(torch.randn(4, 8), torch.tensor([0, 1, 2, 0])).shape
    torch.Size([])
    """

    def __init__(self, embedding_dim: int, num_classes: int, margin: float = 0.5, scale: float = 64.0) -> None:
        super().__init__(embedding_dim, num_classes, margin, scale)


class SubCenterArcFaceLoss(_AngularMargin):
    """ArcFace with several centers per class, of which the nearest counts: robust to noise and multimodal classes.

    >>> loss = SubCenterArcFaceLoss(embedding_dim=8, num_classes=3, sub_centers=2)
    >>> loss.weight.shape, loss.logits(torch.randn(4, 8)).shape
    (torch.Size([6, 8]), torch.Size([4, 3]))
    """

    def __init__(
        self, embedding_dim: int, num_classes: int, margin: float = 0.5, scale: float = 64.0, sub_centers: int = 3
    ) -> None:
        super().__init__(embedding_dim, num_classes, margin, scale, sub_centers)


def _sine(cosine: Tensor) -> Tensor:
    """sqrt(1 - cos^2), with value and gradient zero where rounding leaves nothing under the root.

    (1 - c)(1 + c) keeps the digits that 1 - c * c loses near one, because 1 - c is exact there.
    """
    square = (1 - cosine) * (1 + cosine)
    inside = square > 0
    return torch.where(inside, torch.where(inside, square, torch.ones_like(square)).sqrt(), torch.zeros_like(square))


def _checked_margin(margin: float, most: float, do: str) -> float:
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin <= most:
        raise BadArgument(expected(f"margin to be from 0 to {most:.3g}", margin, do))
    return float(margin)

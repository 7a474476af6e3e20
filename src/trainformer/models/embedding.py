"""A backbone and what makes an embedding of its features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.models.backbones import feature_shape
from trainformer.models.heads import BNNeck
from trainformer.models.poolers import make_pooler


class EmbeddingModel(nn.Module):
    """Backbone, pooling, projection, neck: images to embeddings of length 1.

    `pooling` (`"gem"`, `"avg"`, `"max"`, a module) takes the place of the backbone's own; the backbone must then give
    feature maps or tokens. ``embedding_dim=None`` leaves the projection out. `neck="bn"` normalises over the batch
    (BNNeck), after which the loss and retrieval see the embedding. The backbone's width is found by a dry run at
    `size`, since not every model gives what it says.
    """

    def __init__(
        self,
        backbone: nn.Module,
        embedding_dim: int | None = 512,
        *,
        pooling: str | nn.Module | None = None,
        neck: str | None = None,
        normalize: bool = True,
        channels: int = 3,
        size: tuple[int, int] = (224, 224),
    ) -> None:
        super().__init__()
        if neck not in (None, "none", "bn"):
            raise BadArgument(expected("neck to be 'bn' or None", neck))
        self.backbone = backbone
        tokens = getattr(backbone, "num_prefix_tokens", 0)  # class and register tokens of a ViT are no positions
        self.pool = nn.Identity() if pooling is None else make_pooler(pooling, prefix_tokens=tokens)
        width = self._width(channels, size)
        self.embedding_dim = embedding_dim or width
        self.proj: nn.Module = nn.Identity() if embedding_dim is None else nn.Linear(width, embedding_dim)
        self.neck: nn.Module = BNNeck(self.embedding_dim) if neck == "bn" else nn.Identity()
        self.normalize = normalize

    def forward(self, images: Tensor) -> Tensor:
        """(N, embedding_dim), of length 1 unless that was declined."""
        embeddings = self.neck(self.proj(self.features(images)))
        if not self.normalize:
            return embeddings
        # Half precision is too coarse for a norm; double is left alone.
        wide = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        return F.normalize(wide, dim=-1)

    def features(self, images: Tensor) -> Tensor:
        """What the projection gets: pooled features of the backbone."""
        return self.pool(self.backbone(images))

    def no_weight_decay(self) -> set[str]:
        """Parameters the backbone wants left alone, under the names they have here."""
        own = getattr(self.backbone, "no_weight_decay", None)
        return {f"backbone.{name}" for name in own()} if callable(own) else set()

    def _width(self, channels: int, size: tuple[int, int]) -> int:
        shape = feature_shape(nn.Sequential(self.backbone, self.pool), channels, size)
        if len(shape) != 2:
            raise BadArgument(
                expected(
                    "one row of features per image",
                    f"a tensor of shape {tuple(shape)} for one image",
                    "Build the backbone with num_classes=0, or pass pooling='avg' or 'gem'.",
                )
            )
        return int(shape[1])

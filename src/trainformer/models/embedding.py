"""A backbone and what makes an embedding of its features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.models.backbones import dtype_of, feature_shape
from trainformer.models.heads import BNNeck
from trainformer.models.poolers import make_pooler

_SHORTEST = 1e-12


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
        size: tuple[int, ...] = (224, 224),
    ) -> None:
        super().__init__()
        check_neck(neck)
        self.backbone = backbone
        self.pool = nn.Identity() if pooling is None else _pooler_for(backbone, pooling)
        width = self._width(channels, size)
        self.embedding_dim = embedding_dim or width
        self.proj: nn.Module = nn.Identity() if embedding_dim is None else nn.Linear(width, embedding_dim)
        self.neck: nn.Module = BNNeck(self.embedding_dim) if neck == "bn" else nn.Identity()
        for part in (self.pool, self.proj, self.neck):
            part.to(dtype_of(backbone))
        self.normalize = normalize

    def forward(self, images: Tensor) -> Tensor:
        """(N, embedding_dim), of length 1 unless that was declined."""
        embeddings = self.neck(self.proj(self.features(images)))
        if not self.normalize:
            return embeddings
        # Half precision is too coarse for a norm; double is left alone.
        wide = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        # A row of zeros (a black image, dead units) stays as it is. `F.normalize` divides it by 1e-12, and its
        # gradient too: beside 1e12 everybody else's is lost in clipping, and half precision does not hold it.
        return wide / torch.where(length > _SHORTEST, length, 1.0)

    def features(self, images: Tensor) -> Tensor:
        """What the projection gets: pooled features of the backbone."""
        return self.pool(self.backbone(images))

    def no_weight_decay(self) -> set[str]:
        """Parameters the backbone wants left alone, under the names they have here."""
        own = getattr(self.backbone, "no_weight_decay", None)
        return {f"backbone.{name}" for name in own()} if callable(own) else set()

    def _width(self, channels: int, size: tuple[int, ...]) -> int:
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


def check_neck(neck: str | None) -> None:
    """Refuse a neck that does not exist."""
    if neck not in (None, "none", "bn"):
        raise BadArgument(expected("neck to be 'bn' or None", neck))


class _ChannelsFirst(nn.Module):
    """(N, H, W, C), as Swin and some others give their features, as (N, C, H, W)."""

    def forward(self, features: Tensor) -> Tensor:
        return features.permute(0, 3, 1, 2)


def _pooler_for(backbone: nn.Module, pooling: str | nn.Module) -> nn.Module:
    """A pooler that gets from the backbone what it takes."""
    # Class and register tokens are no positions. CaiT and XCiT have a class token and do not count it.
    tokens = getattr(backbone, "num_prefix_tokens", int(isinstance(getattr(backbone, "cls_token", None), Tensor)))
    pooler = make_pooler(pooling, prefix_tokens=tokens)
    return nn.Sequential(_ChannelsFirst(), pooler) if getattr(backbone, "output_fmt", None) == "NHWC" else pooler

"""Embedding models: a backbone with pooling, projection and neck, and the poolers.

Poolers reduce feature maps (N, C, H, W) of convolutional networks, or tokens (N, L, D) of transformers, to one vector
per image; `prefix_tokens` class and register tokens in front of the patches are skipped.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.models.backbones import feature_shape, model_dtype
from trainformer.models.heads import BNNeck

_EPS = 1e-12


class EmbeddingModel(nn.Module):
    """Backbone, pooling, projection and neck: images to L2-normalised embeddings.

    `pooling` (`"gem"`, `"avg"`, `"max"`, a module) replaces the backbone's own; the backbone must then return feature
    maps or tokens. ``embedding_dim=None`` omits the projection. `neck="bn"` adds a BNNeck; loss and retrieval use its
    output. The width of the backbone comes from a dry run at `size`, because not every model reports it correctly.
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
            part.to(model_dtype(backbone))
        self.normalize = normalize

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings (N, embedding_dim), L2-normalised unless ``normalize=False``."""
        embeddings = self.neck(self.proj(self.features(images)))
        if not self.normalize:
            return embeddings
        wide = embeddings if embeddings.dtype == torch.float64 else embeddings.float()  # half is too coarse for norms
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        # A zero row (a black image, dead units) stays zero. `F.normalize` divides it, and its gradient, by 1e-12: next
        # to 1e12 all other gradients vanish in clipping, and half precision overflows.
        return wide / torch.where(norm > _EPS, norm, 1.0)

    def features(self, images: Tensor) -> Tensor:
        """Pooled features of the backbone, the input of the projection."""
        return self.pool(self.backbone(images))

    def no_weight_decay(self) -> set[str]:
        """The backbone's `no_weight_decay` parameters, under the names they have here."""
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
    """Reject an unknown neck."""
    if neck not in (None, "none", "bn"):
        raise BadArgument(expected("neck to be 'bn' or None", neck))


# -- poolers -----------------------------------------------------------------------------------------------


class _Pooler(nn.Module):
    def __init__(self, prefix_tokens: int = 0) -> None:
        super().__init__()
        if prefix_tokens < 0:
            raise BadArgument(expected("prefix_tokens to be 0 or more", prefix_tokens))
        self.prefix_tokens = prefix_tokens

    def _positions_last(self, features: Tensor) -> Tensor:
        """Feature maps or tokens as (N, C, positions)."""
        if features.ndim == 4:
            return features.flatten(2)
        if features.ndim == 3:
            return features[:, self.prefix_tokens :].transpose(1, 2)
        do = "Pool the features before the backbone's own pooling (timm: global_pool='')."
        raise DataError(expected("features of shape (N, C, H, W) or (N, L, D)", tuple(features.shape), do))


class AvgPool(_Pooler):
    """Mean over all positions.

    >>> AvgPool()(torch.ones(2, 8, 7, 7)).shape, AvgPool(prefix_tokens=1)(torch.ones(2, 50, 8)).shape
    (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    def forward(self, features: Tensor) -> Tensor:
        return self._positions_last(features).mean(-1)


class MaxPool(_Pooler):
    """Maximum over all positions."""

    def forward(self, features: Tensor) -> Tensor:
        return self._positions_last(features).amax(-1)


class GeM(_Pooler):
    """Generalised mean pooling (Radenović et al., 2018): (mean of x^p)^(1/p), between mean (p = 1) and maximum.

    Values are clamped to at least `eps`. The power `p` is learned unless ``trainable=False``. Computed in float32
    relative to the highest value, so that no power under- or overflows for any `p`.

    >>> GeM(p=1.0)(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[2.]], grad_fn=<MulBackward0>)
    """

    p: Tensor

    def __init__(self, p: float = 3.0, eps: float = 1e-6, trainable: bool = True, prefix_tokens: int = 0) -> None:
        super().__init__(prefix_tokens)
        if p <= 0:
            raise BadArgument(expected("GeM's p to be above 0", p, "1 is the mean, 3 is usual."))
        if eps <= 0:
            raise BadArgument(expected("GeM's eps to be above 0", eps))
        if trainable:
            self.p = nn.Parameter(torch.tensor(float(p)))
        else:
            self.register_buffer("p", torch.tensor(float(p)))
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:
        values = self._positions_last(features).float().clamp(min=self.eps)
        power = self.p.float()
        # GeM(x) = s * GeM(x / s) for any constant s, so s needs no gradient. Without it 1e-6 ** 8 is 0 in float32, and
        # the gradient of its root infinite.
        highest = values.detach().amax(-1)
        relative = values / highest.unsqueeze(-1)
        return (highest * relative.pow(power).mean(-1).pow(1 / power)).to(features.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}, trainable={isinstance(self.p, nn.Parameter)}, prefix_tokens={self.prefix_tokens}"


class ClassToken(nn.Module):
    """The first token of (N, L, D).

    >>> ClassToken()(torch.ones(2, 50, 8)).shape
    torch.Size([2, 8])
    """

    def forward(self, features: Tensor) -> Tensor:
        if features.ndim != 3:
            do = "Feature maps have no class token: take 'avg' or 'gem'."
            raise DataError(expected("tokens of shape (N, L, D)", tuple(features.shape), do))
        return features[:, 0]


def make_pooler(pooler: str | nn.Module, *, prefix_tokens: int = 0) -> nn.Module:
    """A pooler by name (`"avg"`, `"max"`, `"gem"`, `"token"`); a module is returned unchanged.

    `prefix_tokens` (timm: ``model.num_prefix_tokens``) are skipped by all but `"token"`.

    >>> make_pooler("gem")
    GeM(eps=1e-06, trainable=True, prefix_tokens=0)
    """
    if isinstance(pooler, nn.Module):
        return pooler
    if pooler == "token":
        return ClassToken()
    poolers: dict[str, type[_Pooler]] = {"avg": AvgPool, "max": MaxPool, "gem": GeM}
    if pooler not in poolers:
        do = did_you_mean(str(pooler), [*poolers, "token"])
        raise BadArgument(expected("pooler to be 'avg', 'max', 'gem', 'token' or a module", pooler, do))
    return poolers[pooler](prefix_tokens=prefix_tokens)


class _ChannelsFirst(nn.Module):
    """(N, H, W, C), as Swin and others return features, to (N, C, H, W)."""

    def forward(self, features: Tensor) -> Tensor:
        return features.permute(0, 3, 1, 2)


def _pooler_for(backbone: nn.Module, pooling: str | nn.Module) -> nn.Module:
    # CaiT and XCiT have a class token but do not report it.
    tokens = getattr(backbone, "num_prefix_tokens", int(isinstance(getattr(backbone, "cls_token", None), Tensor)))
    pooler = make_pooler(pooling, prefix_tokens=tokens)
    return nn.Sequential(_ChannelsFirst(), pooler) if getattr(backbone, "output_fmt", None) == "NHWC" else pooler

"""Poolers: from a map of features to one vector per image.

Owns the arithmetic over positions. Every pooler takes feature maps (N, C, H, W), as convolutional networks give them,
and tokens (N, L, D), as transformers do, less the class and register tokens in front if it is told how many there are.
Which pooler suits a backbone is the model's business.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected


class AvgPool(nn.Module):
    """The mean over all positions.

    >>> AvgPool()(torch.ones(2, 8, 7, 7)).shape, AvgPool(prefix_tokens=1)(torch.ones(2, 50, 8)).shape
    (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    def __init__(self, prefix_tokens: int = 0) -> None:
        super().__init__()
        self.prefix_tokens = _not_negative(prefix_tokens)

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) or (N, L, C) as (N, C)."""
        return _positions_last(features, self.prefix_tokens).mean(-1)


class MaxPool(nn.Module):
    """The highest value of each channel over all positions."""

    def __init__(self, prefix_tokens: int = 0) -> None:
        super().__init__()
        self.prefix_tokens = _not_negative(prefix_tokens)

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) or (N, L, C) as (N, C)."""
        return _positions_last(features, self.prefix_tokens).amax(-1)


class GeM(nn.Module):
    """Generalised mean (Radenović et al., 2018): (mean of x^p)^(1/p), between the mean (p = 1) and the maximum.

    Values below `eps` count as `eps`. The power `p` is learned unless ``trainable=False``. Computed in fp32 relative
    to the highest value, so that no power of it leaves the range of floats, whatever `p` becomes.

    >>> GeM(p=1.0)(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[2.]], grad_fn=<MulBackward0>)
    """

    p: Tensor

    def __init__(self, p: float = 3.0, eps: float = 1e-6, trainable: bool = True, prefix_tokens: int = 0) -> None:
        super().__init__()
        if p <= 0:
            raise BadArgument(expected("GeM's p to be above 0", p, "1 is the mean, 3 is usual."))
        if eps <= 0:
            raise BadArgument(expected("GeM's eps to be above 0", eps))
        if trainable:
            self.p = nn.Parameter(torch.tensor(float(p)))
        else:
            self.register_buffer("p", torch.tensor(float(p)))
        self.eps = eps
        self.prefix_tokens = _not_negative(prefix_tokens)

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) or (N, L, C) as (N, C), in the precision of the features."""
        values = _positions_last(features, self.prefix_tokens).float().clamp(min=self.eps)
        power = self.p.float()
        # GeM(x) = s * GeM(x / s) for any constant s, so s takes no part in the gradient. Without it 1e-6 ** 8 is 0 in
        # fp32, and the gradient of its root infinite.
        highest = values.detach().amax(-1)
        relative = values / highest.unsqueeze(-1)
        return (highest * relative.pow(power).mean(-1).pow(1 / power)).to(features.dtype)

    def extra_repr(self) -> str:
        """What the printed module says of itself."""
        return f"eps={self.eps}, trainable={isinstance(self.p, nn.Parameter)}, prefix_tokens={self.prefix_tokens}"


class ClassToken(nn.Module):
    """The first token of (N, L, D).

    >>> ClassToken()(torch.ones(2, 50, 8)).shape
    torch.Size([2, 8])
    """

    def forward(self, features: Tensor) -> Tensor:
        """(N, L, D) as (N, D)."""
        if features.ndim != 3:
            do = "Feature maps have no class token: take 'avg' or 'gem'."
            raise DataError(expected("tokens of shape (N, L, D)", tuple(features.shape), do))
        return features[:, 0]


_NAMES = ("avg", "max", "gem", "token")


def make_pooler(pooler: str | nn.Module, *, prefix_tokens: int = 0) -> nn.Module:
    """A pooler by name (`"avg"`, `"max"`, `"gem"`, `"token"`), or a module as it is.

    `prefix_tokens` are those in front of the patches' (timm: ``model.num_prefix_tokens``), which only `"token"` uses.

    >>> make_pooler("gem")
    GeM(eps=1e-06, trainable=True, prefix_tokens=0)
    """
    if isinstance(pooler, nn.Module):
        return pooler
    if pooler == "avg":
        return AvgPool(prefix_tokens)
    if pooler == "max":
        return MaxPool(prefix_tokens)
    if pooler == "gem":
        return GeM(prefix_tokens=prefix_tokens)
    if pooler == "token":
        return ClassToken()
    do = did_you_mean(str(pooler), _NAMES)
    raise BadArgument(expected("pooler to be 'avg', 'max', 'gem', 'token' or a module", pooler, do))


def _positions_last(features: Tensor, prefix_tokens: int) -> Tensor:
    """(N, C, positions) of a map or of tokens."""
    if features.ndim == 4:
        return features.flatten(2)
    if features.ndim == 3:
        return features[:, prefix_tokens:].transpose(1, 2)
    do = "Pool the features before the backbone's own pooling (timm: global_pool='')."
    raise DataError(expected("features of shape (N, C, H, W) or (N, L, D)", tuple(features.shape), do))


def _not_negative(prefix_tokens: int) -> int:
    if prefix_tokens < 0:
        raise BadArgument(expected("prefix_tokens to be 0 or more", prefix_tokens))
    return prefix_tokens

"""Heads: projectors, predictors and classifiers, structured and initialised as in the papers of their methods.

A linear layer in front of a BatchNorm has no bias, because BatchNorm would remove it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import weight_norm

from trainformer.core.errors import BadArgument, expected
from trainformer.utils.distributed import world_size


class MLPHead(nn.Sequential):
    """An MLP with the widths `dims` and ReLU between the layers.

    `norm` adds a BatchNorm after each hidden layer, `last_norm` one after the last (without scale and shift if
    ``last_affine=False``). By default layers without a BatchNorm have a bias; `bias` overrides it for all layers.

    >>> MLPHead([8, 16, 4])
    MLPHead(
      (0): Linear(in_features=8, out_features=16, bias=False)
      (1): BatchNorm1d(16, ...)
      (2): ReLU(inplace=True)
      (3): Linear(in_features=16, out_features=4, bias=True)
    )
    """

    def __init__(
        self,
        dims: Sequence[int],
        *,
        norm: bool = True,
        last_norm: bool = False,
        last_affine: bool = True,
        bias: bool | None = None,
    ) -> None:
        if len(dims) < 2 or min(dims) < 1:
            raise BadArgument(expected("dims to be at least two positive widths", list(dims)))
        layers: list[nn.Module] = []
        for index, (width_in, width_out) in enumerate(pairwise(dims)):
            last = index == len(dims) - 2
            normed = last_norm if last else norm
            layers.append(nn.Linear(width_in, width_out, bias=not normed if bias is None else bias))
            if normed:
                layers.append(nn.BatchNorm1d(width_out, affine=last_affine or not last))
            if not last:
                layers.append(nn.ReLU(inplace=True))
        super().__init__(*layers)


def simclr_projector(in_dim: int, hidden_dim: int = 2048, out_dim: int = 128, *, layers: int = 2) -> MLPHead:
    """SimCLR's projector: BatchNorm after every layer; 2 layers in the first paper, 3 in the second."""
    return MLPHead(_widths(in_dim, hidden_dim, out_dim, layers), last_norm=True)


def moco_projector(in_dim: int, hidden_dim: int = 2048, out_dim: int = 128) -> MLPHead:
    """MoCo v2's projector: two layers without BatchNorm."""
    return MLPHead([in_dim, hidden_dim, out_dim], norm=False)


def moco_v3_projector(in_dim: int, hidden_dim: int = 4096, out_dim: int = 256, *, layers: int = 3) -> MLPHead:
    """MoCo v3's projector: BatchNorm after every layer, the last one not affine; 3 layers for ViTs, 2 for ResNets."""
    return MLPHead(_widths(in_dim, hidden_dim, out_dim, layers), last_norm=True, last_affine=False)


def moco_v3_predictor(
    in_dim: int = 256, hidden_dim: int = 4096, out_dim: int = 256, *, last_norm: bool = True
) -> MLPHead:
    """MoCo v3's predictor: two layers; for ResNets the authors omit the last BatchNorm (``last_norm=False``)."""
    bias = None if last_norm else False  # no layer of theirs has a bias
    return MLPHead([in_dim, hidden_dim, out_dim], last_norm=last_norm, last_affine=False, bias=bias)


def byol_projector(in_dim: int, hidden_dim: int = 4096, out_dim: int = 256) -> MLPHead:
    """BYOL's projector: two layers with BatchNorm in between."""
    return MLPHead([in_dim, hidden_dim, out_dim])


def byol_predictor(in_dim: int = 256, hidden_dim: int = 4096, out_dim: int = 256) -> MLPHead:
    """BYOL's predictor: the same structure as its projector."""
    return MLPHead([in_dim, hidden_dim, out_dim])


class DINOHead(nn.Module):
    """DINO's head: an MLP with GELU to an L2-normalised bottleneck, then a weight-normed layer to `out_dim` prototypes.

    With `norm_last_layer` the prototypes keep norm 1, otherwise their norms are learned. While `last_layer_frozen` is
    True (in the paper: during the first epoch) the prototypes get no gradient, so they are unused parameters for DDP.

    >>> import torch
    >>> head = DINOHead(32, out_dim=64, hidden_dim=16, bottleneck_dim=8)
    >>> head(torch.randn(4, 32)).shape, head.last_layer.weight.norm(dim=1).allclose(torch.ones(64))
    (torch.Size([4, 64]), True)
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        *,
        norm_last_layer: bool = True,
        layers: int = 3,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        widths = _widths(in_dim, hidden_dim, bottleneck_dim, layers)
        parts: list[nn.Module] = []
        for width_in, width_out in pairwise(widths[:-1]):
            parts.append(nn.Linear(width_in, width_out, bias=not batch_norm))
            if batch_norm:
                parts.append(nn.BatchNorm1d(width_out))
            parts.append(nn.GELU())
        parts.append(nn.Linear(widths[-2], widths[-1]))
        self.mlp = nn.Sequential(*parts)
        for part in parts:
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight, std=0.02)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
        self.last_layer = weight_norm(nn.Linear(bottleneck_dim, out_dim, bias=False))
        norms = self.last_layer.parametrizations.weight.original0  # the g of weight norm
        nn.init.ones_(norms)
        norms.requires_grad_(not norm_last_layer)
        self.last_layer_frozen = False

    def forward(self, features: Tensor) -> Tensor:
        """Logits (N, out_dim): with `norm_last_layer`, cosines between features and prototypes."""
        # In float32: squares of small fp16 values are zero, and bf16 norms are off by up to 0.4 %.
        direction = F.normalize(self.mlp(features).float(), dim=-1)
        weight: Tensor = self.last_layer.weight  # computes the weight norm, once
        if self.last_layer_frozen:
            weight = weight.detach()
        return F.linear(direction.to(weight.dtype), weight)


class ClassificationHead(nn.Sequential):
    """Dropout and a linear layer, after a non-affine BatchNorm with `batch_norm`, as usual for linear probes.

    Features of masked autoencoders need that BatchNorm: their scales differ by orders of magnitude. Small initial
    weights (0.01) and zero bias make the first loss close to log(num_classes).

    >>> import torch
    >>> ClassificationHead(8, 3, batch_norm=True)(torch.randn(4, 8)).shape
    torch.Size([4, 3])
    """

    def __init__(self, in_dim: int, num_classes: int, *, dropout: float = 0.0, batch_norm: bool = False) -> None:
        if num_classes < 1:
            raise BadArgument(expected("num_classes to be a positive integer", num_classes))
        if not 0 <= dropout < 1:
            raise BadArgument(expected("dropout to be at least 0 and below 1", dropout))
        linear = nn.Linear(in_dim, num_classes)
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)
        layers: list[nn.Module] = [nn.BatchNorm1d(in_dim, affine=False, eps=1e-6)] if batch_norm else []
        if dropout:
            layers.append(nn.Dropout(dropout))
        super().__init__(*layers, linear)


class BNNeck(nn.BatchNorm1d):
    """BatchNorm with the bias frozen at 0 (Luo et al., 2019), between embedding and classifier.

    >>> [name for name, weight in BNNeck(8).named_parameters() if weight.requires_grad]
    ['weight']
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.bias.requires_grad_(False)


def single_sample_batchnorm(*modules: nn.Module, size: int) -> AbstractContextManager[None]:
    """Let a batch of `size` 1 pass BatchNorm within this context, using the running statistics.

    BatchNorm in train mode rejects one value per channel, and the last batch of an epoch may have one sample. For any
    other size this is a no-op. BatchNorm synchronised over ranks may see more samples on other ranks: it stays in train
    mode and is only notified, because a rank that skipped the collective would block the others.

    >>> import torch
    >>> head = MLPHead([4, 4, 2])
    >>> with single_sample_batchnorm(head, size=1):
    ...     head(torch.randn(1, 4)).shape
    torch.Size([1, 2])
    """
    return nullcontext() if size != 1 else _running_statistics(modules)


@contextmanager
def _running_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    distributed = world_size() > 1
    parts = [p for module in modules for p in module.modules() if isinstance(p, _BatchNorm) and p.training]
    shared: list[Any] = [p for p in parts if distributed and getattr(p, "syncs_statistics", False)]
    own = [p for p in parts if not (distributed and (isinstance(p, nn.SyncBatchNorm) or p in shared))]
    for part in own:
        part.training = False
    for part in shared:
        part.single_sample = True
    try:
        yield
    finally:
        for part in own:
            part.training = True
        for part in shared:
            part.single_sample = False


def _widths(in_dim: int, hidden_dim: int, out_dim: int, layers: int) -> list[int]:
    if layers < 1:
        raise BadArgument(expected("layers to be at least 1", layers))
    widths = [in_dim, *[hidden_dim] * (layers - 1), out_dim]
    if min(widths) < 1:
        raise BadArgument(expected("positive widths", widths))
    return widths

"""Heads: the small networks behind a backbone, as the papers of their methods have them.

Owns their structure and initialisation. A linear layer before a BatchNorm has no bias (BatchNorm would take it out
again). Losses, queues, centres and the choice of widths are for the losses and the tasks.
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
    """Linear layers of the widths `dims`, from the first to the last, with ReLU between them.

    `norm` puts a BatchNorm behind each hidden layer and `last_norm` one behind the last (without scale and shift if
    ``last_affine=False``). `bias` is by default where no BatchNorm follows; True or False say it for all layers.

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
    """SimCLR's: BatchNorm behind every layer, ReLU between them; 2 layers in the first paper, 3 in the second."""
    return MLPHead(_widths(in_dim, hidden_dim, out_dim, layers), last_norm=True)


def moco_projector(in_dim: int, hidden_dim: int = 2048, out_dim: int = 128) -> MLPHead:
    """MoCo v2's: two layers without BatchNorm."""
    return MLPHead([in_dim, hidden_dim, out_dim], norm=False)


def moco_v3_projector(in_dim: int, hidden_dim: int = 4096, out_dim: int = 256, *, layers: int = 3) -> MLPHead:
    """MoCo v3's: BatchNorm behind every layer, the last without scale and shift; 3 layers for ViTs, 2 for ResNets."""
    return MLPHead(_widths(in_dim, hidden_dim, out_dim, layers), last_norm=True, last_affine=False)


def moco_v3_predictor(
    in_dim: int = 256, hidden_dim: int = 4096, out_dim: int = 256, *, last_norm: bool = True
) -> MLPHead:
    """MoCo v3's: two layers; for ResNets the authors leave out the last BatchNorm (``last_norm=False``)."""
    bias = None if last_norm else False  # their layers have no bias anywhere
    return MLPHead([in_dim, hidden_dim, out_dim], last_norm=last_norm, last_affine=False, bias=bias)


def byol_projector(in_dim: int, hidden_dim: int = 4096, out_dim: int = 256) -> MLPHead:
    """BYOL's: two layers with BatchNorm between them."""
    return MLPHead([in_dim, hidden_dim, out_dim])


def byol_predictor(in_dim: int = 256, hidden_dim: int = 4096, out_dim: int = 256) -> MLPHead:
    """BYOL's: as its projector."""
    return MLPHead([in_dim, hidden_dim, out_dim])


class DINOHead(nn.Module):
    """DINO's: an MLP with GELU to a bottleneck of length 1, then a weight-normalised layer to `out_dim` prototypes.

    With `norm_last_layer` the prototypes keep length 1, else their lengths are learned. While `last_layer_frozen` is
    True the prototypes get no gradient at all (the paper: during the first epoch) and everything below them does; a
    wrapper that waits for every gradient must be told, or the gradient be dropped after the backward pass instead.

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
        lengths = self.last_layer.parametrizations.weight.original0  # the g of weight norm
        nn.init.ones_(lengths)
        lengths.requires_grad_(not norm_last_layer)
        self.last_layer_frozen = False

    def forward(self, features: Tensor) -> Tensor:
        """Scores (N, out_dim): with `norm_last_layer` cosines between features and prototypes."""
        # In fp32: the squares of small fp16 values are zero, and bf16 lengths are off by up to 0.4 %.
        direction = F.normalize(self.mlp(features).float(), dim=-1)
        weight: Tensor = self.last_layer.weight  # weight norm is computed here, and only once
        if self.last_layer_frozen:
            weight = weight.detach()
        return F.linear(direction.to(weight.dtype), weight)


class ClassificationHead(nn.Sequential):
    """Dropout and a linear layer; with `batch_norm` behind a BatchNorm without scale and shift, as linear probes are.

    Masked autoencoders need that BatchNorm: their features differ in scale by orders of magnitude. The weights begin
    small (0.01) and the bias at 0, so that the first loss is close to the logarithm of the number of classes.

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
    """BatchNorm whose shift is frozen at 0 (Luo et al., 2019), between an embedding and its classifier.

    >>> [name for name, weight in BNNeck(8).named_parameters() if weight.requires_grad]
    ['weight']
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.bias.requires_grad_(False)


def single_sample_batchnorm(*modules: nn.Module, size: int) -> AbstractContextManager[None]:
    """Within this context a batch of `size` 1 passes BatchNorm, with the running statistics instead of its own.

    BatchNorm in train mode refuses one value per channel, and an epoch's last batch may well be one sample. For any
    other size nothing is done and nothing looked at. BatchNorm over several ranks may well have more than one sample
    and is only told: a rank that left it alone would keep the others waiting.

    >>> import torch
    >>> head = MLPHead([4, 4, 2])
    >>> with single_sample_batchnorm(head, size=1):
    ...     head(torch.randn(1, 4)).shape
    torch.Size([1, 2])
    """
    return nullcontext() if size != 1 else _running_statistics(modules)


@contextmanager
def _running_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    together = world_size() > 1
    parts = [p for module in modules for p in module.modules() if isinstance(p, _BatchNorm) and p.training]
    shared: list[Any] = [p for p in parts if together and getattr(p, "syncs_statistics", False)]
    own = [p for p in parts if not (together and (isinstance(p, nn.SyncBatchNorm) or p in shared))]
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

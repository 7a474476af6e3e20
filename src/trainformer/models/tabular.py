"""Networks for tables: an MLP, a residual network and a transformer over columns, with embeddings of categories."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

TABULAR_MODELS = ("mlp", "resnet", "ft-transformer")


class _Columns(nn.Module):
    """Numbers and embedded categories side by side. The index 0, an unknown category, is embedded as zero."""

    def __init__(self, numbers: int, cardinalities: Sequence[int], width: int | None = None) -> None:
        super().__init__()
        sizes = [width or min(50, math.ceil(count**0.5) + 1) for count in cardinalities]
        parts = zip(cardinalities, sizes, strict=True)
        self.embeddings = nn.ModuleList(nn.Embedding(count, size, padding_idx=0) for count, size in parts)
        self.width = numbers + sum(sizes)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        embedded = [layer(categories[:, place]) for place, layer in enumerate(self.embeddings)]
        return torch.cat([numbers.to(embedded[0].dtype) if embedded else numbers, *embedded], dim=1)


class TabularMLP(nn.Module):
    """Hidden layers with GELU and dropout.

    >>> TabularMLP(3, [4], outputs=2)(torch.zeros(5, 3), torch.zeros(5, 1, dtype=torch.long)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        numbers: int,
        cardinalities: Sequence[int],
        outputs: int,
        width: int = 128,
        depth: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.columns = _Columns(numbers, cardinalities)
        layers: list[nn.Module] = []
        for place in range(depth):
            layers += [nn.Linear(self.columns.width if place == 0 else width, width), nn.GELU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(width if depth else self.columns.width, outputs))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        return self.layers(self.columns(numbers, categories))


class TabularResNet(nn.Module):
    """Residual blocks, as in "Revisiting deep learning models for tabular data" (Gorishniy et al. 2021).

    With LayerNorm in place of BatchNorm, so a row does not depend on the others of its batch.
    """

    def __init__(
        self,
        numbers: int,
        cardinalities: Sequence[int],
        outputs: int,
        width: int = 128,
        depth: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.columns = _Columns(numbers, cardinalities)
        self.first = nn.Linear(self.columns.width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(2 * width, width),
                nn.Dropout(dropout),
            )
            for _ in range(depth)
        )
        self.last = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        rows = self.first(self.columns(numbers, categories))
        for block in self.blocks:
            rows = rows + block(rows)
        return self.last(rows)


class FTTransformer(nn.Module):
    """A transformer whose tokens are the columns (Gorishniy et al. 2021), with a learned token that is classified."""

    def __init__(
        self,
        numbers: int,
        cardinalities: Sequence[int],
        outputs: int,
        width: int = 64,
        depth: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numbers, width))
        self.bias = nn.Parameter(torch.empty(numbers + len(cardinalities), width))
        self.token = nn.Parameter(torch.empty(1, width))
        self.embeddings = nn.ModuleList(nn.Embedding(count, width, padding_idx=0) for count in cardinalities)
        for parameter in (self.weight, self.bias, self.token):
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)
        heads = next(heads for heads in (8, 4, 2, 1) if width % heads == 0)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        tokens = [numbers.unsqueeze(-1) * self.weight]
        tokens += [layer(categories[:, place]).unsqueeze(1) for place, layer in enumerate(self.embeddings)]
        columns = torch.cat(tokens, dim=1) + self.bias
        sequence = torch.cat([self.token.expand(len(columns), 1, -1), columns], dim=1)
        return self.last(self.encoder(sequence)[:, 0])


def build_tabular(
    name: str, numbers: int, cardinalities: Sequence[int], outputs: int, width: int, depth: int, dropout: float
) -> nn.Module:
    """A network by name: `mlp`, `resnet` or `ft-transformer`."""
    kind = {"mlp": TabularMLP, "resnet": TabularResNet, "ft-transformer": FTTransformer}[name]
    return kind(numbers, cardinalities, outputs, width, depth, dropout)

"""Networks that forecast a window: DLinear and N-BEATS, with covariates that are known in advance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORECASTERS = ("dlinear", "nbeats")


class DLinear(nn.Module):
    """A linear forecast of the trend (a moving average) and one of the rest (Zeng et al. 2023).

    >>> DLinear(48, 12)(torch.zeros(5, 48), torch.zeros(5, 60, 0)).shape
    torch.Size([5, 12])
    """

    def __init__(self, context: int, horizon: int, covariates: int = 0, kernel: int = 25) -> None:
        super().__init__()
        self.kernel = min(kernel, context) | 1  # odd
        self.trend, self.rest = nn.Linear(context, horizon), nn.Linear(context, horizon)
        self.known = nn.Linear((context + horizon) * covariates, horizon, bias=False) if covariates else None

    def forward(self, context: Tensor, covariates: Tensor) -> Tensor:
        side = self.kernel // 2
        padded = F.pad(context.unsqueeze(1), (side, side), mode="replicate")
        trend = F.avg_pool1d(padded, self.kernel, stride=1).squeeze(1)
        forecast = self.trend(trend) + self.rest(context - trend)
        return forecast if self.known is None else forecast + self.known(covariates.flatten(1))


class NBeats(nn.Module):
    """Blocks that each explain a part of the context and add to the forecast (Oreshkin et al. 2020, generic)."""

    def __init__(
        self, context: int, horizon: int, covariates: int = 0, width: int = 128, depth: int = 3, dropout: float = 0.0
    ) -> None:
        super().__init__()
        inputs = context + (context + horizon) * covariates
        self.context, self.horizon = context, horizon
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(inputs, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Dropout(dropout),
                # The last block explains nothing more of the context.
                nn.Linear(width, horizon if place == depth - 1 else context + horizon),
            )
            for place in range(depth)
        )

    def forward(self, context: Tensor, covariates: Tensor) -> Tensor:
        forecast, known = context.new_zeros(len(context), self.horizon), covariates.flatten(1)
        for block in self.blocks:
            output = block(torch.cat([context, known], dim=1))
            forecast = forecast + output[:, -self.horizon :]
            context = context - output[:, : self.context] if output.shape[1] > self.horizon else context
        return forecast


def build_forecaster(
    name: str, context: int, horizon: int, covariates: int, width: int, depth: int, dropout: float
) -> nn.Module:
    """A network by name: `dlinear` or `nbeats`."""
    if name == "dlinear":
        return DLinear(context, horizon, covariates)
    return NBeats(context, horizon, covariates, width, depth, dropout)

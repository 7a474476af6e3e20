"""Rollouts as tensors: their rewards and their tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trainformer.data.text.encode import IGNORE_INDEX


class Scored(NamedTuple):
    """Rewards of each function (B, F) and in total (B,), in float64; NaN where there is none."""

    parts: Tensor
    total: Tensor


class TokenRows(NamedTuple):
    """Prompts with their completions, padded on the right; labels are -100 but at tokens that the model wrote.

    `sampled` (B, T - 1) are the log probabilities of the engine that sampled, if it was another one.
    """

    input_ids: Tensor
    labels: Tensor
    sampled: Tensor | None = None

    @property
    def targets(self) -> Tensor:
        """The token that each position predicts, or -100 (B, T - 1)."""
        return self.labels[:, 1:]

    @property
    def mask(self) -> Tensor:
        """Which of them the model wrote."""
        return self.targets != IGNORE_INDEX

    def take(self, rows: Tensor) -> TokenRows:
        """Some of the rows."""
        return TokenRows(*(None if tensor is None else tensor[rows] for tensor in self))  # type: ignore[arg-type]

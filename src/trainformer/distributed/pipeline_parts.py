"""One stage as `torch.distributed.pipelining` calls it, for the micro-batches of one batch.

Owns turning what a task returns into a sum and a weight, and micro-batches of unequal size into tensors of one shape:
torch's stages receive into memory of a fixed shape. Rows that are missing are filled up with zeros on the way, and cut
off before anybody computes with them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import Loss, Mean
from trainformer.data.sharding import batch_length, slice_batch
from trainformer.distributed.stages import Chain


class Meta(NamedTuple):
    """What a tensor that goes from one stage to the next is like, without its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, count: int, device: Any, requires_grad: bool = True) -> Tensor:
        """So many rows of it, of zeros."""
        zeros = torch.zeros(count, *self.shape, dtype=self.dtype, device=device)
        return zeros.requires_grad_(requires_grad)


class Piece(NamedTuple):
    """A micro-batch."""

    data: Any
    rows: int


class Result(NamedTuple):
    """What the last stage says of a micro-batch. The values carry no gradient."""

    sum: Any
    weight: Any
    metrics: dict[str, tuple[Any, Any]]


def cut(batch: Any, count: int) -> list[Piece]:
    """A batch in so many micro-batches, whose sizes differ by at most one; some are empty if it is that small."""
    rows = batch_length(batch)
    edges = [rows * i // count for i in range(count + 1)]
    return [Piece(slice_batch(batch, low, high, rows), high - low) for low, high in pairwise(edges)]


def weighed(output: Any, rows: int) -> tuple[Tensor, Result]:
    """What `train_step` returned, as a sum to differentiate and the values to tell."""
    if isinstance(output, Tensor):
        total, weight, metrics = output * rows, rows, None
    elif isinstance(output, Mean) and output.value is not None:
        total, weight, metrics = output.value * output.weight, output.weight, output.metrics
    elif isinstance(output, Loss):
        total, weight, metrics = output
    else:
        raise BadArgument(
            expected("train_step to return a scalar tensor or Loss(sum, weight) in a pipeline", type(output).__name__)
        )
    pairs = {
        name: value if isinstance(value, tuple) else (value * rows, rows) for name, value in (metrics or {}).items()
    }
    return total, Result(total.detach(), weight, pairs)


class Part(nn.Module):
    """A stage of the chain. It is called once for each micro-batch, in their order.

    `sent` is what it sends on, None for the last stage: that gives its share of the loss, already divided by the
    reference.
    """

    def __init__(self, chain: Chain, stage: int, sent: Meta | None) -> None:
        super().__init__()
        self.chain = chain
        self.stage = stage
        self.sent = sent
        self.results: list[Result] = []
        self._function: Callable[[Any], Any] = _nothing
        self._context: Callable[[], AbstractContextManager[Any]]
        self._pieces: list[Piece] = []
        self._most = 0
        self._next = 0
        self._reference = 1.0

    def begin(
        self,
        function: Callable[[Any], Any],
        pieces: list[Piece],
        reference: float,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Take up the micro-batches of a batch."""
        self._function, self._context = function, context
        self._pieces, self._reference = pieces, reference
        self._most = max(piece.rows for piece in pieces)
        self._next = 0
        self.results = []

    def end(self) -> list[Result]:
        """Let go of the batch; what was found."""
        self._pieces, results, self.results = [], self.results, []
        return results

    def forward(self, received: Tensor) -> Tensor:
        """The next micro-batch; `received` is what the stage before sent, and nothing of interest on the first."""
        piece = self._pieces[self._next]
        self._next += 1
        if piece.rows == 0:
            return self._empty(received)
        before = received[: piece.rows] if self.stage > 0 else None
        with self._context():
            output = self.chain.run(self.stage, self._function, piece.data, before)
            if self.sent is not None:
                return self._filled(output, piece.rows)
            total, result = weighed(output, piece.rows)
        self.results.append(result)
        return _as_output(total / self._reference)

    def _empty(self, received: Tensor) -> Tensor:
        """A micro-batch without samples: zeros, of which gradients flow back (also zeros), as torch expects them."""
        if self.sent is None:
            return _as_output(received[:0].sum())
        zeros = self.sent.rows(self._most, received.device, requires_grad=self.stage == 0)
        return zeros if self.stage == 0 else zeros + received[:0].sum().to(zeros.dtype)

    def _filled(self, hidden: Tensor, rows: int) -> Tensor:
        if len(hidden) != rows:
            raise BadArgument(
                expected(
                    f"what goes from stage {self.stage} to the next to have a row for each of {rows} samples",
                    tuple(hidden.shape),
                    "Pass another split.",
                )
            )
        missing = self._most - rows
        if missing:
            return torch.cat([hidden, hidden.new_zeros(missing, *hidden.shape[1:])])
        return hidden.contiguous()


def _as_output(loss: Tensor) -> Tensor:
    """A loss as torch was told the last stage's output would be. Its own gradient is 1 in every type."""
    return torch.stack([loss.float()])


def _nothing(batch: Any) -> None:
    return None

"""Micro-batches of a pipeline: cutting a batch, running one stage on each, and sending tensors between ranks.

`StageModule` is what `torch.distributed.pipelining` calls. It turns what a task returns into a sum and a weight. Stages
of torch receive into buffers of a fixed shape, so micro-batches of unequal size are padded with zero rows before they
are sent, and the padding is cut off before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import Loss, Mean
from trainformer.data.sharding import batch_length, slice_batch
from trainformer.distributed.pipeline.stages import StagedModel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMENSIONS = 8


class ActivationSpec(NamedTuple):
    """Shape (without rows) and dtype of the activations sent from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, rows: int, device: Any, requires_grad: bool = True) -> Tensor:
        """A tensor of zeros with this many rows."""
        zeros = torch.zeros(rows, *self.shape, dtype=self.dtype, device=device)
        return zeros.requires_grad_(requires_grad)


class MicroBatch(NamedTuple):
    """A part of a batch."""

    data: Any
    rows: int


class LossTerms(NamedTuple):
    """What the last stage reports about a micro-batch. The values carry no gradient."""

    sum: Any
    weight: Any
    metrics: dict[str, tuple[Any, Any]]


def split_batch(batch: Any, count: int) -> list[MicroBatch]:
    """A batch in `count` micro-batches whose sizes differ by at most one; some are empty if the batch is small."""
    rows = batch_length(batch)
    edges = [rows * i // count for i in range(count + 1)]
    return [MicroBatch(slice_batch(batch, low, high, rows), high - low) for low, high in pairwise(edges)]


def loss_terms(output: Any, rows: int) -> tuple[Tensor, LossTerms]:
    """What `train_step` returned, as a sum to differentiate and the values to report."""
    if isinstance(output, Tensor):
        total, weight, metrics = output * rows, rows, None
    elif isinstance(output, Mean) and output.value is not None:
        total, weight, metrics = output.value * output.weight, output.weight, output.metrics
    elif isinstance(output, Loss):
        total, weight, metrics = output
    else:
        what = "train_step to return a scalar tensor or Loss(sum, weight) in a pipeline"
        raise BadArgument(expected(what, type(output).__name__))
    pairs = {
        name: value if isinstance(value, tuple) else (value * rows, rows) for name, value in (metrics or {}).items()
    }
    return total, LossTerms(total.detach(), weight, pairs)


class StageModule(nn.Module):
    """One stage of the model, called once per micro-batch, in order.

    `output` describes the activations it sends; None for the last stage, which returns its loss divided by the
    reference.
    """

    def __init__(self, model: StagedModel, stage: int, output: ActivationSpec | None) -> None:
        super().__init__()
        self.model = model
        self.stage = stage
        self.output = output
        self.results: list[LossTerms] = []
        self._function: Callable[[Any], Any] = lambda batch: None
        self._context: Callable[[], AbstractContextManager[Any]]
        self._microbatches: list[MicroBatch] = []
        self._max_rows = 0
        self._next = 0
        self._reference = 1.0

    def begin(
        self,
        function: Callable[[Any], Any],
        microbatches: list[MicroBatch],
        reference: float,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Set the micro-batches of the next batch."""
        self._function, self._context = function, context
        self._microbatches, self._reference = microbatches, reference
        self._max_rows = max(microbatch.rows for microbatch in microbatches)
        self._next = 0
        self.results = []

    def end(self) -> list[LossTerms]:
        """Release the batch and return the results."""
        self._microbatches, results, self.results = [], self.results, []
        return results

    def forward(self, received: Tensor) -> Tensor:
        """Compute the next micro-batch from the activations of the previous stage (a dummy on the first)."""
        microbatch = self._microbatches[self._next]
        self._next += 1
        if microbatch.rows == 0:
            # Zeros with zero gradients, as torch expects gradients to flow.
            if self.output is None:
                return _as_output(received[:0].sum())
            zeros = self.output.zeros(self._max_rows, received.device, requires_grad=self.stage == 0)
            return zeros if self.stage == 0 else zeros + received[:0].sum().to(zeros.dtype)
        before = received[: microbatch.rows] if self.stage > 0 else None
        with self._context():
            output = self.model.run(self.stage, self._function, microbatch.data, before)
            if self.output is not None:
                return self._padded(output, microbatch.rows)
            total, result = loss_terms(output, microbatch.rows)
        self.results.append(result)
        return _as_output(total / self._reference)

    def _padded(self, hidden: Tensor, rows: int) -> Tensor:
        if len(hidden) != rows:
            what = f"the activations between stage {self.stage} and the next to have a row for each of {rows} samples"
            raise BadArgument(expected(what, tuple(hidden.shape), "Pass another split."))
        missing = self._max_rows - rows
        if missing:
            return torch.cat([hidden, hidden.new_zeros(missing, *hidden.shape[1:])])
        return hidden.contiguous()


def _as_output(loss: Tensor) -> Tensor:
    """A loss in the shape and dtype that torch was given for the last stage's output."""
    return torch.stack([loss.float()])


# -- communication outside of schedules --------------------------------------------------------------------


def send_activations(tensor: Tensor, to: int) -> None:
    """Send a tensor whose shape the receiver does not know."""
    if tensor.dtype not in _DTYPES or tensor.ndim > _MAX_DIMENSIONS:
        what = f"{tensor.ndim} dimensions of {tensor.dtype}"
        raise BadArgument(expected("floating-point activations between two stages", what, "Pass another split."))
    head = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    dist.send(torch.tensor(head + [0] * (_MAX_DIMENSIONS + 2 - len(head))), dst=to)
    dist.send(tensor.detach().contiguous(), dst=to)


def receive_activations(source: int, device: torch.device) -> Tensor:
    """Receive a tensor from `send_activations`."""
    head = torch.zeros(_MAX_DIMENSIONS + 2, dtype=torch.int64)
    dist.recv(head, src=source)
    dtype, dimensions, *sizes = head.tolist()
    tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[dtype], device=device)
    dist.recv(tensor, src=source)
    return tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the active autocast; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def current_autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A factory of contexts with the autocast that is active now."""
    dtype = autocast_dtype(device)
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype)

"""The records that pass between the layers. They hold tensors of any framework without knowing which."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Loss(NamedTuple):
    """What a task's `train_step` may return instead of a mean: a sum and the weight it is to be divided by.

    The engine divides the sums of all micro-batches (and ranks) once by the sum of all weights, so that the
    result does not depend on how the data were sliced. `sum` carries the gradient. `weight` is a number or a
    scalar tensor (number of supervised tokens, of valid pixels, of samples). `metrics` are further values to
    log, each a scalar (averaged over samples) or a ``(sum, weight)`` pair.

    >>> Loss(sum=12.0, weight=4)
    Loss(sum=12.0, weight=4, metrics=None)
    """

    sum: Any
    weight: Any
    metrics: Mapping[str, Any] | None = None


class Mean(NamedTuple):
    """The same, where the loss is a mean already: it is `value`, and counts as much as `weight` says.

    ``Mean(None, 0)`` is a micro-batch that gives no loss this time; nothing is learned from it.
    """

    value: Any
    weight: Any
    metrics: Mapping[str, Any] | None = None


class BackwardDone(NamedTuple):
    """The same as `Loss`, where the gradients of ``sum`` over the step's reference are computed already."""

    sum: Any
    weight: Any
    metrics: Mapping[str, Any] | None = None


class Origin(NamedTuple):
    """Which samples a batch holds: what random numbers that belong to a sample are derived from."""

    seed: int
    epoch: int
    samples: Any  # an array of whole numbers, one per sample


class HostBatch(NamedTuple):
    """A batch as the loader gives it, with the number of samples in it, and of those that could not be read.

    Where ranks share a batch, `size` is this rank's part: 0 if its data are only there so that it can take part.
    `global_size` is the number of samples over all ranks, None if unknown; `consumed` is how far the
    batch leads in the order of the epoch, None if that is its own size.
    """

    data: Any
    size: int
    bad: int = 0
    origin: Origin | None = None
    global_size: int | None = None
    consumed: int | None = None


@runtime_checkable
class DataSource(Protocol):
    """Where batches come from; what `Trainer(task, data)` accepts besides datasets and loaders.

    The batches of an epoch must be a function of its number, and `batches` must be able to start anywhere in it: that
    is all it takes to resume. A source that can only be read forwards also has `state_dict()` and
    `load_state_dict(state)`, which are saved with every checkpoint. Among several ranks each takes its part of every
    batch, unless the source has a true attribute `is_sharded`: then it yields the batches of its own rank.
    """

    @property
    def batches_per_epoch(self) -> int | None:
        """Number of batches, or None if it is unknown."""
        ...

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """The rest of an epoch after `batch` batches with `position` samples."""
        ...


class DeviceBatch(NamedTuple):
    """The same batch where the model is. `tokens` is 0 for data that have none.

    `more` says that another micro-batch of the same step follows; it is told only to a backend that wants to know.
    """

    data: Any
    size: int
    tokens: int = 0
    bad: int = 0
    more: bool = False
    global_size: int | None = None
    consumed: int | None = None


class Entry(NamedTuple):
    """One value of a metric, still on the device.

    `value` is a mean over `weight` if `is_mean`, else a sum that belongs to `weight`. Keeping the two apart
    saves a multiplication on the device for every step; the arithmetic happens on the host, at a log point.
    """

    name: str
    value: Any
    weight: Any
    is_mean: bool


class StepResult(NamedTuple):
    """What one optimizer step produced. Reading a scalar of `entries` or `loss` waits for the device.

    `lr` is a number, one that is computed when it is looked at, or None if nobody knows it.

    `entries` are to be added up over ranks; `loss` is that of all ranks. `samples` are those of all ranks, `tokens` and
    `bad` those of this one. `consumed` is how far the step led in the order of the epoch; None: by all these samples.
    """

    entries: list[Entry]
    lr: Any
    samples: int
    tokens: int
    bad: int = 0
    consumed: int | None = None
    loss: list[Entry] | None = None


class EvalResult(NamedTuple):
    """What one evaluation batch produced: values to average, and rows to collect."""

    entries: list[Entry]
    rows: dict[str, Any]


class SharingPattern(enum.Enum):
    """Who has a component, and so who writes it."""

    GLOBAL = "global"
    """One state for the whole run; rank 0 writes it."""
    REPLICATED = "replicated"
    """The same on every rank; rank 0 writes it, and the others can be compared with it."""
    PER_RANK = "per_rank"
    """Every rank has its own and writes it."""
    PER_GROUP = "per_group"
    """The same within a process group; the first rank of each group writes it."""
    PER_NODE = "per_node"
    """The same within a machine; the first rank of each machine writes it."""

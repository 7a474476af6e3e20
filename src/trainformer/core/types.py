"""Records that pass between the layers. They hold tensors of any framework."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable


class _SumAndWeight(NamedTuple):
    sum: Any
    weight: Any
    metrics: Mapping[str, Any] | None = None


class Loss(_SumAndWeight):
    """What `train_step` may return instead of a mean: a sum, and the weight to divide it by.

    The engine divides the sum over all micro-batches and ranks once by the total weight, so the result does not depend
    on micro-batch size, gradient accumulation or world size. `sum` carries the gradient. `weight` is a number or a
    scalar tensor (supervised tokens, valid pixels, samples). `metrics` are further values to log, each a scalar
    (averaged over samples) or a ``(sum, weight)`` pair.

    `per_sample` is a pair of tensors with the loss sum and the weight of each sample, or only the losses if every
    sample has the weight 1. With it, training on a `Mixture` logs the loss of each source. It needs no gradient, and
    is no item of the tuple.

    >>> Loss(sum=12.0, weight=4)
    Loss(sum=12.0, weight=4, metrics=None)
    """

    per_sample: Any = None
    # torch's pytrees take what has this method for a plain named tuple, and lose `per_sample`.
    _asdict = None  # type: ignore[assignment]

    def __new__(cls, sum: Any, weight: Any, metrics: Mapping[str, Any] | None = None, per_sample: Any = None) -> Loss:
        self = super().__new__(cls, sum, weight, metrics)
        self.per_sample = per_sample
        return self


class Mean(NamedTuple):
    """Like `Loss`, for a loss that is already a mean over `weight`.

    ``Mean(None, 0)`` is a micro-batch without a loss; it contributes no gradient.
    """

    value: Any
    weight: Any
    metrics: Mapping[str, Any] | None = None


class BackwardDone(NamedTuple):
    """Like `Loss`, when the backward pass of ``sum`` (divided by the step's reference weight) has already run."""

    sum: Any
    weight: Any
    metrics: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerConfig:
    """One of several optimizers of a task, as `configure_optimizers` declares them by name.

    Fields that are None take the trainer's setting of the same name.

    Args:
        params: What it trains: a module, parameters, or param groups.
        optimizer: A name, a mapping with a name and options, a class, or a factory of the param groups.
        lr: The learning rate.
        weight_decay: The weight decay of matrices; biases and norms have none.
        scheduler: As in the trainer. It counts the updates of this optimizer.
        gradient_clip: Maximum norm of its gradients; 0 does not clip.
        every: Update it in every n-th step only.
        repeat: Updates per step, all on the batch of that step.
        step: The function of a batch that returns its loss, by default the task's method ``<name>_step``.
        updates_per_step: How often a `train_step` that yields losses updates it in a step that it is due in. The length
            of its schedule follows from that.

    >>> OptimizerConfig(params=[], lr=1e-4, every=5).every
    5
    """

    params: Any
    optimizer: Any = None
    lr: float | None = None
    weight_decay: float | None = None
    scheduler: Any = None
    gradient_clip: float | None = None
    every: int = 1
    repeat: int = 1
    step: Callable[[Any], Any] | None = None
    updates_per_step: int = 1


class Origin(NamedTuple):
    """The samples of a batch, from which per-sample random seeds are derived."""

    seed: int
    epoch: int
    samples: Any  # an integer array, one per sample


class SampleSources(NamedTuple):
    """Which source of a mixture each sample of a batch comes from: `numbers` index `names`.

    `is_single` says that all samples of a batch come from one source, in every batch.
    """

    names: tuple[str, ...]
    numbers: Any  # an integer array on the host
    is_single: bool = False
    on_device: Any = None  # `numbers` on the device of the model


class HostBatch(NamedTuple):
    """A batch from the loader, with its number of samples, and of samples that could not be read (`bad`).

    When ranks share a global batch, `size` is the part of this rank: 0 if its data is only padding, so that the rank
    can take part in collectives. `global_size` is the global batch size, None if each rank knows only its own.
    `consumed` is how far the batch advances in the order of the epoch, None if by its own size. `sources` is set for
    batches of a mixture.
    """

    data: Any
    size: int
    bad: int = 0
    origin: Origin | None = None
    global_size: int | None = None
    consumed: int | None = None
    sources: SampleSources | None = None


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

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """The rest of an epoch after `batch` batches with `position` samples."""


class DeviceBatch(NamedTuple):
    """A batch on the device of the model. `tokens` is 0 for data without tokens.

    `more` means that another micro-batch of the same step follows; it is only set for backends that ask for it.
    """

    data: Any
    size: int
    tokens: int = 0
    bad: int = 0
    more: bool = False
    global_size: int | None = None
    consumed: int | None = None
    sources: SampleSources | None = None


class Entry(NamedTuple):
    """One value of a metric, still on the device.

    `value` is a mean over `weight` if `is_mean`, else a sum with that weight. Storing both kinds saves a multiplication
    on the device every step; the arithmetic happens on the host, at a log point.
    """

    name: str
    value: Any
    weight: Any
    is_mean: bool


class StepResult(NamedTuple):
    """The result of one optimizer step. Reading a scalar of `entries` or `loss` waits for the device.

    `lr` is a number, a lazily computed one, or None if unknown; with several optimizers, a mapping from log names.
    `entries` are to be summed over ranks; `loss` is already that of all ranks. `samples` counts all ranks, `tokens` and
    `bad` only this one. `consumed` is how far the step advanced in the order of the epoch; None if by `samples`.
    """

    entries: list[Entry]
    lr: Any
    samples: int
    tokens: int
    bad: int = 0
    consumed: int | None = None
    loss: list[Entry] | None = None


class EvalResult(NamedTuple):
    """The result of one evaluation batch: values to average, and rows to collect."""

    entries: list[Entry]
    rows: dict[str, Any]


class SharingPattern(enum.Enum):
    """Which ranks hold a component of a checkpoint, and so which rank writes it."""

    GLOBAL = "global"
    """One state for the whole run; rank 0 writes it."""
    REPLICATED = "replicated"
    """The same on every rank; rank 0 writes it, and the others can be verified against it."""
    PER_RANK = "per_rank"
    """Different on every rank; every rank writes its own."""
    PER_GROUP = "per_group"
    """The same within a process group; the first rank of each group writes it."""
    PER_NODE = "per_node"
    """The same within a node; the first rank of each node writes it."""

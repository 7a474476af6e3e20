"""Adapts a `BaseTrainer` subclass to a run: its `forward` as a task, its data as a loader, its schedule.

`forward`'s return value becomes a loss and metrics, and any iterable a loader that measures how long steps wait for it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import Mean
from trainformer.data.sharding import batch_length
from trainformer.distributed import Strategy
from trainformer.mini.utils import checked_records, flattened
from trainformer.utils.distributed import is_dtensor

if TYPE_CHECKING:
    from trainformer.mini.trainer import BaseTrainer

# Names that the engine logs itself.
_RESERVED = ("loss", "grad_norm", "lr", "epoch", "bad_samples", "skipped_steps", "loss_scale")

# Attributes of the inner loader that a run may use.
_LOADER_ATTRIBUTES = ("batch_size", "sampler", "batch_sampler", "dataset", "set_epoch", "state_dict", "load_state_dict")


class LossNoneWarning(UserWarning):
    """`forward` returned no loss for a model whose ranks wait for each other."""


class TrainerTask:
    """The trainer as a task. All micro-batches have the same weight, whatever their size."""

    def __init__(self, owner: BaseTrainer) -> None:
        self.owner = owner
        self.losses: list[Tensor] = []  # of the micro-batches of the current step
        self.records: list[dict[str, Any]] = []
        self.retries = 0
        if owner.no_sync_accumulate and owner.gradient_accumulation_steps > 1:
            # Skips the gradient all-reduce of a DDP or FSDP2 model.
            switch = getattr(owner.model, "set_requires_gradient_sync", None)
            if callable(getattr(owner.model, "no_sync", None)):
                self.no_sync: Any = owner.model.no_sync
            elif switch is not None:
                self.no_sync = partial(_switched_off, switch)

    @property
    def model(self) -> nn.Module:
        return self.owner.model

    def train_step(self, batch: Any) -> Mean:
        output = self.owner.forward(batch)
        if not isinstance(output, tuple) or len(output) != 2:
            what = f"a tuple of {len(output)}" if isinstance(output, tuple) else type(output).__name__
            raise BadArgument(expected("forward() to return (loss, records)", what, "Return loss, {} for no records."))
        loss, records = output[0], checked_records(output[1])
        if loss is not None and not (isinstance(loss, Tensor) and loss.ndim == 0):
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            do = "Take the mean over the batch; return None to skip the batch."
            raise BadArgument(expected("forward() to return a scalar tensor or None as its loss", what, do))
        metrics = {
            f"records.{name}" if name in _RESERVED else name: (value, 1)
            for name, value in flattened(records).items()
            if value is not None
        }
        self.records.append(records)
        if loss is None:
            if isinstance(self.model, (DistributedDataParallel, FullyShardedDataParallel)):
                warnings.warn(
                    "forward() returned no loss for a DDP or FSDP model: its backward pass is skipped. Every rank must "
                    "do the same, or return None before it calls the model.",
                    LossNoneWarning,
                    stacklevel=2,
                )
            return Mean(None, 0, metrics)
        self.losses.append(loss.detach())
        return Mean(loss, 1, metrics)

    def on_step_skipped(self) -> None:
        """Forget the micro-batches of a step that will be retried."""
        self.losses, self.records = [], []
        self.retries += 1

    def begin_step(self) -> None:
        """Forget the micro-batches of the step before."""
        self.losses, self.records, self.retries = [], [], 0

    def eval_step(self, batch: Any) -> dict[str, Any]:
        raise BadArgument("Expected evaluation to be done in a hook, received an eval_step call; mini has none.")

    def count_samples(self, batch: Any) -> int:
        """Samples of a batch; 1 if its length is unknown."""
        try:
            return batch_length(batch)
        except BadArgument:
            return 1

    def model_state_dict(self) -> dict[str, Any]:
        """The weights under the names of the unwrapped model."""
        options = state_options(self.owner)
        if options is not None:
            return get_model_state_dict(self.model, options=options)
        return self.owner.unwrapped_model.state_dict()

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        options = state_options(self.owner)
        if options is not None:
            set_model_state_dict(self.model, state, options=options)
        else:
            self.owner.unwrapped_model.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.owner._data_seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the data order of the checkpoint, however this process was seeded."""
        self.owner._restore_data_seed(state["seed"])


def state_options(owner: BaseTrainer) -> StateDictOptions | None:
    """`StateDictOptions` for sharded models; default: a full state dict."""
    if owner.state_dict_options is None and any(is_dtensor(p) for p in owner.model.parameters()):
        return StateDictOptions(full_state_dict=True)
    return owner.state_dict_options


class UserStrategy(Strategy):
    """With several processes, the user wraps or shards the model and shards the data."""

    log_metric_advice = "Return it in the records of forward(), or call self.log({...})."

    def __repr__(self) -> str:
        return self.name

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm of all gradients, sharded ones included."""
        norm: Any = super().total_norm(grads, uniform)
        return norm.full_tensor() if is_dtensor(norm) else norm


@contextmanager
def _switched_off(switch: Callable[[bool], Any]) -> Iterator[None]:
    switch(False)
    try:
        yield
    finally:
        switch(True)


class Loader:
    """Any iterable of batches as a loader that measures step time and data time."""

    def __init__(self, inner: Any, owner: BaseTrainer) -> None:
        self.inner = inner
        self.requested_at: float | None = None
        self.waits: list[float] = []  # seconds, for each micro-batch of the current step
        self._owner = owner
        self._consumed = 0

    def __getattr__(self, name: str) -> Any:
        if name in _LOADER_ATTRIBUTES:
            return getattr(self.inner, name)
        raise AttributeError(name)

    def __iter__(self) -> Iterator[Any]:
        is_iterator = isinstance(self.inner, Iterator)
        if is_iterator and self._consumed:
            # A run that continues in mid-epoch skips the batches it has seen; an iterator is past them already.
            yield from [None] * min(self._consumed, self._owner._run_state.batch)
        batches, before = iter(self.inner), self._consumed
        while True:
            start = time.perf_counter()
            if self.requested_at is None:
                self.requested_at = start
            try:
                batch = next(batches)
            except StopIteration:
                break
            self.waits.append(time.perf_counter() - start)
            self._consumed += 1
            yield batch
        if is_iterator and self._consumed == before:
            done, wanted = self._owner._run_state.step, self._owner.max_steps
            raise DataError(
                f"Expected data for {wanted} steps, received data for {done}: the iterable that build_data_loader() "
                f"returned can be iterated only once and ended after {self._consumed} batches. Return a DataLoader or "
                "a list, which can be iterated again, or an endless generator."
            )

    def pop_times(self, now: float) -> tuple[float, list[float]]:
        """Seconds of the step that just ended, and how many of them each micro-batch waited for data."""
        times = now - (self.requested_at if self.requested_at is not None else now), self.waits
        self.requested_at, self.waits = None, []
        return times


class SizedLoader(Loader):
    def __len__(self) -> int:
        return len(self.inner)


def as_loader(inner: Any, owner: BaseTrainer) -> Loader:
    """The result of `build_data_loader` as a loader."""
    if isinstance(inner, (str, bytes)) or not isinstance(inner, Iterable):
        do = "Return a DataLoader, a list of batches, a generator, or any other iterable."
        raise BadArgument(expected("build_data_loader() to return an iterable", type(inner).__name__, do))
    try:
        len(inner)  # type: ignore[arg-type]
    except TypeError:  # also a DataLoader of an iterable dataset
        return Loader(inner, owner)
    return SizedLoader(inner, owner)


class NoSchedule(LRScheduler):
    """Leaves the learning rates to the optimizer and to hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        pass

    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {}  # the optimizer saves its learning rates

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def checked_scheduler(scheduler: Any) -> LRScheduler | None:
    """The result of `build_lr_scheduler`. Raises if it cannot be stepped once per optimizer step."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise BadArgument(
            "Expected build_lr_scheduler() to return a scheduler that depends on the step only, received "
            "ReduceLROnPlateau, which needs a metric. Return None, and call its step(metric) in a hook."
        )
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        what = "build_lr_scheduler() to return a torch LRScheduler or None"
        raise BadArgument(expected(what, type(scheduler).__name__))
    return scheduler

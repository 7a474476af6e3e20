"""What a subclass of `BaseTrainer` looks like to a session: a task, a loader, and a schedule.

Owns the translation and nothing else: what `forward` returns becomes a loss and metrics, and any iterable becomes a
loader that can tell how long it was waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainformer.backends.torch.gradients import is_dtensor
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import Mean
from trainformer.data.sharding import batch_length
from trainformer.distributed import Strategy
from trainformer.mini.utils import checked_records, flattened

if TYPE_CHECKING:
    from trainformer.mini.trainer import BaseTrainer

# Names that the engine logs itself.
_TAKEN = ("loss", "grad_norm", "lr", "epoch", "bad_samples", "skipped_steps", "loss_scale")

# What a session may ask a loader for.
_OF_LOADERS = ("batch_size", "sampler", "batch_sampler", "dataset", "set_epoch", "state_dict", "load_state_dict")


class TrainerTask:
    """The trainer as a task. Micro-batches count alike, however many samples they hold."""

    def __init__(self, owner: BaseTrainer) -> None:
        self.owner = owner
        self._losses: list[Tensor] = []
        self._records: list[dict[str, Any]] = []
        if owner.no_sync_accumulate and owner.gradient_accumulation_steps > 1:
            no_sync = without_sync(owner.model)
            if no_sync is not None:
                self.no_sync = no_sync

    @property
    def model(self) -> nn.Module:
        """The model, as the user built and wrapped it."""
        return self.owner.model

    def train_step(self, batch: Any) -> Mean:
        """One call of `forward`."""
        output = self.owner.forward(batch)
        if not isinstance(output, tuple) or len(output) != 2:
            what = f"a tuple of {len(output)}" if isinstance(output, tuple) else type(output).__name__
            raise BadArgument(expected("forward() to return (loss, records)", what, "Return loss, {} for no records."))
        loss, records = output[0], checked_records(output[1])
        _check_loss(loss)
        self._records.append(records)
        metrics = {
            f"records.{name}" if name in _TAKEN else name: (value, 1)
            for name, value in flattened(records).items()
            if value is not None
        }
        if loss is None:
            return Mean(None, 0, metrics)
        self._losses.append(loss.detach())
        return Mean(loss, 1, metrics)

    def on_step_skipped(self) -> None:
        """What was seen belongs to a step that is not made, and may come again."""
        self._losses, self._records = [], []

    def take_window(self) -> tuple[Tensor | None, dict[str, Any]]:
        """Loss and records of the step that was just made; nothing is read from the device."""
        losses, records = self._losses, self._records
        self._losses, self._records = [], []
        if len(losses) > 1:
            loss: Tensor | None = _mean(losses)
        else:
            loss = losses[0] if losses else None
        return loss, records[0] if len(records) == 1 else _mean_records(records)

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """A mini trainer has no evaluation of its own; hooks do that."""
        raise BadArgument("Expected evaluation to be done in a hook, received a call of the engine's: there is none.")

    def count_samples(self, batch: Any) -> int:
        """Samples of a batch; a batch that does not tell counts as one."""
        try:
            return batch_length(batch)
        except BadArgument:
            return 1

    # -- state ---------------------------------------------------------------------------------------------

    def model_state_dict(self) -> dict[str, Any]:
        """The weights under the model's own names, whatever it is wrapped in."""
        options = state_options(self.owner)
        if options is not None:
            return get_model_state_dict(self.model, options=options)
        return self.owner.unwrapped_model.state_dict()

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        options = state_options(self.owner)
        if options is not None:
            set_model_state_dict(self.model, state, options=options)
        else:
            self.owner.unwrapped_model.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The seed of the data's order."""
        return {"seed": self.owner._data_seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the same order, however this process was seeded."""
        self.owner._take_seed(state["seed"])


def state_options(owner: BaseTrainer) -> StateDictOptions | None:
    """How models that are spread over ranks are saved; as whole ones, where the user does not say it."""
    if owner.state_dict_options is None and any(is_dtensor(p) for p in owner.model.parameters()):
        return StateDictOptions(full_state_dict=True)
    return owner.state_dict_options


class UsersStrategy(Strategy):
    """TorchProcessGroup, if there are any, are the user's: he wraps or divides the model, and divides the data."""

    def __repr__(self) -> str:
        return self.name

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """That of all gradients, also of those that are divided over ranks."""
        norm: Any = super().total_norm(grads, uniform)
        return norm.full_tensor() if is_dtensor(norm) else norm


def _mean_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The key-wise average of several micro-batches. Tensors are averaged where they are, without being read."""
    average: dict[str, Any] = {}
    for key in dict.fromkeys(key for record in records for key in record):
        values = [record[key] for record in records if record.get(key) is not None]
        if any(isinstance(value, dict) for value in values):
            average[key] = _mean_records([value for value in values if isinstance(value, dict)])
        elif values:
            average[key] = sum(values[1:], start=values[0]) / len(values)
    return average


def _check_loss(loss: Any) -> None:
    if loss is None or (isinstance(loss, Tensor) and loss.ndim == 0):
        return
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    do = "Take the mean over the batch; return None where there is nothing to learn."
    raise BadArgument(expected("forward() to return a scalar tensor or None as its loss", what, do))


def without_sync(model: nn.Module) -> Callable[[], Any] | None:
    """The context in which ranks keep their gradients to themselves, for a model that exchanges them."""
    if callable(getattr(model, "no_sync", None)):
        return model.no_sync  # type: ignore[return-value]
    switch: Any = getattr(model, "set_requires_gradient_sync", None)
    if switch is None:
        return None

    @contextmanager
    def off() -> Iterator[None]:
        switch(False)
        try:
            yield
        finally:
            switch(True)

    return off


class Loader:
    """Any iterable of batches as a loader. Knows when a step's data were first asked for, and how long that took."""

    def __init__(self, inner: Any, owner: BaseTrainer) -> None:
        self.inner = inner
        self.asked_at: float | None = None
        self.waited = 0.0
        self._owner = owner
        self._given = 0

    def __getattr__(self, name: str) -> Any:
        if name in _OF_LOADERS:
            return getattr(self.inner, name)
        raise AttributeError(name)

    def __iter__(self) -> Iterator[Any]:
        only_once = isinstance(self.inner, Iterator)
        if only_once and self._given:
            # Whoever goes on in the middle of an epoch passes over what was seen; a generator has done so already.
            yield from [None] * min(self._given, self._owner._run_state.batch)
        batches, before = iter(self.inner), self._given
        while True:
            began = time.perf_counter()
            if self.asked_at is None:
                self.asked_at = began
            try:
                batch = next(batches)
            except StopIteration:
                break
            finally:
                self.waited += time.perf_counter() - began
            self._given += 1
            yield batch
        if only_once and self._given == before:
            self._complain()

    def _complain(self) -> None:
        done, wanted = self._owner._run_state.step, self._owner.max_steps
        raise DataError(
            f"Expected data for {wanted} steps, received data for {done}: the iterable that build_data_loader() "
            f"returned can be iterated only once, and it has ended after {self._given} batches. Return a DataLoader or "
            "a list, which begin anew, or let the generator go on for ever."
        )

    def take_times(self, now: float) -> tuple[float, float]:
        """Seconds of the step that has just ended, and those of them that were spent waiting for data."""
        times = now - (self.asked_at if self.asked_at is not None else now), self.waited
        self.asked_at, self.waited = None, 0.0
        return times


class SizedLoader(Loader):
    """One that knows how many batches there are."""

    def __len__(self) -> int:
        return len(self.inner)


def as_loader(inner: Any, owner: BaseTrainer) -> Loader:
    """What `build_data_loader` returned, as a loader."""
    if isinstance(inner, (str, bytes)) or not isinstance(inner, Iterable):
        do = "Return a DataLoader, a list of batches, a generator, or any other iterable."
        raise BadArgument(expected("build_data_loader() to return an iterable", type(inner).__name__, do))
    try:
        len(inner)  # type: ignore[arg-type]
    except TypeError:  # also of a DataLoader, if its data set is a stream
        return Loader(inner, owner)
    return SizedLoader(inner, owner)


class StandingRates(LRScheduler):
    """No schedule: the rates are left as they are, so that hooks may change them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """Nothing."""

    def get_last_lr(self) -> list[Any]:
        """The rates in force."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the optimizer keeps its rates."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


def checked_scheduler(scheduler: Any) -> LRScheduler | None:
    """What `build_lr_scheduler` returned, if it can be stepped once per optimizer step."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise BadArgument(
            "Expected build_lr_scheduler() to return a scheduler that needs nothing but the step, received "
            "ReduceLROnPlateau, which waits for a metric. Return None, and call its step(metric) in a hook."
        )
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        what = "build_lr_scheduler() to return a torch LRScheduler or None"
        raise BadArgument(expected(what, type(scheduler).__name__))
    return scheduler


def _mean(losses: list[Tensor]) -> Tensor:
    """In double precision where there is one, as everywhere else: a mean must not depend on who computes it."""
    stacked = torch.stack(losses)
    return stacked.mean() if stacked.device.type == "mps" else stacked.double().mean()

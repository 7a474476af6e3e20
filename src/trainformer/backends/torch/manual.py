"""Manual optimization: a task with `manual_step` takes its optimizer steps by itself.

The engine still owns data, logging, evaluation, checkpoints and resuming. Each optimizer that the task receives scales,
clips and checks gradients and counts its updates, as in an automatic step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainformer.backends.torch.accumulation import AccumulationWindow
from trainformer.backends.torch.several_optimizers import NamedOptimizer, SeveralOptimizers
from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import DeviceBatch, Entry, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainformer.distributed import Strategy
    from trainformer.run.torch.settings import RunSettings


class ManualOptimizer:
    """One optimizer as `manual_step` receives it: call `backward` once or several times, then `step`.

    `optimizer` is the torch optimizer. Changing its state other than by `step` is up to you.
    """

    def __init__(self, backend: ManualOptimization, named: NamedOptimizer) -> None:
        self._backend = backend
        self._named = named
        self._window = backend.new_window()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""
        return self._named.optimizer

    @property
    def updates(self) -> int:
        """How often it was stepped since the start of the run."""
        return self._named.updates

    @property
    def has_gradients(self) -> bool:
        """Whether `backward` was called since the last `step` or `zero_grad`."""
        return bool(self._window.entries)

    def backward(self, loss: Any) -> None:
        """Accumulate the gradients of this optimizer's parameters. `loss` is a mean, or ``Loss(sum, weight)``."""
        with self._backend.activated(self._named, self._window):
            self._backend.backward(loss)

    def zero_grad(self) -> None:
        """Drop the gradients accumulated since the last `step`."""
        for p in self._named.parameters:
            p.grad = None
        self._window = self._backend.new_window()

    def step(self) -> None:
        """Average gradients over ranks, scale, check and clip them, set the learning rate, update, zero gradients."""
        with self._backend.activated(self._named, self._window):
            self._backend.take_step()
        self.zero_grad()


class ManualOptimization(SeveralOptimizers):
    """The torch backend for a task with `manual_step`."""

    who_updates = "manual_step does not call optimizers[{name!r}].step()"

    def __init__(self, task: Any, settings: RunSettings, strategy: Strategy, reduces_rows: bool = True) -> None:
        if settings.accumulation_steps != 1:
            do = "Accumulate inside manual_step: call backward several times before step."
            raise BadArgument(expected("accumulation_steps=1 with manual_step", settings.accumulation_steps, do))
        super().__init__(task, settings, strategy, reduces_rows)
        if strategy.shards_state:
            do = "Use strategy='ddp', or declare one loss function per optimizer."
            raise BadArgument(expected("a strategy that keeps whole parameters for manual_step", strategy.name, do))
        if self.guard.retries:
            raise BadArgument(expected("nonfinite='raise' or 'skip' with manual_step", settings.nonfinite))
        self.splitter.policy = "raise"
        self.handles = {name: ManualOptimizer(self, optimizer) for name, optimizer in self.optimizers.items()}
        self._batch = DeviceBatch(None, 0)
        self._entries: list[Entry] = []

    def _find_functions(self) -> dict[str, Callable[[Any], Any]]:
        for name, optimizer in self.optimizers.items():
            config = optimizer.config
            if (config.every, config.repeat, config.step) != (1, 1, None):
                what = f"no `every`, `repeat` or `step` for {name!r} with manual_step, which decides that itself"
                raise BadArgument(expected(what, f"every={config.every}, repeat={config.repeat}, step={config.step}"))
        return {}

    def new_window(self) -> AccumulationWindow:
        """An empty accumulation window."""
        return AccumulationWindow(self._reference)

    # -- the step ------------------------------------------------------------------------------------------

    @property
    def may_repeat(self) -> bool:
        return False

    def updates(self, step: int | None, window: Iterable[DeviceBatch]) -> Iterator[Any]:
        """One call of `manual_step`, however many updates it makes."""
        yield None
        self.guard.count_step()

    def accumulate(self, batch: DeviceBatch) -> bool:
        """Call `manual_step`."""
        self._batch, self._entries, self._result = batch, [], None
        self._keep_statistics()
        try:
            with self._forward(batch.size):
                metrics = self.task.manual_step(batch.data, dict(self.handles))
        except Exception as error:
            self.checks.explain(error, "manual_step", batch)
            raise
        pending = [name for name, handle in self.handles.items() if handle.has_gradients]
        if pending:
            raise BadArgument(
                f"Expected manual_step to call step() or zero_grad() after backward(), received gradients of "
                f"{', '.join(pending)} that were used by neither: they would be lost at the end of the step. "
                "For larger steps, raise batch_size and call backward for parts of the batch."
            )
        self._entries += _metric_entries(metrics, batch.size)
        return True

    @contextmanager
    def activated(self, optimizer: NamedOptimizer, window: AccumulationWindow) -> Iterator[None]:
        """Make an optimizer and its window the active ones, outside of autocast."""
        kept = self._window
        self.active, self._window = optimizer, window
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            self._window = kept

    def backward(self, output: Any) -> None:
        """Backward pass into the parameters of the active optimizer."""
        loss = self._window.add(output, self._batch)
        if loss is not None:
            self._backward(loss)

    def take_step(self) -> None:
        """Update the active optimizer with the gradients of its window."""
        window = self._window
        if not self._is_single:
            sums = window.weight_and_sum(self.device)
            if not window.entries:  # gradients that the task computed by itself count as means of equal weight
                sums[0] = self._reference or 1.0
                window.global_samples = None
            self.strategy.piggyback_stats(None, torch.cat([sums, sums.new_zeros(1)]))
        SeveralOptimizers.finish(self)
        result = SeveralOptimizers.update(self, 0)
        assert self._result is result
        self._keep_statistics()  # for the next update of this step

    def _keep_statistics(self) -> None:
        if self._statistics is not None:
            self._statistics.keep()

    def finish(self) -> bool:
        """Nothing to do: the task has taken its steps."""
        return True

    def update(self, step: int) -> StepResult:
        """The values of all updates that the task made, and its counts."""
        counts, made = self.new_window(), self._result
        counts.count(self._batch)
        if not self._is_single:
            self.strategy.piggyback_stats(None, torch.full((1,), float(self.has_request()), device=self.device))
            requests = self.strategy.reduced_stats(None)
            assert requests is not None
            self._request_flag.record(requests[0])
        return StepResult(
            entries=[*([] if made is None else made.entries), *self._entries],
            lr=self.learning_rates(),
            samples=counts.samples if self._is_single else counts.consumed,
            tokens=counts.tokens,
            bad=counts.bad,
            consumed=counts.consumed,
            loss=None if made is None else made.loss,
        )

    @property
    def _is_first_update(self) -> bool:
        return False  # requests are shared once per step, in `update`


def _metric_entries(metrics: Any, size: int) -> list[Entry]:
    if metrics is None:
        return []
    if not isinstance(metrics, Mapping):
        what = "manual_step to return None or a mapping of metrics"
        raise BadArgument(expected(what, type(metrics).__name__))
    found = []
    for name, value in metrics.items():
        pair = value if isinstance(value, tuple) else (value, size)
        total, weight = (v.detach() if isinstance(v, Tensor) else v for v in pair)
        found.append(Entry(name, total, weight, not isinstance(value, tuple)))
    return found

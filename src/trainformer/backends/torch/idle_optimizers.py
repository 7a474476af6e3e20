"""Optimizers of a task that are never updated: their parameters stay as they are, without an error."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainformer.core.errors import expected

if TYPE_CHECKING:
    from trainformer.backends.torch.several_optimizers import NamedOptimizer, SeveralOptimizers

logger = logging.getLogger("trainformer")


class IdleOptimizers:
    """Finds the optimizers of a backend that a run does not update, and warns of each once.

    Steps of an optimizer of torch that `manual_step` takes by itself count as updates.
    """

    def __init__(self, backend: SeveralOptimizers) -> None:
        self._backend = backend
        self._stepped: set[str] = set()
        self._warned: set[str] = set()
        for optimizer in backend.optimizers.values():
            self._watch(optimizer)

    def _watch(self, optimizer: NamedOptimizer) -> None:
        inner = getattr(optimizer.optimizer, "inner", optimizer.optimizer)
        inner.register_step_post_hook(lambda *_: self._stepped.add(optimizer.name))

    def forget_steps(self) -> None:
        """Forget the steps so far: those of trials are undone by loading a state."""
        self._stepped.clear()

    def never_due(self, total_steps: int | None) -> list[str]:
        """What is wrong with optimizers that are not due once in this many steps."""
        if total_steps is None:
            return []
        return [
            expected(
                f"the optimizer {o.name!r} ({self._size(o)}) to be updated in a run of {total_steps} steps",
                f"every={o.config.every}",
                "Train longer, or lower `every`.",
            )
            for o in self._backend.optimizers.values()
            if o.config.every > total_steps
        ]

    def without(self, updated: Iterable[str]) -> list[str]:
        """What to say about the optimizers that are not among those `updated` in the first step."""
        names = set(updated)
        return [
            f"the optimizer {o.name!r} ({self._size(o)}) is not updated in the first step: {self._reason(o)}."
            for o in self._backend.optimizers.values()
            if o.name not in names
        ]

    def warn(self, steps: int, is_end: bool) -> None:
        """Warn of optimizers that were due and not updated in the `steps` since `fit` began.

        At the end of a run that was not stopped, also of those that were never due.
        """
        for o in self._backend.optimizers.values():
            is_late = is_end or steps >= o.config.every
            if steps == 0 or not is_late or o.updates or o.name in self._stepped | self._warned:
                continue
            self._warned.add(o.name)
            logger.warning(
                "the optimizer %r (%s) was never updated in %d steps: %s. Its parameters do not change. If that is "
                "intended, leave it out and set requires_grad_(False) on them.",
                o.name, self._size(o), steps, self._reason(o),
            )  # fmt: skip

    def _reason(self, optimizer: NamedOptimizer) -> str:
        if optimizer.config.every > 1:
            return f"every={optimizer.config.every}"
        return self._backend.who_updates.format(name=optimizer.name)

    def _size(self, optimizer: NamedOptimizer) -> str:
        return f"{self._backend.strategy.count_parameters(optimizer.parameters):,} parameters"

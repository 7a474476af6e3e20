"""What a `Trainer` accepts from programs for Forgather: factories, a loss of logits, the distributed environment."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from trainformer.checkpointing import StateComponent
from trainformer.core.errors import BadArgument, expected
from trainformer.hf.distributed import this_process
from trainformer.hf.outputs import logits_from_outputs


def check_environment(given: Any) -> None:
    """Raise if a `distributed_env` says something else than the launcher, which decides."""
    process = this_process()
    if given is not None and (given.rank, given.world_size) != (process.rank, process.world_size):
        do = "Leave it out: the launcher (trainformer launch, torchrun) decides."
        what = f"distributed_env to have rank {process.rank} of {process.world_size}"
        raise BadArgument(expected(what, f"rank {given.rank} of {given.world_size}", do))


def factories(
    optimizers: tuple[Any, Any],
    optimizer_factory: Callable[[Any], Any] | None,
    lr_scheduler_factory: Callable[..., Any] | None,
    make_model: Callable[[], nn.Module],
) -> tuple[Any, Any]:
    """The optimizer and the scheduler that were passed, or functions that create them as Forgather does.

    `optimizer_factory` gets the named parameters of the model, `lr_scheduler_factory` the optimizer.
    """
    optimizer, scheduler = optimizers
    for name, given, factory in (
        ("optimizer_factory", optimizer, optimizer_factory),
        ("lr_scheduler_factory", scheduler, lr_scheduler_factory),
    ):
        if given is not None and factory is not None:
            raise BadArgument(expected(f"either {name} or optimizers", "both", "Leave one out."))
    if optimizer_factory is not None:
        make_optimizer = optimizer_factory
        optimizer = lambda groups: make_optimizer(list(make_model().named_parameters()))  # noqa: E731
    if lr_scheduler_factory is not None:
        make_scheduler = lr_scheduler_factory
        scheduler = lambda optimizer: make_scheduler(optimizer=optimizer)  # noqa: E731
    return optimizer, scheduler


logger = logging.getLogger("trainformer")

_STATES = {
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler", "schedule"),
    "dataset": ("dataset", "data", "trainer", "run"),
    "rng": ("rng",),
}


def skipped_components(args: Any, verb: str) -> set[str]:
    """The components that are not saved ("save") or not loaded ("restore"), as arguments such as save_rng_state say."""
    return {key for name, keys in _STATES.items() if not getattr(args, f"{verb}_{name}_state", True) for key in keys}


class StatefulsMixin:
    """The state of a trainer as Forgather's older versions name it, and components that subclasses add."""

    args: Any
    get_state_components: Callable[[], list[StateComponent]]
    _collects_extra = False

    def get_statefuls_for_save(self) -> dict[str, Any]:
        """What a checkpoint has besides the model, by name. Override it, or `get_state_components`, to add objects."""
        skipped = skipped_components(self.args, "save")
        loader = getattr(self, "train_dataloader", None)
        if loader is not None and not hasattr(loader, "state_dict") and "dataset" not in skipped:
            logger.warning("train_dataloader has no method state_dict: its position is not saved")
        return {part.key: part.stateful for part in self._others() if part.key not in skipped}

    def get_statefuls_for_load(self) -> dict[str, Any]:
        """What is loaded from a checkpoint besides the model, by name."""
        skipped = skipped_components(self.args, "restore")
        found = {part.key: part.stateful for part in self._others() if part.key not in skipped}
        for key, stateful in found.items():
            if not callable(getattr(stateful, "load_state_dict", None)):
                logger.warning("%s has no method load_state_dict, and keeps its state", key)
        return {key: part for key, part in found.items() if callable(getattr(part, "load_state_dict", None))}

    def _others(self) -> list[StateComponent]:
        return [part for part in self.get_state_components() if part.key != "model"]

    def extra_components(self, known: Iterable[str]) -> list[StateComponent]:
        """Components that a subclass adds to those that every trainer has."""
        if self._collects_extra:  # an override that calls the method of its base class
            return []
        known = {*known, *(name for names in _STATES.values() for name in names)}
        self._collects_extra = True
        try:
            found = {part.key: replace(part, required=False) for part in self.get_state_components()}
            if type(self).get_statefuls_for_save is not StatefulsMixin.get_statefuls_for_save:
                given = self.get_statefuls_for_save()
                found |= {
                    key: StateComponent(key, part, required=False) for key, part in given.items() if key not in found
                }
        finally:
            self._collects_extra = False
        return [part for key, part in found.items() if key not in known]


def combined_callbacks(defaults: list[Any], given: Iterable[Any] | None) -> list[Any]:
    """The default callbacks and those that are given, as in HF; one that is given replaces a default of its class.

    An empty list means none, as in Forgather.

    >>> combined_callbacks([1, "default"], ["given"]), combined_callbacks([1], []), combined_callbacks([1], None)
    ([1, 'given'], [], [1])
    """
    if given is None:
        return defaults
    given = list(given) if isinstance(given, Iterable) else [given]  # a single one
    kinds = {callback if isinstance(callback, type) else type(callback) for callback in given}
    return [*(callback for callback in defaults if type(callback) not in kinds), *given] if given else []


def check_pair(optimizers: Any) -> None:
    """Reject `optimizers` that are not an optimizer and a scheduler."""
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        what = "optimizers to be a pair (optimizer, lr_scheduler)"
        raise BadArgument(
            expected(what, type(optimizers).__name__, "Pass (optimizer, None) for one without the other.")
        )


def takes_outputs(loss: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
    """The loss function; one whose first parameter is called `logits`, as in Forgather, gets the logits of the outputs.

    >>> loss = takes_outputs(lambda logits, labels: logits.sum() - labels.sum())
    >>> import torch
    >>> loss(torch.ones(2), torch.ones(2)).item()
    0.0
    """
    if loss is None:
        return None
    try:
        names = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):
        return loss
    if not names or names[0] not in ("logits", "preds", "predictions"):
        return loss

    @functools.wraps(loss)
    def of_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        return loss(logits_from_outputs(outputs), *args, **kwargs)

    return of_outputs

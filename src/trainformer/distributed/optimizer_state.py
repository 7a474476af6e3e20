"""Optimizer state by parameter name, so that it fits wherever the same parameters are trained.

torch numbers parameters. Saving turns numbers into names, and loading turns them back and shards tensors of a
parameter's shape like that parameter. The files belong to `sharded_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainformer.backends.torch.master_weights import MasterWeights
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.distributed.sharded_state import ShardedState, resharded
from trainformer.utils.distributed import is_dtensor


class NamedParameters:
    """The parameters of an optimizer with their names.

    Param groups with both DTensors and plain tensors are split in two, because torch's updates cannot mix them. Saved
    states keep the groups the optimizer was created with, as a single process has them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> None:
        names = {id(p): name for name, p in named.items()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        unknown = [tuple(p.shape) for p in parameters if id(p) not in names]
        if unknown:
            what = "the optimizer to hold the sharded parameters of the task"
            do = "Pass the optimizer by name, as a class or as a factory: it is created after sharding."
            raise BadArgument(expected(what, f"{len(unknown)} others, of shapes {unknown[:4]}", do))
        self.by_name = {names[id(p)]: p for p in parameters}
        self._original_groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        _split_mixed_groups(optimizer)
        self._groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._names = dict(enumerate(name for group in self._groups for name in group))
        self._numbers = {name: number for number, name in self._names.items()}

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer state with names instead of numbers."""
        state = renamed(optimizer.state_dict(), self._names)
        return {**state, "param_groups": _regrouped(state["param_groups"], self._original_groups)}

    def load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load a state from `state_of`, a `ShardedState`, or an ordinary state dict with full tensors and numbers."""
        self.check(state)
        state = self._named(state)
        # A tree like the state, with the parameter in place of each tensor of its shape.
        like = {
            key: {name: self._parameter_for(value, name) for name, value in entries.items()}
            for key, entries in state.items()
            if isinstance(entries, Mapping)
        }
        state = resharded(state, like)
        groups = _regrouped(state["param_groups"], self._groups)
        optimizer.load_state_dict(renamed({**state, "param_groups": groups}, self._numbers))

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise if a state does not fit these parameters."""
        state = self._named(state)
        saved = {name for group in state["param_groups"] for name in group["params"]}
        missing, unknown = sorted(self.by_name.keys() - saved), sorted(saved - self.by_name.keys())
        shapes = [
            f"{key} of {name}: {tuple(value.shape)} in the checkpoint, {tuple(self.by_name[name].shape)} here"
            for name, entries in state["state"].items()
            for key, value in entries.items()
            if isinstance(value, Tensor) and value.numel() > 1
            if name in self.by_name and value.shape != self.by_name[name].shape
        ]
        problems = [
            f"{label}: {', '.join(map(str, found[:8]))}"
            for label, found in (("missing", missing), ("unknown", unknown), ("of another shape", shapes))
            if found
        ]
        if problems:
            raise DataError(
                f"The checkpoint's optimizer does not fit. {'; '.join(problems)}. Nothing was loaded. "
                "To change the optimizer on purpose, name the components to load without it."
            )

    def _named(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if _has_names(state):
            return state
        return renamed(state, dict(enumerate(name for group in self._original_groups for name in group)))

    def _parameter_for(self, value: Any, name: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._parameter_for(inner, name) for key, inner in value.items()}
        parameter = self.by_name.get(name)
        fits = isinstance(value, Tensor) and parameter is not None and parameter.shape == value.shape
        return parameter if fits else None


def unsharded_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Any optimizer state in torch's own form, with numbers and full tensors, as a single process loads it."""
    full = state.unsharded() if isinstance(state, ShardedState) else state
    if not _has_names(full):
        return dict(full)
    names = [name for group in full["param_groups"] for name in group["params"]]
    return renamed(full, {name: number for number, name in enumerate(names)})


def _split_mixed_groups(optimizer: torch.optim.Optimizer) -> None:
    """Split param groups with both DTensors and plain tensors in two, in place."""
    holders = [optimizer, optimizer.inner] if isinstance(optimizer, MasterWeights) else [optimizer]
    for i in reversed(range(len(optimizer.param_groups))):
        sharded = [is_dtensor(p) for p in optimizer.param_groups[i]["params"]]
        if any(sharded) and not all(sharded):
            for holder in holders:
                group = holder.param_groups[i]
                halves = [
                    [p for p, d in zip(group["params"], sharded, strict=True) if d is kind] for kind in (True, False)
                ]
                holder.param_groups[i : i + 1] = [{**group, "params": half} for half in halves]
    if isinstance(optimizer, MasterWeights):
        copies = {id(p): (p, copy) for p, copy in optimizer._pairs}
        optimizer._pairs = [copies[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _regrouped(saved: list[dict[str, Any]], groups: list[list[str]]) -> list[dict[str, Any]]:
    """The given groups, each with the options of the saved group that held its first parameter."""
    own = [next(group for group in saved if names[0] in group["params"]) for names in groups]
    return [{**group, "params": names} for group, names in zip(own, groups, strict=True)]


def _has_names(state: Mapping[str, Any]) -> bool:
    return any(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """The state with other parameter keys in its groups, in ``state``, and in any further mapping of the optimizer."""
    made: dict[str, Any] = {}
    for key, entries in state.items():
        if key == "param_groups":
            made[key] = [{**group, "params": [names.get(p, p) for p in group["params"]]} for group in entries]
        elif isinstance(entries, Mapping):
            made[key] = {names.get(p, p): value for p, value in entries.items()}
        else:
            made[key] = entries
    return made

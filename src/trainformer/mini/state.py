"""The state of a mini trainer: the components of its run, under the names that hooks know as well.

Hooks add to one dict, as in trainloop: what a hook adds is its own component and, for readers of the state, an entry at
the top level. States of trainloop are converted when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainformer.callbacks.compat.mini import HookCallback
from trainformer.checkpointing.checkpointer import load_components
from trainformer.core.errors import DataError, expected
from trainformer.mini.adapter import state_options

if TYPE_CHECKING:
    from trainformer.mini.run import MiniRun
    from trainformer.mini.trainer import BaseTrainer


def collect_state(trainer: BaseTrainer, run: MiniRun) -> dict[str, Any]:
    """All components, ``training_state`` (step, optimizer, lr_scheduler, grad_scaler), and what hooks add."""
    hooks, components = _hook_keys(run), run.components()
    states = {c.key: c.stateful.state_dict() for c in components if c.key not in hooks}
    states["training_state"] = {
        "step": run.state.step,
        "optimizer": states["optimizer"],
        "lr_scheduler": states["schedule"] if trainer.lr_scheduler is not None else None,
        "grad_scaler": states["backend"]["scaler"],
    }
    with _shown_to_hooks(trainer, states):
        added = {c.key: c.stateful.state_dict() for c in components if c.key in hooks}
    for own in added.values():
        states |= own
    return states | added


def load_state(trainer: BaseTrainer, run: MiniRun, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Load a state of `collect_state`, of a checkpoint file, or of trainloop. Returns the states by component."""
    states = state_dict.get("components", state_dict)
    is_mapping = isinstance(states, Mapping)
    if is_mapping and "run" not in states and states.keys() >= {"model", "training_state"}:
        states = _from_trainloop(trainer, run, states)
    if not is_mapping or "run" not in states:
        do = "Load weights alone with trainer.unwrapped_model.load_state_dict()."
        raise DataError(expected("the state of a run from state_dict()", sorted(map(str, state_dict)), do))
    hooks = _hook_keys(run)
    with _shown_to_hooks(trainer, {key: value for key, value in states.items() if key not in hooks}):
        load_components(run.components(), dict(states))
    return dict(states)


def read_trainloop_folder(folder: Path) -> dict[str, Any]:
    """A checkpoint of trainloop: one file per entry of the state."""
    return {path.stem: torch.load(path, map_location="cpu", weights_only=True) for path in sorted(folder.glob("*.pt"))}


def _hook_keys(run: MiniRun) -> set[str]:
    named = run.callbacks.named().items()
    return {"callback." + name.replace("#", "-") for name, callback in named if isinstance(callback, HookCallback)}


@contextmanager
def _shown_to_hooks(trainer: BaseTrainer, states: dict[str, Any]) -> Iterator[None]:
    trainer.state_in_transfer = states
    try:
        yield
    finally:
        trainer.state_in_transfer = None


def _from_trainloop(trainer: BaseTrainer, run: MiniRun, states: Mapping[str, Any]) -> dict[str, Any]:
    """The components of a state of trainloop, which has no RNG state and no position: the data start again."""
    training: Mapping[str, Any] = states["training_state"]
    saved, hooks = training["optimizer"], _hook_keys(run)
    converted = {
        **{c.key: c.stateful.state_dict() for c in run.components() if c.key not in states and c.key not in hooks},
        **states,
        "optimizer": saved if state_options(trainer) is not None else _by_number(trainer, saved),
        "schedule": training["lr_scheduler"] or {},
        "backend": {**run.backend.state_dict(), "scaler": training["grad_scaler"]},
        "run": {"step": training["step"]},
    }
    return converted | {key: {} for key in hooks}  # they find their entries at the top level


def _by_number(trainer: BaseTrainer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer whose parameters have names, as torch's own state dict, where they have numbers."""
    if all(isinstance(key, int) for group in saved["param_groups"] for key in group["params"]):
        return dict(saved)
    names = {id(p): name for name, p in trainer.unwrapped_model.named_parameters()}
    ordered = [[names[id(p)] for p in group["params"]] for group in trainer.optimizer.param_groups]
    numbers = {name: number for number, name in enumerate(name for group in ordered for name in group)}
    groups = [
        {**group, "params": [numbers[name] for name in names_of_group]}
        for group, names_of_group in zip(saved["param_groups"], ordered, strict=True)
    ]
    state = {numbers[name]: value for name, value in saved["state"].items() if name in numbers}
    return {"state": dict(sorted(state.items())), "param_groups": groups}

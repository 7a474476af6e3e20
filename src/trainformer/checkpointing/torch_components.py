"""Which components make up the state of a torch run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainformer.adapters.base import is_adapted
from trainformer.backends.torch import TorchBackend, capture_random, restore_random
from trainformer.backends.torch.optimizers import modules_of
from trainformer.backends.torch.schedules import Schedule
from trainformer.backends.torch.state import check_fits, gathered
from trainformer.checkpointing.components import StateComponent, StatefulAdapter
from trainformer.core.types import SharingPattern
from trainformer.distributed.sharded_state import resharded
from trainformer.distributed.strategy import Strategy, unsharded
from trainformer.tasks.base import provides

#: What training steps change, and so what a sandbox restores.
_TRAINED = ("model", "task", "optimizer", "schedule", "backend", "rng")


def is_trained(component: StateComponent) -> bool:
    """Whether training steps change a component, so that a sandbox has to restore it."""
    return component.key.partition(".")[0] in _TRAINED


def torch_components(
    task: Any,
    backend: TorchBackend,
    source: Any,
    common: Iterable[StateComponent],
    callbacks: Iterable[tuple[str, StatefulAdapter]],
) -> list[StateComponent]:
    """Everything needed to resume exactly, in the order in which it is saved and loaded.

    `common` are the components that every run has (progress, context, loggers), `callbacks` the states of callbacks.
    """
    strategy = backend.strategy
    components = [
        _model(task, backend),
        *(_optimizer(strategy, name, o.optimizer) for name, o in backend.optimizers.items()),
        *(_schedule(name, o.schedule) for name, o in backend.optimizers.items()),
        StateComponent(
            "backend",
            StatefulAdapter(backend.state_dict, backend.load_state_dict, backend.check_state),
            required=False,
        ),
        *common,
        StateComponent("rng", StatefulAdapter(capture_random, restore_random), SharingPattern.PER_RANK, required=False),
    ]
    stateful = list(callbacks)
    own = module_states(task)
    if provides(task, "state_dict"):
        adapter = StatefulAdapter(task.state_dict, task.load_state_dict, getattr(task, "check_state", None))
        stateful.insert(0, ("task", adapter))
    elif own is not None:
        stateful.insert(0, ("task", own))
    if hasattr(source, "state_dict"):
        # A loader that shards the data itself has another position on each rank.
        per_rank = backend.process_group.world_size > 1 and getattr(source, "is_sharded", False)
        pattern = SharingPattern.PER_RANK if per_rank else SharingPattern.GLOBAL
        adapter = StatefulAdapter(source.state_dict, source.load_state_dict)
        components.append(StateComponent("data", adapter, pattern, required=False))
    return [*components, *(_with_tensors(key, adapter, strategy.shards_state) for key, adapter in stateful)]


def _model(task: Any, backend: TorchBackend) -> StateComponent:
    strategy = backend.strategy
    weights, load_weights = task.model.state_dict, task.model.load_state_dict
    if provides(task, "model_state_dict"):
        weights, load_weights = task.model_state_dict, task.load_model_state_dict
    # With an adapter only the adapter is saved: it is small, and stored as the file that peft reads.
    adapter_only = strategy.shards_state and hasattr(task, "adapter") and is_adapted(task.model)

    def state() -> Any:
        found = strategy.model_state(weights)
        return gathered(found) if adapter_only else found

    return StateComponent(
        "model",
        StatefulAdapter(
            state,
            lambda saved: strategy.load_model_state(saved, load_weights),
            lambda saved: strategy.check_model_state(saved, weights),
        ),
        SharingPattern.GLOBAL if adapter_only else strategy.sharing,
        validate_replication=strategy.sharing is SharingPattern.REPLICATED,
        format="sharded" if strategy.shards_state and not adapter_only else "weights",
    )


def _optimizer(strategy: Strategy, name: str, optimizer: torch.optim.Optimizer) -> StateComponent:
    return StateComponent(
        _key("optimizer", name),
        StatefulAdapter(
            lambda: strategy.optimizer_state(optimizer),
            lambda saved: strategy.load_optimizer_state(optimizer, saved),
            lambda saved: strategy.check_optimizer_state(optimizer, saved),
        ),
        strategy.sharing,
        validate_replication=strategy.sharing is SharingPattern.REPLICATED,
        format="sharded" if strategy.shards_state else "tensors",
    )


def _schedule(name: str, schedule: Schedule) -> StateComponent:
    adapter = StatefulAdapter(schedule.state_dict, schedule.load_state_dict, schedule.check_state)
    return StateComponent(_key("schedule", name), adapter, required=False)


def _key(kind: str, name: str) -> str:
    """The key of a component; `name` is that of one of several optimizers."""
    return f"{kind}.{name}" if name else kind


def module_states(task: Any) -> StatefulAdapter | None:
    """The trained modules and parameters that a task holds besides its model; None if there are none.

    They are saved for a task that does not define `state_dict` itself. Frozen modules are not.
    """
    if isinstance(task, nn.Module):
        return None  # has a state dict of its own
    inside = {id(p) for p in task.model.parameters()}
    modules = {
        name: module
        for name, module in modules_of(task).items()
        if any(p.requires_grad and id(p) not in inside for p in module.parameters())
    }
    bare = {name: p for name, p in vars(task).items() if isinstance(p, nn.Parameter) and p.requires_grad}
    if not modules and not bare:
        return None

    def state() -> dict[str, Any]:
        return {name: module.state_dict() for name, module in modules.items()} | {k: p.data for k, p in bare.items()}

    def check(saved: dict[str, Any]) -> None:
        check_fits(state(), saved, "task")
        for name, module in modules.items():
            check_fits(module.state_dict(), saved[name], name)

    def load(saved: dict[str, Any]) -> None:
        for name, module in modules.items():
            module.load_state_dict(saved[name])
        for name, parameter in bare.items():
            parameter.data.copy_(saved[name])

    return StatefulAdapter(state, load, check)


def _with_tensors(key: str, adapter: StatefulAdapter, shards_state: bool) -> StateComponent:
    """A component that may hold a copy of the model (an EMA, a momentum encoder): sharded where the model is."""
    check = adapter.check
    if shards_state:
        sharded = StatefulAdapter(adapter.get, lambda s: adapter.put(resharded(s, adapter.get())), check)
        return StateComponent(key, sharded, required=False, format="sharded")
    full = StatefulAdapter(
        adapter.get,
        lambda s: adapter.put(unsharded(s)),
        None if check is None else lambda s: check(unsharded(s)),
    )
    return StateComponent(key, full, required=False)

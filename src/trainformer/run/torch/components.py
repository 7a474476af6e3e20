"""The components of a run's state, in the order in which they are written and given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainformer.backends.torch import capture_random, restore_random
from trainformer.backends.torch.state_trees import gathered
from trainformer.checkpointing import SharingPattern, StateComponent
from trainformer.distributed.sharded_state import fitted
from trainformer.distributed.strategy import whole
from trainformer.run.components import StatefulAdapter, callback_states, record_components
from trainformer.tasks.base import provides

if TYPE_CHECKING:
    from trainformer.run.torch.run import TorchRun

#: What trial steps change, and so what a sandbox puts back.
TRAINED = ("model", "task", "optimizer", "schedule", "backend", "rng")


def state_components(run: TorchRun) -> list[StateComponent]:
    """Everything needed to go on exactly from here."""
    task, backend = run.task, run.backend
    model, optimizer, schedule = task.model, backend.optimizer, backend.schedule
    weights, load_weights = model.state_dict, model.load_state_dict
    if provides(task, "model_state"):
        weights, load_weights = task.model_state, task.load_model_state
    strategy = backend.strategy
    sharing, replicated = strategy.sharing, strategy.sharing is SharingPattern.REPLICATED
    # Of a run with an adapter only that is saved: small, and as the file that peft reads.
    is_small = strategy.divides_state and getattr(task, "adapter", None) is not None
    in_parts = strategy.divides_state and not is_small
    progress, *others = record_components(run)
    components = [
        StateComponent(
            "model",
            StatefulAdapter(
                lambda: gathered(strategy.model_state(weights)) if is_small else strategy.model_state(weights),
                lambda s: strategy.load_model_state(s, load_weights),
                lambda s: strategy.check_model_state(s, weights),
            ),
            SharingPattern.GLOBAL if is_small else sharing,
            validate_replication=replicated,
            format="sharded" if in_parts else "weights",
        ),
        StateComponent(
            "optimizer",
            # Cloned: torch keeps the tensors it is given and goes on to change them.
            StatefulAdapter(
                lambda: strategy.optimizer_state(optimizer),
                lambda s: strategy.load_optimizer_state(optimizer, s),
                lambda s: strategy.check_optimizer_state(optimizer, s),
            ),
            sharing,
            validate_replication=replicated,
            format="sharded" if strategy.divides_state else "tensors",
        ),
        StateComponent("schedule", StatefulAdapter(schedule.state_dict, schedule.load_state_dict), required=False),
        StateComponent("backend", StatefulAdapter(backend.state_dict, backend.load_state_dict), required=False),
        progress,
        StateComponent("rng", StatefulAdapter(capture_random, restore_random), SharingPattern.PER_RANK, required=False),
        *others,
    ]
    if provides(task, "state_dict"):
        held = StatefulAdapter(task.state_dict, task.load_state_dict, getattr(task, "check_state", None))
        components.append(_perhaps_divided("task", held, run))
    if hasattr(run.train_source, "state_dict"):
        source: Any = run.train_source
        # A loader that divides the data itself is somewhere else on each rank.
        own = run.process_group.world_size > 1 and source.is_sharded
        pattern = SharingPattern.PER_RANK if own else SharingPattern.GLOBAL
        held = StatefulAdapter(source.state_dict, source.load_state_dict)
        components.append(StateComponent("data", held, pattern, required=False))
    components += [_perhaps_divided(key, held, run) for key, held in callback_states(run)]
    return components


def _perhaps_divided(key: str, held: StatefulAdapter, run: TorchRun) -> StateComponent:
    """A component that may hold a copy of the model: divided where the model is."""
    if not run.backend.strategy.divides_state:
        check = held.check
        unsharded = StatefulAdapter(
            held.get, lambda s: held.put(whole(s)), None if check is None else lambda s: check(whole(s))
        )
        return StateComponent(key, unsharded, required=False)
    divided = StatefulAdapter(held.get, lambda s: held.put(fitted(s, held.get())), held.check)
    return StateComponent(key, divided, required=False, format="sharded")

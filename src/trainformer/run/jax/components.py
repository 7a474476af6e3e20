"""The components of a run's state on JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from trainformer.checkpointing import StateComponent
from trainformer.checkpointing.jax_files import SavedArrays
from trainformer.checkpointing.orbax_files import check_fits, read_state
from trainformer.core.errors import DataError
from trainformer.run.components import StatefulAdapter, callback_states, record_components

if TYPE_CHECKING:
    from trainformer.run.jax.run import JaxRun


def state_components(run: JaxRun) -> list[StateComponent]:
    """Everything needed to go on exactly from here. The random key is part of the state, and a function of the step."""
    backend = run.backend

    def take(saved: Any) -> None:
        like = _shapes(backend.state)
        backend.state = None  # there need not be room for two of them
        backend.state = read_state(saved.folder, like)

    def check(saved: Any) -> None:
        if not isinstance(saved, SavedArrays):
            raise DataError("The checkpoint is not one of a run on JAX: its state holds no arrays that orbax wrote.")
        check_fits(saved.folder, _shapes(backend.state))

    components = [
        StateComponent("state", StatefulAdapter(lambda: backend.state, take, check), format="orbax"),
        *(replace(c, format="tree") if c.format == "tensors" else c for c in record_components(run)),
    ]
    source: Any = run.train_source
    if hasattr(source, "state_dict"):

        def go_to(place: Any) -> None:
            if run.state.batch:  # an epoch that has not begun begins anew, also where the one before was cut short
                source.load_state_dict(place)

        # Batches that wait on the devices were read, and not trained on.
        held = StatefulAdapter(lambda: source.state_dict(unused=backend.batches_ahead), go_to)
        components.append(StateComponent("data", held, required=False, format="tree"))
    components += [StateComponent(key, held, required=False, format="tree") for key, held in callback_states(run)]
    return components


def _shapes(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)

"""That processes which were started together train together."""

from __future__ import annotations

from trainformer.core.errors import BadArgument
from trainformer.distributed import Strategy
from trainformer.distributed.process_group import Launch


def refuse_to_part(strategy: Strategy) -> None:
    """Raise if several processes were started, and each would train the whole alone, in the same folder."""
    world_size = Launch.find().world_size
    if type(strategy) is Strategy and world_size > 1:
        raise BadArgument(
            f"Expected a strategy for the {world_size} processes that were started together, received 'single': each "
            "of them would train the whole model alone and write to the same folder. Pass "
            "strategy='auto', or start one process."
        )

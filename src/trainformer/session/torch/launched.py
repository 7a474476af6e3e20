"""That processes which were started together train together."""

from __future__ import annotations

from trainformer.backends.torch.distribution import Strategy
from trainformer.backends.torch.distribution.ranks import Launch
from trainformer.core.errors import BadArgument


def refuse_to_part(strategy: Strategy) -> None:
    """Raise if several processes were started, and each would train the whole alone, in the same folder."""
    world = Launch.find().world
    if type(strategy) is Strategy and world > 1:
        raise BadArgument(
            f"Expected a strategy for the {world} processes that were started together, received 'single': each of "
            "them would train the whole model alone and write to the same folder. Pass strategy='auto', or start one "
            "process."
        )

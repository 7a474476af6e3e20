"""When a micro-batch does not fit into memory: the same data in smaller pieces, with the same weighted gradient."""

from __future__ import annotations

import logging
from itertools import pairwise

import torch
from torch import nn

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import DeviceBatch
from trainformer.data.sharding import slice_batch

logger = logging.getLogger("trainformer")

POLICIES = ("split", "raise")


class MemorySplitter:
    """Cuts batches into as many pieces as memory has been seen to need. The number only grows."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise BadArgument(expected("oom to be 'split' or 'raise'", policy))
        self.policy = policy
        self.pieces = 1

    def cut(self, batch: DeviceBatch) -> list[DeviceBatch]:
        """A batch in pieces of nearly equal size, in order."""
        pieces = min(self.pieces, batch.size)
        if pieces <= 1:
            return [batch]
        edges = [batch.size * i // pieces for i in range(pieces + 1)]
        tokens = batch.tokens / batch.size
        cut = [
            DeviceBatch(
                slice_batch(batch.data, low, high, batch.size),
                high - low,
                round(tokens * (high - low)),
                more=batch.more or high < batch.size,
            )
            for low, high in pairwise(edges)
        ]
        return [cut[0]._replace(bad=batch.bad), *cut[1:]]

    def shrink(self, batch: DeviceBatch, model: nn.Module) -> bool:
        """Use twice as many pieces from now on; False if a single sample is already too large."""
        if self.policy == "raise" or self.pieces >= batch.size:
            return False
        self.pieces *= 2
        size = -(-batch.size // self.pieces)
        logger.warning(
            "out of memory with %d samples at once: the step is repeated in pieces of %d, and so are all that follow. "
            "Losses and gradients are weighted as before%s",
            batch.size, size, _not_equal(model),
        )  # fmt: skip
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True


def _not_equal(model: nn.Module) -> str:
    """What cannot be the same in pieces, said once."""
    kinds = []
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        kinds.append("BatchNorm statistics (they see fewer samples at a time)")
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()):
        kinds.append("dropout masks (they are drawn in another order)")
    return f", but not equal to an unsplit run: {' and '.join(kinds)}." if kinds else "."

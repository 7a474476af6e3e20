"""The floating-point operations of a step, by torch's counter."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

logger = logging.getLogger("trainformer")


def count_flops(step: Callable[[], Any]) -> float | None:
    """The FLOPs of a call, or None if torch cannot count them."""
    try:
        with FlopCounterMode(display=False, custom_mapping=_uncounted_by_torch()) as counter:
            step()
    except RuntimeError as error:  # a backward pass inside of the step, for instance; a real error comes back later
        logger.warning("Throughput: torch cannot count the FLOPs of this step; logging throughput without (%s)", error)
        return None
    flops = counter.get_total_flops()
    if not flops:
        logger.info("Throughput: torch counts no FLOPs for this model; logging throughput without them")
        return None
    return float(flops)


def _uncounted_by_torch() -> dict[Any, Any]:
    """Formulas that torch's counter lacks: grouped matrix products, with which transformers computes experts."""
    grouped = getattr(torch.ops.aten, "_grouped_mm", None)
    return {} if grouped is None else {grouped: _grouped_mm_flops}


def _grouped_mm_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """Each row of a stack is multiplied with one of the matrices.

    >>> _grouped_mm_flops((10, 4), (3, 4, 5))  # ten tokens, three experts
    400
    """
    return 2 * math.prod(a) * b[-1]

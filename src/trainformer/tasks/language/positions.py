"""The longest sequence that a model can read: rows of a table of positions, or rotary positions."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from torch import nn

from trainformer.core.errors import BadArgument, expected
from trainformer.models.rope import rope_positions

logger = logging.getLogger("trainformer")

_LENGTHS = ("max_length", "max_source_length", "max_target_length")


def longest_sequence(model: nn.Module) -> int | None:
    """Rows of the table of positions that a sequence may use; None for models without one (rotary, relative).

    >>> class Tiny(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.wpe = nn.Embedding(64, 8)
    >>> longest_sequence(Tiny())
    64
    """
    found = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (last in ("wpe", "embed_positions") or "position_embedding" in last):
            # Some count from the padding token (RoBERTa), or have unused rows at the start (BART).
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            found.append(module.num_embeddings - max(unused, int(getattr(module, "offset", 0))))
    return min(found, default=None)


def fit_lengths(task: Any) -> None:
    """Reject lengths beyond the positions of the model; lower those that were left at their defaults."""
    longest, do = longest_sequence(task.model), ""
    if longest is None:
        longest = rope_positions(task.model)
        do = "Pass rope_scaling='yarn' (or 'linear', 'dynamic', 'llama3') for longer sequences."
    if longest is None:
        return
    for field in (f for f in fields(task) if f.name in _LENGTHS):
        length = getattr(task, field.name)
        if length <= longest:
            continue
        if length != field.default:
            what = f"{field.name} of at most {longest}, the positions that the model has"
            raise BadArgument(expected(what, length, do))
        logger.info("%s is %d, the positions that the model has", field.name, longest)
        setattr(task, field.name, longest)

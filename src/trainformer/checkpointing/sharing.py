"""Which rank writes and reads what, by sharing pattern. Owns no files: names only."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from trainformer.checkpointing import SharingPattern, StateComponent

_OF_A_RANK = re.compile(r"\.rank(\d+)\.[^.]+$")


def is_ours(component: StateComponent, process_group: Any) -> bool:
    """Whether this rank writes a component, or its part of it."""
    pattern = component.sharing_pattern
    if component.format in ("sharded", "orbax") or pattern is SharingPattern.PER_RANK:
        return True
    if pattern is SharingPattern.PER_NODE:
        return process_group.local_rank == 0
    if pattern is SharingPattern.PER_GROUP:
        return process_group.group(component.process_group_name).is_first
    return process_group.is_main


def stem_of(component: StateComponent, process_group: Any) -> str:
    """The name of the file that this rank writes, without the ending."""
    of_a_group = component.sharing_pattern is SharingPattern.PER_GROUP
    group = process_group.group(component.process_group_name).number if of_a_group else 0
    return component.stem(process_group.rank, group, int(os.environ.get("GROUP_RANK", "0")))


def files_for(key: str, names: Sequence[str], rank: int) -> list[str]:
    """Which of a component's files a rank reads: its own, where each has one; none, if it had none then.

    >>> files_for("rng", ["rng.rank0.pt", "rng.rank1.pt"], rank=1), files_for("model", ["model.safetensors"], rank=1)
    (['rng.rank1.pt'], ['model.safetensors'])
    """
    numbers = {name: int(match[1]) for name in names if (match := _OF_A_RANK.search(name))}
    if not numbers or len(numbers) < len(names):
        return list(names)
    return [name for name, number in numbers.items() if number == rank]


def is_of_another_rank(name: str) -> bool:
    """Whether a file that appears while rank 0 writes is another rank's: a part of something, or its note."""
    return re.search(r"^\.part-|\.shard-|\.rank\d+\.", name) is not None

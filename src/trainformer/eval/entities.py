"""Entities in tagged sequences: finding them, and counting those that are found right.

Owns the schemes of tags. IOB (`B-PER I-PER O`), IOBES and BILOU have the place in the entity before the type, and are
read as leniently as the CoNLL evaluation does: an entity also begins where its type does. Tags without places
(`PER PER O`) mean that neighbours of one type are one entity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

OUTSIDE = "O"
_BEGIN, _END = frozenset("BSU"), frozenset("ESLU")
_PLACES = frozenset("BIESLU")


class Entity(NamedTuple):
    """Words from `begin` to before `end`."""

    type: str
    begin: int
    end: int


class TagScheme:
    """What a set of tags means. Without places in tags and without `O`, there are no entities: `types` is empty.

    >>> scheme = TagScheme(["O", "B-PER", "I-PER", "B-LOC"])
    >>> scheme.types, scheme.entities(["B-PER", "I-PER", "O", "B-LOC"])
    (['LOC', 'PER'], [Entity(type='PER', begin=0, end=2), Entity(type='LOC', begin=3, end=4)])
    """

    def __init__(self, tags: Sequence[str]) -> None:
        inside = [tag for tag in tags if tag != OUTSIDE]
        placed = bool(inside) and all(tag[:1] in _PLACES and tag[1:2] in ("-", "_") for tag in inside)
        self._parts = {tag: (tag[0], tag[2:]) if placed else ("I", tag) for tag in inside}
        has_entities = placed or OUTSIDE in tags
        self.types = sorted({kind for _, kind in self._parts.values()}) if has_entities else []

    def entities(self, tags: Sequence[str]) -> list[Entity]:
        """The entities of a sequence, in order."""
        found: list[Entity] = []
        begin, before = 0, ("", "")  # of the entity that is open, if its place is not empty
        for index, tag in enumerate([*tags, OUTSIDE]):
            place, kind = self._parts.get(tag, ("", ""))
            goes_on = place not in _BEGIN and before[0] not in _END and kind == before[1]
            if before[0] and not (place and goes_on):
                found.append(Entity(before[1], begin, index))
                before = ("", "")
            if place and not before[0]:
                begin = index
            before = (place, kind)
        return found

    def counts(self, predicted: Sequence[str], wanted: Sequence[str]) -> np.ndarray:
        """Per type: entities found right (the same words and type), predicted, and wanted."""
        row = {kind: number for number, kind in enumerate(self.types)}
        table = np.zeros((len(self.types), 3), dtype=np.int32)
        both = set(self.entities(predicted)), set(self.entities(wanted))
        for column, several in enumerate((both[0] & both[1], *both)):
            for entity in several:
                table[row[entity.type], column] += 1
        return table


class Rates(NamedTuple):
    """Precision, recall and F1."""

    precision: float
    recall: float
    f1: float


def rates(right: int, predicted: int, wanted: int) -> Rates:
    """Precision, recall and F1 of counts; a ratio without cases counts as 0.

    >>> rates(1, 2, 1)
    Rates(precision=0.5, recall=1.0, f1=0.6666666666666666)
    """
    return Rates(right / max(predicted, 1), right / max(wanted, 1), 2 * right / max(predicted + wanted, 1))

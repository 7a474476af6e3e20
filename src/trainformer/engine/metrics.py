"""Running metrics: pairs (sum, weight), kept on the device until a log point.

A step only appends references to device scalars. All arithmetic happens when the values are read, in double
precision on the host, so that a result depends neither on the order nor on the size of the batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from trainformer.core.types import Entry
from trainformer.engine.process_group import ProcessGroup, SingleProcess

# So many scalars are kept per metric before they are folded into one on the device. At 512 bytes each (CUDA's
# smallest block) this bounds the memory of a run that never logs to half a megabyte per metric.
_FOLD_AT = 1024


class Reader(Protocol):
    """The part of a backend that metrics need."""

    def read(self, scalars: Sequence[Any]) -> list[float]:
        """Values of scalars in one transfer."""
        ...

    def fold(self, scalars: Sequence[Any]) -> Any:
        """Their sum, still on the device."""
        ...


Sums = dict[str, tuple[float, float]]


class RunningMetrics:
    """Weighted means over everything added since the last `drain`, on all ranks.

    >>> class Plain:
    ...     def read(self, scalars): return [float(s) for s in scalars]
    ...     def fold(self, scalars): return sum(scalars)
    >>> metrics = RunningMetrics(Plain())
    >>> metrics.extend([Entry("loss", 2.0, 3, True), Entry("loss", 4.0, 1, False)])
    >>> metrics.drain()
    {'loss': 2.5}
    """

    def __init__(self, reader: Reader, process_group: ProcessGroup | None = None) -> None:
        self._reader = reader
        self._peers = process_group or SingleProcess()
        self._entries: dict[str, list[Entry]] = defaultdict(list)

    def extend(self, entries: Iterable[Entry]) -> None:
        """Add values without looking at them."""
        for entry in entries:
            kept = self._entries[entry.name]
            kept.append(entry)
            if len(kept) >= _FOLD_AT:
                self._entries[entry.name] = [self._folded(entry.name, kept)]

    def drain(self) -> dict[str, float]:
        """The means, in one transfer; begins anew. A metric of no weight at all is left out."""
        entries, self._entries = self._entries, defaultdict(list)
        if self._peers.is_single_process:
            return weighted_means(entries, self._reader)
        return {name: total / weight for name, (total, weight) in self._shared(entries).items()}

    def _shared(self, entries: Mapping[str, list[Entry]]) -> Sums:
        """Sums and weights of all ranks."""
        together: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for sums in self._peers.all_gather_dp(weighted_sums(entries, self._reader)):
            for name, pair in sums.items():
                together[name].append(pair)
        return {name: (_sum([a for a, _ in pairs]), _sum([b for _, b in pairs])) for name, pairs in together.items()}

    def values(self) -> list[list[Any]]:
        """Everything added since the last `drain`, as plain numbers. Waits for the device, and for other ranks."""
        if not self._peers.is_single_process:
            return [[name, total, weight, False] for name, (total, weight) in self._shared(self._entries).items()]
        entries = [e for kept in self._entries.values() for e in kept]
        numbers = iter(self._reader.read([x for e in entries for x in (e.value, e.weight)]))
        return [[e.name, next(numbers), next(numbers), e.is_mean] for e in entries]

    def _folded(self, name: str, entries: list[Entry]) -> Entry:
        total = self._reader.fold([e.value * e.weight if e.is_mean else e.value for e in entries])
        weight = self._reader.fold([e.weight for e in entries])
        return Entry(name, total, weight, is_mean=False)


def weighted_sums(entries: Mapping[str, list[Entry]], reader: Reader) -> Sums:
    """Sum of sums and sum of weights, per metric that has any weight."""
    scalars = [x for kept in entries.values() for e in kept for x in (e.value, e.weight)]
    values = iter(reader.read(scalars))
    found: Sums = {}
    for name, kept in entries.items():
        sums: list[float] = []
        weights: list[float] = []
        for entry in kept:
            value, weight = next(values), next(values)
            # An empty batch has weight 0 and often a NaN mean: it must not count at all.
            if weight != 0:
                sums.append(value * weight if entry.is_mean else value)
                weights.append(weight)
        total = math.fsum(weights)
        if total != 0:
            found[name] = _sum(sums), total
    return found


def weighted_means(entries: Mapping[str, list[Entry]], reader: Reader) -> dict[str, float]:
    """Sum of sums over sum of weights, per metric."""
    return {name: total / weight for name, (total, weight) in weighted_sums(entries, reader).items()}


def _sum(values: list[float]) -> float:
    # fsum is exact but refuses inf - inf; plain addition gives the NaN that should be seen.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)

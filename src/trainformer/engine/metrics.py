"""Running metrics: (sum, weight) pairs that stay on the device until a log point, and scalars that sync when read.

A step only appends references to device scalars. All arithmetic happens when the values are read, in double
precision on the host, so results depend neither on the order nor on the size of the batches.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainformer.core.types import Entry
from trainformer.engine.process_group import ProcessGroup, SingleProcess
from trainformer.engine.protocols import Backend

# This many scalars are kept per metric before they are summed on the device. At 512 bytes each (CUDA's
# smallest block) this bounds the memory of a run that never logs to half a megabyte per metric.
_FOLD_AT = 1024


Sums = dict[str, tuple[float, float]]
#: Returns a number that is on its way from the device once it has arrived, and None until then. Never waits.
Poll = Callable[[], float | None]


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

    def __init__(self, reader: Backend, process_group: ProcessGroup | None = None) -> None:
        self._reader = reader
        self._process_group = process_group or SingleProcess()
        self._entries: dict[str, list[Entry]] = defaultdict(list)

    def extend(self, entries: Iterable[Entry]) -> None:
        """Add values without reading them from the device."""
        for entry in entries:
            kept = self._entries[entry.name]
            kept.append(entry)
            if len(kept) >= _FOLD_AT:
                total = self._reader.fold([e.value * e.weight if e.is_mean else e.value for e in kept])
                weight = self._reader.fold([e.weight for e in kept])
                self._entries[entry.name] = [Entry(entry.name, total, weight, is_mean=False)]

    def drain(self) -> dict[str, float]:
        """The means, in one transfer; then reset. Metrics with zero total weight are left out."""
        entries, self._entries = self._entries, defaultdict(list)
        if self._process_group.is_single_process:
            return weighted_means(entries, self._reader)
        return {name: total / weight for name, (total, weight) in self._all_ranks(entries).items()}

    def _all_ranks(self, entries: Mapping[str, list[Entry]]) -> Sums:
        """Sums and weights of all ranks."""
        together: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for sums in self._process_group.all_gather_dp(weighted_sums(entries, self._reader)):
            for name, pair in sums.items():
                together[name].append(pair)
        return {name: (_sum([a for a, _ in pairs]), _sum([b for _, b in pairs])) for name, pairs in together.items()}

    def values(self) -> list[list[Any]]:
        """Everything added since the last `drain`, as plain numbers. Syncs with the device and the other ranks."""
        if not self._process_group.is_single_process:
            return [[name, total, weight, False] for name, (total, weight) in self._all_ranks(self._entries).items()]
        entries = [e for kept in self._entries.values() for e in kept]
        numbers = iter(self._reader.read([x for e in entries for x in (e.value, e.weight)]))
        return [[e.name, next(numbers), next(numbers), e.is_mean] for e in entries]


def weighted_sums(entries: Mapping[str, list[Entry]], reader: Backend) -> Sums:
    """Sum of sums and sum of weights, per metric that has any weight."""
    scalars = [x for kept in entries.values() for e in kept for x in (e.value, e.weight)]
    return _combine(entries, reader.read(scalars))


def _combine(entries: Mapping[str, list[Entry]], numbers: Sequence[float]) -> Sums:
    """Sums and weights, given the numbers behind the entries."""
    values = iter(numbers)
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


def weighted_means(entries: Mapping[str, list[Entry]], reader: Backend) -> dict[str, float]:
    """Sum of sums over sum of weights, per metric."""
    return {name: total / weight for name, (total, weight) in weighted_sums(entries, reader).items()}


def start_mean(entries: list[Entry], reader: Backend) -> Poll:
    """Start to read the mean of some entries. The result returns it once it has arrived, and None until then."""
    poll = reader.start_read([x for e in entries for x in (e.value, e.weight)])

    def arrived() -> float | None:
        numbers = poll()
        if numbers is None:
            return None
        total, weight = _combine({"": entries}, numbers).get("", (math.nan, 1.0))
        return total / weight

    return arrived


def _sum(values: list[float]) -> float:
    # fsum is exact but raises on inf - inf; plain addition gives the NaN that should be visible.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


class LazyScalar:
    """A float that is still on the device: it syncs only when it is read.

    `on_step_end` receives the loss as one of these, so callbacks that do not read it cost nothing.

    >>> reads = []
    >>> loss = LazyScalar(lambda: reads.append(1) or 0.25)
    >>> reads
    []
    >>> loss < 0.5, f"{loss:.3f}", loss * 2, reads
    (True, '0.250', 0.5, [1])
    """

    __slots__ = ("_read", "_start", "_value")

    def __init__(self, read: Callable[[], float], start: Callable[[], Poll] | None = None) -> None:
        self._read: Callable[[], float] | None = read
        self._start = start
        self._value = 0.0

    def start_read(self) -> Poll:
        """Start to copy the value to the host. Call the result to poll for it: None until it has arrived.

        Nothing waits for the device, so this is for displays. A device that cannot do that never delivers.
        """
        if self._read is None:
            return lambda: self._value
        return (lambda: None) if self._start is None else self._start()

    def __float__(self) -> float:
        if self._read is not None:
            self._value, self._read = float(self._read()), None
        return self._value

    def item(self) -> float:
        """The value, as a tensor would give it."""
        return float(self)

    def __int__(self) -> int:
        return int(float(self))

    def __bool__(self) -> bool:
        return bool(float(self))

    def __repr__(self) -> str:
        return repr(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __hash__(self) -> int:
        return hash(float(self))


def _delegate(name: str, function: Callable[..., Any]) -> None:
    def method(self: LazyScalar, *others: Any) -> Any:
        return function(float(self), *(float(o) if isinstance(o, LazyScalar) else o for o in others))

    method.__name__ = name
    setattr(LazyScalar, name, method)


for _name in ("lt", "le", "eq", "ne", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _delegate(f"__{_name}__", getattr(operator, _name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _delegate(f"__r{_name}__", lambda a, b, name=_name: getattr(operator, name)(b, a))
for _name in ("neg", "pos", "abs"):
    _delegate(f"__{_name}__", getattr(operator, _name))
_delegate("__round__", round)

# isinstance(loss, numbers.Real) is how careful code asks for "a number".
numbers.Real.register(LazyScalar)

"""The numbers of a run as curves: one list of steps and one of values for each metric, short enough to draw.

Owns how many points a curve keeps, which metrics share a plot, and how a step becomes an epoch or a time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

POINTS = 5_000  # of a curve; more than the pixels of a wide screen
_FEWEST = 500
_DRAWN_AT_ONCE = 40_000  # points of one metric over all runs; more make the page slow
_CLOCK_POINTS = 2_000
_PARTS = ("train", "val", "test", "eval")
_EPOCH = "train/epoch"

# The first that fits decides; what nothing fits goes to the validation metrics or to the others.
_GROUPS = (
    ("Learning rate", ("lr", "learning_rate", "weight_decay", "momentum")),
    ("Gradient norm", ("grad",)),
    ("Throughput", ("per_second", "mfu", "throughput", "seconds", "runtime", "_ms")),
    ("Memory", ("memory",)),
    ("Loss", ("loss", "perplexity")),
)
GROUPS = ("Loss", "Validation", "Learning rate", "Gradient norm", "Throughput", "Memory", "Others")


@dataclass
class Series:
    """One metric of one run. `total` is how many values were logged."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    total: int = 0


def points_for(runs: int) -> int:
    """How many points each curve may have.

    >>> points_for(1), points_for(20), points_for(1000)
    (5000, 2000, 500)
    """
    return max(_FEWEST, min(POINTS, _DRAWN_AT_ONCE // max(1, runs)))


def series_of(records: Iterable[dict[str, Any]], points: int = POINTS) -> dict[str, Series]:
    """The curves in records of ``metrics.jsonl``. What is no number is left out; a step that was logged twice counts
    as it was logged last."""
    found: dict[str, Series] = {}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        for name, value in record.items():
            if isinstance(value, float | int) and name != "step" and name != "time":
                series = found.get(name)
                if series is None:
                    series = found[name] = Series()
                series.steps.append(step)
                series.values.append(value)
    for series in found.values():
        _put_in_order(series)
        series.total = len(series.steps)
        kept = kept_points(series.values, points)
        if len(kept) < series.total:
            series.steps = [series.steps[place] for place in kept]
            series.values = [series.values[place] for place in kept]
    return found


def _put_in_order(series: Series) -> None:
    steps = series.steps
    if all(before < after for before, after in itertools.pairwise(steps)):
        return
    latest = dict(zip(steps, series.values, strict=True))
    series.steps = sorted(latest)
    series.values = [latest[step] for step in series.steps]


def kept_points(values: Sequence[float], points: int) -> list[int]:
    """Which of many values to draw: the first, the last, and of each stretch the lowest, the highest, and one that is
    not finite. So no peak, no dip and no NaN is lost, and the curve looks as it would with all of them.

    >>> kept_points([0, 5, 1, 1, 1, -3, 1, 0], points=4)
    [0, 1, 4, 5, 7]
    """
    if len(values) <= points:
        return list(range(len(values)))
    stretches = max(1, points // 2)
    kept = {0, len(values) - 1}
    for number in range(stretches):
        places = range(number * len(values) // stretches, (number + 1) * len(values) // stretches)
        finite = [place for place in places if math.isfinite(values[place])]
        if finite:
            kept.add(min(finite, key=values.__getitem__))
            kept.add(max(finite, key=values.__getitem__))
        if len(finite) < len(places):
            kept.add(next(place for place in places if not math.isfinite(values[place])))
    return sorted(kept)


# -- which metrics belong together -------------------------------------------------------------------------


def plots_of(names: Iterable[str]) -> list[dict[str, Any]]:
    """The plots, in the order in which they are shown; ``train/loss`` and ``val/loss`` are one.

    >>> [(plot["group"], plot["names"]) for plot in plots_of(["train/lr", "val/loss", "train/loss", "val/f1"])]
    [('Loss', ['train/loss', 'val/loss']), ('Validation', ['val/f1']), ('Learning rate', ['train/lr'])]
    """
    members: dict[str, list[str]] = {}
    for name in names:
        if name != _EPOCH:
            members.setdefault(split(name)[1], []).append(name)
    plots = [
        {"title": title, "group": _group_of(title, names), "names": sorted(names, key=_by_part)}
        for title, names in members.items()
    ]
    return sorted(plots, key=lambda plot: (GROUPS.index(plot["group"]), -len(plot["names"]), plot["title"]))


def split(name: str) -> tuple[str, str]:
    """What was measured on, and what was measured.

    >>> split("val/loss"), split("reward")
    (('val', 'loss'), ('', 'reward'))
    """
    part, slash, rest = name.partition("/")
    return (part, rest) if slash and rest and part in _PARTS else ("", name)


def _by_part(name: str) -> tuple[int, str]:
    part = split(name)[0]
    return _PARTS.index(part) if part else -1, name


def _group_of(title: str, names: Sequence[str]) -> str:
    for group, words in _GROUPS:
        if any(word == title or (len(word) > 2 and word in title) or title.startswith(f"{word}/") for word in words):
            return group
    return "Validation" if any(split(name)[0] in _PARTS[1:] for name in names) else "Others"


# -- steps, epochs and time --------------------------------------------------------------------------------


def clock_of(records: Sequence[dict[str, Any]], starts: Sequence[float], others: Sequence[float]) -> dict[str, list]:
    """When the run was at which step, and in which epoch: a table to look steps up in.

    Time is time at work: what lies between the last sign of life before a start (`starts` after the first, `others` are
    signs of life besides the records) and that start is left out.
    """
    timed = [r for r in records if isinstance(r.get("step"), int) and isinstance(r.get("time"), float | int)]
    if not timed:
        return {"steps": [], "seconds": [], "epochs": []}
    signs = sorted([*others, *(record["time"] for record in timed)])
    begin = min([*starts[:1], signs[0]])
    before = {start: bisect_left(signs, start) for start in starts}
    pauses = [(start, start - signs[place - 1]) for start, place in before.items() if place > 0]
    table: dict[int, tuple[float, float | None]] = {}
    epoch = None
    for record in timed:
        epoch = record.get(_EPOCH, epoch)
        pause = sum(length for start, length in pauses if start <= record["time"])
        table[record["step"]] = (record["time"] - begin - pause, epoch if isinstance(epoch, float | int) else None)
    steps = sorted(table)
    if len(steps) > _CLOCK_POINTS:
        steps = [steps[place * (len(steps) - 1) // _CLOCK_POINTS] for place in range(_CLOCK_POINTS + 1)]
    return {
        "steps": steps,
        "seconds": [round(table[step][0], 3) for step in steps],
        "epochs": [table[step][1] for step in steps],
    }

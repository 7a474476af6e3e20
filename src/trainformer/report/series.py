"""Metrics as curves: a list of steps and a list of values each, short enough to draw.

Owns downsampling, which metrics share a plot, and the mapping from steps to epochs and time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_POINTS = 5_000  # per curve; more than the pixels of a wide screen
_MIN_POINTS = 500
_MAX_POINTS_PER_PLOT = 40_000  # over all runs; more make the page slow
_CLOCK_POINTS = 2_000
_SPLITS = ("train", "val", "test", "eval")
_EPOCH = "train/epoch"

# The first match wins; the rest goes to "Validation" or "Others".
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
    """One metric of one run. `total` is the number of logged values."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    total: int = 0


def points_for(runs: int) -> int:
    """The maximum number of points per curve.

    >>> points_for(1), points_for(20), points_for(1000)
    (5000, 2000, 500)
    """
    return max(_MIN_POINTS, min(MAX_POINTS, _MAX_POINTS_PER_PLOT // max(1, runs)))


def read_series(records: Iterable[dict[str, Any]], points: int = MAX_POINTS) -> dict[str, Series]:
    """The curves in records of ``metrics.jsonl``. Only numbers; of a step that was logged twice, the last value."""
    found: dict[str, Series] = {}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        for name, value in record.items():
            if isinstance(value, float | int) and name != "step" and name != "time":
                series = found.setdefault(name, Series())
                series.steps.append(step)
                series.values.append(value)
    for series in found.values():
        if any(before >= after for before, after in itertools.pairwise(series.steps)):
            latest = dict(sorted(zip(series.steps, series.values, strict=True), key=lambda pair: pair[0]))
            series.steps, series.values = list(latest), list(latest.values())
        series.total = len(series.steps)
        kept = downsample(series.values, points)
        if len(kept) < series.total:
            series.steps = [series.steps[index] for index in kept]
            series.values = [series.values[index] for index in kept]
    return found


def downsample(values: Sequence[float], points: int) -> list[int]:
    """The indices of the values to draw: the first, the last, and per bin the minimum, the maximum and one NaN or inf.

    So no peak, no dip and no NaN is lost, and the curve looks the same as with all values.

    >>> downsample([0, 5, 1, 1, 1, -3, 1, 0], points=4)
    [0, 1, 4, 5, 7]
    """
    if len(values) <= points:
        return list(range(len(values)))
    bins = max(1, points // 2)
    kept = {0, len(values) - 1}
    for number in range(bins):
        indices = range(number * len(values) // bins, (number + 1) * len(values) // bins)
        finite = [index for index in indices if math.isfinite(values[index])]
        if finite:
            kept.add(min(finite, key=values.__getitem__))
            kept.add(max(finite, key=values.__getitem__))
        if len(finite) < len(indices):
            kept.add(next(index for index in indices if not math.isfinite(values[index])))
    return sorted(kept)


# -- plots ---------------------------------------------------------------------------------------------------


def group_plots(names: Iterable[str], val_sets: Collection[str] = ()) -> list[dict[str, Any]]:
    """The plots in display order; ``train/loss``, ``val/loss`` and those of each validation set share one.

    >>> group_plots(["val/clean/loss", "val/shifted/loss", "train/loss"], ["clean", "shifted"])[0]["names"]
    ['train/loss', 'val/clean/loss', 'val/shifted/loss']
    >>> [(plot["group"], plot["names"]) for plot in group_plots(["train/lr", "val/loss", "train/loss", "val/f1"])]
    [('Loss', ['train/loss', 'val/loss']), ('Validation', ['val/f1']), ('Learning rate', ['train/lr'])]
    """
    members: dict[str, list[str]] = {}
    for name in names:
        if name != _EPOCH:
            members.setdefault(split_name(name, val_sets)[1], []).append(name)
    plots = []
    for title, found in members.items():
        ordered = sorted(found, key=lambda name: (("", *_SPLITS).index(split_name(name)[0]), name))
        plots.append({"title": title, "group": _group_of(title, ordered), "names": ordered})
    return sorted(plots, key=lambda plot: (GROUPS.index(plot["group"]), -len(plot["names"]), plot["title"]))


def split_name(name: str, val_sets: Collection[str] = ()) -> tuple[str, str]:
    """The data split and the metric.

    >>> split_name("val/loss"), split_name("reward"), split_name("val/clean/loss", ["clean"])
    (('val', 'loss'), ('', 'reward'), ('val', 'loss'))
    """
    split, slash, rest = name.partition("/")
    if not slash or not rest or split not in _SPLITS:
        return "", name
    val_set, slash, metric = rest.partition("/")
    return split, metric if slash and metric and val_set in val_sets else rest


def _group_of(title: str, names: Sequence[str]) -> str:
    for group, words in _GROUPS:
        if any(word == title or (len(word) > 2 and word in title) or title.startswith(f"{word}/") for word in words):
            return group
    return "Validation" if any(split_name(name)[0] in _SPLITS[1:] for name in names) else "Others"


# -- steps, epochs and time --------------------------------------------------------------------------------


def read_clock(records: Sequence[dict[str, Any]], starts: Sequence[float], others: Sequence[float]) -> dict[str, list]:
    """A table of the training time and the epoch at each logged step.

    The time between an interruption and the next start does not count: `starts` are the times at which the run was
    started or resumed, `others` the times of other records, which show how long it was running before.
    """
    timed = [r for r in records if isinstance(r.get("step"), int) and isinstance(r.get("time"), float | int)]
    if not timed:
        return {"steps": [], "seconds": [], "epochs": []}
    times = sorted([*others, *(record["time"] for record in timed)])
    begin = min([*starts[:1], times[0]])
    before = {start: bisect_left(times, start) for start in starts}
    pauses = [(start, start - times[index - 1]) for start, index in before.items() if index > 0]
    table: dict[int, tuple[float, float | None]] = {}
    epoch = None
    for record in timed:
        epoch = record.get(_EPOCH, epoch)
        pause = sum(length for start, length in pauses if start <= record["time"])
        table[record["step"]] = (record["time"] - begin - pause, epoch if isinstance(epoch, float | int) else None)
    steps = sorted(table)
    if len(steps) > _CLOCK_POINTS:
        steps = [steps[index * (len(steps) - 1) // _CLOCK_POINTS] for index in range(_CLOCK_POINTS + 1)]
    return {
        "steps": steps,
        "seconds": [round(table[step][0], 3) for step in steps],
        "epochs": [table[step][1] for step in steps],
    }

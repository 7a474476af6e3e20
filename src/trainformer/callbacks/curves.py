"""A small line chart as SVG, for places that show HTML but run no scripts.

Owns how numbers become a picture: thinning, axes, colours. Lines and texts take the colour of the text around them, so
that the chart is readable on light and dark pages alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[int, float]

COLOURS = ("#2f7ed8", "#e0701a")  # both are seen on white and on black
_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 56, 10, 26


@dataclass(frozen=True)
class Series:
    """A named line. Those on the `right` have an axis of their own there."""

    name: str
    points: Sequence[Point]
    right: bool = False


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points that look the same: of each stretch the lowest and the highest, and both ends.

    Values that are not finite have no place in a picture, and are left out.

    >>> thinned([(0, 1.0), (1, float("nan")), (2, 3.0)], 10)
    [(0, 1.0), (2, 3.0)]
    """
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if len(finite) <= most:
        return finite
    count = max(1, (most - 2) // 2)
    inner = finite[1:-1]
    kept = [finite[0]]
    for place in range(count):
        stretch = inner[len(inner) * place // count : len(inner) * (place + 1) // count]
        if stretch:
            ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
            kept += sorted(ends)
    return [*kept, finite[-1]]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two others, at most so many.

    >>> ticks(0.0, 1.0), ticks(3, 187)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [50.0, 100.0, 150.0])
    """
    width = high - low
    if not width > 0:
        return [low]
    unit = 10.0 ** math.floor(math.log10(width / most))
    for factor in (1, 2, 2.5, 5, 10, 20, 25, 50):
        step = unit * factor
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [round(number * step, 12) for number in range(first, last + 1)]


def line_chart(series: Sequence[Series], most: int = 300) -> str:
    """An ``<svg>`` of at most two lines over steps; an empty string if there is nothing to see yet."""
    lines = [(one, thinned(one.points, most), COLOURS[place]) for place, one in enumerate(series)]
    lines = [line for line in lines if line[1]]
    if not any(len(points) > 1 for _, points, _ in lines):
        return ""
    steps = [step for _, points, _ in lines for step, _ in points]
    across = _Axis(min(steps), max(steps), _LEFT, _WIDTH - _RIGHT)
    parts = [_step_marks(across)]
    for right in (False, True):
        group = [line for line in lines if line[0].right == right]
        values = [value for _, points, _ in group for _, value in points]
        if values:
            up = _Axis(min(values), max(values), _HEIGHT - _BOTTOM, _TOP, margin=0.04)
            parts.append(_value_marks(up, right, grid=not right or len(group) == len(lines)))
            parts += [_line(one, points, colour, across, up) for one, points, colour in group]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'style="display:block;width:100%;max-width:{_WIDTH}px;height:auto" font-family="sans-serif" font-size="11">'
        f"{''.join(parts)}</svg>"
    )


class _Axis:
    """From values to places in the picture."""

    def __init__(self, low: float, high: float, begin: float, end: float, margin: float = 0.0) -> None:
        room = (high - low) * margin or (0.0 if high > low else max(abs(low) * 0.1, 1e-9))
        self.low, self.high = low - room, high + room
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        """Where a value is."""
        return self._begin + (value - self.low) / (self.high - self.low) * (self._end - self._begin)


def _step_marks(across: _Axis) -> str:
    bottom = _HEIGHT - _BOTTOM
    marks = [_rule(bottom, 0.5)]
    for step in ticks(across.low, across.high, 7):
        if step == int(step):
            marks.append(_text(across.place(step), bottom + 16, f"{int(step):,}", "middle"))
    return "".join(marks)


def _value_marks(up: _Axis, right: bool, grid: bool) -> str:
    marks = []
    for value in ticks(up.low, up.high):
        y = up.place(value)
        if grid:
            marks.append(_rule(y, 0.15))
        x, anchor = (_WIDTH - _RIGHT + 6, "start") if right else (_LEFT - 6, "end")
        marks.append(_text(x, y + 4, f"{value:.4g}", anchor))
    return "".join(marks)


def _line(one: Series, points: Sequence[Point], colour: str, across: _Axis, up: _Axis) -> str:
    places = [(across.place(step), up.place(value)) for step, value in points]
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
    dots = places if len(places) <= 40 else places[-1:]  # so that a few evaluations are seen as such
    marks = "".join(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="2.2" fill="{colour}"/>' for x, y in dots)
    name = escape(one.name, quote=True)
    return (
        f'<polyline data-name="{name}" points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" '
        f'stroke-linejoin="round"><title>{name}</title></polyline>{marks}'
    )


def _rule(y: float, opacity: float) -> str:
    across = f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"
    return f'<path d="{across}" stroke="currentColor" stroke-opacity="{opacity}" fill="none"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor" '
        f'fill-opacity="0.75">{escape(text)}</text>'
    )

"""Progress display for notebooks: a bar, the latest metrics and their curves, in one output that is redrawn.

`ProgressBar` drives it in a Jupyter kernel (VS Code and Colab included). It is plain HTML with an inline SVG, without
widgets or scripts, so the last state stays in the saved notebook. Curves and labels use the surrounding text colour,
so they are readable on light and dark pages. It redraws at most twice a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trainformer.callbacks.pace import clock
from trainformer.callbacks.progress import values_of

_SECONDS_BETWEEN_UPDATES = 0.5
_MAX_POINTS = 4000  # stored per line; far fewer are drawn
_LOSS = "train/loss"
COLOURS = ("#2f7ed8", "#e0701a")  # visible on white and on black
_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 56, 10, 26

Point = tuple[int, float]
#: Publishes a MIME bundle (HTML and text). Further calls replace the output.
Publish = Callable[[dict[str, str]], None]


class NotebookDisplay:
    """The display of one run. `monitor` is the metric plotted beside the training loss."""

    def __init__(self, monitor: str = "val/loss", publish: Publish | None = None) -> None:
        self._publish = publish or _cell_output()
        self._lines: dict[str, list[Point]] = {_LOSS: [], monitor: []}
        self._monitor = monitor
        self._numbers: dict[str, float] = {}
        self._total: int | None = None
        self._step = self._epoch = 0
        self._began = time.perf_counter()
        self._drawn = 0.0
        self._left: float | None = None
        self._evaluation = ""
        self._end = ""
        self._failed = False

    def begin(self, step: int, total: int | None, history: Iterable[Mapping[str, float]] = ()) -> None:
        """Show the display, with the log history of a resumed run."""
        self._step = step
        self._total = total
        for record in history:
            self._add_points(int(record["step"]), record)
        self._draw(now=True)

    def move(
        self, step: int, epoch: int | None = None, values: Mapping[str, float] | None = None, left: float | None = None
    ) -> None:
        """Set the number of completed steps, and the current values and the seconds left, where they are known."""
        self._step = step
        self._numbers |= values or {}
        self._left = self._left if left is None else left
        self._epoch = self._epoch if epoch is None else epoch
        self._draw()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a log record or evaluation."""
        self._step = step
        self._numbers |= metrics
        self._add_points(step, metrics)
        self._draw()

    def evaluate(self, done: int, total: int | None) -> None:
        """Show the number of evaluated batches; 0 means the evaluation is over."""
        of = "" if total is None else f" of {total:,}"
        self._evaluation = f"evaluating: batch {done:,}{of}" if done else ""
        self._draw()

    def end(self, step: int, stopped: str | None = None) -> None:
        """Show the final state. `stopped`: by whom and why, if the run stopped early."""
        self._step = step
        self._end = "done" if stopped is None else f"stopped {stopped}"
        self._draw(now=True)

    def fail(self, error: BaseException) -> None:
        """Show the final state of a run that failed or was interrupted."""
        self._failed = not isinstance(error, KeyboardInterrupt)
        what = f"failed: {type(error).__name__}: {error}".removesuffix(": ")
        self._end = what if self._failed else "interrupted"
        self._draw(now=True)

    # -- rendering -------------------------------------------------------------------------------------------

    def _add_points(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, points in self._lines.items():
            if name in metrics:
                points.append((step, float(metrics[name])))
                if len(points) > _MAX_POINTS:
                    self._lines[name] = downsample(points, _MAX_POINTS // 2)

    def _draw(self, now: bool = False) -> None:
        clock = time.perf_counter()
        if now or clock - self._drawn >= _SECONDS_BETWEEN_UPDATES:
            self._drawn = clock
            self._publish({"text/html": self.html(), "text/plain": self.text()})

    def text(self) -> str:
        """One line, for frontends without HTML."""
        return "  ".join(part for part in (self._position(), self._timing(), self._values(), self._status()) if part)

    def html(self) -> str:
        """Bar, metrics and curves."""
        share = min(1.0, self._step / self._total) if self._total else (1.0 if self._end == "done" else 0.0)
        colour = "#c62828" if self._failed else COLOURS[0]
        bar = (
            '<div style="max-width:640px;height:8px;border-radius:4px;background:rgba(128,128,128,0.3)">'
            f'<div style="width:{100 * share:.1f}%;height:8px;border-radius:4px;background:{colour}"></div></div>'
        )
        head = " · ".join(escape(part) for part in (self._position(), self._timing()) if part)
        state = f' <b style="color:{colour if self._failed else "inherit"}">{escape(self._status())}</b>'
        series = [Series(_LOSS, self._lines[_LOSS])]
        if self._monitor != _LOSS:
            # Losses share an axis; other metrics get their own on the right.
            series.append(Series(self._monitor, self._lines[self._monitor], right=not self._monitor.endswith("loss")))
        legend = " &nbsp; ".join(
            f'<span style="color:{COLOURS[index]}">&#9644;</span> {escape(line.name)}'
            + (" (right)" if line.right else "")
            for index, line in enumerate(series)
            if line.points
        )
        chart = line_chart(series)
        return (
            '<div style="font-family:sans-serif;font-size:13px;line-height:1.6;max-width:660px">'
            f"<div>{head}{state}</div>{bar}<div>{escape(self._values()).replace('  ', ' &nbsp; ')}</div>"
            + (f'<div style="font-size:12px;margin-top:4px">{legend}</div>{chart}' if chart else "")
            + "</div>"
        )

    def _position(self) -> str:
        total = "" if self._total is None else f" of {self._total:,}"
        return f"epoch {self._epoch + 1}, step {self._step:,}{total}"

    def _timing(self) -> str:
        elapsed = f"{clock(time.perf_counter() - self._began)} elapsed"
        return elapsed if self._end or self._left is None else f"{elapsed}, {clock(self._left)} left"

    def _values(self) -> str:
        parts = values_of(self._numbers)
        if self._monitor != _LOSS and self._monitor in self._numbers:
            parts.append(f"{self._monitor} {self._numbers[self._monitor]:.4g}")
        return "  ".join(parts)

    def _status(self) -> str:
        return self._end or self._evaluation


def _cell_output() -> Publish:
    """Publishes to the output of the running cell."""
    from IPython.display import display

    handle: Any = None

    def publish(bundle: dict[str, str]) -> None:
        nonlocal handle
        if handle is None:
            handle = display(bundle, raw=True, display_id=True)
        else:
            handle.update(bundle, raw=True)

    return publish


@dataclass(frozen=True)
class Series:
    """A named line, on the left or the `right` axis."""

    name: str
    points: Sequence[Point]
    right: bool = False


def downsample(points: Sequence[Point], max_points: int) -> list[Point]:
    """At most `max_points` points that look the same: the minimum and maximum of each bin, and both ends.

    Non-finite values are dropped.

    >>> downsample([(0, 1.0), (1, float("nan")), (2, 3.0)], 10)
    [(0, 1.0), (2, 3.0)]
    """
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if len(finite) <= max_points:
        return finite
    bins = max(1, (max_points - 2) // 2)
    inner = finite[1:-1]
    kept = [finite[0]]
    for i in range(bins):
        chunk = inner[len(inner) * i // bins : len(inner) * (i + 1) // bins]
        if chunk:
            kept += sorted({min(chunk, key=lambda p: p[1]), max(chunk, key=lambda p: p[1])})
    return [*kept, finite[-1]]


def ticks(low: float, high: float, max_ticks: int = 5) -> list[float]:
    """At most `max_ticks` round numbers between `low` and `high`.

    >>> ticks(0.0, 1.0), ticks(3, 187)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [50.0, 100.0, 150.0])
    """
    width = high - low
    if not width > 0:
        return [low]
    unit = 10.0 ** math.floor(math.log10(width / max_ticks))
    for factor in (1, 2, 2.5, 5, 10, 20, 25, 50):
        step = unit * factor
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < max_ticks:
            break
    return [round(number * step, 12) for number in range(first, last + 1)]


def line_chart(series: Sequence[Series], max_points: int = 300) -> str:
    """An ``<svg>`` of at most two lines over steps, or an empty string if no line has two points yet."""
    lines = [(line, downsample(line.points, max_points), COLOURS[index]) for index, line in enumerate(series)]
    lines = [line for line in lines if line[1]]
    if not any(len(points) > 1 for _, points, _ in lines):
        return ""
    steps = [step for _, points, _ in lines for step, _ in points]
    x_axis = _Axis(min(steps), max(steps), _LEFT, _WIDTH - _RIGHT)
    bottom = _HEIGHT - _BOTTOM
    labels = [(x_axis.pixel(step), f"{int(step):,}") for step in ticks(x_axis.low, x_axis.high, 7) if step == int(step)]
    parts = [_horizontal_line(bottom, 0.5), *(_text(x, bottom + 16, label, "middle") for x, label in labels)]
    for right in (False, True):
        group = [line for line in lines if line[0].right == right]
        values = [value for _, points, _ in group for _, value in points]
        if values:
            y_axis = _Axis(min(values), max(values), _HEIGHT - _BOTTOM, _TOP, margin=0.04)
            parts.append(_y_labels(y_axis, right, grid=not right or len(group) == len(lines)))
            parts += [_polyline(line.name, points, colour, x_axis, y_axis) for line, points, colour in group]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'style="display:block;width:100%;max-width:{_WIDTH}px;height:auto" font-family="sans-serif" font-size="11">'
        f"{''.join(parts)}</svg>"
    )


class _Axis:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float, margin: float = 0.0) -> None:
        room = (high - low) * margin or (0.0 if high > low else max(abs(low) * 0.1, 1e-9))
        self.low, self.high = low - room, high + room
        self._begin, self._end = begin, end

    def pixel(self, value: float) -> float:
        return self._begin + (value - self.low) / (self.high - self.low) * (self._end - self._begin)


def _y_labels(axis: _Axis, right: bool, grid: bool) -> str:
    marks = []
    for value in ticks(axis.low, axis.high):
        y = axis.pixel(value)
        if grid:
            marks.append(_horizontal_line(y, 0.15))
        x, anchor = (_WIDTH - _RIGHT + 6, "start") if right else (_LEFT - 6, "end")
        marks.append(_text(x, y + 4, f"{value:.4g}", anchor))
    return "".join(marks)


def _polyline(name: str, points: Sequence[Point], colour: str, x_axis: _Axis, y_axis: _Axis) -> str:
    pixels = [(x_axis.pixel(step), y_axis.pixel(value)) for step, value in points]
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in pixels)
    dots = pixels if len(pixels) <= 40 else pixels[-1:]  # mark each point of a short curve, such as evaluations
    marks = "".join(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="2.2" fill="{colour}"/>' for x, y in dots)
    name = escape(name, quote=True)
    return (
        f'<polyline data-name="{name}" points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" '
        f'stroke-linejoin="round"><title>{name}</title></polyline>{marks}'
    )


def _horizontal_line(y: float, opacity: float) -> str:
    path = f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"
    return f'<path d="{path}" stroke="currentColor" stroke-opacity="{opacity}" fill="none"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor" '
        f'fill-opacity="0.75">{escape(text)}</text>'
    )

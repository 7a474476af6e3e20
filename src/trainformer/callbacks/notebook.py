"""How a run looks in a notebook: a bar, its latest numbers and its curves, in one output that is drawn anew.

Owns the display. When it is told something is the business of `ProgressBar`, whose place it takes in a Jupyter kernel
(VS Code and Colab have one, too). It is plain HTML with an inline SVG: no widgets, no scripts, so the last state stays
in the saved notebook. Nothing is drawn more than twice a second, however fast steps are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from trainformer.callbacks.curves import COLOURS, Point, Series, line_chart, thinned
from trainformer.callbacks.progress import summary

_SECONDS_BETWEEN_UPDATES = 0.5
_MOST_POINTS = 4000  # kept of a line; far fewer are drawn
_LOSS = "train/loss"

#: Shows a bundle of forms (HTML, text) of one thing; called again, it replaces what is there.
Publish = Callable[[dict[str, str]], None]


class NotebookDisplay:
    """The display of one run. `monitor` is the metric whose curve stands beside the training loss."""

    def __init__(self, monitor: str = "val/loss", publish: Publish | None = None) -> None:
        self._publish = publish or _in_notebook()
        self._lines: dict[str, list[Point]] = {_LOSS: [], monitor: []}
        self._monitor = monitor
        self._numbers: dict[str, float] = {}
        self._total: int | None = None
        self._first = self._step = self._epoch = 0
        self._began = time.perf_counter()
        self._drawn = 0.0
        self._evaluation = ""
        self._end = ""
        self._failed = False

    def begin(self, step: int, total: int | None, history: Iterable[Mapping[str, float]] = ()) -> None:
        """Show it, with what a run that goes on has logged before."""
        self._first = self._step = step
        self._total = total
        for record in history:
            self._keep(int(record["step"]), record)
        self._draw(now=True)

    def move(self, step: int, epoch: int | None = None) -> None:
        """So many steps are done."""
        self._step = step
        self._epoch = self._epoch if epoch is None else epoch
        self._draw()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A record of training or of an evaluation."""
        self._step = step
        self._numbers |= metrics
        self._keep(step, metrics)
        self._draw()

    def evaluate(self, done: int, total: int | None) -> None:
        """So many batches of an evaluation are done; 0: it is over."""
        of = "" if total is None else f" of {total:,}"
        self._evaluation = f"evaluating: batch {done:,}{of}" if done else ""
        self._draw()

    def end(self, step: int, stopped: str | None = None) -> None:
        """The last state. `stopped`: by whom and why, if it ended before its time."""
        self._step = step
        self._end = "done" if stopped is None else f"stopped {stopped}"
        self._draw(now=True)

    def fail(self, error: BaseException) -> None:
        """The last state of a run that failed, or that was interrupted at once."""
        if isinstance(error, KeyboardInterrupt):
            self._end = "interrupted"
            self._draw(now=True)
            return
        self._failed = True
        self._end = f"failed: {type(error).__name__}: {error}".removesuffix(": ")
        self._draw(now=True)

    # -- what it shows ---------------------------------------------------------------------------------------

    def _keep(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, points in self._lines.items():
            if name in metrics:
                points.append((step, float(metrics[name])))
                if len(points) > _MOST_POINTS:
                    self._lines[name] = thinned(points, _MOST_POINTS // 2)

    def _draw(self, now: bool = False) -> None:
        clock = time.perf_counter()
        if now or clock - self._drawn >= _SECONDS_BETWEEN_UPDATES:
            self._drawn = clock
            self._publish({"text/html": self.html(), "text/plain": self.text()})

    def text(self) -> str:
        """One line, for front ends without HTML."""
        return "  ".join(part for part in (self._place(), self._pace(), self._values(), self._state()) if part)

    def html(self) -> str:
        """Bar, numbers and curves."""
        share = min(1.0, self._step / self._total) if self._total else (1.0 if self._end == "done" else 0.0)
        colour = "#c62828" if self._failed else COLOURS[0]
        bar = (
            '<div style="max-width:640px;height:8px;border-radius:4px;background:rgba(128,128,128,0.3)">'
            f'<div style="width:{100 * share:.1f}%;height:8px;border-radius:4px;background:{colour}"></div></div>'
        )
        head = " · ".join(escape(part) for part in (self._place(), self._pace()) if part)
        state = f' <b style="color:{colour if self._failed else "inherit"}">{escape(self._state())}</b>'
        series = [Series(_LOSS, self._lines[_LOSS])]
        if self._monitor != _LOSS:
            # A loss can be compared with the other one; an accuracy has an axis of its own.
            series.append(Series(self._monitor, self._lines[self._monitor], right=not self._monitor.endswith("loss")))
        legend = " &nbsp; ".join(
            f'<span style="color:{COLOURS[place]}">&#9644;</span> {escape(one.name)}'
            + (" (right)" if one.right else "")
            for place, one in enumerate(series)
            if one.points
        )
        chart = line_chart(series)
        return (
            '<div style="font-family:sans-serif;font-size:13px;line-height:1.6;max-width:660px">'
            f"<div>{head}{state}</div>{bar}<div>{escape(self._values()).replace('  ', ' &nbsp; ')}</div>"
            + (f'<div style="font-size:12px;margin-top:4px">{legend}</div>{chart}' if chart else "")
            + "</div>"
        )

    def _place(self) -> str:
        total = "" if self._total is None else f" of {self._total:,}"
        return f"epoch {self._epoch + 1}, step {self._step:,}{total}"

    def _pace(self) -> str:
        elapsed = time.perf_counter() - self._began
        done = self._step - self._first
        if self._end or not done or self._total is None:
            return f"{_duration(elapsed)} elapsed"
        left = elapsed / done * max(0, self._total - self._step)
        return f"{_duration(elapsed)} elapsed, {_duration(left)} left"

    def _values(self) -> str:
        parts = [summary(self._numbers)]
        if self._monitor != _LOSS and self._monitor in self._numbers:
            parts.append(f"{self._monitor} {self._numbers[self._monitor]:.4g}")
        return "  ".join(part for part in parts if part)

    def _state(self) -> str:
        return self._end or self._evaluation


def _duration(seconds: float) -> str:
    """
    >>> _duration(5.2), _duration(75), _duration(7384)
    ('5 s', '1:15', '2:03:04')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def _in_notebook() -> Publish:
    """Into the output of the cell that is running."""
    from IPython.display import display

    handle: Any = None

    def publish(bundle: dict[str, str]) -> None:
        nonlocal handle
        if handle is None:
            handle = display(bundle, raw=True, display_id=True)
        else:
            handle.update(bundle, raw=True)

    return publish

"""How fast a run is at the moment, and how long it will still take: what progress displays show."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_SECONDS = 10.0  # throughput is that of the last ten seconds; of the last steps where a step takes longer
_MIN_POINTS = 4


class Point(NamedTuple):
    """The counters of a run at a time on the clock."""

    time: float
    step: int
    samples: int
    tokens: int


class Pace:
    """Throughput over the last seconds, without evaluations, and the time left, with them.

    >>> pace = Pace()
    >>> for second in range(3):
    ...     pace.add(Point(float(second), step=2 * second, samples=16 * second, tokens=0))
    >>> pace.samples_per_second, pace.tokens_per_second, pace.seconds_left(total_steps=104)
    (16.0, None, 50.0)
    """

    def __init__(self) -> None:
        self._recent: deque[Point] = deque()
        self._first: Point | None = None
        self._counted: Point | None = None  # when the number of tokens last changed: ranks add it up at log points only
        self._paused = 0.0

    def add(self, point: Point) -> None:
        """Take in the counters after a step."""
        point = point._replace(time=point.time - self._paused)
        if self._first is None:
            self._first = self._counted = point  # the first step is not measured: it warms up and compiles
        assert self._counted is not None
        if point.tokens != self._counted.tokens:
            self._counted = point
        recent = self._recent
        recent.append(point)
        while len(recent) > _MIN_POINTS and recent[1].time < point.time - _SECONDS:
            recent.popleft()

    def pause(self, seconds: float) -> None:
        """The run did something else, such as an evaluation."""
        self._paused += seconds

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all ranks, or None before it is known."""
        seconds = self._seconds
        return (self._recent[-1].samples - self._recent[0].samples) / seconds if seconds > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all ranks, or None for data without tokens."""
        samples = self.samples_per_second
        if samples is None or self._first is None or self._counted is None or self._counted is self._first:
            return None
        return samples * (self._counted.tokens - self._first.tokens) / (self._counted.samples - self._first.samples)

    def seconds_left(self, total_steps: int | None) -> float | None:
        """Until `total_steps` are done: at the recent speed, with pauses as often as so far."""
        steps = self._recent[-1].step - self._recent[0].step if self._recent else 0
        if total_steps is None or not steps or self._first is None:
            return None
        newest = self._recent[-1]
        pauses = self._paused / (newest.step - self._first.step)
        return (total_steps - newest.step) * (self._seconds / steps + pauses)

    @property
    def _seconds(self) -> float:
        return self._recent[-1].time - self._recent[0].time if self._recent else 0.0


def clock(seconds: float) -> str:
    """A duration as on a clock.

    >>> clock(5.2), clock(75), clock(7384), clock(200_000)
    ('0:05', '1:15', '2:03:04', '2 d 7 h')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

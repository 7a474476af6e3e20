"""Numbers in words."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """A time that is easy to read.

    >>> [duration(s) for s in (42, 420, 12_000, 187_000)]
    ['42 s', '7 min', '3 h 20 min', '2 d 4 h']
    """
    if seconds is None:
        return "?"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"

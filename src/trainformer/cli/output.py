"""What commands print: tables and numbers for people, JSON for programs. rich is imported when there is a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

#: In a pipe there is no width to keep to.
_WIDE = 10_000


def print_json(value: Any) -> None:
    """One JSON document on one line; what JSON does not have (NaN, paths) becomes text."""
    from trainformer.context.jsonable import jsonable

    print(json.dumps(jsonable(value), ensure_ascii=False, default=str))


def print_rich(thing: Any) -> None:
    """Anything that rich can show, as wide as the terminal."""
    _console().print(thing)


def width() -> int:
    """Characters in a line."""
    return _console().width


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDE)


def print_table(columns: Mapping[str, str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """Rows under headings. The columns say how each is set: left, right, or fold for one that may break."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # A title of a table is folded to the table's width; a path must stay whole, to be copied.
    if title is not None:
        print(title)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name, setting in columns.items():
        justify: Any = "right" if setting == "right" else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=setting != "fold")
    for row in rows:
        table.add_row(*(Text(number(cell)) for cell in row))
    print_rich(table)


def lines_of(values: Mapping[str, Any]) -> list[str]:
    """Names and values, one under the other."""
    width = max(map(len, values), default=0)
    return [f"  {name:<{width}}  {number(value)}" for name, value in values.items()]


def number(value: Any) -> str:
    """
    >>> number(0.123456789), number(12), number(None)
    ('0.12346', '12', '')
    """
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def duration(seconds: float | None) -> str:
    """A time to read at a glance.

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


def note(text: str) -> None:
    """Something beside the result, which goes where it is not taken for the result."""
    print(text, file=sys.stderr)

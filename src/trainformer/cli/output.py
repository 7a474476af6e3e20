"""What commands share: tables and numbers for people, JSON for programs, checks of arguments. rich is imported late."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, expected
from trainformer.core.secrets import mask, mask_text
from trainformer.utils.text import duration as duration

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 10_000  # characters, where the output is no terminal


def whole_number(least: int) -> Any:
    """A type for options: whole numbers of at least `least`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, received {text!r}")
        return int(text)

    return convert


positive = whole_number(1)


SECRET = "a secret of the run, which its recipe does not contain"


def add_variable_argument(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Variables of a config, which are also its secrets."""
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", dest="variables", help=purpose)


def variables_of(args: argparse.Namespace) -> dict[str, Any]:
    """The variables by name, read as YAML."""
    from trainformer.config.loading import parse_assignment

    return dict(parse_assignment(text, "a variable such as --var width=8") for text in args.variables)


def check_free(path: Path, force: bool) -> None:
    """Refuse to overwrite a file without `force`."""
    if path.is_dir():
        raise BadArgument(expected("the name of a file to write", str(path), "This is a folder."))
    if path.exists() and not force:
        raise BadArgument(expected("a file that does not exist yet", str(path), "Pass --force to overwrite it."))


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what libraries print to stderr, so that stdout has the result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(value: Any) -> None:
    """Print one JSON document on one line; values that JSON does not have (NaN, paths) become text."""
    from trainformer.context.jsonable import jsonable

    print(json.dumps(mask(jsonable(value)), ensure_ascii=False, default=str))


def print_result(args: argparse.Namespace, value: Any, text: str) -> None:
    """Print the value as JSON if the user passed `--json`, the text otherwise."""
    if args.json:
        print_json(value)
    else:
        print(mask_text(text))


def print_rich(thing: Any) -> None:
    """Print anything that rich can show, as wide as the terminal."""
    _console().print(thing)


def width() -> int:
    """The width of the terminal in characters."""
    return _console().width


def _console() -> Console:
    from trainformer.utils.console import PipeConsole

    console = PipeConsole(highlight=False, markup=False)
    return console if console.is_terminal else PipeConsole(highlight=False, markup=False, width=_WIDE)


def print_table(columns: Mapping[str, str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """Print rows under headings. A column is aligned left or right, or may be folded over several lines (fold).

    In a terminal that is too narrow for the table, each row is printed as a paragraph.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # rich folds the title of a table to its width; a path must stay whole, to be copied.
    if title is not None:
        print(title)
    cells = [[mask_text(number(cell)) for cell in row] for row in rows]
    widths = [max(map(len, [name, *(row[i] for row in cells)])) for i, name in enumerate(columns)]
    settings = list(columns.values())
    needed = sum(min(w, 20) if s == "fold" else w for w, s in zip(widths, settings, strict=True)) + 2 * len(columns)
    if needed > width():
        print("", *(_row_as_text(list(columns), row) for row in cells), sep="\n")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name, setting in columns.items():
        justify: Any = "right" if setting == "right" else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=setting != "fold")
    for row in cells:
        table.add_row(*map(Text, row))
    print_rich(table)


def _row_as_text(names: Sequence[str], row: Sequence[str]) -> str:
    """A row in words: its first cell, then the others with their names."""
    rest = ", ".join(f"{name} {cell}".strip() for name, cell in zip(names[1:], row[1:], strict=True) if cell)
    return textwrap.fill(
        f"{row[0]}: {rest}", width(), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def lines_of(values: Mapping[str, Any]) -> list[str]:
    """Names and values, one pair per line."""
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


def note(text: str) -> None:
    """Print something that is not part of the result, to stderr."""
    print(mask_text(text), file=sys.stderr)

"""Metrics as lines of text, on a terminal or in a log file.

Owns the formatting of a record. Lines go through the rich console of the progress bar, which prints them above it.
"""

from __future__ import annotations

import math
import re
from typing import Any

import rich
from rich.console import Console
from rich.text import Text

from trainformer.loggers.base import BaseLogger, as_numbers

#: Metrics with these prefixes get a separate line, which starts with the prefix instead of "step".
EVALUATIONS = ("val", "test")
_LEARNING_THROUGHPUT = re.compile(r"(?:^|/)(?:lr|learning_rate)(?![a-z])")
_THROUGHPUT = re.compile(r"(.+)_per_(?:s|sec|second)")


class ConsoleLogger(BaseLogger):
    """One aligned line per record; evaluation lines are highlighted.

    `train_lines` says whether training metrics are printed. By default they are not on a terminal or in a notebook,
    where the progress bar shows them.

    >>> import sys
    >>> logger = ConsoleLogger(Console(file=sys.stdout, force_terminal=False))
    >>> logger.init({})
    >>> logger.log({"train/epoch": 1.5, "train/loss": 0.23117, "train/lr": 9.8e-4}, step=300)
    step   300  epoch 1.50  loss 0.2312  lr 9.8e-04
    >>> logger.log({"val/loss": 0.21, "val/accuracy": 0.934}, step=300)
    val    300  loss 0.2100  accuracy 0.9340
    """

    def __init__(self, console: Console | None = None, train_lines: bool | None = None) -> None:
        self.console = console
        self.train_lines = train_lines
        self._open: Console | None = None
        self._widths: dict[tuple[str, str], int] = {}

    def init(self, config: dict[str, Any]) -> None:
        # rich's global console is the default because other progress bars are most likely on it.
        self._open = self.console or rich.get_console()
        self._widths = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        console = self._started(self._open)
        lines: dict[str, dict[str, float]] = {}
        for key, value in as_numbers(metrics).items():
            kind, _, rest = key.partition("/")
            if kind in EVALUATIONS and rest:
                lines.setdefault(kind, {})[rest] = value
            else:
                lines.setdefault("step", {})[key.removeprefix("train/")] = value
        has_bar = console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)
        train_lines = not has_bar if self.train_lines is None else self.train_lines
        for kind, values in lines.items():
            if kind != "step":
                self._print(console, self._line(kind, step, values), "bold green")
            elif train_lines:
                self._print(console, self._line(kind, step, values), "")

    def log_text(self, key: str, text: str, step: int) -> None:
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._print(self._started(self._open), f"{'text':<4} {step:>5}  {key}\n{indented}", "")

    def finish(self, status: str = "finished") -> None:
        self._open = None

    def _line(self, kind: str, step: int, values: dict[str, float]) -> str:
        """The cells of a record: the epoch first, throughput last, all others in the given order."""
        cells = [f"{kind:<4} {step:>5}"]
        for name in sorted(values, key=lambda name: (name != "epoch", _THROUGHPUT.fullmatch(name) is not None)):
            number = format_number(name, values[name])
            # A column never gets narrower again, so lines stay aligned once the widest number has appeared.
            width = self._widths[kind, name] = max(len(number), self._widths.get((kind, name), 0))
            throughput = _THROUGHPUT.fullmatch(name)
            cells.append(f"{number:>{width}} {throughput[1]}/s" if throughput else f"{name} {number:>{width}}")
        return "  ".join(cells)

    @staticmethod
    def _print(console: Console, line: str, style: str) -> None:
        # A log file wrapped at 80 columns cannot be searched; on a terminal lines are wrapped between words.
        shown = Text(line, style=style if console.is_terminal else "")
        console.print(shown, soft_wrap=not console.is_terminal, highlight=False)


def format_number(name: str, value: float) -> str:
    """A number in the usual format of its metric.

    >>> [format_number("loss", value) for value in (0.23117, 12.5, 1234.5, 1.5e-7, float("nan"))]
    ['0.2312', '12.50', '1,234.5', '1.50e-07', 'nan']
    >>> format_number("lr", 0.00098), format_number("grad_norm", 0.8123), format_number("samples_per_sec", 1234.4)
    ('9.8e-04', '0.81', '1,234')
    """
    size = abs(value)
    last = name.rpartition("/")[2]
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if last == "epoch":
        return f"{value:.2f}"
    if _LEARNING_THROUGHPUT.search(name):
        return f"{value:.1e}"
    if _THROUGHPUT.fullmatch(last):
        return f"{value:,.0f}" if size >= 10 else f"{value:.2f}"
    if last.endswith("norm") and (value == 0 or 0.01 <= size < 1000):
        return f"{value:.2f}"
    if last.endswith(("_gb", "seconds")) and size >= 0.01:
        return f"{value:.2f}"
    if value != 0 and not 1e-3 <= size < 1e6:
        return f"{value:.2e}"
    if size < 10:
        return f"{value:.4f}"
    return f"{value:.2f}" if size < 1000 else f"{value:,.1f}"

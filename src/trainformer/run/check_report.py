"""`CheckReport`: what the pre-flight check of a run found out, on torch or on JAX."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.table import Table

from trainformer.core.errors import CheckFailed

Status = Literal["ok", "warning", "failed"]
_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[bold red]failed[/]"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    question: str
    status: Status
    message: str


@dataclass
class CheckReport:
    """What `Trainer.check()` found out."""

    findings: list[Finding] = field(default_factory=list)
    seconds_per_step: float | None = None
    peak_bytes: int | None = None
    estimated_seconds: float | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings are allowed."""
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        """What makes the run pointless."""
        return [f for f in self.findings if f.status == "failed"]

    @property
    def warnings(self) -> list[Finding]:
        """What is worth a look."""
        return [f for f in self.findings if f.status == "warning"]

    def add(self, question: str, problems: list[str], fine: str, status: Status = "failed") -> None:
        """Record an answer: the problems, or that it is fine."""
        self.findings.append(
            Finding(question, status, " ".join(problems)) if problems else Finding(question, "ok", fine)
        )

    def table(self) -> Table:
        """The report as a table."""
        table = Table(title="pre-flight check", title_justify="left", show_edge=False)
        table.add_column("question", no_wrap=True)
        table.add_column("result", no_wrap=True)
        table.add_column("what was found")
        for f in self.findings:
            table.add_row(f.question, _MARKS[f.status], f.message)
        return table

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=120).print(self.table())
        return file.getvalue()

    def print_to(self, console: Console) -> None:
        """Print as wide as the terminal; elsewhere as wide as the table: a finding is one line of a log file."""
        usual = console.width
        if not console.is_terminal and not console.is_jupyter:
            console.width = 10_000
        console.print(self.table())
        console.width = usual

    def raise_failures(self) -> None:
        """Raise `CheckFailed` if a check failed."""
        if not self.ok:
            lines = "\n".join(f"- {f.question}: {f.message}" for f in self.failures)
            raise CheckFailed(f"{len(self.failures)} of {len(self.findings)} checks failed:\n{lines}")


def words(error: Exception) -> str:
    """The type and the text of an error."""
    return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def some(names: list[str], most: int = 6) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

"""`metrics.jsonl`: one JSON object per line, the record of a run that needs no service and no account.

Owns the format, and that a crash at any byte costs at most the record that was being written:
``{"step": 300, "time": 1735689600.0, "train/loss": 0.2312}`` for numbers, ``{"step": 300, "time": ...,
"text/sample": "..."}`` for texts. NaN and infinities are the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, so
that every line is JSON that any reader accepts; `read_jsonl` turns them back into floats.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.loggers.base import BaseLogger
from trainformer.loggers.values import as_numbers, jsonable

_NONFINITE = {"NaN", "Infinity", "-Infinity"}


class JsonlLogger(BaseLogger):
    """Appends each record to a file, at once: what was logged survives the process.

    >>> from tempfile import TemporaryDirectory
    >>> folder = TemporaryDirectory()
    >>> path = Path(folder.name) / "metrics.jsonl"
    >>> logger = JsonlLogger(path)
    >>> logger.init({})
    >>> logger.log({"train/loss": 0.5}, step=10)
    >>> logger.log({"train/loss": float("nan")}, step=20)
    >>> logger.finish()
    >>> [(record["step"], record["train/loss"]) for record in read_jsonl(path)]
    [(10, 0.5), (20, nan)]
    >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: BufferedWriter | None = None

    def init(self, config: dict[str, Any]) -> None:
        self.finish()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mend_end(self.path)
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed in finish()

    def log(self, metrics: dict[str, float], step: int) -> None:
        reserved = {"step", "time"} & metrics.keys()
        if reserved:
            raise BadArgument(
                expected("metric names other than 'step' and 'time'", sorted(reserved), "Prefix them: 'train/time'.")
            )
        self._write(as_numbers(metrics), step)

    def log_text(self, key: str, text: str, step: int) -> None:
        self._write({f"text/{key}": text}, step)

    def continue_from(self, step: int) -> None:
        """Drop the records after `step`, and what a crash left of a half-written line."""
        if not self.path.exists():
            return
        kept = [line for line, record in _lines(self.path) if record.get("step", 0) <= step]
        content = b"".join(line + b"\n" for line in kept)
        if content != self.path.read_bytes():
            _replace(self.path, content)

    def flush(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())

    def finish(self, status: str = "finished") -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, values: dict[str, Any], step: int) -> None:
        file = self._started(self._file)
        file.write(as_line({"step": step, "time": round(time.time(), 3), **values}))
        file.flush()  # hands it to the system, which writes it even if this process is killed


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file written by `JsonlLogger`, also while the run is going on or after it crashed.

    A half-written last line is passed over. Any other line that is not a JSON object is passed over with a warning.
    """
    return [_with_floats(record) for _, record in _lines(Path(path))]


def as_line(record: dict[str, Any]) -> bytes:
    """A record as one line of JSON, whatever is in it."""
    # backslashreplace only meets lone surrogates, and turns them into the escapes JSON has for them.
    return (json.dumps(jsonable(record), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The readable lines without their newline, each with its record."""
    # Not splitlines(): that also splits at characters which JSON allows inside a string.
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            yield line, record
        elif line.strip() and number < len(lines):
            warnings.warn(
                f"Expected a JSON object in line {number} of {path}, received {line[:40]!r}. The line is left out.",
                RuntimeWarning,
                stacklevel=3,
            )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _with_floats(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(value) if not key.startswith("text/") and isinstance(value, str) and value in _NONFINITE else value
        for key, value in record.items()
    }


def mend_end(path: Path) -> None:
    """See to it that the file ends with a newline, so that the next record does not stick to a torn one."""
    content = path.read_bytes() if path.exists() else b""
    torn = content[content.rfind(b"\n") + 1 :]
    if torn:
        # A record that only lost its newline is complete: no beginning of a JSON object is itself an object.
        _replace(path, content + b"\n" if _parse(torn) is not None else content.removesuffix(torn))


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that, whenever the process dies, either the old or the new content is there in full."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

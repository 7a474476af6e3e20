"""`metrics.jsonl`: the metrics of a run, one JSON object per line.

Owns the format, and that a crash at any byte costs at most the record being written. A line is
``{"step": 300, "time": 1735689600.0, "train/loss": 0.2312}`` for metrics and ``{"step": 300, "time": ...,
"text/sample": "..."}`` for texts. NaN and infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, so
that every line is strict JSON; `read_jsonl` converts them back to floats.
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

from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, expected
from trainformer.loggers.base import BaseLogger, as_numbers
from trainformer.utils.files import decode_json, make_folder, sync, write_atomically

_NONFINITE = {"NaN", "Infinity", "-Infinity"}


class JsonlLogger(BaseLogger):
    """Appends each record to a file at once: what was logged survives a kill of the process.

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
        make_folder(self.path.parent)
        truncate_partial_line(self.path)
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed in finish()
        sync(self.path.parent)  # `flush` makes the records durable, but not the name of a new file

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
        """Drop the records after `step`, and a partial last line."""
        if not self.path.exists():
            return
        kept = (line + b"\n" for line, record in valid_lines(self.path) if record.get("step", 0) <= step)
        write_atomically(self.path, kept)

    def flush(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())

    def finish(self, status: str = "finished") -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, values: dict[str, Any], step: int) -> None:
        file = self._started(self._file)
        file.write(encode_record({"step": step, "time": round(time.time(), 3), **values}))
        file.flush()  # to the operating system, which writes it even if this process is killed


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file written by `JsonlLogger`, also during the run or after a crash.

    A partial last line is skipped. Any other line that is not a JSON object is skipped with a warning.
    """
    return [_parse_nonfinite(record) for _, record in valid_lines(Path(path))]


def encode_record(record: dict[str, Any]) -> bytes:
    """A record as one line of JSON, whatever is in it."""
    # backslashreplace only affects lone surrogates, and produces the escapes that JSON has for them.
    return (json.dumps(jsonable(record), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def valid_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines that hold a JSON object, without their newline, each with its record."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removesuffix(b"\n")
            record = _parse(content)
            if record is not None:
                yield content, record
            elif content.strip() and content != line:
                warnings.warn(
                    f"Expected a JSON object with a step in line {number} of {path}, received {content[:40]!r}. The "
                    "line is skipped.",
                    RuntimeWarning,
                    stacklevel=3,
                )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = decode_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step", 0), int | float) else None


def _parse_nonfinite(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(value) if not key.startswith("text/") and isinstance(value, str) and value in _NONFINITE else value
        for key, value in record.items()
    }


def truncate_partial_line(path: Path) -> None:
    """Make the file end with a newline: remove a partial last line, or complete one that only lacks its newline."""
    content = path.read_bytes() if path.exists() else b""
    partial = content[content.rfind(b"\n") + 1 :]
    if partial:
        # No proper prefix of a JSON object is itself an object, so one that parses is complete.
        is_complete = _parse(partial) is not None
        write_atomically(path, content + b"\n" if is_complete else content.removesuffix(partial))

"""Durable files: atomic writes and fsync (a name is durable once its folder is fsynced); and JSON from strangers."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError


def decode_json(text: str | bytes | bytearray) -> Any:
    """`json.loads` for what others wrote: whatever is wrong raises `json.JSONDecodeError`.

    >>> decode_json("[" * 100_000)
    Traceback (most recent call last):
    json.decoder.JSONDecodeError: nested too deeply: line 1 column 1 (char 0)
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except ValueError as error:  # bytes that are not UTF-8; integers of more than 4,300 digits
        raise json.JSONDecodeError(str(error), "", 0) from error


def check_archive(path: Path) -> None:
    """Refuse a zip file that unpacks to more than its own size: torch and NumPy store without compression.

    So a file of a megabyte cannot take gigabytes of memory. Files that are not zip files pass.
    """
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except Exception as error:  # BadZipFile, UnicodeDecodeError, struct.error, NotImplementedError, ...
        raise DataError(f"{path} is damaged: {error}.") from error
    if unpacked > path.stat().st_size:
        raise DataError(
            f"Expected {path} to be stored without compression, received {path.stat().st_size:,} bytes that unpack to "
            f"{unpacked:,}. It was not written by torch or NumPy."
        )


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file durably: readers see either the old or the new content, after a power cut the new one.

    Of `content` in parts, only one is in memory at a time.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist; their names are durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync(path: Path) -> None:
    """fsync a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Durable files: atomic writes and fsync (a name is durable once its folder is fsynced); and JSON from strangers."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, DataError, expected

_REMOTE = re.compile(r"[A-Za-z][\w+.-]+:/")  # as a `Path` writes it; a drive of Windows has one letter


def check_local(name: str, path: Any) -> None:
    """Refuse a URL where a folder or file is expected: it would become a local folder of that name.

    >>> check_local("output_dir", "gs://bucket/run")
    Traceback (most recent call last):
    trainformer.core.errors.BadArgument: Expected output_dir to be a path of this machine, received 'gs://bucket/run'...
    """
    if isinstance(path, (str, os.PathLike)) and _REMOTE.match(os.fspath(path)):
        do = "Remote storage is not supported: mount it as a folder, or copy the run there when it has ended."
        raise BadArgument(expected(f"{name} to be a path of this machine", str(path), do))


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


def decode_record(text: str) -> Any:
    """`decode_json` for data: what other readers would understand differently raises, too.

    NaN and infinity are no JSON, of a repeated key all values but one are lost, and half a surrogate pair is no text:
    it cannot be encoded or tokenized.

    >>> decode_record('{"text": "a", "text": "b"}')
    Traceback (most recent call last):
    json.decoder.JSONDecodeError: the key 'text' is repeated: line 1 column 1 (char 0)
    """
    try:
        content = _RECORDS.decode(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error
    if "\\u" in text:  # only an escape sequence can make one, since the file is UTF-8
        found = _lone_surrogate(content)
        if found is not None:
            raise json.JSONDecodeError(f"half a surrogate pair, \\u{ord(found):04x}: no valid text", "", 0)
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise json.JSONDecodeError(f"the key {repeated!r} is repeated", "", 0)
    return made


def _no_constant(name: str) -> Any:
    raise json.JSONDecodeError(f"{name} is no JSON value; write null, or leave the key out", "", 0)


def _lone_surrogate(value: Any) -> str | None:
    if isinstance(value, str):
        return next((character for character in value if "\ud800" <= character <= "\udfff"), None)
    if isinstance(value, dict):
        return _lone_surrogate([*value, *value.values()])
    if isinstance(value, list):
        return next((found for found in map(_lone_surrogate, value) if found is not None), None)
    return None


_RECORDS = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


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

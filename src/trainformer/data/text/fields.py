"""Fields of records: reading them, with errors for data that may be very long."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from trainformer.core.errors import DataError, did_you_mean, expected

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def require_key(record: Any, key: str) -> Any:
    """The value of a key, else an error that lists the keys of the record."""
    if not isinstance(record, Mapping):
        raise DataError(expected(f"a record with the key {key!r}", type(record).__name__))
    if key not in record:
        keys = ", ".join(map(repr, record)) or "no key"
        close = did_you_mean(key, map(str, record))
        raise DataError(f"Expected the key {key!r}, received a record with: {keys}. {close}".strip())
    return record[key]


def expected_value(what: str, value: Any, do: str = "") -> str:
    """`expected` for a value from the data, which may be very long.

    >>> expected_value("a number", "many words " * 1000)
    "Expected a number, received 'many words many words many ...ds many words many words '."
    """
    text = f"Expected {what}, received {_SHORT.repr(value)}."
    return f"{text} {do}" if do else text


def require_text(value: Any, key: str) -> str:
    """The value, which must be text."""
    if not isinstance(value, str):
        raise DataError(expected_value(f"a text in {key!r}", value))
    return value

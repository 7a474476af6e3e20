"""Turns what users hand in (metrics, a configuration) into what every logging service understands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from trainformer.core.errors import BadArgument, expected

Scalar = bool | int | float | str | None


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """The metrics as plain Python numbers; also takes NumPy scalars and one-element tensors.

    >>> import numpy as np
    >>> as_numbers({"train/loss": np.float32(0.5), "train/tokens": 12, "val/perfect": True})
    {'train/loss': 0.5, 'train/tokens': 12, 'val/perfect': 1}
    """
    return {key: _number(key, value) for key, value in metrics.items()}


def _number(key: str, value: Any) -> int | float:
    if isinstance(value, int):
        return int(value)
    # float("0.5") would work, but a string among the metrics is a mistake that should be seen.
    if not isinstance(value, str | bytes):
        try:
            return float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
            pass
    raise BadArgument(
        expected(f"metric {key!r} to be a number", value, "Reduce it to a scalar first, or use log_text for texts.")
    )


def jsonable(value: Any) -> Any:
    """The same value in JSON's types: mappings, lists, strings, finite numbers, booleans and None.

    NaN and infinities become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, since JSON has no numbers
    for them and strict readers refuse the bare words. Anything unknown becomes its `str`.

    >>> from pathlib import Path
    >>> jsonable({"dir": Path("runs"), "betas": (0.9, 0.999), "best": float("inf")})
    {'dir': 'runs', 'betas': [0.9, 0.999], 'best': 'Infinity'}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else name_nonfinite(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((jsonable(item) for item in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [jsonable(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a NumPy scalar or a 0-d tensor
        return jsonable(value.item())
    return str(value)


def name_nonfinite(value: float) -> str:
    """How a NaN or an infinity is spelled in JSON here; `float` reads all three back."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """A nested configuration as one level of scalars; lists become JSON text.

    >>> flatten({"lr": 0.1, "data": {"size": 32, "crops": [2, 8]}})
    {'lr': 0.1, 'data.size': 32, 'data.crops': '[2, 8]'}
    """
    flat: dict[str, Scalar] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
            continue
        plain = jsonable(value)
        flat[name] = json.dumps(plain) if isinstance(plain, list) else plain
    return flat

"""Calls methods of HF-style callbacks, by position or by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def call_handler(handler: Callable[..., Any], args: Any, state: Any, control: Any, keywords: dict[str, Any]) -> Any:
    """Call a method of a callback: by position as HF does, or all by name as Forgather does if it takes them so.

    >>> def on_log(logs, state, **kwargs):
    ...     return logs["loss"], state
    >>> call_handler(on_log, None, "state", None, {"logs": {"loss": 0.5}})
    (0.5, 'state')
    """
    positions, takes_more = _positional_names(getattr(handler, "__func__", handler))
    own = positions[1:] if hasattr(handler, "__self__") else positions
    named = {"args": args, "state": state, "control": control}
    is_reordered = any(name in named and list(named).index(name) != index for index, name in enumerate(own))
    if not takes_more and (len(own) < len(named) or is_reordered):
        return handler(**named, **keywords)
    return handler(args, state, control, **keywords)


@functools.lru_cache(maxsize=1024)
def _positional_names(function: Any) -> tuple[tuple[str, ...], bool]:
    """The positional parameters of a function, and whether it takes any number of them, or cannot be inspected."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return (), True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds), any(p.kind is p.VAR_POSITIONAL for p in parameters)

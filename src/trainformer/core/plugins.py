"""Extension points: tasks, callbacks, loggers, strategies, optimizers and data sources from other packages.

A package registers an object under an entry point group such as ``trainformer.loggers``; it can then be used by name
wherever a built-in one can. Metadata of installed packages is read on the first lookup, and a plugin is imported only
when it is used.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from trainformer.core.errors import BadArgument

PluginKind = Literal["tasks", "callbacks", "loggers", "strategies", "optimizers", "data_sources"]


@cache
def _registered(kind: PluginKind) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=f"trainformer.{kind}"):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise BadArgument(
                f"Two packages register {point.name!r} as trainformer.{kind}: {other.value} and {point.value}. "
                "Uninstall one of them."
            )
    return found


def plugin_names(kind: PluginKind) -> list[str]:
    """Names registered by installed packages.

    >>> isinstance(plugin_names("loggers"), list)
    True
    """
    return sorted(_registered(kind))


def load_plugin(kind: PluginKind, name: str) -> Any | None:
    """The object registered under a name, or None if no installed package registers it. Look up built-ins first.

    >>> load_plugin("loggers", "no such logger") is None
    True
    """
    point = _registered(kind).get(name)
    if point is None:
        return None
    try:
        return point.load()
    except Exception as error:
        raise BadArgument(
            f"The plugin {name!r} (trainformer.{kind}, {point.value}) cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error

"""How often a function is compiled, and why again; the cache of compiled functions on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

logger = logging.getLogger("trainformer")

_MOST = 4  # changes that a warning names


class _Signature(NamedTuple):
    """What decides whether jax compiles anew: shapes and formats by path, and the static parts."""

    leaves: dict[str, str]
    structure: Any
    statics: dict[str, Any]


class Compilations:
    """Counts how often a function is traced, which is once for each compilation, and warns from the second time on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen: list[_Signature] = []

    @property
    def count(self) -> int:
        """How often it was compiled."""
        return len(self._seen)

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, noting each time it is traced. Give the result to `jax.jit`."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._note(_signature_of((*args, *kwargs.values())))
            return function(*args, **kwargs)

        watched.__name__ = getattr(function, "__name__", "step")  # what profiles call it
        return watched

    def _note(self, signature: _Signature) -> None:
        self._seen.append(signature)
        if len(self._seen) > 1:
            # Compared with the nearest, and of those with the latest.
            changes = min((_changes(before, signature) for before in self._seen[-2::-1]), key=len)
            logger.warning("The %s is compiled again (number %d): %s.", self.name, self.count, _sentence(changes))


def _signature_of(args: Any) -> _Signature:
    leaves, structure = jax.tree_util.tree_flatten_with_path(args)
    # The whole of a static part is kept by reference: it lives as long as jax keeps what it compiled for it anyway.
    return _Signature({_path(path): _describe(leaf) for path, leaf in leaves}, structure, _statics_of(args))


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path[1:] if len(path) > 1 else path, simple=True, separator="/")


def _describe(leaf: Any) -> str:
    shape = ", ".join(str(size) for size in getattr(leaf, "shape", ()))
    weak = ", of a Python number" if getattr(leaf, "weak_type", False) else ""
    place = " outside the mesh" if jax.typeof(leaf).sharding.mesh.empty else ""
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{shape}]{weak}{place}"


def _statics_of(args: Any) -> dict[str, Any]:
    """Static fields of dataclasses among the arguments, by name."""
    found: dict[str, Any] = {}
    for arg in args:
        for field in getattr(arg, "__dataclass_fields__", {}).values():
            if field.metadata.get("pytree_node") is False:
                found[field.name] = getattr(arg, field.name)
    return found


def _changes(before: _Signature, after: _Signature) -> list[str]:
    changes = [
        f"{name} was {before.leaves[name]} and is {now}"
        for name, now in after.leaves.items()
        if before.leaves.get(name, now) != now
    ]
    changes += [f"{name} is new" for name in after.leaves.keys() - before.leaves.keys()]
    changes += [f"{name} is missing" for name in before.leaves.keys() - after.leaves.keys()]
    for name, value in after.statics.items():
        if name in before.statics and before.statics[name] != value:
            changes.append(_STATICS.get(name, f"the static {name} is another"))
    if not changes and before.structure != after.structure:
        changes.append("a static part of its arguments is another")
    return changes


_STATICS = {
    "tx": "the optimizer is another object (make it once and keep it)",
    "graphdef": "the model's static graph is another",
    "trainable": "other parameters are trained",
}


def _sentence(changes: list[str]) -> str:
    if not changes:
        return "its arguments are of the same kind, but the mesh or a setting of jax is another"
    more = f" and {len(changes) - _MOST} more changes" if len(changes) > _MOST else ""
    return "; ".join(changes[:_MOST]) + more


def enable_compilation_cache(folder: str | Path, least_seconds: float = 1.0) -> Path:
    """Keep compiled functions in a folder, so that the next process need not compile them again."""
    path = Path(folder).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
    return path

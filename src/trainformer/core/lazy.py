"""Lazy imports of public names (PEP 562), so that `import trainformer` stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainformer.core.optional import missing_torch


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose public names are defined in the given modules."""
    home = {name: module for module, names in exports.items() for name in names}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(home[name])
        except ModuleNotFoundError as error:
            missing = missing_torch(error, f"for {package}.{name}")
            if missing is None:
                raise
            raise missing from error
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted(set(home) | set(vars(sys.modules[package])))

    return get, listing, sorted(home)

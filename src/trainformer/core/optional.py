"""Optional packages: imported when needed, and missed with the command that installs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from trainformer.core.errors import MissingDependency


def require(module: str, extra: str, why: str) -> ModuleType:
    """Import `module`, or say which pip command brings it.

    >>> require("no_such_package", "vision", "to build the backbone")
    Traceback (most recent call last):
    ...
    trainformer.core.errors.MissingDependency: 'no_such_package' is needed to build the backbone but is not installed. \
Install it with: pip install 'trainformer[vision]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A package that is there but broken inside must show its own error, not ours.
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingDependency(
            f"{module.split('.')[0]!r} is needed {why} but is not installed. "
            f"Install it with: pip install 'trainformer[{extra}]'"
        ) from error

"""Optional dependencies: imported on use; the error for a missing one names the pip command."""

from __future__ import annotations

import importlib
from types import ModuleType

from trainformer.core.errors import MissingDependency


def require(module: str, extra: str, why: str) -> ModuleType:
    """Import `module`; if it is missing, the error names the pip command that installs it.

    >>> require("no_such_package", "vision", "to build the backbone")
    Traceback (most recent call last):
    ...
    trainformer.core.errors.MissingDependency: 'no_such_package' is needed to build the backbone but is not installed. \
Install it with: pip install 'trainformer[vision]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An installed package that fails to import must show its own error.
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingDependency(
            f"{module.split('.')[0]!r} is needed {why} but is not installed. "
            f"Install it with: pip install 'trainformer[{extra}]'"
        ) from error

"""Optional dependencies: imported on use; the error for a missing one names the pip command.

torch is one of them: what trains on JAX works without it.
"""

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
        raise MissingDependency(_message(module.split(".")[0], extra, why)) from error


def missing_torch(error: BaseException, why: str) -> MissingDependency | None:
    """The error that names the pip command, if `error` is an import of torch where it is not installed; else None.

    >>> print(missing_torch(ModuleNotFoundError("No module named 'torch'", name="torch"), "for trainformer.Trainer"))
    'torch' is needed for trainformer.Trainer but is not installed. Install it with: pip install 'trainformer[torch]'
    >>> missing_torch(ModuleNotFoundError("No module named 'timm'", name="timm"), "for trainformer.Trainer") is None
    True
    """
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or name.split(".")[0] != "torch" or isinstance(error, MissingDependency):
        return None
    return MissingDependency(_message("torch", "torch", why))


def _message(package: str, extra: str, why: str) -> str:
    return f"{package!r} is needed {why} but is not installed. Install it with: pip install 'trainformer[{extra}]'"

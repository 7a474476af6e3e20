"""What templates in Forgather's syntax can use besides variables: functions for paths and times, and `toyaml`.

They read the clock, the working directory and the names of folders. None of them opens a file or runs anything.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Callable
from typing import Any

from trainformer.core.errors import MissingDependency

_FILE_TIME = "%Y-%m-%dT%H-%M-%S"


def template_globals() -> dict[str, Any]:
    """The functions by name."""
    paths: dict[str, Callable[..., Any]] = {
        "joinpath": os.path.join,
        "normpath": os.path.normpath,
        "abspath": os.path.abspath,
        "relpath": os.path.relpath,
        "dirname": os.path.dirname,
        "basename": os.path.basename,
        "splitext": os.path.splitext,
        "modname_from_path": lambda path: os.path.splitext(os.path.basename(path))[0],
    }
    folders = ("user_data_dir", "user_cache_dir", "user_config_dir", "site_data_dir", "site_config_dir")
    return {
        **{name: _defined(function) for name, function in paths.items()},
        **{name: _platform_folder(name) for name in folders},
        "isotime": lambda: datetime.datetime.now().isoformat(timespec="seconds"),
        "utcisotime": lambda: _utcnow().isoformat(timespec="seconds"),
        "filetime": lambda: datetime.datetime.now().strftime(_FILE_TIME),
        "utcfiletime": lambda: _utcnow().strftime(_FILE_TIME),
        "now": datetime.datetime.now,
        "utcnow": _utcnow,
        "repr": repr,
        "getcwd": os.getcwd,
        "user_home_dir": lambda: os.path.expanduser("~"),
        "forgather_config_dir": _forgather_config_dir,
    }


def project_globals(project_dir: str, workspace_root: str) -> dict[str, Any]:
    """What templates of a project also know: its folders, the machine, and versions of packages."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "project_dir": project_dir,
        "workspace_root": workspace_root,
        "hostname": platform.node(),
        "uname": platform.uname(),
        "versions": versions,
    }


def toyaml(value: Any, *default: Any) -> str:
    """A filter: a value as YAML on one line, and the default in place of an undefined one."""
    import jinja2
    import yaml

    if isinstance(value, jinja2.Undefined):
        if not default:
            value._fail_with_undefined_error()
        value = default[0]
    if isinstance(value, bool | int):
        return str(value)
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return str(text).strip().removesuffix("...").strip()


def _defined(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with Jinja's own error for an undefined argument: that of Python would not name it."""

    def checked(*args: Any) -> Any:
        import jinja2

        for arg in args:
            if isinstance(arg, jinja2.Undefined):
                arg._fail_with_undefined_error()
        return function(*args)

    return checked


def _platform_folder(name: str) -> Callable[..., str]:
    def folder(*args: Any, **kwargs: Any) -> str:
        try:
            import platformdirs
        except ModuleNotFoundError as error:
            what = f"platformdirs is needed for {name}() in a template but is not installed."
            raise MissingDependency(f"{what} Install it with: pip install platformdirs") from error
        return str(getattr(platformdirs, name)(*args, **kwargs))

    return folder


def _forgather_config_dir() -> str:
    return os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "forgather")


def _utcnow() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(tzinfo=None)

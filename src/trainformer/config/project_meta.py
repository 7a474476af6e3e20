"""Forgather's projects: a folder with `meta.yaml`, which says where templates are searched and which configs there are.

Only `meta.yaml` and the templates that it extends or includes are read here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainformer.config.nodes import Place, Source
from trainformer.config.template_globals import project_globals
from trainformer.config.templates import Templates, preprocess
from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected

META = "meta.yaml"
WORKSPACE = "forgather_workspace"


@dataclass(frozen=True)
class ProjectMeta:
    """What `meta.yaml` says about a project."""

    project_dir: str
    workspace_root: str  # the nearest folder with `forgather_workspace`, or the project itself
    name: str | None
    description: str | None
    searchpath: tuple[str, ...]
    config_prefix: str
    default: str | None
    config_dict: Mapping[str, Any]

    def configs(self) -> Iterator[str]:
        """The names of the configs, in the order of the search path."""
        seen: set[str] = set()
        for folder in self.searchpath:
            base = Path(folder, self.config_prefix)
            for file in sorted(base.rglob("*.yaml")):
                name = file.relative_to(base).as_posix()
                if name not in seen and not any(part.startswith(".") for part in file.relative_to(base).parts):
                    seen.add(name)
                    yield name

    def default_config(self) -> str:
        """The config that `meta.yaml` names as the default, else the first."""
        name = self.default or next(self.configs(), None)
        if name is None:
            where = [os.path.join(folder, self.config_prefix) for folder in self.searchpath]
            raise DataError(expected(f"configs in one of {where}", "none", f"They are searched by {self._file}."))
        return name

    def find(self, config: str) -> tuple[str, Path]:
        """The name of a config's template, and its file."""
        template = os.path.join(self.config_prefix, config)
        for folder in self.searchpath:
            file = Path(folder, template)
            if file.is_file():
                here = Path.cwd()
                return template, file.relative_to(here) if file.is_relative_to(here) else file
        known = list(self.configs())
        do = did_you_mean(config, known) or f"There is: {', '.join(known) or 'none'}."
        raise DataError(expected(f"a config of the project {self.project_dir}", config, do))

    def template_of(self, file: Path) -> str | None:
        """The name under which a file is found as a template; None if it is not."""
        for folder in self.searchpath:
            if file.resolve().is_relative_to(Path(folder).resolve()):
                return file.resolve().relative_to(Path(folder).resolve()).as_posix()
        return None

    def templates(self, more: Mapping[str, str] | None = None) -> Templates:
        """How the templates of the project are read."""
        known = project_globals(self.project_dir, self.workspace_root)
        return Templates(self.searchpath, line_syntax=True, known=known, more=more or {})

    @property
    def _file(self) -> str:
        return os.path.join(self.project_dir, META)


def read_meta(project_dir: str | os.PathLike[str]) -> ProjectMeta:
    """Read `meta.yaml` of a project."""
    from trainformer.config.loading import read_text
    from trainformer.config.yaml_format import parse_yaml

    folder = os.path.abspath(project_dir)
    file = Path(folder, META)
    if not file.is_file():
        raise DataError(expected(f"a project: a folder with {META}", str(project_dir), "It has none."))
    workspace = _above(Path(folder), lambda above: (above / WORKSPACE).is_dir()) or Path(folder)
    templates = Templates(
        (folder, str(workspace / WORKSPACE)), line_syntax=True, known=project_globals(folder, str(workspace))
    )
    rendered = preprocess(file, read_text(file), {}, templates, META)
    given = parse_yaml(rendered, Source(file=str(file)), {}, Place(str(file), 1, preprocessed=True), forgather=True)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise BadArgument(expected(f"keys and values at the top of {file}", type(given).__name__))
    search = given.get("searchdir") or [os.path.join(folder, "templates")]
    if not isinstance(search, list) or not all(isinstance(entry, str) for entry in search):
        raise BadArgument(expected(f"searchdir in {file} to be a list of folders", search))
    for key in ("config_prefix", "default_config"):
        if not isinstance(given.get(key, ""), str):
            raise BadArgument(expected(f"{key} in {file} to be a name", given[key]))
    return ProjectMeta(
        project_dir=str(project_dir),
        workspace_root=str(workspace),
        name=given.get("name"),
        description=given.get("description"),
        searchpath=tuple(os.path.abspath(entry) for entry in search),
        config_prefix=given.get("config_prefix", "configs"),
        default=given.get("default_config"),
        config_dict=given,
    )


def find_project(file: Path) -> ProjectMeta | None:
    """The project that a file belongs to: it is found as a template of a folder above it that has `meta.yaml`."""
    folder = _above(file.absolute().parent, lambda above: (above / META).is_file())
    meta = None if folder is None else read_meta(folder)
    return meta if meta is not None and meta.template_of(file) is not None else None


def _above(folder: Path, fits: Any) -> Path | None:
    return next((above for above in (folder, *folder.parents) if fits(above)), None)

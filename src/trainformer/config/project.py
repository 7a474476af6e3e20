"""`Project`: a config of a Forgather project, and what it builds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from trainformer.config.building import materialize
from trainformer.config.loading import read_project_config
from trainformer.config.nodes import Config
from trainformer.config.project_meta import ProjectMeta, read_meta
from trainformer.core.errors import BadArgument, did_you_mean, expected


class Targets(dict[str, Any]):
    """What a project built, by name; also as attributes.

    >>> Targets(width=8).width
    8
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(did_you_mean(name, self) or f"There is: {', '.join(self)}.") from None


class Project:
    """A config of a project: a folder with `meta.yaml` and templates in Forgather's syntax.

    Args:
        config_name: The config; an empty name is the default one of `meta.yaml`.
        project_dir: The folder.
        trust: Packages that may be imported when something is built.
        variables: Variables of the templates.

    >>> from pathlib import Path
    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> (folder / "templates/configs").mkdir(parents=True)
    >>> _ = (folder / "meta.yaml").write_text('name: "Letters"')
    >>> _ = (folder / "templates/configs/short.yaml").write_text("-- set last = 'c'\\nmain: [a, b, {{ last }}]")
    >>> Project(project_dir=folder)()
    ['a', 'b', 'c']
    """

    def __init__(
        self,
        config_name: str | None = "",
        project_dir: str | os.PathLike[str] = ".",
        *,
        trust: Sequence[str] = (),
        **variables: Any,
    ) -> None:
        self.meta: ProjectMeta = read_meta(project_dir)
        self.project_dir = os.path.abspath(project_dir)
        self.trust = tuple(trust)
        self._templates: dict[str, str] = {}
        self.load_config(config_name, **variables)

    def load_config(self, config_name: str | None = "", **variables: Any) -> None:
        """Read a config of the project; an empty name is the default one."""
        self.config_name = config_name or self.meta.default_config()
        self.config: Config = read_project_config(
            self.meta, self.config_name, variables, trust=self.trust, more=self._templates
        )
        self.pp_config = self.config.pp_config

    def add_template(self, name: str, data: str) -> None:
        """Add a template that is in no file, for configs that are loaded afterwards."""
        self._templates[name] = data

    def __call__(self, *targets: Any, asdict: bool = False, **variables: Any) -> Any:
        """Build parts of the config: `main`, the one that is named, or several. Each call builds new objects.

        Args:
            targets: Top-level keys. Of a list of keys those that exist are built, and returned by name.
            asdict: Return several targets by name; otherwise in the order in which they are named.
            variables: Values of `!var`.
        """
        names = list(targets) if targets and targets[0] != "" else ["main"]
        if isinstance(names[0], list | tuple):
            names, asdict = [name for name in names[0] if name in self.config], True
        for name in names:
            if name not in self.config:
                do = did_you_mean(str(name), self.config) or f"There is: {', '.join(map(str, self.config))}."
                raise BadArgument(expected(f"a target of {self.config_name}", name, do))
        built = materialize({name: self.config[name] for name in names}, root=self.config, variables=variables)
        if asdict:
            return Targets(built)
        return built[names[0]] if len(names) == 1 else tuple(built[name] for name in names)

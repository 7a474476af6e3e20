"""Jinja2 templates in YAML configs, and the position of their errors.

The sandbox keeps a template away from Python's internals. Only variables with plain data reach it, so that it can call
no method of a program's objects. A template in Forgather's line syntax is translated first.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from trainformer.config.line_syntax import split_templates, translate, uses_line_syntax
from trainformer.config.template_globals import template_globals, toyaml
from trainformer.core.errors import BadArgument, did_you_mean
from trainformer.core.optional import require

_MARK = re.compile(r"\{[{%#]")


@dataclass(frozen=True)
class Templates:
    """Where templates are searched, and what they know besides variables.

    `line_syntax` reads all of them as Forgather does; otherwise only those that have line statements are translated.
    """

    search: Sequence[str | os.PathLike[str]] = ()
    line_syntax: bool = False
    known: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)  # texts of templates that are in no file


def preprocess(file: Path, text: str, variables: Mapping[str, Any], templates: Templates, name: str = "") -> str:
    """Render the text; without any template syntax it is returned unchanged.

    `name` is that of the template, if it is not searched in the folder of the file.
    """
    if not templates.line_syntax and not _MARK.search(text):
        return text
    jinja2 = require("jinja2", "config", f"for the template in {file}")
    folders = [*templates.search] if name else [str(file.parent), *templates.search]
    environment = _environment(folders, templates)
    plain = {name: value for name, value in variables.items() if _is_plain(value)}
    try:
        return str(environment.get_template(name or file.name).render(plain))
    except jinja2.TemplateNotFound as error:
        folders = [folder for folder in environment.loader.searchpath if os.path.isdir(folder)]
        hint = did_you_mean(str(error.name), [name for folder in folders for name in os.listdir(folder)])
        raise BadArgument(
            f"Expected the template {error.name!r} in one of {environment.loader.searchpath}{_line_of(error, file)}, "
            f"received none. {hint}".rstrip()
        ) from error
    except jinja2.TemplateSyntaxError as error:
        where = f"{_shown(error.filename or error.name or file)}:{error.lineno}"
        raise BadArgument(
            f"Expected a template that Jinja understands, received at {where}: {error.message}"
        ) from error
    except jinja2.UndefinedError as error:
        do = f"There is: {', '.join(sorted(plain)) or 'none'}. Give it as a keyword or by --var name=value."
        raise BadArgument(
            f"Expected every variable of the template to have a value{_line_of(error, file)}: {error}. {do}"
        ) from error
    except RecursionError as error:
        names = " and ".join(_templates_in(error.__traceback__, file)[-2:])
        raise BadArgument(
            f"Expected templates that do not extend or include each other in a cycle, received one: {names}."
        ) from None
    except Exception as error:  # expressions in a template may raise anything: SecurityError, TypeError, ...
        raise BadArgument(
            f"Expected a template that renders{_line_of(error, file)}, received {type(error).__name__}: {error}"
        ) from error


def literal(text: str) -> str:
    """The text escaped so that rendering restores it."""
    return re.sub(r"\{(?=[{%#])", "{{ '{' }}", text)


def _environment(folders: Sequence[str | os.PathLike[str]], templates: Templates) -> Any:
    from jinja2 import FileSystemLoader, StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    own = not templates.line_syntax

    class Loader(FileSystemLoader):
        """Translates line syntax; a file may have several templates."""

        def __init__(self) -> None:
            super().__init__([os.fspath(folder) for folder in folders], encoding="utf-8-sig")
            self.inline: dict[str, Any] = {name: (text, None, lambda: True) for name, text in templates.more.items()}

        def get_source(self, environment: Any, template: str) -> Any:
            text, file, is_current = self.inline.get(template) or super().get_source(environment, template)
            if template not in self.inline and (not own or uses_line_syntax(text)):
                text, others = split_templates(text)
                self.inline.update({name: (other, file, is_current) for name, other in others.items()})
            return (translate(text) if not own or uses_line_syntax(text) else text), file, is_current

    environment = SandboxedEnvironment(
        loader=Loader(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=own,
        keep_trailing_newline=own,
        # YAML would read None as a string, and does so in Forgather.
        finalize=(lambda value: "null" if value is None else value) if own else None,
    )
    if not own:
        environment.globals |= {**template_globals(), **templates.known}
        environment.filters["toyaml"] = toyaml
    return environment


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (str, int, float, bool)


def _line_of(error: BaseException, file: Path) -> str:
    """The innermost template line in a traceback, which Jinja adds."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.name in ("top-level template code", "template") or frame.name.startswith("block "):
            return f" ({_shown(frame.filename)}:{frame.lineno})"
    return f" ({file})"


def _shown(name: str | os.PathLike[str]) -> str:
    path = Path(name)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _templates_in(trace: TracebackType | None, file: Path) -> list[str]:
    """The templates in a traceback, each once, in order."""
    names: list[str] = []
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if Path(name).suffix not in (".py", "") and _shown(name) not in names:
            names.append(_shown(name))
        trace = trace.tb_next
    return names or [str(file)]

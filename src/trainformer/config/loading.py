"""Read a config from a Python, YAML, JSON or TOML file, and apply overrides: `a.b=3` changes, `+a.b=3` adds a value.

Only `.py` files are executed. All others are only read, and nothing they name is imported.
"""

from __future__ import annotations

import json
import os
import runpy
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from trainformer.config.nodes import (
    Call,
    Config,
    ConfigList,
    Place,
    Source,
    adopt,
    check_secrets,
    find_step,
    parts,
    place_at,
    unknown_part,
)
from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.secrets import is_secret_name, remember

if TYPE_CHECKING:
    from trainformer.config.project_meta import ProjectMeta
    from trainformer.config.templates import Templates

_YAML = (".yaml", ".yml")
_PLAIN = (str, int, float, bool, bytes, list, tuple, dict, set, frozenset, PurePath, type(None))


def load_config(
    path: str | os.PathLike[str],
    overrides: str | Sequence[str] | Mapping[str, Any] = (),
    *,
    search: Sequence[str | os.PathLike[str]] = (),
    trust: Sequence[str] = (),
    variables: Mapping[str, Any] | None = None,
    **more_variables: Any,
) -> Config:
    """Read a config.

    Args:
        path: A `.py`, `.yaml`, `.yml`, `.json` or `.toml` file. A Python file defines the variable `config`; without
            it, all its public variables with plain values are taken. Or the folder of a Forgather project, for its
            default config.
        overrides: `"a.b=3"` changes a value, `"+a.b=3"` adds one; or a mapping of such paths.
        search: Folders of templates, searched after the file's own.
        trust: Packages that may be imported when parts of this config are built.
        variables: Values for templates, `!var` and `!secret`; keyword arguments are the same.
    """
    meta = _project_at(Path(path))
    file = _config_file(Path(path), meta)
    given = {**(variables or {}), **more_variables}
    for name, value in given.items():
        if is_secret_name(name):
            remember(value, name)
    source = Source(file=str(path), trust=checked_trust(trust))
    suffix = file.suffix.lower()
    if suffix in _YAML:
        values = _parse(file, _render(file, given, search, meta), source, given)
    elif suffix in _READERS:
        if given:
            do = "Only YAML files have variables; change values with overrides."
            raise BadArgument(expected(f"no variables for {path}", sorted(given), do))
        values = _READERS[suffix](file)
    else:
        raise BadArgument(expected("a .py, .yaml, .yml, .json or .toml file", str(path)))
    if not isinstance(values, Mapping):
        raise BadArgument(expected(f"keys and values at the top of {path}", type(values).__name__))
    config = values if isinstance(values, Config) else adopt(values, source, Place(str(path)))
    source.root = config
    _apply_overrides(config, overrides, given)
    check_secrets(config)
    return config


def read_project_config(
    meta: ProjectMeta,
    config: str,
    variables: Mapping[str, Any],
    *,
    trust: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
) -> Config:
    """A config of a Forgather project by its name; `more` are templates that are in no file."""
    template, file = meta.find(config)
    source = Source(file=str(file), trust=checked_trust(trust))
    values = _parse(file, _Rendered.of(file, variables, meta.templates(more), template), source, {})
    if not isinstance(values, Config):
        raise BadArgument(expected(f"keys and values at the top of {file}", type(values).__name__))
    source.root = values
    check_secrets(values)
    return values


def preprocessed_text(
    path: str | os.PathLike[str], variables: Mapping[str, Any], search: Sequence[str | os.PathLike[str]] = ()
) -> str:
    """The text of a YAML file after templates, even if it is not valid YAML then."""
    meta = _project_at(Path(path))
    file = _config_file(Path(path), meta)
    if file.suffix.lower() not in _YAML:
        raise BadArgument(expected("a .yaml file: only these are preprocessed", str(path)))
    return _render(file, variables, search, meta).text


def checked_trust(trust: Sequence[str]) -> tuple[str, ...]:
    """Names of packages as a tuple; a single name is accepted too."""
    names = (trust,) if isinstance(trust, str) else tuple(trust)
    for name in names:
        if not isinstance(name, str) or not all(word.isidentifier() for word in name.split(".")):
            raise BadArgument(expected("the name of a package to trust", name))
        if name.endswith(".py"):
            raise BadArgument(expected("the name of a module to trust, not its file", name, f"Write {name[:-3]}."))
    return names


def _existing(file: Path) -> Path:
    if file.is_file():
        return file
    if file.is_dir():
        raise DataError(expected("the file of a config", str(file), "It is a folder."))
    folder = file.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    raise DataError(expected("the file of a config", str(file), did_you_mean(file.name, names) or "There is none."))


def read_text(file: Path) -> str:
    """The text of a file in UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"Expected text in UTF-8, received {file}: {error}.") from error


def _project_at(path: Path) -> ProjectMeta | None:
    """The project whose folder it is, if any."""
    from trainformer.config.project_meta import META, read_meta

    return read_meta(path) if (path / META).is_file() else None


def _config_file(path: Path, meta: ProjectMeta | None) -> Path:
    return _existing(path) if meta is None else meta.find(meta.default_config())[1]


@dataclass(frozen=True)
class _Rendered:
    """The text of a YAML file after templates."""

    text: str
    is_changed: bool
    forgather: bool  # whether it is in Forgather's syntax

    @staticmethod
    def of(file: Path, variables: Mapping[str, Any], templates: Templates, name: str = "") -> _Rendered:
        from trainformer.config.templates import preprocess

        text = read_text(file)
        rendered = preprocess(file, text, variables, templates, name)
        return _Rendered(rendered, rendered != text, templates.line_syntax)


def _render(
    file: Path, variables: Mapping[str, Any], search: Sequence[str | os.PathLike[str]], meta: ProjectMeta | None
) -> _Rendered:
    from trainformer.config.line_syntax import uses_line_syntax
    from trainformer.config.project_meta import find_project
    from trainformer.config.templates import Templates

    if meta is None and not uses_line_syntax(read_text(file)):
        return _Rendered.of(file, variables, Templates(search))
    meta = meta or find_project(file)
    if meta is None:
        return _Rendered.of(file, variables, Templates(search, line_syntax=True))
    templates = meta.templates()
    folders = [*templates.search, *search]
    return _Rendered.of(file, variables, replace(templates, search=folders), meta.template_of(file) or "")


def _parse(file: Path, rendered: _Rendered, source: Source, variables: Mapping[str, Any]) -> Any:
    from trainformer.config.yaml_format import parse_yaml

    source.pp_config, source.forgather = rendered.text, rendered.forgather
    # In Forgather's syntax, variables that have no value yet may get one when something is built.
    known = variables if rendered.forgather else {"pp_config": rendered.text, **variables}
    first = Place(str(file), 1, preprocessed=rendered.is_changed)
    values = parse_yaml(rendered.text, source, known, first, forgather=rendered.forgather)
    if rendered.forgather and isinstance(values, Config):
        for key in [key for key in values if isinstance(key, str) and key.startswith(".")]:
            del values[key]  # `.define` only gives a name to something
    return Config(source=source, place=Place(str(file))) if values is None else values


def _read_json(file: Path) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            double = next(name for name in names if names.count(name) > 1)
            raise BadArgument(expected(f"each key once ({file})", double))
        return values

    try:
        return json.loads(read_text(file), object_pairs_hook=once)
    except RecursionError:
        raise BadArgument(
            f"Expected a config of reasonable depth, received one that is nested too deeply ({file})."
        ) from None
    except json.JSONDecodeError as error:
        raise BadArgument(f"Expected JSON that can be read, received at {file}:{error.lineno}: {error.msg}.") from error
    except BadArgument:
        raise
    except ValueError as error:  # an integer of more than 4,300 digits
        raise BadArgument(f"Expected JSON that can be read, received in {file}: {error}.") from error


def _read_toml(file: Path) -> Any:
    try:
        return tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise BadArgument(f"Expected TOML that can be read, received in {file}: {error}.") from error


def _read_python(file: Path) -> Any:
    try:
        names = runpy.run_path(str(file), run_name="__config__")
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise BadArgument(f"Expected Python that can be read, received at {where}: {error.msg}.") from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        place = Place(str(file), lines[-1] if lines else None)
        raise BadArgument(f"Expected a config from {place}, received {type(error).__name__}: {error}.") from error
    if "config" in names:
        return names["config"]
    return {name: value for name, value in names.items() if not name.startswith("_") and isinstance(value, _PLAIN)}


_READERS: dict[str, Callable[[Path], Any]] = {".json": _read_json, ".toml": _read_toml, ".py": _read_python}


# -- overrides -------------------------------------------------------------------------------------------------------


def _apply_overrides(
    config: Config, overrides: str | Sequence[str] | Mapping[str, Any], variables: Mapping[str, Any]
) -> None:
    """Change the config in place. Values in text are YAML; those of a mapping are used as they are."""
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, Mapping):
        for path, value in overrides.items():
            place = Place(f"override of {path}")
            _set(config, path, adopt(value, config.source, place), place)
    else:
        for text in overrides:
            path, value = parse_assignment(text, "an override such as model.width=8", variables, config.source)
            _set(config, path, value, Place(f"override {text}"))


def parse_assignment(
    text: str, what: str, variables: Mapping[str, Any] | None = None, source: Source | None = None
) -> tuple[str, Any]:
    """Name and value of `name=value`, the value read as YAML.

    >>> parse_assignment("lr=1e-4", "a variable")
    ('lr', 0.0001)
    """
    from trainformer.config.yaml_format import parse_yaml

    name, equals, value = text.partition("=")
    if not equals or not name.strip("+ "):
        raise BadArgument(expected(what, text))
    return name.strip(), parse_yaml(value, source or Source(), variables or {}, Place(f"override {text}"))


def _set(config: Config, path: str, value: Any, place: Place) -> None:
    add = path.startswith("+")
    words = path.removeprefix("+").split(".")
    holder: Any = config
    for position, word in enumerate(words[:-1]):
        step = find_step(holder, word)
        if step is None:
            if not add:
                raise BadArgument(_unknown(holder, word, path))
            # A missing parent is created as a mapping: a number in the path does not imply a list.
            _put(holder, word, Config(source=config.source, place=place), place)
            step = find_step(holder, word)
        holder = dict(parts(holder))[step]
        if not isinstance(holder, Call | Config | ConfigList):
            there = ".".join(words[: position + 1])
            raise BadArgument(expected(f"{there!r} to have parts, as {path!r} says", holder))
    step = find_step(holder, words[-1])
    if step is not None:
        _put(holder, step, value, place)
    elif add:
        _put(holder, words[-1], value, place)
    else:
        raise BadArgument(_unknown(holder, words[-1], path))


def _put(holder: Any, step: Any, value: Any, place: Place) -> None:
    if isinstance(holder, Call):
        holder = holder.args if str(step).isdigit() else holder.kwargs
    if isinstance(holder, ConfigList) and not isinstance(step, int):
        if step != str(len(holder)):
            what = f"{place} to name an item, or {len(holder)} for a new one"
            raise BadArgument(expected(what, step))
        holder.append(value)
        step = len(holder) - 1
    else:
        holder[step] = value
    place_at(holder, step, place)


def _unknown(holder: Any, word: str, path: str) -> str:
    return f"{unknown_part(holder, word, path)} To add a new one: --set +{path}=..."

"""Changes from the command line: `a.b=3` changes what is there, `+a.b=3` adds what is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainformer.config.nodes import (
    Call,
    Config,
    ConfigList,
    Place,
    Source,
    adopt,
    find_step,
    parts,
    place_at,
    unknown_part,
)
from trainformer.core.errors import BadArgument, expected


def apply_overrides(
    config: Config, overrides: str | Sequence[str] | Mapping[str, Any], variables: Mapping[str, Any]
) -> None:
    """Change the config in place. Values of text are YAML; those of a mapping are taken as they are."""
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
    from trainformer.config.yamlfile import parse_yaml

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
            # The value is set below: a list cannot be guessed from a number, so what is missing is a mapping.
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
    return f"{unknown_part(holder, word, path)} To add what is not there: --set +{path}=..."

"""Arguments to JSON and back. Reading never executes anything from the file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import optax

from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, expected
from trainformer.core.secrets import find_mask, mask
from trainformer.jax.aliases import resolve_aliases

FILE_NAME = "training_arguments.json"
_OBJECT = "an object that JSON cannot represent"


class JsonArguments:
    """JSON for a dataclass of arguments. `passed` holds the names of the arguments that were not left to defaults."""

    linked: ClassVar[tuple[str, ...]] = ()  # fields whose defaults depend on each other
    passed: frozenset[str]

    @classmethod
    def field_names(cls) -> list[str]:
        """Names of all arguments."""
        return [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed. (`dataclasses.replace` would mark all fields as passed.)"""
        passed = {name: getattr(self, name) for name in self.passed}
        return type(self)(**{**passed, **resolve_aliases(changes, self.field_names(), type(self).__name__)})

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types, and which of them were passed.

        Objects (an optax transformation, a function, a logger) are replaced by a description.
        """
        return {**{name: _plain(getattr(self, name)) for name in self.field_names()}, "passed": sorted(self.passed)}

    def to_json(self) -> str:
        """`to_dict` as JSON text. Secrets are masked: pass them again to `from_json`."""
        return json.dumps(mask(self.to_dict()), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **changes: Any) -> Self:
        """The arguments from `to_dict`, with `changes`.

        Objects that were only described must be passed again. Without a `passed` entry all values count as passed.
        """
        if not isinstance(values, Mapping):
            raise BadArgument(expected("the arguments as a mapping", values))
        names, kind = cls.field_names(), cls.__name__
        own = resolve_aliases({name: value for name, value in values.items() if name != "passed"}, names, kind)
        passed = values.get("passed", own)
        # A default that was edited in the file counts as passed, but not one that follows from linked fields.
        defaults = cls(**{name: own[name] for name in cls.linked if name in own and name in passed}).to_dict()
        chosen = {name: value for name, value in own.items() if name in passed or value != defaults[name]}
        chosen |= resolve_aliases(changes, names, kind)
        for name, value in chosen.items():
            if find_mask(value) is not None:
                do = f"It is not kept in files. Pass it again: from_json(text, {name}=...)."
                raise BadArgument(expected(f"the secret {name}", value, do))
            if isinstance(value, Mapping) and _OBJECT in value:
                do = f"Pass it again: from_json(text, {name}=...)."
                raise BadArgument(expected(f"{name} as a JSON value", value[_OBJECT], do))
        return cls(**chosen)

    @classmethod
    def from_json(cls, text: str, **changes: Any) -> Self:
        """The arguments from `to_json`, or from hand-written JSON."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadArgument(expected("arguments as JSON", text[:40], f"{error}.")) from error
        return cls.from_dict(values, **changes)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to a file, or as ``training_arguments.json`` into a folder."""
        path = Path(path)
        path = path if path.suffix == ".json" else path / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str], **changes: Any) -> Self:
        """Read what `save` wrote."""
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise BadArgument(expected("an arguments file, or a folder with one", str(path)))
        return cls.from_json(path.read_text(encoding="utf-8"), **changes)

    # Their names in EasyDeL.
    to_json_string = to_json
    save_arguments = save
    load_arguments = load


def _plain(value: Any) -> Any:
    """A JSON value; objects are marked, so that their description is never mistaken for a value."""
    if isinstance(value, (tuple, list)) and not isinstance(value, optax.GradientTransformation):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {_OBJECT: jsonable(value)}

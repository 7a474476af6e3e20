"""Arguments as JSON and back. Nothing of a file is ever executed."""

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
from trainformer.jax.aliases import in_own_words

FILE_NAME = "training_arguments.json"
_OBJECT = "an object that JSON cannot hold"


class Written:
    """What lets a dataclass of arguments be written and read. It notes in `passed` what was not left to its default."""

    linked: ClassVar[tuple[str, ...]] = ()  # fields that decide about the defaults of one another
    passed: frozenset[str]

    @classmethod
    def field_names(cls) -> list[str]:
        """The names of all arguments."""
        return [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]

    def replace(self, **changes: Any) -> Self:
        """The same with other values for some fields. (`dataclasses.replace` would take all of them for passed.)"""
        said = {name: getattr(self, name) for name in self.passed}
        return type(self)(**{**said, **in_own_words(changes, self.field_names(), type(self).__name__)})

    def to_dict(self) -> dict[str, Any]:
        """All fields in types that JSON knows, and which of them were passed.

        An object in their place (a transformation of optax, a function, a logger) is described, not written.
        """
        return {**{name: _plain(getattr(self, name)) for name in self.field_names()}, "passed": sorted(self.passed)}

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **changes: Any) -> Self:
        """The arguments again; `changes` replace what was written.

        Objects that were only described must be passed again. Without an entry `passed`, everything given was.
        """
        if not isinstance(values, Mapping):
            raise BadArgument(expected("the arguments as names and values", values))
        names, kind = cls.field_names(), cls.__name__
        own = in_own_words({name: value for name, value in values.items() if name != "passed"}, names, kind)
        passed = values.get("passed", own)
        # Whoever changed a default in the file has said it, too; but what follows from other fields was not said.
        unsaid = cls(**{name: own[name] for name in cls.linked if name in own and name in passed}).to_dict()
        said = {name: value for name, value in own.items() if name in passed or value != unsaid[name]}
        said |= in_own_words(changes, names, kind)
        for name, value in said.items():
            if isinstance(value, Mapping) and _OBJECT in value:
                do = f"Pass it again: from_json(text, {name}=...)."
                raise BadArgument(expected(f"{name} in a form that JSON can hold", value[_OBJECT], do))
        return cls(**said)

    @classmethod
    def from_json(cls, text: str, **changes: Any) -> Self:
        """The arguments from `to_json`, or from JSON that somebody wrote by hand."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadArgument(expected("arguments as JSON", text[:40], f"{error}.")) from error
        return cls.from_dict(values, **changes)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write them to a file, or into a folder as ``training_arguments.json``."""
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
            raise BadArgument(expected("a file of arguments, or a folder with one", str(path)))
        return cls.from_json(path.read_text(encoding="utf-8"), **changes)


def _plain(value: Any) -> Any:
    """A value of JSON's types; an object is marked, so that its description is never taken for a value."""
    if isinstance(value, (tuple, list)) and not isinstance(value, optax.GradientTransformation):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {_OBJECT: jsonable(value)}

"""What a config may name: which packages are imported for it, and which of their functions are never called.

Importing runs code, so the check comes before the import. Parts of a few packages are allowed (see `allowed`), and the
project's own code; the user may trust more. This keeps a config from a stranger from running arbitrary code. What it
builds still gets the arguments that the config gives, so read what you build.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from trainformer.config.allowed import (
    ALLOWED,
    ARGUMENTS,
    DENIED,
    METHODS,
    class_of_method,
    lies_in,
    may_be_asked,
    may_be_built,
    offers,
)
from trainformer.config.nodes import Call, Place, as_call, at, dotted_name, parts, place_in
from trainformer.config.registry import Registry
from trainformer.core.errors import BadArgument, did_you_mean, expected


class Importer:
    """Imports what a config names. `trust`: packages allowed in addition to `ALLOWED` and the project's own."""

    def __init__(self, registry: Registry, trust: Collection[str] = ()) -> None:
        self.registry = registry
        self.trust = tuple(trust)

    def find(self, target: str, place: Place | None = None) -> Any:
        """What is registered under the name, or can be imported by it."""
        if target in self.registry:
            return self.registry[target]
        path, words = self._words(target, place)
        self._permit(words[0], ".".join(words), target, place)
        module, rest = self._module(path, words, target, place)
        thing: Any = module
        for position, word in enumerate(rest):
            if not self._may_pass(thing):
                self._refuse_thing(thing, target, place)
            # Check the real name: a path may reach a denied object under another one.
            self._deny(".".join([_name(thing), *rest[position:]]), target, place)
            thing = _attribute(thing, word, target, place)
        self._permit_thing(thing, target, place)
        return thing

    def check_arguments(self, call: Call, named: Mapping[str, Any], others: Sequence[Any]) -> None:
        """Refuse arguments that make a function run code it loads, also in nested dictionaries."""
        if not self._is_trusted(call.title.replace(":", ".")):
            for key, value in named.items():
                self._check_argument(call, key, value, place_in(call, key))
            self._check_inside(call, others)

    def _check_argument(self, call: Call, key: Any, value: Any, place: Place | None) -> None:
        if isinstance(key, str) and key in ARGUMENTS:
            is_good, reason = ARGUMENTS[key]
            if not is_good(value):
                path = call.title.replace(":", ".")
                raise BadArgument(f"Expected no {key}={value!r} in a config{at(place)}: it {reason}. {_do(path)}")
        self._check_inside(call, value)

    def _check_inside(self, call: Call, value: Any) -> None:
        if as_call(value) is not None:  # checked when it is built
            return
        for step, part in parts(value):
            self._check_argument(call, step, part, place_in(value, step) or call.place)

    def _words(self, target: str, place: Place | None) -> tuple[str | None, list[str]]:
        """The path of the module if a colon ends it, and all words of the path."""
        module, colon, name = target.partition(":")
        words = (f"{module}.{name}" if colon else target).split(".")
        if len(words) == 1:
            hint = did_you_mean(target, self.registry) or "Register it, or write where it is: package.module.Class."
            data = " A dictionary of plain data that has a key `type` is written as !dict in YAML."
            raise BadArgument(expected(f"the name of something registered{at(place)}", target, hint + data))
        if not all(word.isidentifier() for word in words):
            what = "a path such as package.module.Class or package.module:Class"
            raise BadArgument(expected(f"{what}{at(place)}", target))
        if any(word.startswith("_") for word in words):
            do = "Names that start with an underscore are private."
            raise BadArgument(expected(f"a path of public names{at(place)}", target, do))
        return (module if colon else None), words

    def _is_trusted(self, path: str) -> bool:
        return lies_in(path, self.trust)

    def _is_allowed(self, package: str, path: str) -> bool:
        return package in ALLOWED or self._is_trusted(path) or is_own(package)

    def _permit(self, package: str, path: str, target: str, place: Place | None) -> None:
        if not self._is_allowed(package, path):
            if not _is_installed(package):
                hint = (
                    did_you_mean(package, ALLOWED)
                    or "Is it installed, and was the program started in the project's folder?"
                )
                raise BadArgument(expected(f"the path of something that exists{at(place)}", target, hint))
            allowed = f"{', '.join(ALLOWED)} and the project's own packages"
            raise BadArgument(
                f"Expected something of {allowed}{at(place)}, received {target!r}: importing it would run code of "
                f"{package!r}. {_do(package)}"
            )
        self._deny(path, target, place)
        if package in ALLOWED and not self._is_trusted(path) and not may_be_asked(path):
            self._refuse_part(package, target, place)

    def _refuse_part(self, package: str, target: str, place: Place | None) -> NoReturn:
        path = target.replace(":", ".")
        raise BadArgument(
            f"Expected something of {package} that is for configs{at(place)}, received {target!r}. "
            f"{offers(package)} {_do(path)}"
        )

    def _deny(self, path: str, target: str, place: Place | None) -> None:
        if self._is_trusted(path):
            return
        words = path.split(".")
        for end in range(len(words), 0, -1):
            reason = DENIED.get(".".join(words[:end]))
            if reason is not None:
                raise BadArgument(
                    f"Expected something that is safe to call from a config{at(place)}, received {target!r}: "
                    f"{'.'.join(words[:end])} {reason}. {_do(target.replace(':', '.'))}"
                )

    def _module(
        self, path: str | None, words: Sequence[str], target: str, place: Place | None
    ) -> tuple[ModuleType, Sequence[str]]:
        """The module that the words start with, imported, and the remaining words."""
        ends = [path.count(".") + 1] if path else range(len(words) - 1, 0, -1)
        for end in ends:
            name = ".".join(words[:end])
            if _exists(name, at(place)):
                return _imported(name, target, place), words[end:]
        missing = path or words[0]
        raise BadArgument(
            f"Expected a module that can be imported{at(place)}, received {missing!r}, which does not exist. Is it "
            f"installed, and was the program started in the project's folder?"
        )

    def _may_pass(self, thing: Any) -> bool:
        """Whether a path may lead through it: modules and classes of allowed packages."""
        if isinstance(thing, ModuleType):
            return self._knows(thing.__name__)
        return isinstance(thing, type) and self._knows(thing.__module__)

    def _knows(self, module: str) -> bool:
        return self._is_allowed(module.split(".")[0], module)

    def _permit_thing(self, thing: Any, target: str, place: Place | None) -> None:
        """Check where an object is defined: a package also has names that it imported from others."""
        if isinstance(thing, ModuleType) or not callable(thing):
            raise BadArgument(expected(f"a class or function{at(place)}", target, f"It is a {type(thing).__name__}."))
        home = _home(thing)
        path = target.replace(":", ".")
        if self._is_trusted(path) and (home is None or home.split(".")[0] == path.split(".")[0]):
            return
        if home is None or not self._knows(home):
            self._refuse_thing(thing, target, place)
        name = f"{home}.{getattr(thing, '__qualname__', '')}"
        self._deny(name, target, place)
        if not (self._is_ours(home, name) or may_be_built(thing, home) or self._is_inherited(thing)):
            self._refuse_part(home.split(".")[0], target, place)

    def _is_ours(self, home: str, name: str) -> bool:
        package = home.split(".")[0]
        return self._is_trusted(name) or (package not in ALLOWED and is_own(package))

    def _is_inherited(self, method: Any) -> bool:
        """Whether it is a class method that builds, which a class of the project inherits from an allowed one."""
        owner = class_of_method(method)
        if owner is None or method.__name__ not in METHODS:
            return False
        return self._is_ours(owner.__module__, dotted_name(owner))

    def _refuse_thing(self, thing: Any, target: str, place: Place | None) -> NoReturn:
        home = thing.__name__ if isinstance(thing, ModuleType) else _home(thing)
        package = str(home).split(".")[0]
        raise BadArgument(
            f"Expected something that belongs to the package it is named by{at(place)}, received {target!r}, which "
            f"leads to {home!r}. {_do(package)}"
        )


def _home(thing: Any) -> str | None:
    owner = getattr(thing, "__objclass__", None)  # methods written in C know only their class
    home = getattr(thing, "__module__", None) or getattr(owner, "__module__", None)
    return home if isinstance(home, str) else None


def _name(thing: Any) -> str:
    return thing.__name__ if isinstance(thing, ModuleType) else dotted_name(thing)


def _attribute(thing: Any, word: str, target: str, place: Place | None) -> Any:
    try:
        return getattr(thing, word)
    except AttributeError:
        hint = did_you_mean(word, [name for name in dir(thing) if not name.startswith("_")])
        raise BadArgument(expected(f"a name in {_name(thing)}{at(place)}", word, hint)) from None
    except Exception as error:  # packages with lazy imports
        raise BadArgument(
            f"Expected to import {target!r}{at(place)}, received {type(error).__name__}: {error}."
        ) from error


def _do(package: str) -> str:
    return f"If you trust it, say so: --trust {package}, or trust=({package!r},)."


def _exists(name: str, where: str) -> bool:
    """Whether a module exists. Looking for a submodule imports its package, which is permitted by now."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return False
        raise BadArgument(f"Expected to import {name!r}{where}, received {type(error).__name__}: {error}.") from error
    except ValueError:  # a module created by hand has no spec
        return name in sys.modules
    except Exception as error:
        raise BadArgument(f"Expected to import {name!r}{where}, received {type(error).__name__}: {error}.") from error


def _imported(name: str, target: str, place: Place | None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise BadArgument(
            f"Expected to import {name!r} for {target!r}{at(place)}, received {type(error).__name__}: {error}."
        ) from error


def _is_installed(package: str) -> bool:
    """Whether a package exists, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        return True


def is_own(package: str) -> bool:
    """Whether a top-level package is the project's own: below the current folder, and not installed there."""
    if package in sys.stdlib_module_names:  # in / the standard library is below the current folder
        return False
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # created by hand, or the program itself
        return False
    if spec is None:
        return False
    files = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    return bool(files) and all(_is_below(Path(file), Path.cwd()) for file in files)


def _is_below(file: Path, folder: Path) -> bool:
    file, folder = file.resolve(), folder.resolve()
    if not file.is_relative_to(folder) or {"site-packages", "dist-packages"} & set(file.parts):
        return False
    between = [parent for parent in file.parents if parent.is_relative_to(folder)]
    return not any((parent / "pyvenv.cfg").exists() for parent in between)

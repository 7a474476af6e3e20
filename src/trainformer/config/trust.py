"""What a config may name: which packages are imported for it, and which of their functions are never called.

Importing runs code, so the check comes before the import. Parts of a few packages are allowed (see `allowed`), and what
the user named or approved (see `own_code`). This keeps a config from a stranger from running arbitrary code. What it
builds still gets the arguments that the config gives, so read what you build.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
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
from trainformer.config.builtins import NAMES as BUILTINS
from trainformer.config.builtins import builtin
from trainformer.config.nodes import Call, Place, as_call, at, dotted_name, parts, place_in
from trainformer.config.own_code import ASK, Code, closed_folder, files_of, find_code, standing_trust
from trainformer.config.registry import Registry
from trainformer.core.errors import BadArgument, did_you_mean, expected

# Keys of a config whose folders hold data or output.
_FOLDERS = (
    "data", "train_data", "val_data", "test_data", "eval_data", "dataset", "data_dir", "root",
    "run_dir", "save_dir", "output_dir",
)  # fmt: skip
_IS_IT_THERE = "Is it installed, and was the program started in the project's folder?"


class Importer:
    """Imports what a config names.

    Args:
        registry: What may be built by its name.
        trust: Packages that the user named for this config. Their arguments are not checked either.
        config: The whole config: nothing is imported from the folders that it names as data or output.
    """

    def __init__(self, registry: Registry, trust: Collection[str] = (), config: Any = None) -> None:
        self.registry = registry
        self.trust = tuple(trust)
        self.config = config
        self.approved: set[str] = set()

    @functools.cached_property
    def standing(self) -> tuple[str, ...]:
        """What the user trusts always."""
        return standing_trust()

    @functools.cached_property
    def closed(self) -> frozenset[Path]:
        """Folders of data and output."""
        return frozenset(_folders_in(self.config, set()))

    def find(self, target: str, place: Place | None = None) -> Any:
        """What is registered under the name, or can be imported by it."""
        if target in self.registry:
            return self.registry[target]
        if target in BUILTINS:
            return builtin(target, lambda kind: self._is_trusted(dotted_name(kind)), self._is_trusted(target))
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

    def check(self, target: str) -> None:
        """Refuse a path whose code may not be imported. Nothing is imported, but the user may be asked."""
        words = self._words(target, None)[1]
        self._permit(words[0], ".".join(words), target, None)

    def check_arguments(self, call: Call, named: Mapping[str, Any], others: Sequence[Any]) -> None:
        """Refuse arguments that make a function run code it loads, also in nested dictionaries."""
        if not lies_in(call.title.replace(":", "."), self.trust):  # what is trusted always has to be named for this
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
        return lies_in(path, self.trust) or lies_in(path, self.approved) or lies_in(path, self.standing)

    def _permit(self, package: str, path: str, target: str, place: Place | None) -> None:
        if package not in ALLOWED or _is_shadowed(package):
            self._permit_code(package, path, target, place)
        self._deny(path, target, place)
        if package in ALLOWED and not self._is_trusted(path) and not may_be_asked(path):
            self._refuse_part(package, target, place)

    def _permit_code(self, package: str, path: str, target: str, place: Place | None) -> None:
        """Check where code lies and whether the user named or approved it; make code of this folder importable."""
        code = find_code(package)
        if code is None:
            hint = did_you_mean(package, ALLOWED) or _IS_IT_THERE
            raise BadArgument(expected(f"the path of something that exists{at(place)}", target, hint))
        self._refuse_closed(code.files, target, place)
        if code.is_local:
            self._permit_local(code, path, target, place)
        elif not self._is_trusted(path):
            raise BadArgument(
                f"Expected something of {', '.join(ALLOWED)}, or code that you trust{at(place)}, received {target!r}: "
                f"importing it would run code of {package!r}. {_do(package)}"
            )

    def _permit_local(self, code: Code, path: str, target: str, place: Place | None) -> None:
        ask = ASK.get()
        if not self._is_trusted(path):
            self.approved.update(code.approved_names())
        if not self._is_trusted(path):
            if ask is None or not ask(code):
                raise BadArgument(
                    f"Expected something of {', '.join(ALLOWED)}, or code that you trust{at(place)}, received "
                    f"{target!r}: importing it would run {_shown(code)}, which was not approved yet or has changed "
                    f"since. {_do(code.name)} To trust it in this folder always, also when it changes, add trust = "
                    f'["{code.name}"] to the section [tool.trainformer] of its pyproject.toml.'
                )
            self.approved.add(code.name)
            code.approve(code.name)
        if ask is not None:
            for name in self.trust:
                if lies_in(path, (name,)):
                    code.approve(name)
        code.make_importable()

    def _refuse_closed(self, files: Sequence[Path], target: str, place: Place | None) -> None:
        found = closed_folder(files, self.closed)
        if found is not None:
            raise BadArgument(
                f"Expected code outside of the folders of runs, sweeps and data{at(place)}, received {target!r}, which "
                f"lies in {str(found[0])!r}: {found[1]}. Nothing is ever imported from there. If the code is yours, "
                "move it to another folder."
            )

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
            if self._exists(name, target, place):
                return _imported(name, target, place), words[end:]
        missing = path or words[0]
        raise BadArgument(
            f"Expected a module that can be imported{at(place)}, received {missing!r}, which does not exist. "
            f"{_IS_IT_THERE}"
        )

    def _exists(self, name: str, target: str, place: Place | None) -> bool:
        """Whether a module exists. Looking for a submodule imports its package, so each is checked before."""
        words = name.split(".")
        for end in range(1, len(words) + 1):
            spec = _spec(".".join(words[:end]), at(place))
            if spec is None:
                return name in sys.modules  # a module created by hand has no spec
            if words[0] not in ALLOWED:
                self._refuse_closed(files_of(spec), target, place)
        return True

    def _may_pass(self, thing: Any) -> bool:
        """Whether a path may lead through it: modules and classes of allowed packages."""
        if isinstance(thing, ModuleType):
            return self._knows(thing.__name__)
        return isinstance(thing, type) and self._knows(thing.__module__)

    def _knows(self, module: str) -> bool:
        package = module.split(".")[0]
        if package in ALLOWED or self._is_trusted(module):
            return True
        code = find_code(package)
        self.approved.update(code.approved_names() if code is not None and code.is_local else ())
        return self._is_trusted(module)

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
        if not (self._is_trusted(name) or may_be_built(thing, home) or self._is_inherited(thing)):
            self._refuse_part(home.split(".")[0], target, place)

    def _is_inherited(self, method: Any) -> bool:
        """Whether it is a class method that builds, which a class of the project inherits from an allowed one."""
        owner = class_of_method(method)
        if owner is None or method.__name__ not in METHODS:
            return False
        return self._is_trusted(dotted_name(owner))

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


def _spec(name: str, where: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise BadArgument(f"Expected to import {name!r}{where}, received {type(error).__name__}: {error}.") from error
    except ValueError:  # created by hand
        return None
    except Exception as error:
        raise BadArgument(f"Expected to import {name!r}{where}, received {type(error).__name__}: {error}.") from error


def _imported(name: str, target: str, place: Place | None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise BadArgument(
            f"Expected to import {name!r} for {target!r}{at(place)}, received {type(error).__name__}: {error}."
        ) from error


def import_named(module: str, why: str) -> ModuleType:
    """Import a module that the user typed, from the working directory if it is not installed; `why` is for errors."""
    importer, package = Importer(Registry(), (module,)), module.partition(".")[0]
    if find_code(package) is not None:
        importer._permit_code(package, module, module, None)
        if importer._exists(module, module, None):
            return importlib.import_module(module)
    raise BadArgument(expected(f"{why} to name a module that exists", module, "Is it in this folder?"))


def _is_shadowed(package: str) -> bool:
    """Whether an allowed package would be imported from the working directory, where it is not installed."""
    if package in sys.modules:
        return False
    code = find_code(package)
    return code is not None and code.shadows


def _folders_in(value: Any, seen: set[int], is_data: bool = False) -> Iterator[Path]:
    """The folders that a config names as data or output, unless the working directory lies in them.

    `is_data`: whether the value itself is data, such as several validation sets by name.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    for key, part in parts(value):
        is_folder = is_data or key in _FOLDERS or (isinstance(value, Call) and isinstance(key, int))
        if not isinstance(part, str):
            yield from _folders_in(part, seen, is_data or key in _FOLDERS)
        elif is_folder and "\0" not in part and os.path.isdir(part):
            folder = Path(os.path.abspath(part))
            if not Path.cwd().resolve().is_relative_to(folder.resolve()):
                yield from (folder, folder.resolve())


def _shown(code: Code) -> str:
    files = [os.path.relpath(file, code.folder) for file in code.files]
    return f"{', '.join(files)} (digest {code.digest[:12]})"

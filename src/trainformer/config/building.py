"""Build objects from a config, for tags and dictionaries with `type` alike.

Arguments are checked against the signature before a class is called, so that the error for a misspelt key names its
line. Each call of `materialize` or `build_from_cfg` creates its own singletons.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from trainformer.config.builtins import Deferred
from trainformer.config.loading import checked_trust
from trainformer.config.nodes import Call, Config, ConfigTuple, Missing, Var, as_call, at, is_shared, place_in
from trainformer.config.registry import REGISTRY, Registry
from trainformer.config.trust import Importer
from trainformer.core.errors import BadArgument, DataError, MissingDependency, did_you_mean, expected

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def build_from_cfg(cfg: Any, /, recursive: bool = True, *, trust: Sequence[str] = (), **extra: Any) -> Any:
    """Build the object that one section describes: `{"type": "torch.optim.AdamW", "lr": 3e-4}`, or a YAML tag.

    Args:
        cfg: The section. `type` is a registered name, `package.module.Class` or `package.module:Class`; all other keys
            are arguments.
        recursive: Also build nested sections. Otherwise they are passed as they are.
        trust: Packages and modules that may be imported, besides those that always may.
        extra: More arguments, passed as they are. They override those of the config.

    A required parameter `x_cfg` that the section does not set gets the section `x` of the whole config, not built.
    """
    call = as_call(cfg)
    if call is None:
        received = sorted(map(str, cfg)) if isinstance(cfg, Mapping) else cfg
        do = "Add the key `type`: a registered name, or where the class is: package.module.Class."
        raise BadArgument(expected(f"a section that says what to build{at(getattr(cfg, 'place', None))}", received, do))
    return _Builder(_root_of(cfg), REGISTRY, trust, recursive).call(call, extra)


def materialize(
    config: Any,
    *,
    trust: Sequence[str] = (),
    registry: Registry = REGISTRY,
    variables: Mapping[str, Any] | None = None,
    root: Config | None = None,
) -> Any:
    """A config, a part of it or a list of parts, with every object in it built.

    `variables` are values of `!var` in Forgather's syntax; `root` is the whole config, if it cannot be found out.

    >>> materialize({"sizes": [1, 2], "name": "plain values stay what they are"})["sizes"]
    [1, 2]
    """
    return _Builder(root or _root_of(config), registry, trust, recursive=True, variables=variables).value(config)


#: What the config that is being built trusts: it holds for the projects that it builds parts of.
TRUST: ContextVar[tuple[str, ...] | None] = ContextVar("TRUST", default=None)


def _root_of(value: Any) -> Config | None:
    if isinstance(value, Call):
        return value.kwargs.source.root
    if isinstance(value, Config):
        return value.root
    if isinstance(value, list | tuple):
        return next((root for root in map(_root_of, value) if root is not None), None)
    return None


class _Builder:
    def __init__(
        self,
        root: Config | None,
        registry: Registry,
        trust: Sequence[str],
        recursive: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        of_file = root.source.trust if root is not None else ()
        self.root = root
        self.variables = variables or {}
        self.importer = Importer(registry, (*of_file, *checked_trust(trust)), root)
        self.recursive = recursive
        self.shared: dict[int, Any] = {}
        self.open: list[int] = []

    def value(self, value: Any) -> Any:
        if isinstance(value, Var):
            return self.variable(value)
        if not isinstance(value, Call | Mapping | list | tuple):
            return value
        if is_shared(value) and id(value) in self.shared:
            return self.shared[id(value)]
        if id(value) in self.open:
            where = at(getattr(value, "place", None))
            raise BadArgument(f"Expected a config without cycles, received one that contains itself{where}.")
        self.open.append(id(value))
        try:
            built = self._built(value)
        finally:
            self.open.pop()
        if is_shared(value):
            self.shared[id(value)] = built
        return built

    def _built(self, value: Any) -> Any:
        call = as_call(value)
        if call is not None:
            return self.call(call, {})
        if isinstance(value, Mapping):
            return {key: self.value(item) for key, item in value.items()}
        if isinstance(value, list) or type(value) in (tuple, ConfigTuple):
            items = [self.value(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def variable(self, var: Var) -> Any:
        if var.name in self.variables:
            return self.variables[var.name]
        if var.default is not Missing:
            return self.value(var.default)
        if var.name == "pp_config" and self.root is not None:
            return self.root.source.pp_config
        hint = did_you_mean(var.name, self.variables) or f"Pass it as a keyword or with --var {var.name}=value."
        raise BadArgument(expected(f"a variable that has a value{at(var.place)}", var.name, hint))

    def call(self, call: Call, extra: Mapping[str, Any], more_args: Sequence[Any] = (), lazy: bool = True) -> Any:
        """Make the call; `extra` overrides its own arguments. A lambda is called with `lazy=False`."""
        if call.kind == "lambda" and lazy and self.recursive:
            if isinstance(call.target, str):  # what may not be called is refused now, not later
                self.importer.find(call.target, call.place)
            return Deferred(self._call_later, call)
        target = self.importer.find(call.target, call.place) if isinstance(call.target, str) else call.target
        if not callable(target):
            raise BadArgument(expected(f"a class or function{at(call.place)}", target))
        takes = signature_of(target)
        args, kwargs = _without(takes, self._resolved(call, takes), extra)
        args = [*args, *more_args]
        self._check(call, takes, args, {**kwargs, **extra})
        positions = _positions(takes)
        by_name = dict(zip(positions, args, strict=False))
        self.importer.check_arguments(call, {**by_name, **kwargs}, args[len(positions) :])
        sections = {}
        if takes is not None and call.kind != "partial":  # a partial gets the rest later
            sections = self._sections(call, takes, args, {**kwargs, **extra})
        make = self.value if self.recursive and call.kind != "meta" else lambda value: value
        built_args = [make(item) for item in args]
        built = {key: make(item) for key, item in kwargs.items()}
        named = {**built, **sections, **extra}
        if call.kind == "partial":
            return Deferred(target, *built_args, **named)
        try:
            with _trusting(self.importer.trust):
                return target(*built_args, **named)
        except MissingDependency:  # it already names the pip command
            raise
        except (BadArgument, DataError) as error:  # they lack only the place
            kind = DataError if isinstance(error, DataError) else BadArgument
            raise kind(f"{call.title}{at(call.place)}: {error}") from error
        except Exception as error:
            raise BadArgument(
                f"Expected {call.title} to be built{at(call.place)}, received {type(error).__name__}: {error}"
            ) from error

    def _call_later(self, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        return self.call(call, kwargs, args, lazy=False)

    def _resolved(self, call: Call, takes: _Takes) -> Call:
        """The call with the values of variables, and with `latent_args` as arguments of its own.

        `submodule_searchpath` is for Forgather's import of files. A target may have parameters of these names.
        """
        kwargs = call.kwargs.copy()
        named = () if takes is None else takes
        if "submodule_searchpath" in kwargs and "submodule_searchpath" not in named:
            del kwargs["submodule_searchpath"]
        if "latent_args" in kwargs and "latent_args" not in named:
            latent = kwargs.pop("latent_args")
            latent = self.variable(latent) if isinstance(latent, Var) else latent
            if not isinstance(latent, Mapping):
                raise BadArgument(expected(f"latent_args to be keys and values{at(call.place)}", latent))
            kwargs.update(latent)
        if call.kind != "meta":
            kwargs.update({key: self.variable(item) for key, item in kwargs.items() if isinstance(item, Var)})
        return replace(call, kwargs=kwargs)

    def _check(self, call: Call, takes: _Takes, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Refuse unknown names and too many positional arguments."""
        if takes is None:
            return
        kinds = {parameter.kind for parameter in takes.values()}
        positions = _positions(takes)
        if len(args) > len(positions) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            what = f"at most {len(positions)} positional arguments of {call.title}{at(call.place)}"
            raise BadArgument(expected(what, len(args)))
        known = [name for name, parameter in takes.items() if parameter.kind in _NAMED]
        for key in named:
            where = at(place_in(call, key) or call.place)
            if key in known and key in positions[: len(args)]:
                raise BadArgument(expected(f"each argument of {call.title} once{where}", key))
            if key not in known and inspect.Parameter.VAR_KEYWORD not in kinds:
                hint = did_you_mean(str(key), known) or f"It takes: {', '.join(known) or 'none'}."
                raise BadArgument(expected(f"an argument that {call.title} takes{where}", key, hint))

    def _sections(
        self, call: Call, takes: Mapping[str, inspect.Parameter], args: Sequence[Any], named: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Values of required parameters that the section does not set: `model_cfg` gets the section `model`."""
        positions = _positions(takes)
        given = {*positions[: len(args)], *named}
        found, missing = {}, []
        for name, parameter in takes.items():
            if parameter.default is not parameter.empty or name in given or name not in _names(takes):
                continue
            section = name.removesuffix("_cfg")
            if section != name and self.root is not None and section in self.root and parameter.kind in _NAMED:
                found[name] = self.root[section]
            else:
                missing.append(name)
        if missing:
            sections = [name.removesuffix("_cfg") for name in missing if name.endswith("_cfg")]
            do = f"Add a section {sections[0]!r} to the config, or pass it." if sections else "Add what is missing."
            what = f"all arguments that {call.title} needs{at(call.place)}, also {', '.join(missing)}"
            raise BadArgument(expected(what, sorted(given), do))
        return found


@contextmanager
def _trusting(trust: tuple[str, ...]) -> Iterator[None]:
    token = TRUST.set(trust)
    try:
        yield
    finally:
        TRUST.reset(token)


_Takes = Mapping[str, inspect.Parameter] | None


def signature_of(target: Any) -> _Takes:
    """The parameters of a class or function; `None` if they are unknown, as of some that are written in C."""
    try:
        takes: Mapping[str, inspect.Parameter] = inspect.signature(target).parameters
        inner: Any = getattr(target, "__func__", None)
        if inspect.ismethod(target) and inspect.ismethod(getattr(inner, "__wrapped__", None)):
            # A copied class method, such as AutoModel.from_config: inspect removes the class twice.
            own = inspect.signature(inner, follow_wrapped=False).parameters
            takes = dict(list(own.items())[1:])
        if isinstance(target, type) and target.__new__ is not object.__new__ and not _names(takes):
            # A __new__(*args, **kwargs) hides the signature of __init__.
            begin = inspect.getattr_static(target, "__init__")
            takes = inspect.signature(functools.partial(begin, None)).parameters
        return takes
    except (TypeError, ValueError):
        return None


def _names(takes: Mapping[str, inspect.Parameter]) -> list[str]:
    return [name for name, parameter in takes.items() if parameter.kind in (*_POSITIONAL, *_NAMED)]


def _positions(takes: _Takes) -> list[str]:
    return [name for name, parameter in (takes or {}).items() if parameter.kind in _POSITIONAL]


def _without(takes: _Takes, call: Call, extra: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The call's own arguments without those in `extra`; positional ones after a gap are passed by name."""
    args = list(call.args)
    kwargs = {key: value for key, value in call.kwargs.items() if key not in extra}
    positions = _positions(takes)
    for index, name in enumerate(positions[: len(args)]):
        if name in extra:
            later = zip(positions[index + 1 :], args[index + 1 :], strict=False)
            kwargs = {**{key: value for key, value in later if key not in extra}, **kwargs}
            return args[:index], kwargs
    return args, kwargs

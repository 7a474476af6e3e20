"""Names of tasks, adapters, callbacks, loggers, optimizers and schedulers, with their summaries and fields.

Everything is read from the source of the classes. Importing a task takes seconds, because it imports torch; a list of
tasks, a page of help and the completion of a shell must not.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainformer.core.plugins import load_plugin, plugin_names

CLASSES = ("tasks", "adapters", "callbacks", "loggers")
KINDS = (*CLASSES, "optimizers", "schedulers")

_ROOT = Path(__file__).parents[1]  # of the package `trainformer`
_OPTIMIZERS = "trainformer.backends.torch.optimizer_names"
_SCHEDULES = "trainformer.backends.torch.schedules"
_FORMULAS = "trainformer.backends.schedules"
_SENTENCE_END = re.compile(r"(?<=[.;])\s+(?=[`A-Z])")
_LONGEST = 240  # characters of help for one field


@dataclass(frozen=True)
class Entry:
    """Something that can be named. `module` is where its class is; empty for what an installed plugin registers."""

    kind: str
    name: str
    summary: str
    module: str = ""

    @property
    def target(self) -> str:
        """How a config names it."""
        if self.module:
            return f"trainformer.{self.kind}:{self.name}"
        thing: Any = load_plugin(self.kind, self.name)  # type: ignore[arg-type]
        return f"{thing.__module__}:{thing.__qualname__}"


@dataclass(frozen=True)
class Field:
    """A field or parameter as it is written. `section` is the comment above it and its neighbours."""

    name: str
    annotation: str = ""
    default: str | None = None
    section: str = ""
    about: str = ""


def entries(kind: str) -> list[Entry]:
    """All entries of a kind: the built-in ones, then those of installed plugins."""
    if kind == "schedulers":
        names = _read_table(_SCHEDULES, "SCHEDULES")
        return [Entry(kind, name, _summary_of_function(_FORMULAS, made), _SCHEDULES) for name, made in names.items()]
    found = list(_optimizers()) if kind == "optimizers" else sorted(_classes(kind), key=lambda entry: entry.name)
    plugins = plugin_names(kind) if kind != "adapters" else []  # type: ignore[arg-type]
    return [*found, *(Entry(kind, name, "from an installed plugin") for name in plugins)]


def _classes(kind: str) -> Iterator[Entry]:
    for name, module in _exports(f"trainformer.{kind}").items():
        found = None if module.endswith(".base") else _read_class(_file_of(module), name)
        if found is None:
            continue
        for entry in [f"{name}.{method}" for method in found.factories] or [name]:
            read = _read_class(_file_of(module), entry)
            of_class = f"{found.summary.partition(':')[0]}; " if entry != name else ""
            yield Entry(kind, entry, f"{of_class}{read.summary}" if read else "", module)


def _optimizers() -> Iterator[Entry]:
    for name, written in _read_table(_OPTIMIZERS, "TORCH_OPTIMIZERS").items():
        yield Entry("optimizers", name, written.strip("()").split(",")[0], _OPTIMIZERS)
    for name, written in _read_table(_OPTIMIZERS, "BITSANDBYTES_OPTIMIZERS").items():
        yield Entry("optimizers", name, f"bitsandbytes.optim.{written.split(chr(39))[1]}", _OPTIMIZERS)


def find(kind: str, name: str) -> Entry | None:
    """An entry by its name; also a class of which `entries` has the class methods only (`SSL`)."""
    known = entries(kind)
    found = next((entry for entry in known if entry.name == name), None)
    if found is not None or kind not in CLASSES:
        return found
    method = next((entry for entry in known if entry.name.partition(".")[0] == name), None)
    read = _read_class(_file_of(method.module), name) if method is not None else None
    return None if method is None or read is None else replace(method, name=name, summary=read.summary)


def paper_options(name: str) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Defaults of a self-supervised method where they follow its paper, and the options of other methods.

    >>> options, others = paper_options("SSL.mae")
    >>> options["mask_ratio"], "queue_size" in others
    (0.75, True)
    """
    task, _, method = name.rpartition(".")
    if task != "SSL":
        return {}, frozenset()
    from trainformer.tasks.vision.ssl.options import DEFAULTS

    known = {**DEFAULTS.get(f"{method}_v3", {}), **DEFAULTS.get(method, {})}
    everything = {option for options in DEFAULTS.values() for option in options}
    others = everything - known.keys() | ({"version"} if f"{method}_v3" not in DEFAULTS else set())
    return known, frozenset(others)


def fields_of(entry: Entry) -> dict[str, Field]:
    """What the constructor takes; for a self-supervised method with the defaults of its paper."""
    read = _read_class(_file_of(entry.module), entry.name) if entry.module and entry.kind in CLASSES else None
    if read is None:
        return {}
    paper, of_other_methods = paper_options(entry.name)
    left_out = of_other_methods | ({"method"} if "." in entry.name else set())
    return {
        name: field if paper.get(name) is None else replace(field, default=repr(paper[name]))
        for name, field in read.fields.items()
        if name not in left_out
    }


def trainer_fields() -> list[Field]:
    """The settings of `Trainer`."""
    read = _read_class(_file_of("trainformer.trainer"), "Trainer")
    assert read is not None
    return [field for name, field in read.fields.items() if name != "task"]


def fields_of_class(call: Any) -> dict[str, Field]:
    """What the source says about the parameters of an imported class or class method; empty if there is no source."""
    kind: Any = call.__self__ if inspect.ismethod(call) else call
    try:
        file = inspect.getsourcefile(kind)
        read = _read_class(Path(file), kind.__name__) if file and isinstance(kind, type) else None
    except (OSError, TypeError, SyntaxError):
        read = None
    return read.fields if read else {}


# -- reading source --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Module:
    text: str
    tree: ast.Module
    classes: dict[str, ast.ClassDef]
    imports: dict[str, str]  # modules of ours, by the names imported from them

    @functools.cached_property
    def comments(self) -> tuple[dict[int, str], dict[int, str]]:
        """By line: comments beside code, and comments on a line of their own."""
        beside: dict[int, str] = {}
        alone: dict[int, str] = {}
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                words = token.string.lstrip("#").strip()
                (beside if token.line[: token.start[1]].strip() else alone)[token.start[0]] = words
        return beside, alone


@dataclass(frozen=True)
class _Class:
    """A class, or a class method that builds one."""

    node: ast.ClassDef
    module: _Module
    method: ast.FunctionDef | None = None

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.node if self.method is None else self.method) or ""

    @property
    def summary(self) -> str:
        return _first_sentence(self.doc)

    @property
    def factories(self) -> dict[str, ast.FunctionDef]:
        """Class methods that return an instance."""
        functions = (part for part in self.node.body if isinstance(part, ast.FunctionDef))
        return {part.name: part for part in functions if _is_factory(part, self.node.name)}

    @functools.cached_property
    def fields(self) -> dict[str, Field]:
        """What is passed to build one. Parameters of a class method come before those that it passes on."""
        of_class = dict(_fields(self.module, self.node))
        own = {} if self.method is None else dict(_parameters(self.method, self.doc))
        return {**own, **of_class, **own}


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n")[0].replace("`", "").split())
    sentence = re.split(r"(?<=[^.]\.)\s", paragraph, maxsplit=1)[0]
    return sentence if sentence.endswith("..") else sentence.removesuffix(".")


def _file_of(module: str) -> Path:
    path = _ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _read_module(file: Path) -> _Module:
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    imports = {
        alias.asname or alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("trainformer.")
        for alias in node.names
    }
    return _Module(text, tree, {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}, imports)


def _read_class(file: Path, name: str) -> _Class | None:
    """A class (`SSL`) or one of its class methods (`SSL.dino`); `None` if the file has no such class."""
    kind, _, method = name.partition(".")
    module = _read_module(file)
    if kind not in module.classes:
        return None
    found = _Class(module.classes[kind], module)
    return replace(found, method=found.factories[method]) if method in found.factories else found


def _exports(package: str) -> dict[str, str]:
    """The modules of the names that one of our packages exports lazily."""
    for node in ast.walk(_read_module(_file_of(package)).tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lazy_exports":
            homes: dict[str, list[str]] = ast.literal_eval(node.args[1])
            return {name: module for module, names in homes.items() for name in names}
    return {}


def _is_factory(method: ast.FunctionDef, kind: str) -> bool:
    is_class_method = any(isinstance(mark, ast.Name) and mark.id == "classmethod" for mark in method.decorator_list)
    return is_class_method and isinstance(method.returns, ast.Name) and method.returns.id == kind


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(ast.unparse(mark).split("(")[0].endswith("dataclass") for mark in node.decorator_list)


def _fields(module: _Module, node: ast.ClassDef) -> Iterator[tuple[str, Field]]:
    """Fields of a dataclass, those of its bases first; the parameters of `__init__` of any other class."""
    if not _is_dataclass(node):
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                yield from _parameters(part, ast.get_docstring(node) or "")
        return
    for base in reversed(node.bases):
        found = _find_class(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None and _is_dataclass(found[1]):
            yield from _fields(*found)
    yield from _own_fields(module, node)


def _find_class(module: _Module, name: str) -> tuple[_Module, ast.ClassDef] | None:
    """A class by its name in a module, if it is written there or imported from us."""
    if name not in module.classes and name in module.imports:
        package = module.imports[name]
        module = _read_module(_file_of(_exports(package).get(name, package)))
    return (module, module.classes[name]) if name in module.classes else None


def _own_fields(module: _Module, node: ast.ClassDef) -> Iterator[tuple[str, Field]]:
    beside, headings = module.comments
    doc, section, above = ast.get_docstring(node) or "", "", node.lineno
    for part in node.body:
        first, last = part.lineno, part.end_lineno or part.lineno
        between = (headings[line] for line in range(first - 1, above, -1) if line in headings)
        section, above = next(between, section), last
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        name, annotation = part.target.id, ast.unparse(part.annotation)
        has_no_init = isinstance(part.value, ast.Call) and "init=False" in ast.unparse(part.value)
        if annotation != "KW_ONLY" and not annotation.startswith("ClassVar") and not has_no_init:
            yield name, Field(name, annotation, _default(part.value), section, beside.get(last) or _help(doc, name))


def _default(value: ast.expr | None) -> str | None:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {word.arg: ast.unparse(word.value) for word in value.keywords}
        return given.get("default") or {"dict": "{}", "list": "[]"}.get(given.get("default_factory", ""), "...")
    return None if value is None else ast.unparse(value)


def _parameters(function: ast.FunctionDef, doc: str) -> Iterator[tuple[str, Field]]:
    given = function.args
    positional = [*given.posonlyargs, *given.args][1:]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    defaults = [*missing, *given.defaults, *given.kw_defaults]
    for argument, default in zip([*positional, *given.kwonlyargs], defaults, strict=True):
        annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
        yield argument.arg, Field(argument.arg, annotation, _default(default), about=_help(doc, argument.arg))


def _read_table(module: str, variable: str) -> dict[str, str]:
    """Keys and values of a dictionary at the top of a module, as they are written."""
    for node in _read_module(_file_of(module)).tree.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.value, ast.Dict)
            and ast.unparse(node.target) == variable
        ):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(key): ast.unparse(value) for key, value in pairs if key is not None}
    return {}


def _summary_of_function(module: str, name: str) -> str:
    functions = (node for node in _read_module(_file_of(module)).tree.body if isinstance(node, ast.FunctionDef))
    found = next((node for node in functions if node.name == name), None)
    return "" if found is None else _first_sentence(ast.get_docstring(found) or "")


# -- help ------------------------------------------------------------------------------------------------------------


def _help(doc: str, name: str) -> str:
    """What a docstring says about a field: under `Args:`, or in the sentence that is about it."""
    text = _arguments(doc).get(name) or _sentence_about(doc, name)
    return textwrap.shorten(text.replace("`", ""), _LONGEST, placeholder=" ...")


@functools.cache
def _arguments(doc: str) -> dict[str, str]:
    if "Args:" not in doc:
        return {}
    import docstring_parser as parser

    return {known.arg_name: " ".join((known.description or "").split()) for known in parser.parse(doc).params}


def _sentence_about(doc: str, name: str) -> str:
    """The sentence that begins with the name of a field, or else a short one that mentions it."""
    sentences = [
        " ".join(sentence.split())
        for paragraph in doc.split("\n\n")
        if not paragraph.lstrip().startswith(">>>")
        for sentence in _SENTENCE_END.split(paragraph)
    ]
    mentions = [sentence for sentence in sentences if re.search(rf"`{name}[`=]", sentence)]
    best = next((sentence for sentence in mentions if sentence.startswith(f"`{name}`")), "")
    return (best or next((sentence for sentence in mentions if len(sentence) < _LONGEST), "")).rstrip(";")

"""What the source of a class says of it: its purpose, its fields, and the words beside them. Nothing is imported.

Importing a task takes seconds, for it brings torch; a list of tasks and a page of help must not.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]  # of the package `trainformer`
_SENTENCE_END = re.compile(r"(?<=[.;])\s+(?=[`A-Z])")
_LONGEST = 240  # characters about one field


@dataclass(frozen=True)
class Field:
    """A field or parameter as it is written. `section` is the comment above it and its neighbours."""

    name: str
    annotation: str = ""
    default: str | None = None
    section: str = ""
    about: str = ""


@dataclass(frozen=True)
class Source:
    """A class, or a class method that makes one, as it is written."""

    node: ast.ClassDef
    home: _Module
    method: ast.FunctionDef | None = None

    @property
    def doc(self) -> str:
        """Its docstring."""
        return ast.get_docstring(self.node if self.method is None else self.method) or ""

    @property
    def makers(self) -> dict[str, ast.FunctionDef]:
        """Class methods that make one."""
        functions = (part for part in self.node.body if isinstance(part, ast.FunctionDef))
        return {part.name: part for part in functions if _makes(part, self.node.name)}

    @functools.cached_property
    def fields(self) -> dict[str, Field]:
        """What is passed to make one. What a class method takes itself goes before what it hands on."""
        of_class = dict(_fields(self.home, self.node))
        own = {} if self.method is None else dict(_parameters(self.method, self.doc))
        return {**own, **of_class, **own}

    @property
    def summary(self) -> str:
        """The first sentence about it."""
        return first_sentence(self.doc)


def first_sentence(doc: str) -> str:
    """The first sentence of a docstring, on one line and without its full stop."""
    paragraph = " ".join(doc.split("\n\n")[0].replace("`", "").split())
    sentence = re.split(r"(?<=[^.]\.)\s", paragraph, maxsplit=1)[0]
    return sentence if sentence.endswith("..") else sentence.removesuffix(".")


def file_of(module: str) -> Path:
    """The file of one of our modules."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exports_of(package: str) -> dict[str, str]:
    """The names that a lazy package of ours offers, and the modules that they are in."""
    for node in ast.walk(_module(file_of(package)).tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lazy_exports":
            homes: dict[str, list[str]] = ast.literal_eval(node.args[1])
            return {name: module for module, names in homes.items() for name in names}
    return {}


def read(module: str, name: str) -> Source | None:
    """A class of ours (`SSL`) or one of its class methods (`SSL.dino`); `None` if there is no such class."""
    return read_file(file_of(module), name)


def read_file(file: Path, name: str) -> Source | None:
    """The same of a class in any file."""
    kind, _, method = name.partition(".")
    module = _module(file)
    if kind not in module.classes:
        return None
    found = Source(module.classes[kind], module)
    return Source(found.node, module, found.makers[method]) if method in found.makers else found


# -- from text to nodes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Module:
    text: str
    tree: ast.Module
    classes: dict[str, ast.ClassDef]
    imports: dict[str, str]  # names that stand for something of another module of ours

    @functools.cached_property
    def comments(self) -> tuple[dict[int, str], dict[int, str]]:
        """By line: comments beside code, and those that have a line for themselves."""
        beside: dict[int, str] = {}
        alone: dict[int, str] = {}
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                words = token.string.lstrip("#").strip()
                (beside if token.line[: token.start[1]].strip() else alone)[token.start[0]] = words
        return beside, alone


@functools.cache
def _module(file: Path) -> _Module:
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    imports = {
        alias.asname or alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainformer.") and node.module
        for alias in node.names
    }
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return _Module(text, tree, classes, imports)


def _makes(method: ast.FunctionDef, kind: str) -> bool:
    is_class_method = any(isinstance(mark, ast.Name) and mark.id == "classmethod" for mark in method.decorator_list)
    return is_class_method and isinstance(method.returns, ast.Name) and method.returns.id == kind


def _fields(module: _Module, node: ast.ClassDef) -> Iterator[tuple[str, Field]]:
    """Those of the bases first, as dataclasses have them; of other classes the parameters of `__init__`."""
    if not _is_dataclass(node):
        begins = (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
        for begin in begins:
            yield from _parameters(begin, ast.get_docstring(node) or "")
        return
    for base in reversed(node.bases):
        found = _find(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None and _is_dataclass(found[1]):
            yield from _fields(*found)
    yield from _own_fields(module, node)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(ast.unparse(mark).split("(")[0].endswith("dataclass") for mark in node.decorator_list)


def _find(module: _Module, name: str) -> tuple[_Module, ast.ClassDef] | None:
    """A class that a module knows by a name, if it is its own or one of ours."""
    if name in module.classes:
        return module, module.classes[name]
    if name not in module.imports:
        return None
    package = module.imports[name]
    home = _module(file_of(exports_of(package).get(name, package)))
    return (home, home.classes[name]) if name in home.classes else None


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
        if annotation == "KW_ONLY" or annotation.startswith("ClassVar") or _is_no_parameter(part.value):
            continue
        about = beside.get(last) or _said(doc, name)
        yield name, Field(name, annotation, _default(part.value), section, about)


def _is_no_parameter(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and any(
        word.arg == "init" and ast.unparse(word.value) == "False" for word in value.keywords
    )


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
        yield argument.arg, Field(argument.arg, annotation, _default(default), about=_said(doc, argument.arg))


# -- words about fields ----------------------------------------------------------------------------------------------


def _said(doc: str, name: str) -> str:
    """What a docstring says of a field: among the `Args`, or in the first sentence that names it."""
    words = _arguments(doc).get(name) or _mentioned(doc, name)
    return textwrap.shorten(words.replace("`", ""), _LONGEST, placeholder=" ...")


@functools.cache
def _arguments(doc: str) -> dict[str, str]:
    """What the section `Args` of a docstring says."""
    if "Args:" not in doc:
        return {}
    import docstring_parser as parser

    return {known.arg_name: " ".join((known.description or "").split()) for known in parser.parse(doc).params}


def _mentioned(doc: str, name: str) -> str:
    """The sentence that is about a field: one that begins with it, or else one that names it."""
    sentences = [
        " ".join(sentence.split())
        for paragraph in doc.split("\n\n")
        if not paragraph.lstrip().startswith(">>>")
        for sentence in _SENTENCE_END.split(paragraph)
    ]
    named = [sentence for sentence in sentences if re.search(rf"`{name}[`=]", sentence)]
    best = next((sentence for sentence in named if sentence.startswith(f"`{name}`")), "")
    # One that is long and begins with something else is hardly about this.
    return (best or next((sentence for sentence in named if len(sentence) < _LONGEST), "")).rstrip(";")


# -- tables ----------------------------------------------------------------------------------------------------------


def read_table(module: str, variable: str) -> dict[str, str]:
    """Keys of a dictionary that a module of ours has at its top, and their values as they are written."""
    for node in _module(file_of(module)).tree.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.value, ast.Dict)
            and ast.unparse(node.target) == variable
        ):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(key): ast.unparse(value) for key, value in pairs if key is not None}
    return {}


def summary_of_function(module: str, name: str) -> str:
    """The first sentence about a function of a module of ours."""
    functions = (node for node in _module(file_of(module)).tree.body if isinstance(node, ast.FunctionDef))
    found = next((node for node in functions if node.name == name), None)
    return "" if found is None else first_sentence(ast.get_docstring(found) or "")

"""Code of the working directory: where it lies, and whether its user approved it.

A config imports such code only if the user named it or approved it before, never because of where it lies. Approvals
are kept outside of the project, with the digest of the code: changed code has to be approved again. Code in the folders
of runs, sweeps, checkpoints and data is never imported.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import stat
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, all_suffixes
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

from trainformer.config.loading import checked_trust
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.utils.files import write_atomically

logger = logging.getLogger("trainformer")

SETTINGS = "pyproject.toml"
VARIABLE = "TRAINFORMER_TRUST"
_DEFAULT_FOLDERS = ("runs", "sweeps")
_RUN_FILES = (
    "recipe.yaml",
    "status.json",
    "metrics.jsonl",
    "records.jsonl",
    "sweep.json",
    "trainer_state.json",
)

#: Asks the user whether code may be imported. The command line sets it; without it nobody is asked, nothing remembered.
ASK: ContextVar[Callable[[Code], bool] | None] = ContextVar("ASK", default=None)

_approved_here: set[tuple[str, str]] = set()  # in this process: what was imported is not asked again when it changes


@dataclass(frozen=True)
class Code:
    """A top-level module or package, found without importing it."""

    name: str
    files: tuple[Path, ...]  # its file, or the folders of a package without one
    folder: Path  # the working directory
    is_on_path: bool = True

    @property
    def is_local(self) -> bool:
        """Whether it lies below the working directory, and is not installed there."""
        return bool(self.files) and all(_is_below(file, self.folder) for file in self.files)

    @property
    def shadows(self) -> bool:
        """Whether it lies directly in the working directory, where no package is installed."""
        return self.is_local and any(self.folder in (file.parent, file.parent.parent) for file in self.files)

    @property
    def digest(self) -> str:
        """SHA-256 of everything that can be imported as part of it."""
        total = hashlib.sha256(self.name.encode())
        for file in sorted(set(self._sources())):
            content = file.read_bytes()
            total.update(f"\0{os.path.relpath(file, self.folder)}\0{len(content)}\0".encode())
            total.update(content)
        return total.hexdigest()

    def _sources(self) -> Iterator[Path]:
        for file in self.files:
            if file.is_dir():
                yield from _modules_in(file)
            elif file.stem == "__init__":
                yield from _modules_in(file.parent)
            else:
                yield file

    def approved_names(self) -> list[str]:
        """Modules of it that the user approved before, as they are now."""
        names = [name for folder, name in _approved_here if folder == str(self.folder)]
        stored = _read_approvals().get(str(self.folder), {})
        mine = {name: digest for name, digest in stored.items() if name.partition(".")[0] == self.name}
        if mine:
            now = self.digest
            names += [name for name, digest in mine.items() if digest == now]
        return names

    def approve(self, name: str) -> None:
        """Remember that the user approved a module of it, or all of it."""
        key = (str(self.folder), name)
        if key in _approved_here:
            return
        _approved_here.add(key)
        if os.environ.get("RANK", "0") != "0":
            return
        approvals = _read_approvals()
        approvals[key[0]] = {**approvals.get(key[0], {}), name: self.digest}
        file = approvals_file()
        try:
            write_atomically(file, json.dumps({"approved": approvals}, indent=2).encode())
            file.chmod(0o600)
        except OSError as error:
            logger.warning("the approval of %s could not be remembered in %s: %s", name, file, error)

    def make_importable(self) -> None:
        """Let Python import it from its sources.

        The working directory comes last on the module search path, where it cannot shadow any package.
        """
        _FromSource.install(self.name)
        if not self.is_on_path and str(self.folder) not in sys.path:
            sys.path.append(str(self.folder))
            importlib.invalidate_caches()


class _SourceLoader(SourceFileLoader):
    """Compiles the source. Python would prefer a matching file in `__pycache__`, which nobody approved."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _FromSource(MetaPathFinder):
    """Imports approved packages with `_SourceLoader`."""

    names: ClassVar[set[str]] = set()

    @classmethod
    def install(cls, name: str) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())
        cls.names.add(name)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _SourceLoader(spec.loader.name, spec.loader.path)
            spec.cached = None
        return spec


def find_code(name: str) -> Code | None:
    """A top-level module or package on the module search path, else in the working directory."""
    folder = Path.cwd()
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # created by hand, or the program itself
        return Code(name, (), folder)
    if spec is not None:
        return Code(name, files_of(spec), folder)
    importlib.invalidate_caches()  # a file that was written a moment ago
    spec = PathFinder.find_spec(name, [str(folder)])
    return None if spec is None else Code(name, files_of(spec), folder, is_on_path=False)


def files_of(spec: ModuleSpec) -> tuple[Path, ...]:
    """The file of a module, or the folders of a namespace package; none of what is built into Python."""
    if spec.name in sys.stdlib_module_names:  # in / the standard library is below the working directory
        return ()
    files = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    return tuple(Path(os.path.abspath(file)) for file in files)


def _is_below(file: Path, folder: Path) -> bool:
    file, folder = file.resolve(), folder.resolve()
    if not file.is_relative_to(folder) or {"site-packages", "dist-packages"} & set(file.parts):
        return False
    between = [parent for parent in file.parents if parent.is_relative_to(folder)]
    return not any((parent / "pyvenv.cfg").exists() for parent in between)


def _modules_in(folder: Path, seen: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Every file in a package that can be imported; not those in closed folders, which cannot."""
    real = folder.resolve()
    if real in seen or closed_folder([folder]) is not None:
        return
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name.isidentifier() and entry.name != "__pycache__":
                yield from _modules_in(entry, seen | {real})
        elif entry.name.endswith(tuple(all_suffixes())) and entry.is_file():
            yield entry


# -- folders of which nothing is imported ----------------------------------------------------------------------------


def closed_folder(files: Iterable[Path], data: Collection[Path] = ()) -> tuple[Path, str] | None:
    """The folder of a run, sweep, checkpoint or data that one of the files lies in, and how it is recognised.

    Links count both where they are and where they lead.
    """
    here = Path.cwd()
    for file in files:
        if {"site-packages", "dist-packages"} & set(file.parts):  # an installed package may have files of any name
            continue
        for path in dict.fromkeys((Path(os.path.abspath(file)), file.resolve())):
            for folder in (path, *path.parents):
                reason = _why_closed(folder, here, data)
                if reason is not None:
                    return folder, reason
    return None


def _why_closed(folder: Path, here: Path, data: Collection[Path]) -> str | None:
    if folder in data:
        return "the config takes data from it or writes to it"
    if folder.is_relative_to(here) or folder.is_relative_to(here.resolve()):
        if folder.name.casefold() in _DEFAULT_FOLDERS and folder.parent in (here, here.resolve()):
            return "runs and sweeps are written there"
        found = next((name for name in _RUN_FILES if (folder / name).is_file()), None)
        if found is None and any(folder.glob("checkpoints/step_*")):
            found = "checkpoints/"
        if found is None and folder.name.startswith("step_") and (folder / "manifest.json").is_file():
            found = "the manifest of a checkpoint"
        return None if found is None else f"it has {found}"
    # Above the working directory, one file by a common name is not enough.
    if (folder / "status.json").is_file() and (folder / "recipe.yaml").is_file():
        return "it has status.json and recipe.yaml of a run"
    return "it has sweep.json" if (folder / "sweep.json").is_file() else None


# -- what the user has named -----------------------------------------------------------------------------------------


def standing_trust() -> tuple[str, ...]:
    """What the user trusts always: named in `TRAINFORMER_TRUST`, or in `pyproject.toml` of the working directory."""
    named = os.environ.get(VARIABLE, "").replace(",", " ").split()
    return (*checked_trust(named), *_project_trust())


def _project_trust() -> tuple[str, ...]:
    """`trust` in the section `[tool.trainformer]` of the project. Parent folders are not searched."""
    file = Path.cwd() / SETTINGS
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise BadArgument(expected("settings that can be read", str(file), f"The error: {error}.")) from error
    section = content.get("tool", {}).get("trainformer", {})
    if not isinstance(section, dict) or set(section) - {"trust"}:
        unknown = next(iter(set(section) - {"trust"})) if isinstance(section, dict) else section
        hint = did_you_mean(str(unknown), ["trust"]) or 'It has only: trust = ["my_project"].'
        raise BadArgument(expected(f"a setting of [tool.trainformer] in {file}", unknown, hint))
    names = checked_trust(section.get("trust", ()))
    closed = closed_folder([file]) if names else None
    if closed is not None:
        logger.warning("%s is not used: %s is no project, because %s", file, *closed)
        return ()
    return names


def approvals_file() -> Path:
    """Where approvals are kept: in the user's folder for settings."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".config"
    return base / "trainformer" / "trust.json"


def _read_approvals() -> dict[str, dict[str, str]]:
    """Digests by folder and module. A file that is damaged, or that others may write, counts as empty."""
    file = approvals_file()
    try:
        state = file.stat()
        if os.name == "posix" and (state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise ValueError("other users may write it")
        content: Any = json.loads(file.read_bytes())
        approvals = content["approved"]
        if not all(isinstance(digest, str) for names in approvals.values() for digest in names.values()):
            raise ValueError("it has something else than digests")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning(
            "%s cannot be used (%s: %s): what was approved before has to be approved again",
            file,
            type(error).__name__,
            error,
        )
        return {}
    return approvals

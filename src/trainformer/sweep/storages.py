"""Where the trials of a sweep are stored: an SQLite file in its folder, another database, a journal file, redis."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.storages import BaseStorage, RDBStorage, journal

from trainformer.core.errors import BadArgument, expected
from trainformer.core.secrets import find_mask, mask

_DATABASE = "study.db"
_JOURNAL_SUFFIXES = (".log", ".journal", ".jsonl")

#: An SQLite file in the folder of the sweep, a URL, a journal file, or an Optuna storage.
Storage = str | Path | BaseStorage | None


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silences Optuna's line per trial, and its warnings about experimental features that are used on purpose."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="optuna")
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def reading(storage: Storage, spec: Mapping[str, Any], folder: Path) -> Iterator[BaseStorage]:
    """The storage of a sweep, to read from.

    Without `storage`, only a file in the folder is opened, whatever `sweep.json` says: the folder may come from
    somebody else. A database is opened read-only.
    """
    if storage is not None:
        yield open_storage(storage, folder)
        return
    path = _path_inside(spec.get("storage"), folder)
    if path.suffix in _JOURNAL_SUFFIXES:
        yield open_storage(path, folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        opened = _open_read_only(path, Path(scratch))
        try:
            yield opened
        finally:
            opened.engine.dispose()


def _path_inside(stored: Any, folder: Path) -> Path:
    """The file in the folder of a sweep that has its trials."""
    text = _DATABASE if stored is None else str(stored).removeprefix("sqlite:///")
    path = folder / text  # an absolute path stays as it is
    if "://" not in text and path.resolve().is_relative_to(folder.resolve()) and path.is_file():
        return path
    if stored is None and not path.exists():
        raise BadArgument(expected(f"a sweep with its {_DATABASE}", str(folder), "There is none."))
    do = (
        "Only files in the folder are opened, because a folder may come from somebody else. If this storage is yours, "
        "name it: --storage URL, or storage=..., with its password."
    )
    raise BadArgument(expected(f"a sweep whose trials are in {folder}", redact(text) if stored else str(path), do))


def _open_read_only(path: Path, scratch: Path) -> RDBStorage:
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        return _open_database(f"sqlite:///{path}", creator=lambda: sqlite3.connect(address, timeout=60, uri=True))
    except BadArgument as error:
        journal_file = path.with_name(f"{path.name}-journal")
        if not journal_file.is_file():
            raise
        # A killed process left half a transaction, which can only be rolled back by writing: in a copy.
        for file in (path, journal_file):
            shutil.copyfile(file, scratch / file.name)
        try:
            return _open_database(f"sqlite:///{scratch / path.name}")
        except BadArgument:
            raise error from None


class _RedisJournal(journal.JournalRedisBackend):
    """Replays the log. Optuna's snapshots are pickles, which execute code when they are read."""

    def load_snapshot(self) -> bytes | None:
        return None

    def save_snapshot(self, snapshot: bytes) -> None: ...


def open_storage(storage: Storage, folder: Path) -> BaseStorage:
    """Open the storage of a sweep, or create it."""
    if storage is None:
        _check_own_database(folder)
        return _open_database(f"sqlite:///{(folder / _DATABASE).absolute()}")
    if isinstance(storage, BaseStorage):
        return storage
    if not isinstance(storage, str | Path):
        raise BadArgument(expected("storage to be a URL, a path, or an Optuna storage", storage))
    text = str(storage)
    if find_mask(text) is not None:
        do = "Its password is not kept in files: pass storage=... (--storage), for instance from the environment."
        raise BadArgument(expected("the storage of the sweep with its password", text, do))
    if text.startswith("redis") and "://" in text:
        return optuna.storages.JournalStorage(_RedisJournal(text))
    if "://" in text:
        return _open_database(text)
    path = Path(text)
    if path.suffix not in _JOURNAL_SUFFIXES:
        suffixes = " or ".join(_JOURNAL_SUFFIXES)
        do = f"A database is given by a URL such as sqlite:///{text}; a journal file ends in {suffixes}."
        raise BadArgument(expected("storage to be the URL of a database or the path of a journal file", text, do))
    path.parent.mkdir(parents=True, exist_ok=True)
    return optuna.storages.JournalStorage(journal.JournalFileBackend(str(path)))


def check_same_storage(storage: Storage, stored: Any, folder: Path) -> None:
    """A sweep with a storage of its own is resumed with it: not in a new one, and not where only its file says."""
    if storage is None and stored is not None:
        do = "Name it again if it is yours: --storage URL, or storage=..., with its password."
        raise BadArgument(expected(f"the storage that {folder} was started with ({redact(str(stored))})", None, do))


def _check_own_database(folder: Path) -> None:
    """Refuse a link to a file elsewhere: what a sweep writes belongs in its folder."""
    path = folder / _DATABASE
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        do = "Name the storage if it is yours: --storage URL, or storage=..."
        raise BadArgument(expected(f"{_DATABASE} to lie in {folder}", f"a link to {path.resolve()}", do))


def _open_database(url: str, **options: Any) -> RDBStorage:
    if url.startswith("sqlite"):  # it allows one writer at a time: wait for it instead of failing at once
        options = {"connect_args": {"timeout": 60}, **options}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=options)
    except ImportError as error:
        do = f"Its driver is missing ({error}): pip install psycopg2-binary for PostgreSQL, pymysql for MySQL."
        raise BadArgument(expected("a storage that can be opened", redact(url), do)) from error
    except Exception as error:  # from SQLAlchemy, the driver, or Optuna
        do = f"The error: {str(error).splitlines()[0]}." if str(error) else type(error).__name__
        raise BadArgument(expected("a storage that can be opened", redact(url), do)) from error


@contextmanager
def sqlite_lock(storage: Storage, folder: Path) -> Iterator[None]:
    """One process of this machine at a time: on SQLite, Optuna lets two create the tables or take the same trial."""
    text = f"sqlite:///{folder / _DATABASE}" if storage is None else str(storage)
    path = Path(text.partition("sqlite:///")[2].partition("?")[0])
    try:
        import fcntl
    except ModuleNotFoundError:  # not on Windows: there a sweep may be run by one process at a time
        path = Path()
    if not path.name or not path.parent.is_dir():
        yield
        return
    with path.with_name(f"{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def redact(storage: Storage) -> str | None:
    """A storage as it is written to files: without its password.

    >>> redact("postgresql://me:p@ss@host/db?sslkey=a&password=b")
    'postgresql://me:***masked***@host/db?sslkey=a&password=***masked***'
    """
    if storage is None:
        return None
    if not isinstance(storage, str | Path):
        return type(storage).__name__
    text = str(storage)
    return mask(text) if "://" in text else str(Path(text).absolute())

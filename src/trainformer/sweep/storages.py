"""Where a study is kept: an SQLite file in the folder of the sweep, or any storage of Optuna."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import journal

from trainformer.core.errors import BadArgument, expected

DATABASE = "study.db"
_JOURNALS = (".log", ".journal", ".jsonl")
_PASSWORD = re.compile(r"(://[^:/@]*):[^@]*@")


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna tells of every trial, and warns of what is used on purpose; we tell of trials ourselves."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="optuna")
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def open_storage(storage: Any, folder: Path, make: bool = True) -> Any:
    """The storage of a sweep: None is a file in its folder; else an URL, the path of a journal file, or a storage."""
    if storage is None:
        if not make and not (folder / DATABASE).exists():
            raise BadArgument(expected(f"a sweep with its {DATABASE}", str(folder), "There is none."))
        return _database(f"sqlite:///{(folder / DATABASE).absolute()}")
    if isinstance(storage, optuna.storages.BaseStorage):
        return storage
    if not isinstance(storage, str | Path):
        raise BadArgument(expected("storage to be an URL, a path, or a storage of Optuna", storage))
    text = str(storage)
    if "://" in text:
        if text.startswith("redis"):
            return optuna.storages.JournalStorage(journal.JournalRedisBackend(text))
        return _database(text)
    path = Path(text)
    if path.suffix not in _JOURNALS:
        do = f"An URL such as sqlite:///{text} names a database; a journal's name ends in {' or '.join(_JOURNALS)}."
        raise BadArgument(expected("storage to be the URL of a database or the path of a journal file", text, do))
    path.parent.mkdir(parents=True, exist_ok=True)
    return optuna.storages.JournalStorage(journal.JournalFileBackend(str(path)))


@contextmanager
def alone(storage: Any, folder: Path) -> Iterator[None]:
    """One process of this machine at a time: with SQLite, Optuna lets two make the tables, or take the same trial."""
    text = f"sqlite:///{folder / DATABASE}" if storage is None else str(storage)
    path = Path(text.partition("sqlite:///")[2].partition("?")[0])
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows has none: there one process at a time works on a sweep
        path = Path()
    if not path.name or not path.parent.is_dir():
        yield
        return
    with path.with_name(f"{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _database(url: str) -> Any:
    """SQLite lets one write at a time: others wait, instead of failing at once."""
    waiting = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=waiting)
    except ImportError as error:
        do = f"Its driver is missing ({error}): pip install psycopg2-binary for PostgreSQL, pymysql for MySQL."
        raise BadArgument(expected("a storage that can be opened", shown(url), do)) from error
    except Exception as error:  # of SQLAlchemy, of the driver, of Optuna
        do = f"It says: {str(error).splitlines()[0]}." if str(error) else type(error).__name__
        raise BadArgument(expected("a storage that can be opened", shown(url), do)) from error


def shown(storage: Any) -> str | None:
    """A storage as it is written into files: without a password.

    >>> shown("postgresql://me:secret@host/db")
    'postgresql://me:***@host/db'
    """
    if storage is None:
        return None
    if not isinstance(storage, str | Path):
        return type(storage).__name__
    text = str(storage)
    return _PASSWORD.sub(r"\1:***@", text) if "://" in text else str(Path(text).absolute())

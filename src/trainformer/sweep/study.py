"""The Optuna study of a sweep: sampler, pruner and storage, and which trials to run, retry and record.

Owns everything written to Optuna's storage. All counts are derived from what is stored, so several processes and
machines can work on one study, and any of them can be killed. Optuna's own heartbeat and retry callback are not used:
they need `study.optimize` and a relational database, and notice a killed process only after a grace period.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, RDBStorage, journal
from optuna.trial import FrozenTrial, TrialState

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.secrets import find_mask, mask
from trainformer.sweep.reading import ACTIVE_CALLS, SPEC, is_stale, read_spec, trial_numbers
from trainformer.sweep.spaces import PLAIN, Space, combinations, describe_spaces, format_value, suggest
from trainformer.sweep.trials import Outcome
from trainformer.utils.files import write_atomically
from trainformer.utils.processes import process_identity

MAX_ATTEMPTS = 2
METHODS = ("grid", "random", "bayes", "hyperband")
DIRECTIONS = ("maximize", "minimize")
_PRUNERS: dict[str, Callable[[], BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
_DATABASE = "study.db"
_JOURNAL_SUFFIXES = (".log", ".journal", ".jsonl")

#: An SQLite file in the folder of the sweep, a URL, a journal file, or an Optuna storage.
Storage = str | Path | BaseStorage | None


@dataclass(frozen=True)
class SweepSpec:
    """What a sweep searches, and how. It must not change when the sweep resumes."""

    name: str
    method: str
    seed: int
    direction: str
    spaces: dict[str, str]  # as text, constants included
    constants: dict[str, Any]

    @classmethod
    def create(cls, name: str, method: str, seed: int, direction: str, spaces: Mapping[str, Any]) -> SweepSpec:
        """Constants that JSON cannot represent are kept as text, and secrets are masked."""
        _refuse_secrets(spaces)
        constants = {key: value for key, value in spaces.items() if not isinstance(value, Space)}
        kept = {key: value if isinstance(value, PLAIN) else format_value(value) for key, value in constants.items()}
        described = {key: mask(text, key) for key, text in describe_spaces(spaces).items()}
        return cls(name, method, seed, direction, described, mask(kept))

    def check_same(self, stored: Mapping[str, Any]) -> None:
        """Refuse to resume a sweep that was started with a different spec."""
        changed = [
            f"{key} was {stored.get(key)!r} and is now {getattr(self, key)!r}"
            for key in ("name", "method", "seed", "direction")
            if stored.get(key) != getattr(self, key)
        ]
        before = dict(stored.get("spaces", {}))
        for key in sorted(before.keys() | self.spaces.keys()):
            if before.get(key) != self.spaces.get(key):
                was, now = before.get(key, "not there"), self.spaces.get(key, "not there")
                changed.append(f"{key} was {was} and is now {now}")
        if changed:
            raise BadArgument(
                f"Expected the sweep {stored['name']!r} to resume with its original settings, received different ones: "
                f"{'; '.join(changed)}. Choose another name, or start over with resume=False (--no-resume)."
            )


def _refuse_secrets(spaces: Mapping[str, Any]) -> None:
    """Refuse to search among secrets: Optuna stores every value that it chooses."""
    for name, space in spaces.items():
        values = getattr(space, "values", None)
        if isinstance(space, Space) and values is not None and mask(values, name) != values:
            do = "Search among names, and let the function read the secrets from the environment."
            raise BadArgument(
                expected(f"{name} to be no secret, as the storage keeps what is searched", str(space), do)
            )


@dataclass
class Job:
    """One running attempt at a trial."""

    number: int
    attempt: int
    config: dict[str, Any]
    folder: Path
    trial: optuna.Trial
    pruned: bool = False
    last_value: float | None = None
    started: float = field(default_factory=time.monotonic)


class SweepStudy:
    """The Optuna study of one sweep."""

    def __init__(self, spec: SweepSpec, spaces: Mapping[str, Any], folder: Path, storage: Storage = None) -> None:
        self.spec = spec
        self.folder = folder
        self.is_shared = storage is not None
        self._spaces = spaces
        self._sampled = {name for name, space in spaces.items() if isinstance(space, Space)}
        self._lock = functools.partial(_sqlite_lock, storage, folder)
        process = os.getpid()
        identity = process_identity(process)
        self._call = str(uuid4())
        self._owner = {"host": socket.gethostname(), "process": process, "identity": identity, "call": self._call}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / SPEC).exists():
            stored_spec = read_spec(folder)
            spec.check_same(stored_spec)
            _check_same_storage(storage, stored_spec.get("storage"), folder)
        with quiet_optuna(), self._lock():
            self._storage = open_storage(storage, folder)
            direction = optuna.study.StudyDirection[spec.direction.upper()]
            self._study = optuna.create_study(
                study_name=spec.name, storage=self._storage, direction=direction, load_if_exists=True
            )
        if (stored := self._study.user_attrs.get("sweep")) is not None:  # other processes may use other folders
            spec.check_same(stored)
        else:
            self._study.set_user_attr("sweep", vars(spec))
        self._write_spec(redact(storage))

    def _write_spec(self, storage: str | None) -> None:
        from trainformer import __version__

        if not (self.folder / SPEC).exists():
            versions = {"trainformer": __version__, "optuna": optuna.__version__}
            content = {**vars(self.spec), "storage": storage, "versions": versions, "time": time.time()}
            write_atomically(self.folder / SPEC, json.dumps(content, indent=2).encode())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Marks this call as running. Trials that it leaves unfinished count as stale afterwards."""
        ACTIVE_CALLS.add(self._call)
        try:
            yield
        finally:
            ACTIVE_CALLS.discard(self._call)

    def configure(self, sampler: BaseSampler | None = None, pruner: str | BasePruner | None = None) -> None:
        """Set the sampler and the pruner."""
        spec = self.spec
        self._study.sampler = make_sampler(spec.method, spec.seed, self._spaces, sampler, self._number_of)
        self._study.pruner = make_pruner(spec.method, pruner)

    def trials(self) -> list[FrozenTrial]:
        """Everything that is stored, retries included."""
        return self._study.get_trials(deepcopy=False)

    def _number_of(self, optuna_number: int) -> int:
        return trial_numbers(self.trials())[optuna_number]

    # -- starting trials -------------------------------------------------------------------------------------

    def next_job(self, n_trials: int) -> Job | None:
        """The next trial to run; None if all are done or running."""
        with self._lock():
            trial = self._ask(n_trials)
        if trial is None:
            return None
        number = self._number_of(trial.number)
        with quiet_optuna():
            config = suggest(trial, self._spaces)
        return Job(number, trial.user_attrs.get("attempt", 1), config, self.folder / "trials" / f"{number:04d}", trial)

    def _ask(self, n_trials: int) -> optuna.Trial | None:
        self._requeue_stale()
        stored = self.trials()
        if not any(trial.state is TrialState.WAITING for trial in stored):
            if len(set(trial_numbers(stored).values())) >= n_trials:
                return None
            # Enqueued with its owner first: a process killed between the two calls leaves no trial without one.
            self._study.enqueue_trial({}, user_attrs={"owner": self._owner, "heartbeat": time.time()})
        with quiet_optuna():
            trial = self._study.ask()
            is_new = "retry_of" not in trial.user_attrs
            if is_new and self._number_of(trial.number) >= n_trials:  # another process took the last one
                trial.set_user_attr("surplus", True)
                self._study.tell(trial, state=TrialState.FAIL)
                return None
        if trial.user_attrs.get("owner") != self._owner:  # enqueued by another process
            trial.set_user_attr("owner", self._owner)
        return trial

    def _requeue_stale(self) -> None:
        for trial in self.trials():
            if trial.state is TrialState.RUNNING and is_stale(trial):
                try:
                    self._fail(trial, "the process of the sweep died", counts=True)
                except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
                    pass  # another process has just done the same

    def _fail(self, trial: optuna.Trial | FrozenTrial, reason: str, counts: bool) -> bool:
        """Fail an attempt and enqueue a retry if one is allowed; whether there is one.

        `counts` says whether the attempt counts towards `MAX_ATTEMPTS`.
        """
        attempt = trial.user_attrs.get("attempt", 1)
        retry = not counts or attempt < MAX_ATTEMPTS
        if retry and not any(other.user_attrs.get("retry_of") == trial.number for other in self.trials()):
            # Killed halfway through sampling: sample all parameters again, for the same values as without the kill.
            params = trial.params if self._sampled <= trial.params.keys() else {}
            attributes = {
                "owner": self._owner,
                "heartbeat": time.time(),
                "retry_of": trial.number,
                "attempt": attempt + counts,
            }
            self._study.enqueue_trial(params, user_attrs=attributes)
        self._storage.set_trial_user_attr(trial._trial_id, "error", reason)
        with quiet_optuna():
            self._study.tell(trial.number, state=TrialState.FAIL)
        return retry

    # -- recording trials ------------------------------------------------------------------------------------

    def report(self, job: Job, step: int, value: float) -> bool:
        """Record an intermediate value; whether the trial should be pruned."""
        job.last_value = value
        with quiet_optuna():
            job.trial.report(value, step)
            job.pruned = job.pruned or job.trial.should_prune()
        return job.pruned

    def record_run(self, job: Job, run: str) -> None:
        """Record the run folder of a trial, relative to the folder of the sweep."""
        path = Path(run).absolute()
        inside = path.is_relative_to(self.folder.absolute())
        job.trial.set_user_attr("run", str(path.relative_to(self.folder.absolute()) if inside else path))

    def heartbeat(self, job: Job) -> None:
        """Tell processes on other machines that this one is alive."""
        job.trial.set_user_attr("heartbeat", time.time())

    def finish(self, job: Job, outcome: Outcome) -> bool:
        """Record how a trial ended; whether it will be retried."""
        if outcome.seconds is not None:
            job.trial.set_user_attr("seconds", outcome.seconds)
        if outcome.status == "lost":
            return self._fail(job.trial, outcome.error or "lost", counts=True)
        with quiet_optuna():
            if outcome.status == "failed":
                job.trial.set_user_attr("error", outcome.error)
                self._study.tell(job.trial, state=TrialState.FAIL)
            elif outcome.status == "pruned" or job.pruned:
                self._study.tell(job.trial, state=TrialState.PRUNED)  # its value is the last one reported
            else:
                self._study.tell(job.trial, outcome.value)
        return False

    def requeue(self, job: Job) -> None:
        """Enqueue an interrupted trial again. Interruptions do not count as attempts."""
        self._fail(job.trial, "interrupted", counts=False)


# -- samplers and pruners ------------------------------------------------------------------------------------


def check_method(method: str, direction: str) -> None:
    """Refuse unknown methods and directions."""
    for what, value, known in (("method", method, METHODS), ("direction", direction, DIRECTIONS)):
        if value not in known:
            hint = did_you_mean(str(value), known)
            raise BadArgument(expected(f"{what} to be one of {', '.join(known)}", value, hint))


def total_trials(method: str, n_trials: int | None, spaces: Mapping[str, Any]) -> int:
    """The number of trials of the whole sweep: `n_trials` (default 10), but at most the points of a grid."""
    if n_trials is not None and (not isinstance(n_trials, int) or isinstance(n_trials, bool) or n_trials < 1):
        raise BadArgument(expected("n_trials to be an integer of at least 1", n_trials))
    if method != "grid":
        return n_trials or 10
    points = combinations(spaces)
    if points == [{}]:
        raise BadArgument("Expected a grid sweep to have a grid() or choice(), received none. Use method='random'.")
    return min(len(points), n_trials or len(points))


def make_pruner(method: str, pruner: str | BasePruner | None) -> BasePruner:
    """The pruner with this name, or the given one. The default is none, and Hyperband for method="hyperband"."""
    if pruner is None:
        pruner = "hyperband" if method == "hyperband" else "none"
    if isinstance(pruner, str):
        if pruner not in _PRUNERS:
            hint = did_you_mean(pruner, _PRUNERS)
            raise BadArgument(expected(f"pruner to be one of {', '.join(_PRUNERS)}, or an Optuna pruner", pruner, hint))
        return _PRUNERS[pruner]()
    if not isinstance(pruner, BasePruner):
        raise BadArgument(expected("an Optuna pruner", pruner, "See optuna.pruners."))
    return pruner


def make_sampler(
    method: str,
    seed: int,
    spaces: Mapping[str, Any],
    sampler: BaseSampler | None,
    number_of: Callable[[int], int],
) -> BaseSampler:
    """The sampler of a method. A given `sampler` is used as it is."""
    if sampler is not None:
        if not isinstance(sampler, BaseSampler):
            raise BadArgument(expected("an Optuna sampler", sampler, "See optuna.samplers."))
        return sampler
    if method == "grid":
        points = combinations(spaces)
        return _SeededPerTrial(
            lambda seed, number: optuna.samplers.PartialFixedSampler(
                points[number % len(points)], optuna.samplers.RandomSampler(seed)
            ),
            seed,
            number_of,
        )
    kind = optuna.samplers.RandomSampler if method == "random" else optuna.samplers.TPESampler
    return _SeededPerTrial(lambda seed, number: kind(seed=seed), seed, number_of)


class _SeededPerTrial(BaseSampler):
    """An Optuna sampler that is created for each trial, seeded by the seed of the sweep and the trial's number.

    So the settings of a trial depend neither on how many trials run in parallel nor on interruptions.
    """

    def __init__(self, make: Callable[[int, int], BaseSampler], seed: int, number_of: Callable[[int], int]) -> None:
        self._make = make
        self._seed = seed
        self._number_of = number_of  # from Optuna's trial number to the sweep's
        self._sampler: BaseSampler = optuna.samplers.RandomSampler(seed)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        number = self._number_of(trial.number)
        seed = int(np.random.SeedSequence(self._seed, spawn_key=(number,)).generate_state(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._sampler = self._make(seed, number)
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._sampler.after_trial(study, trial, state, values)


# -- storages ------------------------------------------------------------------------------------------------


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


def _check_same_storage(storage: Storage, stored: Any, folder: Path) -> None:
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
def _sqlite_lock(storage: Storage, folder: Path) -> Iterator[None]:
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

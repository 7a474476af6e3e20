"""The study of a sweep, as an account of its trials: which are to be made, by whom, and what came of them.

Owns everything that is written into Optuna's storage. The sweep's trials have numbers of their own: in the study an
attempt that is made again is one more trial, which says whom it `follows`. All numbers and counts are derived from
what is stored, so that several processes and machines can work on one study, and any of them can be killed.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import optuna
from optuna.trial import FrozenTrial, TrialState

from trainformer.core.errors import BadArgument
from trainformer.sweep.methods import make_pruner, make_sampler
from trainformer.sweep.reading import read_spec
from trainformer.sweep.spaces import PLAIN, Space, described, in_words, suggest
from trainformer.sweep.storages import alone, open_storage, quiet_optuna, shown
from trainformer.sweep.trials import Outcome
from trainformer.utils.files import write_atomically
from trainformer.utils.processes import process_identity

MOST_ATTEMPTS = 2
SPEC = "sweep.json"
BEAT = 30.0  # seconds between two signs of life, where others look at them
_GONE = 600.0  # after so many seconds without, a process of another machine counts as dead
_CALLS: set[Any] = set()  # of `Sweep.run`, in this process, that are at work


@dataclass(frozen=True)
class Spec:
    """What a sweep searches, and how: what must be the same when it goes on."""

    name: str
    method: str
    seed: int
    direction: str
    spaces: dict[str, str]  # as they are written; those of `constants` too
    constants: dict[str, Any]

    @classmethod
    def of(cls, name: str, method: str, seed: int, direction: str, spaces: Mapping[str, Any]) -> Spec:
        """The spec of a sweep; constants that JSON does not know are written in words."""
        fixed = {key: value for key, value in spaces.items() if not isinstance(value, Space)}
        kept = {key: value if isinstance(value, PLAIN) else in_words(value) for key, value in fixed.items()}
        return cls(name, method, seed, direction, described(spaces), kept)

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """In words."""
        found = [
            f"{key} was {other.get(key)!r} and is now {getattr(self, key)!r}"
            for key in ("name", "method", "seed", "direction")
            if other.get(key) != getattr(self, key)
        ]
        theirs = dict(other.get("spaces", {}))
        for key in sorted(theirs.keys() | self.spaces.keys()):
            if theirs.get(key) != self.spaces.get(key):
                was, now = theirs.get(key, "not there"), self.spaces.get(key, "not there")
                found.append(f"{key} was {was} and is now {now}")
        return found


@dataclass
class Job:
    """One attempt at a trial, under way."""

    number: int
    attempt: int
    config: dict[str, Any]
    folder: Path
    trial: Any  # Optuna's
    pruned: bool = False
    last: float | None = None
    seen: float = field(default_factory=time.monotonic)


class Ledger:
    """The study of one sweep."""

    def __init__(self, spec: Spec, spaces: Mapping[str, Any], folder: Path, storage: Any = None) -> None:
        self.spec = spec
        self.folder = folder
        self.is_shared = storage is not None
        self._spaces = spaces
        self._drawn = {name for name, space in spaces.items() if isinstance(space, Space)}
        self._where = shown(storage)
        self._alone = functools.partial(alone, storage, folder)
        process = os.getpid()
        identity = process_identity(process)
        self._owner = {"host": socket.gethostname(), "process": process, "identity": identity, "call": str(uuid4())}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SPEC
        if path.exists():
            self._check_same(read_spec(folder))
        with quiet_optuna(), self._alone():
            self._storage = open_storage(storage, folder)
            direction: Any = spec.direction
            self.study = optuna.create_study(
                study_name=spec.name, storage=self._storage, direction=direction, load_if_exists=True
            )
        if (kept := self.study.user_attrs.get("sweep")) is not None:  # others may have begun it, in folders elsewhere
            self._check_same(kept)
        else:
            self.study.set_user_attr("sweep", vars(spec))
        self._write_spec(path)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Trials that are begun meanwhile are being made; what this call leaves behind is abandoned."""
        _CALLS.add(self._owner["call"])
        try:
            yield
        finally:
            _CALLS.discard(self._owner["call"])

    def search(self, sampler: Any = None, pruner: Any = None) -> None:
        """Choose what samples and prunes."""
        spec = self.spec
        self.study.sampler = make_sampler(spec.method, spec.seed, self._spaces, sampler, self.number_of)
        self.study.pruner = make_pruner(spec.method, pruner)

    def _check_same(self, kept: Mapping[str, Any]) -> None:
        if found := self.spec.differences(kept):
            raise BadArgument(
                f"Expected the sweep {kept['name']!r} to go on as it began, received another one: "
                f"{'; '.join(found)}. Give it another name, or begin anew with resume=False (--anew)."
            )

    def _write_spec(self, path: Path) -> None:
        from trainformer import __version__

        if not path.exists():
            versions = {"trainformer": __version__, "optuna": optuna.__version__}
            content = {**vars(self.spec), "storage": self._where, "versions": versions, "time": time.time()}
            write_atomically(path, json.dumps(content, indent=2).encode())

    # -- which is which --------------------------------------------------------------------------------------

    def trials(self) -> list[FrozenTrial]:
        """All that is stored."""
        return self.study.get_trials(deepcopy=False)

    def number_of(self, stored: int) -> int:
        """The sweep's number of a trial, given Optuna's."""
        return numbers(self.trials())[stored]

    # -- what is next ----------------------------------------------------------------------------------------

    def next(self, n_trials: int) -> Job | None:
        """The next trial to be made, unless all are made or being made."""
        with self._alone():
            trial = self._take(n_trials)
        if trial is None:
            return None
        number = self.number_of(trial.number)
        with quiet_optuna():
            config = suggest(trial, self._spaces)
        return Job(number, trial.user_attrs.get("attempt", 1), config, self.folder / "trials" / f"{number:04d}", trial)

    def _take(self, n_trials: int) -> Any:
        self._take_back()
        trials = self.trials()
        if not any(trial.state is TrialState.WAITING for trial in trials):
            if len(set(numbers(trials).values())) >= n_trials:
                return None
            # Written down before it is begun, with its owner: whoever is killed in between leaves no riddle.
            self.study.enqueue_trial({}, user_attrs={"owner": self._owner, "seen": time.time()})
        with quiet_optuna():
            trial = self.study.ask()
            is_new = "follows" not in trial.user_attrs
            if is_new and self.number_of(trial.number) >= n_trials:  # another process was as fast
                trial.set_user_attr("surplus", True)
                self.study.tell(trial, state=TrialState.FAIL)
                return None
        if trial.user_attrs.get("owner") != self._owner:  # it was waiting for whoever comes
            trial.set_user_attr("owner", self._owner)
        return trial

    def _take_back(self) -> None:
        """Trials whose process is gone are lost; they are made again, once."""
        for trial in self.trials():
            if trial.state is TrialState.RUNNING and is_abandoned(trial):
                try:
                    self._lose(trial, "the process of the sweep ended", counts=True)
                except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
                    pass  # another process has just done the same

    def _lose(self, trial: Any, reason: str, counts: bool) -> bool:
        """End an attempt that came to nothing; whether there is to be another. `counts`: if there can be only one."""
        attempt = trial.user_attrs.get("attempt", 1)
        again = not counts or attempt < MOST_ATTEMPTS
        if again and not any(other.user_attrs.get("follows") == trial.number for other in self.trials()):
            # Killed while its settings were drawn: a part of them would be drawn otherwise than all.
            params = trial.params if self._drawn <= trial.params.keys() else {}
            attempt += 1 if counts else 0
            about = {"owner": self._owner, "seen": time.time(), "follows": trial.number, "attempt": attempt}
            self.study.enqueue_trial(params, user_attrs=about)
        self._storage.set_trial_user_attr(trial._trial_id, "error", reason)
        with quiet_optuna():
            self.study.tell(trial.number, state=TrialState.FAIL)
        return again

    # -- what came of it -------------------------------------------------------------------------------------

    def report(self, job: Job, step: int, value: float) -> bool:
        """Note how good a trial is so far; whether it is to be pruned."""
        job.last = value
        with quiet_optuna():
            job.trial.report(value, step)
            job.pruned = job.pruned or job.trial.should_prune()
        return job.pruned

    def note_run(self, job: Job, run: str) -> None:
        """Note the folder of a trial's run, as seen from that of the sweep."""
        path = Path(run).absolute()
        inside = path.is_relative_to(self.folder.absolute())
        job.trial.set_user_attr("run", str(path.relative_to(self.folder.absolute()) if inside else path))

    def note_alive(self, job: Job) -> None:
        """A sign of life, for processes on other machines."""
        job.trial.set_user_attr("seen", time.time())

    def conclude(self, job: Job, outcome: Outcome) -> bool:
        """Note how a trial ended; whether it will be made again."""
        if outcome.seconds is not None:
            job.trial.set_user_attr("seconds", outcome.seconds)
        if outcome.status == "lost":
            return self._lose(job.trial, outcome.error or "lost", counts=True)
        with quiet_optuna():
            if outcome.status == "failed":
                job.trial.set_user_attr("error", outcome.error)
                self.study.tell(job.trial, state=TrialState.FAIL)
            elif outcome.status == "pruned" or job.pruned:
                self.study.tell(job.trial, state=TrialState.PRUNED)  # its value is the last that was reported
            else:
                self.study.tell(job.trial, outcome.value)
        return False

    def put_back(self, job: Job) -> None:
        """An interrupted trial is there to be taken up again, however often that happens."""
        self._lose(job.trial, "interrupted", counts=False)


def numbers(trials: list[FrozenTrial]) -> dict[int, int]:
    """The sweep's numbers of trials by Optuna's: those that follow another have its number; surplus ones have none."""
    found: dict[int, int] = {}
    count = 0
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.user_attrs.get("surplus"):
            continue
        follows = trial.user_attrs.get("follows")
        found[trial.number] = count if follows is None else found[follows]
        count += follows is None
    return found


def is_abandoned(trial: FrozenTrial) -> bool:
    """Whether the process that makes a trial is gone, as far as can be seen from here."""
    owner = trial.user_attrs.get("owner")
    if owner is None:  # begun by another program
        return False
    if owner["host"] == socket.gethostname():
        if owner["process"] == os.getpid() and owner["call"] not in _CALLS:
            return True
        return process_identity(owner["process"]) != owner["identity"]
    return time.time() - trial.user_attrs.get("seen", 0.0) > _GONE

"""The Optuna study of a sweep: sampler, pruner and storage, and which trials to run, retry and record.

Owns everything written to Optuna's storage. All counts are derived from what is stored, so several processes and
machines can work on one study, and any of them can be killed. Optuna's own heartbeat and retry callback are not used:
they need `study.optimize` and a relational database, and notice a killed process only after a grace period.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.secrets import mask
from trainformer.sweep.reading import ACTIVE_CALLS, SPEC, is_stale, read_spec, trial_numbers
from trainformer.sweep.spaces import PLAIN, Space, combinations, describe_spaces, format_value, suggest
from trainformer.sweep.storages import Storage, check_same_storage, open_storage, quiet_optuna, redact, sqlite_lock
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
        self._lock = functools.partial(sqlite_lock, storage, folder)
        process = os.getpid()
        identity = process_identity(process)
        self._call = str(uuid4())
        self._owner = {"host": socket.gethostname(), "process": process, "identity": identity, "call": self._call}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / SPEC).exists():
            stored_spec = read_spec(folder)
            spec.check_same(stored_spec)
            check_same_storage(storage, stored_spec.get("storage"), folder)
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

    def next_job(self, n_trials: int, is_isolated: bool = False) -> Job | None:
        """The next trial to run; None if all are done or running.

        `is_isolated`: it runs in another process, so it is not to blame if this one dies.
        """
        with self._lock():
            trial = self._ask(n_trials)
        if trial is None:
            return None
        if trial.user_attrs.get("is_isolated") != is_isolated:
            trial.set_user_attr("is_isolated", is_isolated)
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
                    counts = not trial.user_attrs.get("is_isolated", False)
                    self._fail(trial, "the process of the sweep died", counts=counts)
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

"""`Sweep` and the `@sweep` decorator: a function, its search space, and `run`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.sweep.reading import SWEEPS, Trial, collect_trials, is_sweep, read_sweep
from trainformer.sweep.spaces import check_names, describe_spaces, original_value
from trainformer.sweep.trials import current_trial

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

    from trainformer.sweep.study import SweepStudy

BACKENDS = ("local", "ray")
_ENDED = ("completed", "pruned", "failed")


class Sweep:
    """A search for the settings with which a function returns the best metric. Calling it calls the function.

    >>> from trainformer.sweep import choice
    >>> experiment = Sweep(lambda lr: -lr, {"lr": choice(0.1, 0.2)})
    >>> experiment(lr=0.3)
    -0.3
    """

    def __init__(self, fn: Callable[..., Any], spaces: dict[str, Any]) -> None:
        if not callable(fn):
            raise BadArgument(expected("a function to sweep", fn))
        self.fn: Callable[..., Any] = fn.fn if isinstance(fn, Sweep) else fn  # decorated twice: the outer one wins
        check_names(self.fn, spaces)
        self.spaces = dict(spaces)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Sweep({self.name}: {', '.join(f'{n}={text}' for n, text in describe_spaces(self.spaces).items())})"

    @property
    def name(self) -> str:
        """The default name of the sweep and its folder: the name of the function."""
        return getattr(self.fn, "__name__", type(self.fn).__name__).strip("<>")

    def run(
        self,
        method: str = "random",
        n_trials: int | None = None,
        n_parallel: int = 1,
        seed: int = 42,
        direction: str = "maximize",
        storage: str | Path | BaseStorage | None = None,
        timeout: float | None = None,
        *,
        name: str | None = None,
        folder: str | Path | None = None,
        backend: str = "local",
        cpus_per_trial: float = 1,
        gpus_per_trial: float = 0,
        address: str | None = None,
        resume: bool = True,
        sampler: BaseSampler | None = None,
        pruner: str | BasePruner | None = None,
        isolate: bool = False,
        log: str = "console",
    ) -> list[dict[str, Any]]:
        """Run the trials and return them, best first; failed trials come last, with their errors.

        `n_trials` (default: 10, or all points of a grid) counts the trials of the sweep, not of this call: run again
        after an interruption, the sweep resumes; run again when all trials are done, it returns at once. No trial
        starts after `timeout` seconds. `docs/sweep.md` explains all arguments.
        """
        require("optuna", "sweep", "to search")
        from trainformer.sweep.runner import Executor, InProcessExecutor, Progress, SweepRunner
        from trainformer.sweep.study import SweepSpec, SweepStudy, check_method, total_trials

        check_method(method, direction)
        _check_arguments(n_parallel, seed, timeout, backend)
        total = total_trials(method, n_trials, self.spaces)
        name = _as_file_name(name or self.name)
        parent = current_trial().folder or Path()  # a sweep inside a trial gets a folder in each trial
        path = Path(folder) if folder is not None else parent / SWEEPS / name
        if not resume:
            _archive(path, storage)
        study = SweepStudy(SweepSpec.create(name, method, seed, direction, self.spaces), self.spaces, path, storage)
        study.configure(sampler, pruner)
        done = self._ended_trials(study)
        in_process = backend == "local" and n_parallel == 1 and not isolate
        metrics = [t.metric if t.status == "completed" else None for t in done]
        with Progress(log != "none", not in_process, direction, metrics, total) as progress:
            runner = SweepRunner(study, total, timeout, progress)

            def make_executor() -> Executor:
                if in_process:
                    return InProcessExecutor(self.fn, direction, runner.on_message)
                if backend == "local":
                    from trainformer.sweep.processes import ProcessExecutor, make_slots

                    return ProcessExecutor(
                        self.fn, direction, make_slots(n_parallel, gpus_per_trial), runner.on_message
                    )
                from trainformer.sweep.ray_tasks import RayExecutor

                resources = {"num_cpus": cpus_per_trial, "num_gpus": gpus_per_trial}
                return RayExecutor(self.fn, direction, n_parallel, address, resources, runner.on_message)

            if len(done) < total:
                runner.run(make_executor())
            trials = self._ended_trials(study)
            progress.warn_if_all_infinite(
                [t.metric for t in trials if t.status == "completed" and t.metric is not None]
            )
        return [_as_dict(trial) for trial in trials]

    def _ended_trials(self, study: SweepStudy) -> list[Trial]:
        """The trials that have ended, with the original objects in their configs instead of labels."""
        trials = collect_trials(study.trials(), vars(study.spec), study.folder)
        ended = [trial for trial in trials if trial.status in _ENDED]
        for trial in ended:
            trial.config = {name: original_value(space, trial.config.get(name)) for name, space in self.spaces.items()}
        return ended


def sweep(**spaces: Any) -> Callable[[Callable[..., Any]], Sweep]:
    """Make a `Sweep` of a function. A plain value is a constant.

    >>> from trainformer.sweep import choice, log_uniform
    >>> @sweep(lr=log_uniform(1e-5, 1e-3), r=choice(4, 8), epochs=3)
    ... def experiment(lr, r, epochs): ...
    >>> experiment
    Sweep(experiment: lr=log_uniform(1e-05, 0.001), r=choice(4, 8), epochs=3)
    """
    return lambda fn: Sweep(fn, spaces)


def _as_dict(trial: Trial) -> dict[str, Any]:
    row: dict[str, Any] = {"config": trial.config, "metric": trial.metric, "status": trial.status}
    if trial.error is not None:
        row["error"] = trial.error
    return row | {"number": trial.number, "seconds": trial.seconds, "run": trial.run, "attempt": trial.attempt}


def _as_file_name(name: str) -> str:
    if not isinstance(name, str) or not name.strip(". "):
        raise BadArgument(expected("the name of a sweep to be a valid folder name", name))
    return re.sub(r"[^\w.=+-]+", "-", name)


def _check_arguments(n_parallel: Any, seed: Any, timeout: Any, backend: Any) -> None:
    for what, value, least in (("n_parallel", n_parallel, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadArgument(expected(f"{what} to be an integer of at least {least}", value))
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise BadArgument(expected("timeout to be a positive number of seconds", timeout))
    if backend not in BACKENDS:
        raise BadArgument(expected("backend to be 'local' or 'ray'", backend, did_you_mean(str(backend), BACKENDS)))


def _archive(folder: Path, storage: object) -> None:
    """For resume=False: move an earlier sweep in this folder to ``previous/`` instead of overwriting it."""
    if storage is not None:
        do = "Studies in other storages are not deleted or moved: choose another name."
        raise BadArgument(expected("resume=False with the default storage", storage, do))
    if not is_sweep(folder):
        return
    trials = read_sweep(folder, with_importances=False).trials
    if any(trial.status == "running" for trial in trials):
        raise BadArgument(
            f"Expected a sweep that is not running, received {folder}: another process is running trials."
        )
    number = 1
    while (archive := folder / "previous" / f"{number:03d}").exists():
        number += 1
    archive.mkdir(parents=True)
    for item in folder.iterdir():
        if item.name != "previous":
            item.rename(archive / item.name)

"""`Sweep`: a function and what to try it with, and `run`, which does."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.sweep.reading import SWEEPS, Trial, collect, is_sweep
from trainformer.sweep.spaces import check_names, described
from trainformer.sweep.trials import current_trial

if TYPE_CHECKING:
    from trainformer.sweep.runner import Conductor, Runner
    from trainformer.sweep.study import Ledger

BACKENDS = ("local", "ray")
_ENDED = ("completed", "pruned", "failed")


class Sweep:
    """A search for the settings with which a function returns the best number. Calling it calls the function.

    >>> from trainformer.sweep import choice
    >>> experiment = Sweep(lambda lr: -lr, {"lr": choice(0.1, 0.2)})
    >>> experiment(lr=0.3)
    -0.3
    """

    def __init__(self, fn: Callable[..., Any], spaces: dict[str, Any]) -> None:
        if not callable(fn):
            raise BadArgument(expected("a function to sweep", fn))
        self.fn: Callable[..., Any] = fn.fn if isinstance(fn, Sweep) else fn  # decorated twice: the last word counts
        check_names(self.fn, spaces)
        self.spaces = dict(spaces)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Sweep({self.name}: {', '.join(f'{n}={text}' for n, text in described(self.spaces).items())})"

    @property
    def name(self) -> str:
        """The name of its folder, unless another is given: that of the function."""
        return getattr(self.fn, "__name__", type(self.fn).__name__).strip("<>")

    def run(
        self,
        method: str = "random",
        n_trials: int | None = None,
        n_parallel: int = 1,
        seed: int = 42,
        direction: str = "maximize",
        storage: Any = None,
        timeout: float | None = None,
        *,
        name: str | None = None,
        folder: str | Path | None = None,
        backend: str = "local",
        cpus_per_trial: float = 1,
        gpus_per_trial: float = 0,
        address: str | None = None,
        resume: bool = True,
        sampler: Any = None,
        pruner: Any = None,
        isolate: bool = False,
        log: str = "console",
    ) -> list[dict[str, Any]]:
        """Try it, and return what was tried: the best first, failed trials last, with their errors.

        `n_trials` (10; of a grid, all its points) counts the trials of the sweep, not of this call: run again after
        an interruption, it goes on; run again when all are done, it returns at once. `timeout` is in seconds: after it
        no trial is begun. `docs/sweep.md` has all settings.
        """
        require("optuna", "sweep", "to search")
        from trainformer.sweep.methods import check_method, trials_of
        from trainformer.sweep.progress import Progress
        from trainformer.sweep.runner import Conductor
        from trainformer.sweep.study import Ledger, Spec

        check_method(method, direction)
        _check_call(n_parallel, seed, timeout, backend)
        most = trials_of(method, n_trials, self.spaces)
        name = _as_file_name(name or self.name)
        around = current_trial().folder or Path()  # a sweep inside a trial is another one in each
        place = Path(folder) if folder is not None else around / SWEEPS / name
        if not resume:
            move_aside(place, storage)
        ledger = Ledger(Spec.of(name, method, seed, direction, self.spaces), self.spaces, place, storage)
        ledger.search(sampler, pruner)
        done = [trial for trial in self._trials(ledger) if trial.status in _ENDED]
        elsewhere = backend == "ray" or n_parallel > 1 or isolate
        metrics = [t.metric if t.status == "completed" else None for t in done]
        with Progress(log != "none", elsewhere, direction, metrics, most) as progress:
            conductor = Conductor(ledger, most, timeout, progress)

            def make_runner() -> Runner:
                if backend == "ray":
                    from trainformer.sweep.ray_tasks import RayTasks

                    resources = {"num_cpus": cpus_per_trial, "num_gpus": gpus_per_trial}
                    return RayTasks(self.fn, direction, n_parallel, address, resources, conductor.hear)
                return self._local_runner(conductor, direction, n_parallel, gpus_per_trial, elsewhere)

            if len(done) < most:
                conductor.run(make_runner())
            trials = [trial for trial in self._trials(ledger) if trial.status in _ENDED]
            progress.warn_if_vain([t.metric for t in trials if t.status == "completed" and t.metric is not None])
        return [_as_dict(trial) for trial in trials]

    def _local_runner(
        self, conductor: Conductor, direction: str, n_parallel: int, gpus_per_trial: float, elsewhere: bool
    ) -> Runner:
        if not elsewhere:
            from trainformer.sweep.runner import InThisProcess

            return InThisProcess(self.fn, direction, conductor.hear)
        from trainformer.sweep.processes import LocalProcesses, make_slots

        return LocalProcesses(self.fn, direction, make_slots(n_parallel, gpus_per_trial), conductor.hear)

    def _trials(self, ledger: Ledger) -> list[Trial]:
        """The trials so far, with the objects that they were made with instead of their labels."""
        trials = collect(ledger.trials(), vars(ledger.spec), ledger.folder)
        for trial in trials:
            trial.config = {name: _original(self.spaces[name], trial.config.get(name)) for name in self.spaces}
        return trials


def sweep(**spaces: Any) -> Callable[[Callable[..., Any]], Sweep]:
    """Make a `Sweep` of a function: ``@sweep(lr=log_uniform(1e-5, 1e-3), r=choice(4, 8))``.

    A plain value is a constant.
    """

    def decorate(fn: Callable[..., Any]) -> Sweep:
        return Sweep(fn, spaces)

    return decorate


def _original(space: Any, stored: Any) -> Any:
    if hasattr(space, "labels"):
        return space.values[space.labels.index(stored)] if stored in space.labels else stored
    return stored if hasattr(space, "suggest") else space


def _as_dict(trial: Trial) -> dict[str, Any]:
    row: dict[str, Any] = {"config": trial.config, "metric": trial.metric, "status": trial.status}
    if trial.error is not None:
        row["error"] = trial.error
    return row | {"number": trial.number, "seconds": trial.seconds, "run": trial.run, "attempt": trial.attempt}


def _as_file_name(name: str) -> str:
    if not isinstance(name, str) or not name.strip(". "):
        raise BadArgument(expected("the name of a sweep to be one that a folder can have", name))
    return re.sub(r"[^\w.=+-]+", "-", name)


def _check_call(n_parallel: Any, seed: Any, timeout: Any, backend: Any) -> None:
    for what, value, least in (("n_parallel", n_parallel, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadArgument(expected(f"{what} to be a whole number of at least {least}", value))
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise BadArgument(expected("timeout to be a positive number of seconds", timeout))
    if backend not in BACKENDS:
        raise BadArgument(expected("backend to be 'local' or 'ray'", backend, did_you_mean(str(backend), BACKENDS)))


def move_aside(folder: Path, storage: Any) -> None:
    """To begin anew: what an earlier sweep left in the folder is moved to ``previous/``, not overwritten."""
    if storage is not None:
        do = "A study in a storage of one's own is kept: give this one another name."
        raise BadArgument(expected("resume=False with the default storage", storage, do))
    if not is_sweep(folder):
        return
    from trainformer.sweep.reading import read_sweep

    trials = read_sweep(folder, with_importances=False).trials
    if any(trial.status == "running" for trial in trials):
        raise BadArgument(f"Expected a sweep that nobody works on, received {folder}: another process makes trials.")
    number = 1
    while (archive := folder / "previous" / f"{number:03d}").exists():
        number += 1
    archive.mkdir(parents=True)
    for item in folder.iterdir():
        if item.name != "previous":
            item.rename(archive / item.name)

"""The methods of a sweep: which of Optuna's samplers and pruners they are.

Nothing is sampled here. What is added is the seed: each trial has a sampler of its own, seeded by the seed of the
sweep and the number of the trial, so that a trial's settings depend neither on how many run at once nor on whether
the sweep was interrupted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.sweep.spaces import combinations

METHODS = ("grid", "random", "bayes", "hyperband")
DIRECTIONS = ("maximize", "minimize")
_PRUNERS: dict[str, Callable[[], Any]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}


def check_method(method: str, direction: str) -> None:
    """Refuse what there is not."""
    for what, value, known in (("method", method, METHODS), ("direction", direction, DIRECTIONS)):
        if value not in known:
            hint = did_you_mean(str(value), known)
            raise BadArgument(expected(f"{what} to be one of {', '.join(known)}", value, hint))


def trials_of(method: str, n_trials: int | None, spaces: Mapping[str, Any]) -> int:
    """How many trials there are in all: as many as wanted, and no more than a grid has points."""
    if n_trials is not None and (not isinstance(n_trials, int) or isinstance(n_trials, bool) or n_trials < 1):
        raise BadArgument(expected("n_trials to be a whole number of at least 1", n_trials))
    if method != "grid":
        return n_trials or 10
    points = combinations(spaces)
    if points == [{}]:
        raise BadArgument("Expected a grid sweep to have a grid() or choice(), received none. Use method='random'.")
    return min(len(points), n_trials or len(points))


def make_pruner(method: str, pruner: Any) -> Any:
    """The pruner that is named or given; by default that of the method, which is none but for hyperband."""
    if pruner is None:
        pruner = "hyperband" if method == "hyperband" else "none"
    if isinstance(pruner, str):
        if pruner not in _PRUNERS:
            hint = did_you_mean(pruner, _PRUNERS)
            raise BadArgument(expected(f"pruner to be one of {', '.join(_PRUNERS)}, or one of Optuna's", pruner, hint))
        return _PRUNERS[pruner]()
    if not isinstance(pruner, optuna.pruners.BasePruner):
        raise BadArgument(expected("a pruner of Optuna", pruner, "See optuna.pruners."))
    return pruner


class SeededPerTrial(BaseSampler):
    """One of Optuna's samplers, made anew for each trial with a seed of its own."""

    def __init__(self, make: Callable[[int, int], BaseSampler], seed: int, number_of: Callable[[int], int]) -> None:
        self._make = make
        self._seed = seed
        self._number_of = number_of  # of the sweep's trial, given the number that Optuna has for it
        self._sampler: BaseSampler = optuna.samplers.RandomSampler(seed)

    def before_trial(self, study: Any, trial: Any) -> None:
        """A new trial, a new sampler."""
        number = self._number_of(trial.number)
        seed = int(np.random.SeedSequence(self._seed, spawn_key=(number,)).generate_state(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._sampler = self._make(seed, number)
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
        """As that sampler does."""
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
        """As that sampler does."""
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        """As that sampler does."""
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
        """As that sampler does."""
        self._sampler.after_trial(study, trial, state, values)


def make_sampler(
    method: str, seed: int, spaces: Mapping[str, Any], given: Any, number_of: Callable[[int], int]
) -> BaseSampler:
    """The sampler of a method. One that is `given` is used as it is."""
    if given is not None:
        if not isinstance(given, BaseSampler):
            raise BadArgument(expected("a sampler of Optuna", given, "See optuna.samplers."))
        return given
    if method == "grid":
        points = combinations(spaces)
        return SeededPerTrial(
            lambda seed, number: optuna.samplers.PartialFixedSampler(
                points[number % len(points)], optuna.samplers.RandomSampler(seed)
            ),
            seed,
            number_of,
        )
    kind = optuna.samplers.RandomSampler if method == "random" else optuna.samplers.TPESampler
    return SeededPerTrial(lambda seed, number: kind(seed=seed), seed, number_of)

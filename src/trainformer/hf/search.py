"""`hyperparameter_search`: trains once per trial of an Optuna study, as in HF."""

from __future__ import annotations

import copy
import gc
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trainformer.callbacks.compat.huggingface_types import TrainerCallback
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require

logger = logging.getLogger("trainformer")

_BATCH_SIZES = [4, 8, 16, 32, 64]
_NOT_METRICS = ("_runtime", "_per_second", "_compilation_time")


class BestRun(NamedTuple):
    """The best trial of a search; of several objectives, one per trial on the Pareto front."""

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def default_hp_space(trial: Any) -> dict[str, Any]:
    """The search space of HF: learning rate, epochs, seed and batch size."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", _BATCH_SIZES),
    }


def default_objective(metrics: Mapping[str, float]) -> float:
    """The sum of the metrics of an evaluation; its loss if there are no others.

    >>> default_objective({"eval_loss": 0.5, "eval_runtime": 1.0, "epoch": 1.0})
    0.5
    >>> default_objective({"eval_loss": 0.5, "eval_accuracy": 0.75, "eval_f1": 0.5})
    1.25
    """
    others = [v for k, v in metrics.items() if k not in ("eval_loss", "epoch") and not k.endswith(_NOT_METRICS)]
    return sum(others) if others else metrics["eval_loss"]


class SearchMixin:
    """The search for hyperparameters of a `Trainer`."""

    def hyperparameter_search(
        self: Any,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | Sequence[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train `n_trials` times with arguments of a search space, and return the best trial.

        `hp_space(trial)` returns arguments to set, with values of `trial.suggest_float(...)` and so on; `model_init`
        may take the trial, too. `compute_objective` turns the metrics of an evaluation into the objective, or several.
        Checkpoints of a trial are in ``output_dir/run-<number>``. `kwargs` are those of `optuna.create_study` (such as
        `sampler`, `pruner`, `storage`) and of its `optimize`. Afterwards the arguments are as before.
        """
        if str(getattr(backend, "value", backend)) not in ("None", "optuna"):
            do = "Use 'optuna', or trainformer.sweep, which also runs on Ray."
            raise BadArgument(expected("backend to be 'optuna'", backend, do))
        if self.model_init is None:
            do = "Pass model_init instead of model: every trial starts with a new model."
            raise BadArgument(expected("model_init for a hyperparameter_search", "None", do))
        optuna: Any = require("optuna", "sweep", "for hyperparameter_search")
        directions = [direction] if isinstance(direction, str) else list(direction)
        objective = compute_objective or default_objective
        before = copy.copy(self.args)
        own = ("timeout", "n_jobs", "gc_after_trial", "catch")
        options = {name: kwargs.pop(name) for name in own if name in kwargs}
        study = optuna.create_study(directions=directions, **kwargs)

        def run(trial: Any) -> Any:
            try:
                return _run_trial(self, trial, hp_space or default_hp_space, objective, hp_name, before)
            finally:
                vars(self.args).update(vars(before))

        study.optimize(run, n_trials=n_trials, **options)
        if len(directions) > 1:
            return [BestRun(str(trial.number), trial.values, trial.params) for trial in study.best_trials]
        best = study.best_trial
        return BestRun(str(best.number), best.value, best.params, study)


def _run_trial(
    trainer: Any, trial: Any, hp_space: Any, objective: Any, hp_name: Any, before: Any
) -> float | list[float]:
    args = trainer.args
    for name, value in hp_space(trial).items():
        if not hasattr(args, name):
            raise BadArgument(expected("hp_space to return arguments of the trainer", name))
        setattr(args, name, value)
    args.output_dir = os.path.join(before.output_dir, f"run-{trial.number}")
    state = trainer.state
    state.is_hyper_param_search, state.trial_params = True, dict(trial.params)
    state.trial_name = str(trial.number) if hp_name is None else hp_name(trial)
    reporter = _Reporter(trial, objective)
    trainer.add_callback(reporter)
    try:
        trainer.train(trial=trial)
    finally:
        trainer.remove_callback(reporter)
        state.is_hyper_param_search = False
        gc.collect()
    found = reporter.value if reporter.value is not None else objective(trainer.evaluate())
    logger.info("trial %s: objective %s with %s", trial.number, found, trial.params)
    return found


class _Reporter(TrainerCallback):
    """Reports each evaluation to the trial, which may end it."""

    def __init__(self, trial: Any, objective: Any) -> None:
        self._trial = trial
        self._objective = objective
        self.value: Any = None

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.value = self._objective(dict(metrics))
        if isinstance(self.value, (list, tuple)):  # Optuna does not prune with several objectives
            return
        self._trial.report(self.value, state.global_step)
        if self._trial.should_prune():
            raise require("optuna", "sweep", "for hyperparameter_search").TrialPruned

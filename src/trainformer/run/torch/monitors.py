"""What a run monitors: metrics of evaluations that choose the best checkpoint, stop the run or step a scheduler.

A name that no evaluation has would be found out after hours, or never. So names that cannot exist are rejected when the
run is built, and unknown ones before its first step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainformer.callbacks.base import was_left_out
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.run.validation_sets import check_monitor, eval_cadences, metric_name, set_of

if TYPE_CHECKING:
    from trainformer.run.torch.run import TorchRun

logger = logging.getLogger("trainformer")


def monitored(run: TorchRun) -> dict[str, str]:
    """The metrics that matter to the run, each with what monitors it."""
    settings = run.settings
    found = {settings.monitor_metric: "monitor_metric"} if settings.save_best else {}
    for callback, metric in _monitors_of_callbacks(run):
        found[metric] = type(callback).__name__
    return found | {metric: type(one).__name__ for metric, one in run.backend.monitors(settings.monitor_metric)}


def _monitors_of_callbacks(run: TorchRun) -> list[tuple[Any, str]]:
    """Callbacks with the metric that each monitors. What callbacks of users call `monitor` may be something else."""
    found = [(callback, getattr(callback, "monitor", None)) for callback in run.callbacks]
    return [
        (callback, name)
        for callback, name in found
        if isinstance(name, str) and (name.startswith("val/") or type(callback).__module__.startswith("trainformer."))
    ]


def callback_metrics(run: TorchRun) -> set[str]:
    """Metrics that callbacks add to evaluations, as far as they say so."""
    names = {name for callback in run.callbacks for name in getattr(callback, "metric_names", ())}
    return {metric_name(name, val_set) for name in names for val_set in run.val_sets} if run.val_sets else names


def unknown_metric(name: str, who: str, metrics: Mapping[str, Any]) -> str:
    """The error for a metric that evaluations do not have."""
    return f"{who} looks for {name!r}, which is not among {sorted(metrics)}. {did_you_mean(name, metrics)}".rstrip()


def check_monitors(run: TorchRun) -> None:
    """Reject what cannot work, whatever the task measures."""
    settings, added = run.settings, callback_metrics(run)
    for metric, who in monitored(run).items():
        check_monitor(metric, who, run.val_sets, added)
    for metric, scheduler in run.backend.monitors(settings.monitor_metric):
        who = type(scheduler).__name__
        if not run.val_sources:
            do = "Pass val_data or val_split."
            raise BadArgument(expected(f"validation data for {who}, which is stepped with {metric}", "none", do))
        cadences = eval_cadences(settings.eval_every, run.val_sets)
        every = cadences.get(set_of(metric, run.val_sets) or "") if isinstance(cadences, dict) else cadences
        if every is None:
            what = f"evaluations during training for {who}, which is stepped with {metric}"
            raise BadArgument(expected(what, f"eval_every={settings.eval_every!r}"))
        mode = getattr(scheduler, "mode", settings.monitor_mode)
        if metric == settings.monitor_metric and mode != settings.monitor_mode:
            what = f"{who} and the run to agree on what is better for {metric}"
            received = f"mode={mode!r} and monitor_mode={settings.monitor_mode!r}"
            raise BadArgument(expected(what, received, "Set both to 'max' for an accuracy, to 'min' for a loss."))
    _reject_never_evaluated(run)


def _reject_never_evaluated(run: TorchRun) -> None:
    """Reject a metric that somebody has chosen, of a validation set that is never evaluated."""
    cadences = eval_cadences(run.settings.eval_every, run.val_sets)
    if not isinstance(cadences, dict):
        return
    for metric, who in monitored(run).items():
        name = set_of(metric, run.val_sets)
        is_chosen = who != "monitor_metric" or "monitor_metric" in run.passed
        if name is not None and cadences[name] is None and is_chosen:
            do = "Give it a cadence, or monitor another set."
            raise BadArgument(expected(f"evaluations of {name!r} for {who}={metric!r}", "eval_every=None for it", do))


def _required(run: TorchRun) -> dict[str, str]:
    """The metrics that evaluations must have, as far as that can be told: those that somebody has chosen."""
    if any(hasattr(cb, "compute_metrics") and not hasattr(cb, "metric_names") for cb in run.callbacks):
        return {}  # callbacks may add anything
    added, was_chosen = callback_metrics(run), "monitor_metric" in run.passed
    return {
        name: who
        for name, who in monitored(run).items()
        if name not in added and not name.startswith("val/without_ema/") and (was_chosen or who != "monitor_metric")
    }


def check_monitored(run: TorchRun) -> None:
    """Before the first step, reject a metric that evaluations do not have.

    The first validation batch tells the names. If one is missing, all of them do: names may depend on the data. With
    several ranks or streams the first evaluation has to tell (`check_evaluated`); so it does if a few samples are too
    few to evaluate.
    """
    check_monitors(run)
    required = _required(run)
    if not required or not run.val_sources or run.folder is not None or not run.process_group.is_single_process:
        return
    names = list(dict.fromkeys(name for metric in required if (name := set_of(metric, run.val_sets))))
    if not run.can_repeat_evaluations(names):
        return
    metrics: dict[str, float] = {}
    with run.backend.run_context():
        for most in (1, None):
            try:
                metrics = run.dry_evaluation(names, most)
            except Exception as error:
                logger.debug("the names of the metrics are not known before the first evaluation: %s", error)
                return
            if all(name in metrics for name in required):
                return
    _reject_missing(required, metrics)


def check_evaluated(run: TorchRun, metrics: Mapping[str, float]) -> None:
    """After an evaluation, reject a metric that it should have had, unless an earlier one had it."""
    missing = {name: who for name, who in _required(run).items() if name not in metrics and not was_left_out(run, name)}
    if missing:
        before = [record for record in run.state.log_history if "train/loss" not in record]
        _reject_missing({n: who for n, who in missing.items() if not any(n in record for record in before)}, metrics)


def _reject_missing(required: Mapping[str, str], metrics: Mapping[str, float]) -> None:
    for name, who in required.items():
        if name not in metrics:
            raise BadArgument(unknown_metric(name, who, metrics))

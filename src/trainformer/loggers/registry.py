"""From ``log="wandb"`` to loggers: the built-in names, and those of other packages (``trainformer.loggers``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.plugins import load_plugin, plugin_names
from trainformer.loggers.base import BaseLogger, MultiLogger
from trainformer.loggers.console import ConsoleLogger
from trainformer.loggers.jsonl import JsonlLogger
from trainformer.loggers.mlflow import MLflowLogger
from trainformer.loggers.tensorboard import TensorBoardLogger
from trainformer.loggers.wandb import WandbLogger

METRICS_FILE = "metrics.jsonl"


def make_loggers(
    spec: str | BaseLogger | Sequence[str | BaseLogger] | None,
    *,
    project: str,
    name: str | None,
    run_dir: Path,
    console: Console | None = None,
) -> BaseLogger:
    """One logger for everything in `spec`, always with ``metrics.jsonl`` in the run folder.

    Names are ``"console"``, ``"wandb"``, ``"tensorboard"``, ``"mlflow"``, and those that installed packages register as
    entry points in the group ``trainformer.loggers``; ``"none"`` and None add nothing to the file. Names and instances
    can be mixed in a list. Nothing is opened before `init`.

    >>> logger = make_loggers(["console", "tensorboard"], project="birds", name=None, run_dir=Path("runs/1"))
    >>> [type(part).__name__ for part in logger.loggers]
    ['JsonlLogger', 'ConsoleLogger', 'TensorBoardLogger']
    """
    builtin: dict[str, Callable[[], BaseLogger]] = {
        "console": lambda: ConsoleLogger(console),
        "wandb": lambda: WandbLogger(project=project, name=name, dir=run_dir),
        "tensorboard": lambda: TensorBoardLogger(run_dir / "tensorboard"),
        "mlflow": lambda: MLflowLogger(experiment_name=project, run_name=name),
    }
    loggers: list[BaseLogger] = []
    is_list = isinstance(spec, Sequence) and not isinstance(spec, str)
    for item in spec if is_list else [] if spec is None else [spec]:  # type: ignore[union-attr]
        if isinstance(item, BaseLogger):
            loggers.append(item)
        elif isinstance(item, str) and item in builtin:
            loggers.append(builtin[item]())
        elif isinstance(item, str) and (plugin := load_plugin("loggers", item)) is not None:
            loggers.append(_make_plugin(item, plugin, {"project": project, "name": name, "run_dir": run_dir}))
        elif item != "none":
            known = [*builtin, *plugin_names("loggers"), "none"]
            hint = did_you_mean(item, known) if isinstance(item, str) else ""
            do = hint or "Pass a name, a BaseLogger, or a list of them."
            raise BadArgument(expected(f"a logger to be one of {', '.join(known)}, or a BaseLogger", item, do))
    metrics = (run_dir / METRICS_FILE).resolve()
    if not any(isinstance(logger, JsonlLogger) and logger.path.resolve() == metrics for logger in loggers):
        # First, so that a record is on disk before any other logger can fail.
        loggers.insert(0, JsonlLogger(run_dir / METRICS_FILE))
    return MultiLogger(loggers)


def _make_plugin(name: str, plugin: Callable[..., Any], about_run: dict[str, Any]) -> BaseLogger:
    """Call a plugin with those of `project`, `name` and `run_dir` that it has parameters for."""
    parameters = inspect.signature(plugin).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    logger = plugin(**{key: value for key, value in about_run.items() if takes_all or key in accepted})
    if not isinstance(logger, BaseLogger):
        do = "Register a subclass of BaseLogger, or a function that returns one."
        raise BadArgument(expected(f"the plugin {name!r} to make a BaseLogger", logger, do))
    return logger

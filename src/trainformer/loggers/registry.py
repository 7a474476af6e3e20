"""From ``log="wandb"`` to loggers. Owns the names and where in the run's folder each logger writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.loggers.base import BaseLogger
from trainformer.loggers.console import ConsoleLogger
from trainformer.loggers.jsonl import JsonlLogger
from trainformer.loggers.mlflow import MLflowLogger
from trainformer.loggers.multi import MultiLogger
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
    """One logger for everything in `spec`, always with ``metrics.jsonl`` in the run's folder.

    Names are ``"console"``, ``"wandb"``, ``"tensorboard"`` and ``"mlflow"``; ``"none"`` and None stand for nothing
    beyond the file. Names and instances can be mixed in a list. Nothing is opened before `init`.

    >>> logger = make_loggers(["console", "tensorboard"], project="birds", name=None, run_dir=Path("runs/1"))
    >>> [type(part).__name__ for part in logger.loggers]
    ['JsonlLogger', 'ConsoleLogger', 'TensorBoardLogger']
    """
    makers: dict[str, Callable[[], BaseLogger]] = {
        "console": lambda: ConsoleLogger(console),
        "wandb": lambda: WandbLogger(project=project, name=name, dir=run_dir),
        "tensorboard": lambda: TensorBoardLogger(run_dir / "tensorboard"),
        "mlflow": lambda: MLflowLogger(experiment_name=project, run_name=name),
    }
    loggers: list[BaseLogger] = []
    for item in _as_list(spec):
        if isinstance(item, BaseLogger):
            loggers.append(item)
        elif isinstance(item, str) and item in makers:
            loggers.append(makers[item]())
        elif item != "none":
            known = [*makers, "none"]
            hint = did_you_mean(item, known) if isinstance(item, str) else ""
            do = hint or "Pass a name, a BaseLogger, or a list of them."
            raise BadArgument(expected(f"a logger to be one of {', '.join(known)}, or a BaseLogger", item, do))
    metrics = (run_dir / METRICS_FILE).resolve()
    if not any(isinstance(logger, JsonlLogger) and logger.path.resolve() == metrics for logger in loggers):
        # First, so that a record is on disk before anything else can go wrong with it.
        loggers.insert(0, JsonlLogger(run_dir / METRICS_FILE))
    return MultiLogger(loggers)


def _as_list(spec: str | BaseLogger | Sequence[str | BaseLogger] | None) -> Sequence[str | BaseLogger]:
    if spec is None:
        return []
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return spec
    return [spec]

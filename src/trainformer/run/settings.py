"""Settings that every run has, whatever it is computed with, and what makes one wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.engine.cadence import Cadence, Unit


@dataclass(kw_only=True)
class CommonSettings:
    """How long a run goes on, what it records, and what it keeps.

    Cadences are integers in their usual unit, or strings that name it: ``"500steps"``, ``"2epochs"``, ``"10min"``.
    """

    # How long, and with what
    epochs: int = 100
    max_steps: int | None = None  # overrides epochs
    batch_size: int = 32  # of all processes together
    eval_batch_size: int | None = None  # None: as batch_size
    accumulation_steps: int = 1
    seed: int = 42
    rank_timeout: float = 1800.0  # seconds that ranks wait for each other

    # What is recorded
    log: Any = "console"  # console, wandb, tensorboard, mlflow, none, a logger, or several
    log_every: int | str | None = 100
    project: str = "trainformer"
    name: str | None = None
    run_dir: str | Path | None = None  # None: runs/<name>

    # What is kept
    save_dir: str = "checkpoints"  # inside the run folder, unless absolute
    save_every: int | str | None = "10min"  # None: only the best and the last
    save_strategy: Unit = "steps"  # the unit of a bare number in save_every: steps, epochs or seconds
    save_best: int = 3
    save_last: int = 1
    keep_every: int | None = None  # keep one checkpoint per so many steps for good
    save_async: bool = False  # copy the state, write it in the background
    eval_on_save: bool = False
    monitor_metric: str = "val/loss"
    monitor_mode: str = "min"
    resume: str | Path | None = "auto"  # auto, a path, or None to begin anew
    load_components: Sequence[str] | None = None  # resume these only, e.g. ["model"]; None: everything
    exit_on_signal: bool = True  # after SIGTERM or SIGINT: save, then leave with 128 + signal; False: return from fit

    # Evaluation
    eval_every: int | str | None = 1

    def validate(self) -> None:
        """Refuse settings that cannot work, before anything is built."""
        for name in ("epochs", "batch_size", "accumulation_steps"):
            self._whole(name, least=1)
        for name in ("max_steps", "eval_batch_size", "keep_every"):
            if getattr(self, name) is not None:
                self._whole(name, least=1)
        for name in ("save_best", "save_last", "seed"):
            self._whole(name, least=0)
        if self.monitor_mode not in ("min", "max"):
            raise BadArgument(expected("monitor_mode to be 'min' or 'max'", self.monitor_mode))
        self._number("rank_timeout", lambda v: v > 0, "a positive number of seconds")
        if self.save_strategy not in ("steps", "epochs", "seconds"):
            raise BadArgument(expected("save_strategy to be 'steps', 'epochs' or 'seconds'", self.save_strategy))
        for name, unit in (("log_every", "steps"), ("save_every", self.save_strategy), ("eval_every", "epochs")):
            Cadence.parse(getattr(self, name), unit, name)  # type: ignore[arg-type]

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadArgument(expected(f"{name} to be a whole number of at least {least}", value))

    def _number(self, name: str, fits: Any, words: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not fits(value):
            raise BadArgument(expected(f"{name} to be {words}", value))

    def values(self) -> dict[str, Any]:
        """Every setting as it is now."""
        return {name: getattr(self, name) for name in self.defaults()}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of every setting."""
        return {f.name: f.default for f in fields(cls)}

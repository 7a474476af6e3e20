"""Settings that every run has, whatever computes it, and what the loop, retention and entry points derive from them.

A setting is declared once, as a field here or in `run.torch.settings`: its name, type, default, meaning (the comment is
also its help text on the command line) and, in `validate`, the values that make sense.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trainformer.checkpointing import Retention
from trainformer.core.errors import BadArgument, expected
from trainformer.engine import Plan
from trainformer.engine.cadence import Cadence, Unit
from trainformer.run.signals import SignalRules
from trainformer.run.validation_sets import eval_cadences
from trainformer.utils.files import check_local

_LONGEST_NAME = 200  # of the 255 bytes that file systems allow, since some loggers append to it


@dataclass(kw_only=True)
class CommonSettings:
    """How long a run trains, what it logs, and what it keeps.

    Cadences are integers in their usual unit, or strings that name it: ``"500steps"``, ``"2epochs"``, ``"10min"``.
    """

    # Length and batches
    epochs: int = 100
    max_steps: int | None = None  # overrides epochs
    batch_size: int = 32  # of all processes together
    eval_batch_size: int | None = None  # None: as batch_size
    accumulation_steps: int = 1
    seed: int = 42
    rank_timeout: float = 1800.0  # seconds that ranks wait for each other

    # Logging
    log: Any = "console"  # console, wandb, tensorboard, mlflow, none, a logger, or several
    log_every: int | str | None = 100
    project: str = "trainformer"
    name: str | None = None
    run_dir: str | Path | None = None  # None: runs/<name>

    # Checkpoints
    save_dir: str = "checkpoints"  # inside the run folder, unless absolute
    save_every: int | str | None = "10min"  # None: only the best and the last
    save_strategy: Unit = "steps"  # the unit of a bare number in save_every: steps, epochs or seconds
    save_best: int = 3
    save_last: int = 1
    keep_every: int | None = None  # keep one checkpoint every so many steps permanently
    save_async: bool = False  # copy the state, write it in the background
    eval_on_save: bool = False
    monitor_metric: str = "val/loss"
    monitor_mode: str = "min"
    resume: str | Path | None = "auto"  # auto, a path, or None to start from scratch
    load_components: Sequence[str] | None = None  # resume only these, e.g. ["model"]; None: everything
    exit_on_signal: bool = True  # after SIGTERM or SIGINT: save, then exit with 128 + signal; False: return from fit

    # Evaluation
    eval_every: int | str | Mapping[str, int | str | None] | None = 1  # or one for each validation set, by name

    def validate(self) -> None:
        """Reject settings that cannot work, before anything is built. NumPy's numbers become Python's."""
        for name in ("epochs", "batch_size", "accumulation_steps"):
            self._whole(name, least=1)
        for name in ("max_steps", "eval_batch_size", "keep_every"):
            self._whole(name, least=1, optional=True)
        for name in ("save_best", "save_last", "seed"):
            self._whole(name, least=0)
        for name in ("save_async", "eval_on_save", "exit_on_signal"):
            self._flag(name)
        self._text("project", "monitor_metric", "save_dir")
        check_run_name(self.name)
        for name in ("save_dir", "run_dir", "resume"):
            self._path(name)
        self._check_folders()
        self._components()
        self._choice("monitor_mode", ("min", "max"))
        self._choice("save_strategy", ("steps", "epochs", "seconds"))
        self._number("rank_timeout", lambda v: v > 0, "a positive number of seconds")
        for name, unit in (("log_every", "steps"), ("save_every", self.save_strategy)):
            Cadence.parse(getattr(self, name), unit, name)  # type: ignore[arg-type]
        eval_cadences(self.eval_every, self.eval_every if isinstance(self.eval_every, Mapping) else ())

    def _whole(self, name: str, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
            raise BadArgument(expected(f"{name} to be a whole number of at least {least}", value, _as_number(value)))
        setattr(self, name, int(value))

    def _number(self, name: str, fits: Any, words: str) -> None:
        value = getattr(self, name)
        if value is None and words.endswith(", or None"):
            return
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
            raise BadArgument(expected(f"{name} to be {words}", value, _as_number(value)))
        if hasattr(value, "dtype"):  # of NumPy
            setattr(self, name, float(value))

    def _flag(self, name: str, optional: bool = False) -> None:
        value = getattr(self, name)
        if (isinstance(value, (bool, int)) and value in (0, 1)) or str(getattr(value, "dtype", "")) == "bool":
            setattr(self, name, bool(value))  # also of NumPy
        elif not (optional and value is None):
            # Every string that is not empty counts as true, also "false".
            raise BadArgument(expected(f"{name} to be True or False", value, "Pass it without quotes."))

    def _text(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), (str, Path)):
                raise BadArgument(expected(f"{name} to be a string", getattr(self, name)))

    def _path(self, name: str) -> None:
        """Expand ``~``, and reject what is no path."""
        value = getattr(self, name)
        if isinstance(value, bool):
            do = "'auto' resumes, None starts from scratch." if name == "resume" else ""
            raise BadArgument(expected(f"{name} to be a path{', auto or None' if do else ''}", value, do))
        if value is None:
            return
        if not isinstance(value, (str, Path)):
            raise BadArgument(expected(f"{name} to be a path", value))
        check_local(name, value)
        if str(value).startswith("~"):
            setattr(self, name, type(value)(Path(value).expanduser()))

    def _check_folders(self) -> None:
        """Reject a run folder that is a file, or lies in one: everything in it would fail to be written."""
        run_dir = Path(self.run_dir or "")
        for path in (run_dir, run_dir / self.save_dir):
            try:
                blocking = next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), None)
            except (OSError, ValueError) as error:  # a name of 300 characters, or a null byte
                shown = f"{str(path)[:60]}...: {getattr(error, 'strerror', None) or error}"
                raise BadArgument(expected("the path of a folder to write to", shown)) from error
            if blocking is not None:
                raise BadArgument(
                    f"Expected a folder to write to, received '{path}': {'it' if blocking == path else blocking} is a "
                    "file. Choose another folder, or remove the file."
                )

    def _components(self) -> None:
        chosen = self.load_components
        if chosen is not None and (isinstance(chosen, str) or not all(isinstance(name, str) for name in chosen)):
            what = "load_components to be a list of names, or None"
            raise BadArgument(expected(what, chosen, f"Write [{chosen!r}]." if isinstance(chosen, str) else ""))

    def _choice(self, name: str, choices: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            *first, last = [repr(choice) if isinstance(choice, str) else str(choice) for choice in choices]
            raise BadArgument(expected(f"{name} to be {', '.join(first)} or {last}", value))

    def values(self) -> dict[str, Any]:
        """The current value of every setting."""
        return {name: getattr(self, name) for name in self.defaults()}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of every setting."""
        return {f.name: f.default for f in fields(cls)}

    def plan(self, evaluates: bool, val_sets: Collection[str] = ()) -> Plan:
        """What the loop does when. `evaluates`: whether there is validation data; `val_sets`: the names of its sets."""
        cadences = eval_cadences(self.eval_every, val_sets) if evaluates else None
        never = cadences is None or (isinstance(cadences, dict) and not any(cadences.values()))
        return Plan(
            max_steps=self.max_steps,
            epochs=None if self.max_steps is not None else self.epochs,
            accumulation=self.accumulation_steps,
            log_every=Cadence.parse(self.log_every, "steps", "log_every"),
            eval_every=cadences,
            save_every=Cadence.parse(self.save_every, self.save_strategy, "save_every"),
            eval_on_save=self.eval_on_save and evaluates,
            eval_at_end=not never,
            monitor=self.monitor_metric,
            monitor_mode=self.monitor_mode,
        )

    def retention(self) -> Retention:
        """Which checkpoints are kept."""
        return Retention(
            last=self.save_last,
            best=self.save_best,
            every=self.keep_every,
            monitor=self.monitor_metric,
            mode=self.monitor_mode,
        )


def check_run_name(name: Any) -> None:
    """Reject a name that cannot be the name of a folder under ``runs/``."""
    if name is None:
        return
    do = "Leave it out for one after the task and the time."
    if not isinstance(name, str):
        raise BadArgument(expected("name to be a string", name))
    if not folder_name(name).strip("."):
        raise BadArgument(expected("name to name a folder under runs/", name, do))
    if len(folder_name(name).encode()) > _LONGEST_NAME:
        short = f"{name[:20]}... with {len(name)} characters"
        raise BadArgument(expected(f"name to have at most {_LONGEST_NAME} bytes", short, "Pass a shorter one."))


def folder_name(name: str) -> str:
    """The folder of a run with this name."""
    return re.sub(r"[^\w.=+-]+", "-", name)


def _as_number(value: Any) -> str:
    """A hint for a number that was passed as a string."""
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        number = None
    if number is None:
        return ""
    yaml = (
        "" if "." in value or "e" not in value.lower() else f"; YAML 1.1 reads {value} as a string, 1.0e-4 as a number"
    )
    return f"Pass a number without quotes{yaml}."


@dataclass(frozen=True)
class FrontOptions:
    """How the runs of an entry point differ from those of `Trainer`.

    `plan` replaces fields of the loop's plan. Without `keeps_folder` nothing is written to disk. `checkpoint_name` is
    formatted with the step. With `shows_messages` log messages go to the console whatever loggers there are.
    With `skips_deleted`, a component whose file was deleted from a checkpoint keeps its initial state. Without
    `keeps_records` a run writes checkpoints and nothing else, unless it has a `run_dir`. `marks_latest` is whether a
    file `latest` names the newest checkpoint, `records_task` whether each has a ``task.json``. `checks_cadences` is
    whether to warn of cadences that a run never reaches: where they were not passed by these names, it would confuse.
    `fresh_start_hint` tells the user how to start from scratch, `continue_hint` how to resume with other settings.
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    keeps_folder: bool = True
    keeps_records: bool = True
    marks_latest: bool = True
    records_task: bool = True
    checks_cadences: bool = True
    checkpoint_name: str = "step_{:08d}"
    shows_messages: bool = False
    skips_deleted: bool = False
    fresh_start_hint: str = "pass resume=None"
    continue_hint: str = "pass resume='{folder}'"
    signals: SignalRules = field(default_factory=SignalRules)

"""Reading sweeps from their folders: trials, best first, and parameter importances.

Owns the meaning of what `trainformer.sweep.study` stores with each Optuna trial. A retry is a new trial in Optuna's
study that names the one it repeats (`retry_of`); both have the same number in the sweep. Imports no Optuna until a
study is opened.
"""

from __future__ import annotations

import importlib.util
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.utils.files import decode_json
from trainformer.utils.processes import process_identity

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

SWEEPS = Path("sweeps")
SPEC = "sweep.json"
STALE_SECONDS = 600.0  # a process on another machine without a heartbeat for so long is taken for dead
ACTIVE_CALLS: set[str] = set()  # the calls of `Sweep.run` in this process
_STATUS = {"COMPLETE": "completed", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
_REQUIRED = {"name": str, "direction": str, "method": str, "seed": int, "spaces": dict, "constants": dict}
_ORDER = ("completed", "pruned", "running", "waiting", "failed")


@dataclass
class Trial:
    """One trial of a sweep: its latest attempt.

    `status` is completed, pruned, failed, running, or waiting (interrupted; it is retried when the sweep resumes).
    `intermediate` holds the reported values by evaluation. `earlier` holds the errors of earlier attempts.
    """

    number: int
    config: dict[str, Any]
    metric: float | None
    status: str
    error: str | None = None
    seconds: float | None = None
    intermediate: dict[int, float] = field(default_factory=dict)
    run: str | None = None
    attempt: int = 1
    earlier: list[str] = field(default_factory=list)


@dataclass
class SweepRecord:
    """A sweep: its search space and its trials, best first, failed ones last."""

    name: str
    folder: Path
    direction: str
    method: str
    seed: int
    spaces: dict[str, str]
    trials: list[Trial]
    importances: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> Trial | None:
        """The best completed trial."""
        return next((trial for trial in self.trials if trial.status == "completed"), None)


def is_sweep(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is the folder of a sweep."""
    return (Path(folder) / SPEC).is_file()


def list_sweeps(folder: str | os.PathLike[str] = SWEEPS) -> list[Path]:
    """The folders of the sweeps in a folder.

    >>> list_sweeps("no/such/folder")
    []
    """
    root = Path(folder)
    return [path for path in sorted(root.iterdir()) if is_sweep(path)] if root.is_dir() else []


def find_sweep(sweep: str | os.PathLike[str]) -> Path:
    """The folder of a sweep, given a path or a name under ``sweeps/``."""
    for path in (Path(sweep), SWEEPS / sweep):
        if is_sweep(path):
            return path
    known = [path.name for path in list_sweeps()]
    hint = did_you_mean(str(sweep), known) or "`trainformer sweep show` lists the sweeps."
    raise BadArgument(expected("the folder of a sweep, or the name of one under sweeps/", str(sweep), hint))


def read_spec(folder: Path) -> dict[str, Any]:
    """The content of ``sweep.json``: what a sweep searches, and how."""
    path = folder / SPEC
    try:
        spec = decode_json(path.read_bytes())
        missing = [key for key in _REQUIRED if key not in spec]
        wrong = [key for key, kind in _REQUIRED.items() if key in spec and not isinstance(spec[key], kind)]
    except (OSError, ValueError, TypeError) as error:
        raise BadArgument(expected("the description of a sweep", str(path), f"It cannot be read: {error}.")) from error
    if missing or wrong or not isinstance(spec, dict):
        damage = f"It is damaged: see {', '.join(wrong) or 'its content'}."
        do = f"It lacks {', '.join(missing)}." if missing else damage
        raise BadArgument(expected("the description of a sweep", str(path), do))
    return spec


def read_sweep(sweep: str | os.PathLike[str], storage: Any = None, *, with_importances: bool = True) -> SweepRecord:
    """Read a sweep, given its folder or its name.

    Without `storage`, only files in the folder are opened: a folder may come from somebody else. Pass `storage` if the
    trials are elsewhere. Importances take some seconds, mostly for imports.
    """
    optuna = require("optuna", "sweep", "to read the trials of a sweep")
    from trainformer.sweep.storages import quiet_optuna, reading, redact

    folder = find_sweep(sweep)
    spec = read_spec(folder)
    with quiet_optuna():
        try:
            with reading(storage, spec, folder) as opened:
                study = optuna.load_study(study_name=spec["name"], storage=opened)
                trials = collect_trials(study.get_trials(deepcopy=False), spec, folder)
                importances = _importances(study) if with_importances else {}
        except BadArgument:
            raise
        except Exception as error:
            do = f"The storage could not be opened: {error}. Pass it as storage=..., with its password."
            what = "a storage with the trials of the sweep"
            raise BadArgument(expected(what, redact(storage) or str(folder), do)) from error
    known = {key: spec[key] for key in _REQUIRED if key != "constants"}
    return SweepRecord(folder=folder, trials=trials, importances=importances, **known)


def collect_trials(stored: list[FrozenTrial], spec: Mapping[str, Any], folder: Path) -> list[Trial]:
    """The trials of the sweep from the trials in Optuna's study, best first."""
    number_of = trial_numbers(stored)
    found: dict[int, Trial] = {}
    for item in sorted(stored, key=lambda item: item.number):
        attributes = item.user_attrs
        if item.number not in number_of or (item.state.name == "WAITING" and "retry_of" not in attributes):
            continue
        number = number_of[item.number]
        earlier = found.get(number)
        trial = _as_trial(number, item, spec["constants"], folder)
        if item.state.name == "RUNNING" and is_stale(item):
            trial.status = "waiting"
        if earlier is not None:
            trial.config, trial.run = earlier.config | trial.config, trial.run or earlier.run
            lost = [earlier.error] if earlier.error and earlier.attempt < attributes.get("attempt", 1) else []
            trial.earlier = [*earlier.earlier, *lost]
        found[number] = trial
    sign = -1.0 if spec["direction"] == "maximize" else 1.0

    def rank(trial: Trial) -> tuple[int, float, int]:
        return _ORDER.index(trial.status), 0.0 if trial.metric is None else sign * trial.metric, trial.number

    return sorted(found.values(), key=rank)


def _as_trial(number: int, item: FrozenTrial, constants: Mapping[str, Any], folder: Path) -> Trial:
    attributes, values = item.user_attrs, item.intermediate_values
    run = attributes.get("run")
    return Trial(
        number=number,
        config={**item.params, **constants},
        metric=item.values[0] if item.values else None,
        status=_STATUS[item.state.name],
        error=attributes.get("error"),
        seconds=attributes.get("seconds"),
        intermediate={step: values[step] for step in sorted(values)},
        run=None if run is None else str(folder / run),
        attempt=attributes.get("attempt", 1),
    )


def trial_numbers(stored: list[FrozenTrial]) -> dict[int, int]:
    """Optuna's trial numbers mapped to the sweep's. A retry has the number of its trial; surplus trials have none."""
    numbers: dict[int, int] = {}
    count = 0
    for trial in sorted(stored, key=lambda trial: trial.number):
        if trial.user_attrs.get("surplus"):
            continue
        retry_of = trial.user_attrs.get("retry_of")
        numbers[trial.number] = count if retry_of is None else numbers[retry_of]
        count += retry_of is None
    return numbers


def is_stale(trial: FrozenTrial) -> bool:
    """Whether the process of a running trial is gone: known at once on this machine, by its heartbeat on others."""
    owner = trial.user_attrs.get("owner")
    if owner is None:  # started by another program
        return False
    if owner["host"] == socket.gethostname():
        if owner["process"] == os.getpid() and owner["call"] not in ACTIVE_CALLS:
            return True
        return process_identity(owner["process"]) != owner["identity"]
    return time.time() - trial.user_attrs.get("heartbeat", 0.0) > STALE_SECONDS


def _importances(study: Study) -> dict[str, float]:
    """Parameter importances by Optuna (PED-ANOVA), which add up to 1; empty if there are too few trials."""
    finite = [t for t in study.get_trials(deepcopy=False) if t.value is not None and math.isfinite(t.value)]
    if len(finite) < 2:
        return {}
    try:
        found = {name: float(value) for name, value in _evaluator().evaluate(study).items()}
    except Exception:  # too few trials, or all alike: every evaluator raises something different
        return {}
    total = math.fsum(found.values())
    shares = {name: value / total if total else 1 / len(found) for name, value in found.items()}
    return {name: share for name, share in shares.items() if math.isfinite(share)}


def _evaluator() -> Any:
    """Optuna's PED-ANOVA. Its package imports scikit-learn, SciPy and pandas (2 s) for another evaluator: not run."""
    package = "optuna.importance"
    if package not in sys.modules and (spec := importlib.util.find_spec(package)) is not None:
        stand_in = ModuleType(package)
        stand_in.__path__ = list(spec.submodule_search_locations or [])
        sys.modules[package] = stand_in
        try:
            return importlib.import_module(f"{package}._ped_anova.evaluator").PedAnovaImportanceEvaluator()
        except (ImportError, AttributeError):  # another version of Optuna
            pass
        finally:
            del sys.modules[package]  # the next import gets the whole package
    return importlib.import_module(package).PedAnovaImportanceEvaluator()

"""Sweeps as their folders show them: trials, the best first, and which settings matter."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require

SWEEPS = Path("sweeps")
_STATUS = {"COMPLETE": "completed", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
_SAID = ("name", "direction", "method", "seed", "spaces", "constants")
_ORDER = ("completed", "pruned", "running", "waiting", "failed")


@dataclass
class Trial:
    """One trial of a sweep: the last attempt at it.

    `status` is completed, pruned, failed, running, or waiting (interrupted: it is made again when the sweep goes on).
    `intermediate` are the metrics that it reported, by evaluation. `earlier` says why earlier attempts came to nothing.
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
    """A sweep: what it searches, and its trials, the best first and failed ones last."""

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
        """The best trial that was completed."""
        return next((trial for trial in self.trials if trial.status == "completed"), None)


def is_sweep(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a sweep."""
    return (Path(folder) / "sweep.json").is_file()


def list_sweeps(folder: str | os.PathLike[str] = SWEEPS) -> list[Path]:
    """The sweeps in a folder."""
    place = Path(folder)
    return [path for path in sorted(place.iterdir()) if is_sweep(path)] if place.is_dir() else []


def find_sweep(sweep: str | os.PathLike[str]) -> Path:
    """The folder that is meant: a path, or the name of a folder under ``sweeps/``."""
    for place in (Path(sweep), SWEEPS / sweep):
        if is_sweep(place):
            return place
    known = [path.name for path in list_sweeps()]
    hint = did_you_mean(str(sweep), known) or "`trainformer sweep show` lists the sweeps there are."
    raise BadArgument(expected("the folder of a sweep, or the name of one under sweeps/", str(sweep), hint))


def read_spec(folder: Path) -> dict[str, Any]:
    """What a sweep searches, and how, as its folder says."""
    path = folder / "sweep.json"
    try:
        spec = json.loads(path.read_bytes())
        missing = [key for key in _SAID if key not in spec]
    except (ValueError, TypeError) as error:
        raise BadArgument(expected("the description of a sweep", str(path), f"It cannot be read: {error}.")) from error
    if missing:
        raise BadArgument(expected("the description of a sweep", str(path), f"It lacks {', '.join(missing)}."))
    return spec


def read_sweep(sweep: str | os.PathLike[str], storage: Any = None, *, with_importances: bool = True) -> SweepRecord:
    """A sweep, given its folder or its name.

    `storage` is needed if the sweep has one of its own whose address is secret: a password is not kept in the folder.
    To tell the importances takes seconds, for what is imported.
    """
    optuna = require("optuna", "sweep", "to read the trials of a sweep")
    from trainformer.sweep.storages import open_storage, quiet_optuna

    folder = find_sweep(sweep)
    spec = read_spec(folder)
    where = storage if storage is not None else spec.get("storage")
    with quiet_optuna():
        try:
            opened = open_storage(where, folder, make=False)
            study = optuna.load_study(study_name=spec["name"], storage=opened)
        except BadArgument:
            raise
        except Exception as error:
            do = f"The storage could not be opened: {error}. Pass it as storage=..., with its password."
            raise BadArgument(expected("a storage with the trials of the sweep", where or str(folder), do)) from error
        trials = collect(study.get_trials(deepcopy=False), spec, folder)
        importances = _importances(study) if with_importances else {}
    return SweepRecord(folder=folder, trials=trials, importances=importances, **{key: spec[key] for key in _SAID[:-1]})


def collect(stored: list[Any], spec: Mapping[str, Any], folder: Path) -> list[Trial]:
    """Trials as they are stored, to trials of the sweep in their order."""
    from trainformer.sweep.study import is_abandoned, numbers

    number_of = numbers(stored)
    found: dict[int, Trial] = {}
    for item in sorted(stored, key=lambda item: item.number):
        if item.number not in number_of or (item.state.name == "WAITING" and "follows" not in item.user_attrs):
            continue
        number, attributes = number_of[item.number], item.user_attrs
        earlier = found.get(number)
        trial = _trial(number, item, spec["constants"], folder)
        if item.state.name == "RUNNING" and is_abandoned(item):
            trial.status = "waiting"
        if earlier is not None:
            trial.config, trial.run = earlier.config | trial.config, trial.run or earlier.run
            lost = [earlier.error] if earlier.error and earlier.attempt < attributes.get("attempt", 1) else []
            trial.earlier = [*earlier.earlier, *lost]
        found[number] = trial
    sign = -1.0 if spec["direction"] == "maximize" else 1.0

    def place(trial: Trial) -> tuple[int, float, int]:
        return _ORDER.index(trial.status), 0.0 if trial.metric is None else sign * trial.metric, trial.number

    return sorted(found.values(), key=place)


def _trial(number: int, item: Any, constants: Mapping[str, Any], folder: Path) -> Trial:
    attributes = item.user_attrs
    run, status = attributes.get("run"), _STATUS[item.state.name]
    values = item.intermediate_values
    metric = item.values[0] if item.values else None
    return Trial(
        number=number,
        config={**item.params, **constants},
        metric=metric,
        status=status,
        error=attributes.get("error"),
        seconds=attributes.get("seconds"),
        intermediate={step: values[step] for step in sorted(values)},
        run=None if run is None else str(folder / run),
        attempt=attributes.get("attempt", 1),
    )


def _importances(study: Any) -> dict[str, float]:
    """How much each setting matters, as Optuna tells it (PED-ANOVA); nothing where that cannot be told."""
    import math

    import optuna

    finite = [t for t in study.get_trials(deepcopy=False) if t.value is not None and math.isfinite(t.value)]
    if len(finite) < 2:
        return {}
    try:
        found = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    except Exception:  # too few trials, or all alike: each evaluator says so in its own way
        return {}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}

"""A sweep as plain values for the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainformer.sweep.reading import read_sweep


def read(folder: Path) -> dict[str, Any]:
    """What `trainformer.sweep` knows of it; `run` of a trial is the resolved folder of its run."""
    record = read_sweep(folder)
    return {
        "name": record.name,
        "path": str(record.folder),
        "direction": record.direction,
        "method": record.method,
        "seed": record.seed,
        "spaces": {name: str(space) for name, space in record.spaces.items()},
        "importances": dict(record.importances),
        "trials": [
            {
                "number": trial.number,
                "config": dict(trial.config),
                "metric": trial.metric,
                "status": trial.status,
                "error": trial.error,
                "seconds": trial.seconds,
                "attempt": trial.attempt,
                "intermediate": sorted(trial.intermediate.items()),
                "run": None if trial.run is None else str(Path(trial.run).resolve()),
            }
            for trial in record.trials
        ],
    }

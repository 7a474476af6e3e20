"""Which checkpoints of a run are kept: the best, and the last."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError
from trainformer.engine.state import is_better
from trainformer.session.folder import write_atomically
from trainformer.session.snapshot import read_snapshot, write_snapshot

logger = logging.getLogger("trainformer")


class CheckpointKeeper:
    """Writes ``step_<n>.pt`` files into a folder and deletes those that are neither among the best nor the last."""

    def __init__(self, folder: Path, *, best: int, last: int, monitor: str, mode: str) -> None:
        self.folder = folder
        self.best = best
        self.last = max(last, 1)
        self.monitor = monitor
        self.mode = mode

    def worth_keeping(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is among the best so far."""
        value = metrics.get(self.monitor)
        if value is None or self.best == 0:
            return False
        kept = self._ranked(self._scores())[: self.best]
        return len(kept) < self.best or is_better(value, kept[-1][0], self.mode)

    def save(self, step: int, state: dict[str, Any], metrics: dict[str, float]) -> Path:
        """Write a checkpoint, then tidy up. `metrics` are those of an evaluation at this very step, if any."""
        path = self.folder / f"step_{step:08d}.pt"
        write_snapshot(path, state)
        scores = self._scores()
        if self.monitor in metrics:
            scores[path.name] = metrics[self.monitor]
        self._tidy(scores)
        return path

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that can be read; damaged ones are named and passed over."""
        for path in reversed(self._files()):
            try:
                return path, read_snapshot(path)
            except DataError as error:
                logger.warning("%s Trying the one before.", error)
        return None

    def _tidy(self, scores: dict[str, float]) -> None:
        files = self._files()
        wanted = {path.name for path in files[-self.last :]}
        wanted |= {name for _, name in self._ranked(scores)[: self.best]}
        for path in files:
            if path.name not in wanted:
                path.unlink()
        kept = {name: score for name, score in scores.items() if name in wanted}
        write_atomically(self.folder / "scores.json", json.dumps(kept, indent=2).encode())

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step_*.pt"))

    def _scores(self) -> dict[str, float]:
        path = self.folder / "scores.json"
        if not path.exists():
            return {}
        scores = json.loads(path.read_text())
        return {name: score for name, score in scores.items() if (self.folder / name).exists()}

    def _ranked(self, scores: dict[str, float]) -> list[tuple[float, str]]:
        return sorted(((score, name) for name, score in scores.items()), reverse=self.mode == "max")

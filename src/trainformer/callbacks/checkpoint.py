"""Save the best models to files of your choice."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainformer.callbacks.base import TrainerLike, was_left_out
from trainformer.core.errors import BadArgument, check_count, expected
from trainformer.engine.state import is_better

logger = logging.getLogger("trainformer")


@dataclass
class ModelCheckpoint:
    """Save a file after each evaluation among the best `save_top_k`, and delete files that drop out of the top k.

    `filename` may use ``{epoch}`` (completed epochs), ``{step}``, ``{monitor}`` and ``{value}``. The trainer saves its
    own checkpoints in the run folder anyway; use this callback to choose names and locations yourself.
    """

    monitor: str = "val/loss"
    mode: str = "min"
    save_top_k: int = 3
    save_dir: str = "checkpoints"
    filename: str = "epoch_{epoch}_{monitor}_{value:.4f}.pt"

    _best_scores: list[tuple[float, Path]] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise BadArgument(expected("ModelCheckpoint's mode to be 'min' or 'max'", self.mode))
        check_count("ModelCheckpoint's save_top_k", self.save_top_k)
        names = [self._name(epoch=number, step=number, value=float(number)) for number in (1, 2)]
        if names[0] == names[1] and self.save_top_k > 1:
            do = "Add {epoch}, {step} or {value}, or pass save_top_k=1: otherwise each file replaces the one before."
            what = f"ModelCheckpoint's filename to differ for {self.save_top_k} files"
            raise BadArgument(expected(what, self.filename, do))

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        value = metrics.get(self.monitor)
        if value is None and was_left_out(trainer, self.monitor):
            return
        if value is None:
            missing = "ModelCheckpoint: %r is not among the metrics %s; nothing saved"
            logger.warning(missing, self.monitor, sorted(metrics))
            return
        full = len(self._best_scores) >= self.save_top_k
        if full and not is_better(value, self._best_scores[-1][0], self.mode):
            return
        name = self._name(epoch=trainer.state.epoch, step=trainer.state.step, value=value)
        path = Path(trainer.save(str(Path(self.save_dir) / name)))
        # Two evaluations may round to the same name; the later one owns the file then.
        kept = [(score, other) for score, other in self._best_scores if other != path]
        self._best_scores = sorted([*kept, (value, path)], key=lambda s: s[0], reverse=self.mode == "max")
        while len(self._best_scores) > self.save_top_k:
            _, dropped = self._best_scores.pop()
            if dropped.is_dir():  # JAX runs save a folder
                shutil.rmtree(dropped)
            else:
                dropped.unlink(missing_ok=True)

    def _name(self, **values: Any) -> str:
        try:
            return self.filename.format(monitor=self.monitor.replace("/", "_"), **values)
        except (KeyError, IndexError, ValueError) as error:
            what = "ModelCheckpoint's filename with {epoch}, {step}, {monitor} and {value}"
            raise BadArgument(expected(what, self.filename)) from error

    @property
    def best_path(self) -> Path | None:
        """The file of the best evaluation so far, or None."""
        return self._best_scores[0][1] if self._best_scores else None

    def state_dict(self) -> dict[str, Any]:
        return {"best_scores": [(score, str(path)) for score, path in self._best_scores]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = [(score, Path(path)) for score, path in state["best_scores"]]
        self._best_scores = [(score, path) for score, path in known if path.exists()]

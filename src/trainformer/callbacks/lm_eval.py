"""Benchmarks of lm-evaluation-harness during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainformer.callbacks.base import EveryNthEvaluation, TrainerLike
from trainformer.core.errors import BadArgument, expected
from trainformer.engine.cadence import Cadence


@dataclass
class LMEval(EveryNthEvaluation):
    """Evaluate a causal language model on benchmarks of lm-evaluation-harness during training.

    Metrics are logged as ``lm_eval/TASK/METRIC``. `every=N` runs at every N-th evaluation of the run, and its metrics
    can be monitored; a string (``"500steps"``, ``"1epoch"``) runs on its own, also without validation data. `limit`
    restricts the samples per task, `include_path` is a folder with tasks of your own, and the other options are those
    of `trainformer.eval.lm_evaluate`. Training is not affected. Every process evaluates all samples.

    >>> LMEval("arc_easy, hellaswag", every="500steps", limit=100).tasks
    ['arc_easy', 'hellaswag']
    """

    needs_torch = True

    tasks: str | Sequence[str]
    every: int | str = 1  # type: ignore[assignment]
    num_fewshot: int | None = None
    limit: int | float | None = None
    batch_size: int | str = 8
    include_path: str | Path | None = None
    apply_chat_template: bool = False

    def __post_init__(self) -> None:
        from trainformer.eval.lm_harness import _check_options, check_tasks

        self.tasks = check_tasks(self.tasks)
        _check_options(self.num_fewshot, self.limit, self.batch_size)
        self._cadence: Cadence | None = None
        if isinstance(self.every, str):
            self._cadence = Cadence.parse(self.every, "steps", "LMEval's every")
            if self._cadence is None or self._cadence.unit == "seconds":
                what = "LMEval's every to be a number of evaluations, or steps or epochs such as '500steps'"
                raise BadArgument(expected(what, self.every))
        elif isinstance(self.every, bool) or self.every < 1:
            raise BadArgument(expected("LMEval's every to be at least 1", self.every))

    def attach(self, trainer: TrainerLike) -> None:
        """Check that the harness is installed, and that the task has a causal language model."""
        from trainformer.eval.lm_harness import lm_eval_package

        if getattr(trainer.task, "kind", None) != "causal_lm" or not hasattr(trainer.task, "text_tokenizer"):
            do = "Remove the callback."
            raise BadArgument(
                expected("a task with a causal language model for LMEval", type(trainer.task).__name__, do)
            )
        lm_eval_package()

    def on_train_begin(self, trainer: TrainerLike) -> None:
        """Check that there are evaluations to run at."""
        if self._cadence is None and trainer.val_dataloader is None:
            do = "Pass val_data or val_split, or every='500steps'."
            raise BadArgument(expected("validation data for LMEval, which runs at evaluations", "none", do))

    def compute_metrics(self, trainer: TrainerLike, metrics: dict[str, float]) -> dict[str, float]:
        return self._evaluate(trainer) if self._cadence is None and self.is_due() else {}

    def on_step_end(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        if self._cadence is not None and self._cadence.due_at_step(step):
            trainer.log_metrics(self._evaluate(trainer))

    def on_epoch_end(self, trainer: TrainerLike, epoch: int, metrics: dict[str, float]) -> None:
        if self._cadence is not None and self._cadence.due_at_epoch(epoch + 1):
            trainer.log_metrics(self._evaluate(trainer))

    def _evaluate(self, trainer: TrainerLike) -> dict[str, float]:
        from trainformer.adapters.base import unwrap_model
        from trainformer.eval.lm_harness import lm_evaluate

        with trainer.eval_mode():
            found = lm_evaluate(
                unwrap_model(trainer.task.model),
                trainer.task.text_tokenizer,
                self.tasks,
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                batch_size=self.batch_size,
                include_path=self.include_path,
                apply_chat_template=self.apply_chat_template,
                bootstrap_iters=0,  # standard errors are not logged
            )
        return found.logged()

"""The records that HuggingFace's callbacks are called with, and the base class to write such callbacks with.

Names and meanings are HuggingFace's, with the additions of Forgather (`should_abort_without_save`, `raw_epoch`, ...).
`transformers` itself is not needed.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class IntervalStrategy(enum.StrEnum):
    """When something happens: never, every so many steps, or after each epoch. Equal to its string.

    >>> IntervalStrategy("steps") == "steps", str(IntervalStrategy.EPOCH)
    (True, 'epoch')
    """

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


@dataclass
class TrainerState:
    """Where a run is. Callbacks read it; what they write to it is not kept, except in `log_history`.

    `epoch` is a fraction, `raw_epoch` the number of the running epoch, and `epoch_start_step` the step it began with.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    max_eval_steps: int = -1
    train_batch_size: int | None = None
    num_train_epochs: float = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)
    epoch_start_step: int = 0
    raw_epoch: int = 0

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return dataclasses.asdict(self)

    def save_to_json(self, json_path: str | Path) -> None:
        """Write all fields to a file."""
        Path(json_path).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Read what `save_to_json` wrote, here or in transformers."""
        values = json.loads(Path(json_path).read_text(encoding="utf-8"))
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


@dataclass
class TrainerControl:
    """What callbacks ask for. A flag counts when a callback changes it, in place or in a control that it returns.

    Flags that the plan has set may be cleared, too: ``control.should_save = False`` in `on_step_end` calls off the
    checkpoint that is due after this step.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    should_abort_without_save: bool = False


class TrainerCallback:
    """Base class of callbacks in HuggingFace's dialect. Override what you need; those not overridden cost nothing.

    Every method gets the arguments, the state and the control of the run, and as keywords `model`, `processing_class`,
    `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader` and `trainer`.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """When the trainer has been built."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before the first step."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After the last step."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before an epoch."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an epoch, before what is due once per epoch."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before an optimizer step."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After each micro-batch of a step but the last."""

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Gradients are complete and clipped; the weights are still the old ones."""

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The weights are new; the gradients are still there."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an optimizer step."""

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After each batch of an evaluation or a prediction."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an evaluation, with `metrics`."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a prediction, with its `metrics`."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a checkpoint was written."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """When metrics are logged, with `logs`."""


#: Every event of the dialect. `on_push_begin` belongs to HuggingFace's hub, which nothing here talks to.
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))

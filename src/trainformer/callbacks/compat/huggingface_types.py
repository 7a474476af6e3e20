"""What HF callbacks receive: arguments, state and control, and the base class to write such callbacks with.

Names and meanings are those of transformers, plus Forgather's additions (`should_abort_without_save`, `raw_epoch`,
...). `transformers` itself is not needed.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError, expected
from trainformer.engine.cadence import Cadence
from trainformer.utils.files import decode_json


class IntervalStrategy(enum.StrEnum):
    """When something happens: never, every N steps, or after each epoch. Equal to its string.

    >>> IntervalStrategy("steps") == "steps", str(IntervalStrategy.EPOCH)
    (True, 'epoch')
    """

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class Name(str):
    """A name that has a `value`, like the enums of HF.

    >>> Name("linear").value, Name("linear") == "linear"
    ('linear', True)
    """

    __slots__ = ()

    @property
    def value(self) -> str:
        """The name as a plain text."""
        return str(self)


class SaveStrategy(enum.StrEnum):
    """When checkpoints are written: like `IntervalStrategy`, or after each evaluation that is the best so far.

    >>> SaveStrategy("best") == "best"
    True
    """

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


#: Fields of our `TrainerState` that transformers does not know.
_NOT_IN_HF = ("max_eval_steps", "epoch_start_step", "raw_epoch")


@dataclass
class TrainerState:
    """Progress of a run, for callbacks to read. Changes by callbacks are discarded, except to `log_history`.

    `epoch` is fractional, `raw_epoch` is the index of the current epoch, and `epoch_start_step` its first step.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: float = 500
    eval_steps: float = 500
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
        """Write the fields that transformers has to a JSON file, which it can read."""
        # Not to_dict(): copying a full log history takes longer than writing it.
        values = {name: value for name, value in vars(self).items() if name not in _NOT_IN_HF}
        Path(json_path).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Set `logging_steps`, `eval_steps` and `save_steps`; fractions in the arguments are those of `max_steps`."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(args, name)
            if steps is not None:
                setattr(self, name, math.ceil(max_steps * steps) if steps < 1 else steps)

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Read a file written by `save_to_json`, here or in transformers."""
        try:
            values = decode_json(Path(json_path).read_bytes())
        except ValueError as error:
            raise DataError(f"{json_path} is damaged: it is not valid JSON ({error}).") from error
        if not isinstance(values, dict):
            raise DataError(expected(f"the fields of a trainer state in {json_path}", type(values).__name__))
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


@dataclass
class TrainerControl:
    """Requests of callbacks. A callback makes one by changing a flag, in place or in a control that it returns.

    Callbacks can also clear a flag that the schedule has set: ``control.should_save = False`` in `on_step_end` skips
    the checkpoint that is due after this step.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    should_abort_without_save: bool = False

    def state(self) -> dict[str, Any]:
        """The flags, in the form in which `trainer_state.json` holds them."""
        flags = {name: value for name, value in vars(self).items() if name != "should_abort_without_save"}
        return {"args": flags, "attributes": {}}

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False


class TrainerCallback:
    """Base class of HF-style callbacks. Override what you need; events that are not overridden cost nothing.

    Every method receives the arguments, state and control of the run, and the keyword arguments `model`,
    `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader` and `trainer`.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After the trainer is built."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before the first step."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After the last step."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before an epoch."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an epoch, before the per-epoch log, evaluation and save."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before an optimizer step."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After each micro-batch of a step except the last."""

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After gradient clipping, before the optimizer step."""

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After the optimizer step, before the gradients are cleared."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an optimizer step."""

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After each batch of an evaluation or prediction."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an evaluation, with `metrics`."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a prediction, with `metrics`."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a checkpoint was written."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """When metrics are logged, with `logs`."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Before files are uploaded to the hub."""


#: All events of HF callbacks.
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


def arguments_of(trainer: Any) -> Any:
    """The `args` of a run. A trainer without arguments gets a view of its settings, built once."""
    args = getattr(trainer, "args", None)
    if args is not None:
        return args
    return trainer.__dict__.setdefault("_settings_as_arguments", SettingsAsArguments(trainer))


class SettingsAsArguments:
    """Read-only view of the settings of a `trainformer.Trainer` under the names of HF `TrainingArguments`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _SETTINGS:
            return _SETTINGS[name](self._trainer)
        raise AttributeError(
            f"A callback read args.{name}, which trainformer.Trainer has no setting for. It has "
            f"{', '.join(_SETTINGS)}. A trainformer.hf.Trainer passes its own TrainingArguments to callbacks."
        )

    def to_dict(self) -> dict[str, Any]:
        """All arguments by name."""
        return {name: getattr(self, name) for name in _SETTINGS}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """All arguments, in types that loggers accept."""
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in self.to_dict().items()}

    def to_json_string(self) -> str:
        """All arguments as JSON."""
        return json.dumps(self.to_sanitized_dict(), indent=2)


def _cadence(trainer: Any, setting: str) -> Cadence | None:
    unit: Any = trainer.save_strategy if setting == "save_every" else "epochs" if setting == "eval_every" else "steps"
    value = getattr(trainer, setting)
    if isinstance(value, Mapping):  # of several validation sets, the one that is monitored
        value = value.get(str(trainer.monitor_metric).split("/")[1], 1)
    return Cadence.parse(value, unit)


def _strategy(setting: str) -> Callable[[Any], IntervalStrategy]:
    def read(trainer: Any) -> IntervalStrategy:
        cadence = _cadence(trainer, setting)
        if cadence is None or (setting == "eval_every" and trainer.val_dataloader is None):
            return IntervalStrategy.NO
        return IntervalStrategy.EPOCH if cadence.unit == "epochs" else IntervalStrategy.STEPS

    return read


def _steps(setting: str) -> Callable[[Any], int]:
    def read(trainer: Any) -> int:
        cadence = _cadence(trainer, setting)
        return int(cadence.every) if cadence is not None and cadence.unit == "steps" else 500

    return read


_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "output_dir": lambda t: str(t.run_folder or t.run_dir or "runs"),
    "logging_dir": lambda t: str(t.run_folder or t.run_dir or "runs"),
    "run_name": lambda t: t.name,
    "num_train_epochs": lambda t: t.epochs,
    "max_steps": lambda t: t.max_steps if t.max_steps is not None else -1,
    "per_device_train_batch_size": lambda t: t.batch_size,
    "per_device_eval_batch_size": lambda t: t.eval_batch_size or t.batch_size,
    "train_batch_size": lambda t: t.batch_size,
    "eval_batch_size": lambda t: t.eval_batch_size or t.batch_size,
    "gradient_accumulation_steps": lambda t: t.accumulation_steps,
    "learning_rate": lambda t: t.lr,
    "weight_decay": lambda t: t.weight_decay,
    "max_grad_norm": lambda t: t.gradient_clip or 0.0,
    "warmup_ratio": lambda t: t.warmup_ratio,
    "seed": lambda t: t.seed,
    "bf16": lambda t: t.precision == "bf16",
    "fp16": lambda t: t.precision == "fp16",
    "logging_strategy": _strategy("log_every"),
    "logging_steps": _steps("log_every"),
    "logging_first_step": lambda t: True,
    "eval_strategy": _strategy("eval_every"),
    "eval_steps": _steps("eval_every"),
    "eval_delay": lambda t: 0,
    "save_strategy": _strategy("save_every"),
    "save_steps": _steps("save_every"),
    "save_total_limit": lambda t: t.save_last,
    "metric_for_best_model": lambda t: str(t.monitor_metric).replace("val/", "eval_", 1),
    "greater_is_better": lambda t: t.monitor_mode == "max",
    "load_best_model_at_end": lambda t: False,
    "disable_tqdm": lambda t: False,
    "report_to": lambda t: [],
    "process_index": lambda t: 0,
    "local_process_index": lambda t: 0,
    "world_size": lambda t: 1,
    "n_gpu": lambda t: 1,
    "device": lambda t: t.device,
}

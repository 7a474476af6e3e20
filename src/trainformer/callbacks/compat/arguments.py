"""What HuggingFace's callbacks get as `args`: the trainer's own, or its settings under HuggingFace's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from trainformer.callbacks.compat.huggingface_types import IntervalStrategy
from trainformer.engine.cadence import Cadence


def arguments_of(trainer: Any) -> Any:
    """The arguments of a run. A trainer that has none gets a view of its settings, made once."""
    args = getattr(trainer, "args", None)
    if args is not None:
        return args
    return trainer.__dict__.setdefault("_settings_as_arguments", SettingsAsArguments(trainer))


class SettingsAsArguments:
    """The settings of a `trainformer.Trainer` under the names of `TrainingArguments`. To be read, not written."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES:
            return _NAMES[name](self._trainer)
        raise AttributeError(
            f"A callback asked for args.{name}, which trainformer.Trainer has no setting for. It has "
            f"{', '.join(_NAMES)}. A trainformer.hf.Trainer hands its own TrainingArguments to callbacks."
        )

    def to_dict(self) -> dict[str, Any]:
        """All of them."""
        return {name: getattr(self, name) for name in _NAMES}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The same, in types that loggers take."""
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in self.to_dict().items()}

    def to_json_string(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_sanitized_dict(), indent=2)


def _strategy(field: str, default_unit: Any) -> Callable[[Any], IntervalStrategy]:
    def read(trainer: Any) -> IntervalStrategy:
        unit = trainer.save_strategy if field == "save_every" else default_unit
        cadence = Cadence.parse(getattr(trainer, field), unit)
        if cadence is None or (field == "eval_every" and trainer.val_dataloader is None):
            return IntervalStrategy.NO
        return IntervalStrategy.EPOCH if cadence.unit == "epochs" else IntervalStrategy.STEPS

    return read


def _steps(field: str, default_unit: Any) -> Callable[[Any], int]:
    def read(trainer: Any) -> int:
        unit = trainer.save_strategy if field == "save_every" else default_unit
        cadence = Cadence.parse(getattr(trainer, field), unit)
        return int(cadence.every) if cadence is not None and cadence.unit == "steps" else 500

    return read


def _metric(trainer: Any) -> str:
    return str(trainer.monitor_metric).replace("val/", "eval_", 1)


_NAMES: dict[str, Callable[[Any], Any]] = {
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
    "logging_strategy": _strategy("log_every", "steps"),
    "logging_steps": _steps("log_every", "steps"),
    "logging_first_step": lambda t: True,
    "eval_strategy": _strategy("eval_every", "epochs"),
    "eval_steps": _steps("eval_every", "epochs"),
    "eval_delay": lambda t: 0,
    "save_strategy": _strategy("save_every", "steps"),
    "save_steps": _steps("save_every", "steps"),
    "save_total_limit": lambda t: t.save_last,
    "metric_for_best_model": _metric,
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

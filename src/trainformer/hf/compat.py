"""Compatibility with scripts written for the HF Trainer: reports, counts, and aliases.

Also what is missing, each with a replacement: reading a missing attribute raises an error that names it, and so does
building a subclass that overrides a method which would never be called.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, expected
from trainformer.utils.files import write_atomically

if TYPE_CHECKING:
    from trainformer.callbacks.compat.huggingface_types import TrainerState

_STEP = "Override training_step, compute_loss, evaluation_loop or prediction_step, or use a callback."
_FILES = "Override save_model to write additional files, or use a callback with on_save."

# Methods of the HF Trainer that are never called here, and what to override instead.
_NEVER_CALLED = {
    **dict.fromkeys(("prediction_loop", "_run_epoch", "_maybe_log_save_evaluate", "get_batch_samples"), _STEP),
    **dict.fromkeys(("_save_optimizer_and_scheduler", "_save_rng_state",
                     "_load_optimizer_and_scheduler", "_load_rng_state"), _FILES),
    "_wrap_model": "Wrap the model before you pass it.",
}  # fmt: skip


def check_overrides(kind: type) -> None:
    """Raise if a subclass overrides a method that would never be called."""
    for name, instead in _NEVER_CALLED.items():
        if hasattr(kind, name):
            raise BadArgument(
                f"{kind.__name__} overrides {name}, which belongs to the HF training loop and is not called. {instead}"
            )


class ScriptMixin:
    """Methods and attributes that the example scripts of transformers use."""

    args: Any
    model: Any
    processing_class: Any
    is_world_process_zero: Any

    @property
    def state(self) -> TrainerState:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{message}. {_NEVER_CALLED[name]}" if name in _NEVER_CALLED else message)

    # -- reports -------------------------------------------------------------------------------------------

    @staticmethod
    def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics formatted for display.

        >>> ScriptMixin.metrics_format({"train_loss": 0.123456, "train_runtime": 61.5, "epoch": 3.0})
        {'train_loss': 0.1235, 'train_runtime': '0:01:01.50', 'epoch': 3.0}
        """
        return {name: _format(name, value) for name, value in metrics.items()}

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of a split ("train", "eval", "test"), one per line, on the main process."""
        if not self.is_world_process_zero:
            return
        print(f"***** {split} metrics *****")
        shown = {name: str(value) for name, value in sorted(self.metrics_format(metrics).items())}
        name_width, value_width = (max(map(len, texts), default=0) for texts in (shown, shown.values()))
        for name, value in shown.items():
            print(f"  {name:<{name_width}} = {value:>{value_width}}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to ``<split>_results.json``, and add them to ``all_results.json``."""
        if not self.is_world_process_zero:
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{split}_results.json": dict(metrics)}
        if combined:
            everything = folder / "all_results.json"
            before = json.loads(everything.read_text(encoding="utf-8")) if everything.exists() else {}
            files["all_results.json"] = {**before, **metrics}
        for name, content in files.items():
            write_atomically(folder / name, json.dumps(content, indent=4, sort_keys=True).encode())

    def save_state(self) -> None:
        """Write the state to ``trainer_state.json``."""
        if not self.is_world_process_zero:
            return
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(Path(self.args.output_dir) / "trainer_state.json")

    # -- counts --------------------------------------------------------------------------------------------

    def num_examples(self, dataloader: Any) -> int:
        """The samples of a dataloader; batches times batch size if the dataset has no length."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.per_device_train_batch_size

    def get_total_train_batch_size(self, args: Any) -> int:
        """The samples of an optimizer step, over all ranks."""
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Epochs, steps per epoch, samples, samples of the run, samples per step, batches per epoch, steps."""
        per_step = self.get_total_train_batch_size(args)
        batches = len(dataloader) if hasattr(dataloader, "__len__") else None
        if batches is None:
            if args.max_steps <= 0:
                raise BadArgument(expected("max_steps for data without a length", args.max_steps))
            samples = args.max_steps * per_step
            return sys.maxsize, args.max_steps, samples, samples, per_step, None, args.max_steps
        steps = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
        total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps)
        samples = self.num_examples(dataloader)
        trained = total * per_step if args.max_steps > 0 else int(samples * args.num_train_epochs)
        return math.ceil(total / steps), steps, samples, trained, per_step, batches, total

    def get_num_trainable_parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    # -- aliases -------------------------------------------------------------------------------------------

    tokenizer = property(lambda self: self.processing_class)  # its old name

    @property
    def callback_handler(self) -> CallbackHandler:
        """The callbacks as HF's `CallbackHandler`."""
        return CallbackHandler(self)


class CallbackHandler:
    """The callbacks of a trainer, with the interface of HF's `CallbackHandler`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.add_callback = trainer.add_callback
        self.pop_callback = trainer.pop_callback
        self.remove_callback = trainer.remove_callback

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks in order (a copy)."""
        return self._trainer.callbacks

    @property
    def callback_list(self) -> str:
        """The names of the callbacks, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Dispatch an event to all HF callbacks; the returned control holds their requests."""
        return self._trainer._dispatch_event(event, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """`on_evaluate(args, state, control, metrics)` and the like; also the objects that callbacks receive."""
        extra = {"on_evaluate": "metrics", "on_predict": "metrics", "on_log": "logs"}.get(name)
        if name.startswith("on_"):
            return lambda args, state, control, value=None, **kwargs: self.call_event(
                name, args, state, control, **({extra: value} if extra else {}), **kwargs
            )
        if name in ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"):
            return getattr(self._trainer, name)
        raise AttributeError(f"'CallbackHandler' object has no attribute {name!r}")


def _format(name: str, value: Any) -> Any:
    if "_runtime" in name:
        return str(timedelta(seconds=int(value))) + f".{int(value * 100) % 100:02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value

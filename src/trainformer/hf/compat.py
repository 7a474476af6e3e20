"""What scripts written for HuggingFace's Trainer call beside training: reports, counts, and names of its parts.

Also what is not here, each with the way to get the same: an attribute that is asked for says so, and a method that a
subclass overrides though nobody would call it is refused when the trainer is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainformer.checkpointing.manifest import MANIFEST
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.utils.files import write_atomically

_LOADER = "Override get_train_dataloader or get_eval_dataloader, which are used as they are."
_STEP = "Override compute_loss or prediction_step, or use a callback."
_FILES = "Override save_model for what is written beside the weights, or use a callback's on_save."

# Methods of HuggingFace's Trainer that nothing here would call, and what to override instead.
_NEVER_CALLED = {
    **dict.fromkeys(("training_step", "evaluation_loop", "prediction_loop", "_inner_training_loop", "_run_epoch",
                     "_maybe_log_save_evaluate", "get_batch_samples", "compute_loss_context_manager",
                     "autocast_smart_context_manager", "_prepare_inputs", "_prepare_input"), _STEP),
    **dict.fromkeys(("_get_train_sampler", "_get_eval_sampler", "_get_dataloader", "_remove_unused_columns",
                     "_set_signature_columns_if_needed", "_get_collator_with_removed_columns"), _LOADER),
    **dict.fromkeys(("_save_checkpoint", "_save_optimizer_and_scheduler", "_save_rng_state", "_load_from_checkpoint",
                     "_load_best_model", "_load_optimizer_and_scheduler", "_load_rng_state"), _FILES),
    **dict.fromkeys(("get_decay_parameter_names", "get_optimizer_cls_and_kwargs"), "Override create_optimizer."),
    "_evaluate": "Override evaluate, which is called during training, too.",
    "_wrap_model": "Wrap the model before you pass it.",
    "create_accelerator_and_postprocess": "Pass an Accelerator to trainformer.hf.AccelTrainer.",
}  # fmt: skip

# Attributes that scripts ask for.
_ABSENT = {
    "hyperparameter_search": "Search from outside: a sweep (trainformer.sweep) makes and trains one trainer per trial.",
    "push_to_hub": "Nothing here talks to the hub. After training: model.push_to_hub(...).",
    "create_model_card": "Nothing here talks to the hub. Use huggingface_hub.ModelCard.",
    "init_hf_repo": "Nothing here talks to the hub. After training: model.push_to_hub(...).",
    "accelerator": "Only AccelTrainer runs on Accelerate. The model is trainer.model, the device trainer.model.device.",
    "model_wrapped": "Use trainer.model.",
    "floating_point_ops": "They are not counted.",
    **_NEVER_CALLED,
}


def refuse_dead_overrides(kind: type) -> None:
    """Raise where a subclass overrides what would never be called."""
    for name, instead in _NEVER_CALLED.items():
        if hasattr(kind, name):
            raise BadArgument(
                f"{kind.__name__} overrides {name}, a part of HuggingFace's loop, which does not run here. {instead}"
            )


def refuse_foreign_checkpoint(*folders: Path) -> None:
    """Raise where one of these was written by HuggingFace's Trainer, whose optimizer and data cannot be taken up."""
    for folder in folders:
        if (folder / "trainer_state.json").exists() and not (folder / MANIFEST).exists():
            raise DataError(
                expected(
                    f"a checkpoint with a {MANIFEST} to resume from",
                    f"one of HuggingFace's Trainer: {folder}",
                    f"Its weights can be used: load them with from_pretrained({str(folder)!r}) and train without "
                    "resume_from_checkpoint, in another output_dir. Optimizer, schedule and position begin anew.",
                )
            )


class Scripting:
    """Methods and names that every example script of transformers uses."""

    args: Any
    model: Any
    processing_class: Any
    state: Any
    is_world_process_zero: Any

    def __getattr__(self, name: str) -> Any:
        said = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{said}. {_ABSENT[name]}" if name in _ABSENT else said)

    # -- reports -------------------------------------------------------------------------------------------

    @staticmethod
    def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics as they are shown.

        >>> Scripting.metrics_format({"train_loss": 0.123456, "train_runtime": 61.5, "epoch": 3.0})
        {'train_loss': 0.1235, 'train_runtime': '0:01:01.50', 'epoch': 3.0}
        """
        return {name: _shown(name, value) for name, value in metrics.items()}

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of a split ("train", "eval", "test"), one per line; the first process does."""
        if not self.is_world_process_zero:
            return
        print(f"***** {split} metrics *****")
        shown = {name: str(value) for name, value in sorted(self.metrics_format(metrics).items())}
        wide, high = (max(map(len, part), default=0) for part in (shown, shown.values()))
        for name, value in shown.items():
            print(f"  {name:<{wide}} = {value:>{high}}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write them to ``<split>_results.json``, and with those of other splits to ``all_results.json``."""
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
        """Write where the run is to ``trainer_state.json``."""
        if not self.is_world_process_zero:
            return
        Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(Path(self.args.output_dir) / "trainer_state.json")

    # -- counts --------------------------------------------------------------------------------------------

    def num_examples(self, dataloader: Any) -> int:
        """Samples behind a loader; where they cannot be counted, batches times their size."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.per_device_train_batch_size

    def get_num_trainable_parameters(self) -> int:
        """Numbers that training changes."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Those of the groups of parameters."""
        optimizer = getattr(self, "optimizer", None)
        if optimizer is None:
            raise BadArgument(expected("an optimizer to ask", "none yet", "Call train() first."))
        return [group["lr"] for group in optimizer.param_groups]

    # -- names of its parts --------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """What is called `processing_class` by now."""
        return self.processing_class

    @property
    def callback_handler(self) -> CallbackHandler:
        """The callbacks, in an object of their own."""
        return CallbackHandler(self)


class CallbackHandler:
    """A trainer's callbacks as scripts know them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.add_callback = trainer.add_callback
        self.pop_callback = trainer.pop_callback
        self.remove_callback = trainer.remove_callback

    @property
    def callbacks(self) -> list[Any]:
        """In their order; a copy."""
        return self._trainer.callbacks

    @property
    def callback_list(self) -> str:
        """Their names, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Tell all of them an event; what they asked for is in the control that is returned."""
        return self._trainer._dispatch_event(event, **kwargs)


def _shown(name: str, value: Any) -> Any:
    if "_runtime" in name:
        return str(timedelta(seconds=int(value))) + f".{int(value * 100) % 100:02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value

"""Trainers built again from the record in a checkpoint, to predict, evaluate and export without the training data.

Weights come from the checkpoint, arguments from its ``training_arguments.json``, everything else from ``trainer.json``.
Nothing that is read is executed: only trainers of `trainformer.jax` are built.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from trainformer.backends.jax.sharding import make_mesh
from trainformer.checkpointing import Checkpoint
from trainformer.checkpointing.tools.jax_models import TrainerRecord, read_weights
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import HostBatch
from trainformer.jax.serialization import FILE_NAME
from trainformer.utils.files import decode_json

_PACKAGE = "trainformer.jax"
_TOKENIZER = "tokenizer.json"
# Arguments that affect training alone, or say where files are.
_TRAINING = {
    "model_name", "output_dir", "num_train_epochs", "max_steps", "training_time_limit", "total_batch_size",
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "learning_rate_end", "scheduler",
    "scheduler_kwargs", "warmup_steps", "warmup_ratio", "optimizer", "optimizer_kwargs", "weight_decay", "tx_mu_dtype",
    "max_grad_norm", "frozen_parameters", "nonfinite", "sharding_array", "param_dtype", "gradient_checkpointing",
    "shuffle_seed_train", "dataloader_num_workers", "per_epoch_training_steps", "log", "logging_steps", "project",
    "run_name", "trainer_prefix", "evaluation_strategy", "eval_steps", "do_eval", "save_strategy", "save_steps",
    "save_interval_minutes", "save_total_limit", "save_best", "save_async", "metric_for_best_model",
    "greater_is_better", "resume", "cache_dir", "generation_interval", "generation_prompts",
    "generation_use_train_prompts", "per_device_eval_batch_size", "eval_batch_size", "quantization",
}  # fmt: skip
_QUIET: dict[str, Any] = {
    "optimizer": "sgd", "scheduler": "constant", "max_steps": 1, "log": "none", "save_strategy": "no", "resume": None
}  # fmt: skip
_EVAL_ROWS = 32  # of an evaluation batch, unless the run or the user says otherwise


class NoTrainingData:
    """Stands for training data that are not there, and for what the trainer `learned` from them."""

    batches_per_epoch: int | None = None

    def __init__(self, learned: Mapping[str, Any]) -> None:
        self.learned = learned

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """There are none."""
        raise BadArgument("Expected training data, received none: this trainer was opened to predict and evaluate.")


def open_trainer(
    checkpoint: Checkpoint,
    dataset_eval: Any = None,
    eval_batch_size: int | None = None,
    ema: bool | str | None = None,
) -> Any:
    """The trainer of a checkpoint with its weights, without training data; `dataset_eval` is what `eval()` uses.

    The weights are the average that the run evaluates, if it keeps one; see `checkpoint.finalize`. The trainer uses one
    device if the model fits there.
    """
    folder, record = checkpoint.path, TrainerRecord.read(checkpoint.path)
    kind, own = _trainer_class(record), record.options
    if dataset_eval is None and _only_generates(kind):
        kind, own = importlib.import_module(_PACKAGE).SFTTrainer, {}  # which needs no rewards and no reference
    if record.opaque and dataset_eval is not None:
        listed = ", ".join(f"{name} (a {what})" for name, what in record.opaque.items())
        do = "Evaluate in the program that started the run: trainer.eval()."
        raise BadArgument(expected(f"arguments of {record.trainer} that can be written to a file", listed, do))
    weights = read_weights(checkpoint, ema)[1]
    options: dict[str, Any] = {"mesh": _mesh_for(sum(array.nbytes for array in weights.values()))}
    if hasattr(kind, "arguments_type") and (folder / _TOKENIZER).is_file():
        options["processing_class"] = str(folder)
    arguments = _arguments(kind, folder, eval_batch_size)
    if dataset_eval is not None:
        options |= kind.options_to_evaluate(record, arguments)
    trainer = kind(
        arguments,
        record.build_model(weights),
        dataset_train=NoTrainingData(record.learned),
        dataset_eval=dataset_eval,
        **{**own, **options},
    )
    trainer.use_learned(record)
    return trainer


def _trainer_class(record: TrainerRecord) -> Any:
    package = importlib.import_module(_PACKAGE)
    kind = getattr(package, record.trainer) if record.trainer in package.__all__ else None
    if getattr(kind, "__module__", None) != record.module or not record.module.startswith(f"{_PACKAGE}."):
        do = "Run its program again, which resumes the run, and use trainer.eval() and trainer.save_pretrained()."
        raise BadArgument(expected(f"a trainer of {_PACKAGE}", f"{record.module}.{record.trainer}, your own class", do))
    return kind


def _only_generates(kind: Any) -> bool:
    """Whether all that a trainer predicts are generated texts."""
    from trainformer.jax.text_trainer import TextTrainer

    return issubclass(kind, TextTrainer) and kind.predicted_columns is TextTrainer.predicted_columns


def _arguments(kind: Any, folder: Path, eval_batch_size: int | None) -> Any:
    """The recorded arguments that affect predictions and metrics."""
    from trainformer.jax.arguments import TrainingArguments

    made = getattr(kind, "arguments_type", TrainingArguments)
    try:
        content = decode_json((folder / FILE_NAME).read_bytes())
        known = made.field_names()
        passed = [name for name in content["passed"] if name not in _TRAINING and name in known]
        kept = {name: content[name] for name in passed}
        rows = content.get("eval_batch_size")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"Expected the arguments of a run in {folder / FILE_NAME} ({error!r}).") from error
    return made.from_dict(kept, **_QUIET, eval_batch_size=eval_batch_size or rows or _EVAL_ROWS)


def _mesh_for(size: int) -> Mesh:
    """One device for weights of `size` bytes that fit there with room for activations, else all of them."""
    devices = jax.local_devices()
    limit = (devices[0].memory_stats() or {}).get("bytes_limit") if devices[0].platform != "cpu" else None
    if limit is None or 2 * size <= limit:
        return make_mesh((1, 1, 1, 1), devices[:1])
    return make_mesh((1, -1, 1, 1), devices)

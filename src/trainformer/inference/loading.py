"""From a folder of torch to a predictor. Nothing in the folder is executed; see `opening` for `load`.

Tasks are built from the values in ``task.json`` by classes that are installed, weights are safetensors, and exported
models are ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trainformer.adapters.saved import SavedAdapters
from trainformer.adapters.state import load_adapter
from trainformer.backends.torch.quantize import recipe_named
from trainformer.checkpointing import Checkpoint
from trainformer.checkpointing.checkpointer import load_components
from trainformer.checkpointing.tools.choosing import choose_checkpoint, choose_ema
from trainformer.checkpointing.tools.deployable import quiet
from trainformer.checkpointing.tools.listing import is_checkpoint
from trainformer.checkpointing.tools.states import States
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.order import preserved_generators
from trainformer.inference.onnx import OnnxPredictor
from trainformer.inference.predictor import Predictor
from trainformer.inference.quantizing import quantize_model
from trainformer.inference.sources import guess_record, is_adapter_folder, is_finalized
from trainformer.inference.text import TextPredictor
from trainformer.run import run_of
from trainformer.run.torch.exporting import FILE as PREPROCESSING
from trainformer.run.torch.record import RecordedData, TaskRecord
from trainformer.tasks.language.reference import is_base
from trainformer.trainer import Trainer
from trainformer.utils.tensor_files import read_weights

WEIGHTS = "model.safetensors"
_CONFIG = "config.json"
_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "processor_config.json")
_EXPORTED = (".pt", ".pt2", ".onnx")
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# Predicting needs neither: a model is not trained on.
_SETTINGS: dict[str, Any] = {
    "log": "none", "resume": None, "strategy": "single", "scheduler": None, "sampler": None,
    "optimizer": {"name": "sgd", "master_weights": False},
}  # fmt: skip


def load_torch(place: Path | str, device: Any, batch_size: int | None, **given: Any) -> Predictor | OnnxPredictor:
    """`load` of what is no run on JAX: a run on torch, a model of transformers, or an exported one."""
    if isinstance(place, Path) and (exported := _exported(place)) is not None:
        given.pop("which")
        if unused := [name for name, value in given.items() if value is not None]:
            raise BadArgument(expected("device and batch_size alone for an exported model", ", ".join(unused)))
        return OnnxPredictor(exported, device, batch_size)
    own = {"device": device, "precision": given.pop("precision"), "eval_batch_size": batch_size}
    return open_folder(place, settings={name: value for name, value in own.items() if value is not None}, **given)


def open_folder(
    place: Path | str,
    task: Any = None,
    base: str | Path | None = None,
    which: str = "last",
    ema: bool | str | None = None,
    settings: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> Predictor:
    """`load` of a run, a checkpoint, a folder with a model or an adapter, or (a string) a model of the hub.

    `settings` are those of the trainer.
    """
    recipe = None if quantize is None else recipe_named(quantize, "quantize")
    if isinstance(place, str) or is_finalized(place) or is_adapter_folder(place):
        checkpoint, folder = None, place
    else:
        checkpoint = choose_checkpoint(place, which)[0]
        folder = checkpoint.path
    record = (None if isinstance(folder, str) else TaskRecord.read(folder)) or guess_record(folder, task, base)
    if task is None:
        task = record.build(**_changes(record, folder, base), **_dtype_change(record, dtype))
        if hasattr(task, "forget_reference") and not _keeps_reference(record, folder):
            task.forget_reference()
    elif dtype is not None:
        raise BadArgument(expected("no dtype with a task of your own", dtype, "Set it on the task."))
    if recipe is not None and not hasattr(task, "model_name"):
        raise BadArgument(expected("a task with a model of transformers to quantize", type(task).__name__))
    settings = {**_SETTINGS, **record.settings, **(settings or {})}
    silent = quiet() if hasattr(task, "model_name") else nullcontext()
    with preserved_generators(), silent:
        if checkpoint is None and not _was_read(task, folder) and is_adapter_folder(Path(folder)):
            task.model = load_adapter(task.model, folder)  # into the model of the user's task
        trainer = Trainer(task, RecordedData(record), num_workers=0, **settings)
        if checkpoint is not None:
            load_weights(trainer, checkpoint, ema)
        elif not _was_read(task, folder) and not is_adapter_folder(Path(folder)):
            task.model.load_state_dict(read_weights(Path(folder), [WEIGHTS]))
        if recipe is not None:
            quantize_model(task, recipe)
    return make_predictor(trainer, place)


def make_predictor(trainer: Trainer, source: Path | str) -> Predictor:
    """The predictor for a trainer's task."""
    kind = TextPredictor if hasattr(trainer.task, "generate_texts") else Predictor
    return kind(trainer, source)


def _was_read(task: Any, folder: Path | str) -> bool:
    """Whether the task reads the weights by itself, with from_pretrained and peft."""
    return isinstance(folder, str) or getattr(task, "model_name", None) == str(folder)


def _dtype_change(record: TaskRecord, dtype: str | None) -> dict[str, Any]:
    if dtype is None:
        return {}
    if "dtype" not in {*record.arguments, *record.opaque}:
        raise BadArgument(expected("a language model to choose the dtype of", record.task, "Leave dtype out."))
    return {"dtype": dtype}


def load_weights(trainer: Trainer, checkpoint: Checkpoint, ema: bool | str | None = None) -> None:
    """Load the weights of a checkpoint (or their EMA) and the state of the task, and nothing else."""
    run, states = run_of(trainer), States(checkpoint)
    if "model" not in states:
        raise DataError(f"{checkpoint.path} has no weights of a torch model; it has {', '.join(states)}.")
    wanted = {key: states[key] for key in ("model", "task") if key in states}
    load_components([c for c in run.components() if c.key in wanted], wanted)
    if (average := choose_ema(states, ema)) is not None:
        run.task.model.load_state_dict(states[average]["model"])


def _exported(place: Path) -> Path | None:
    """The ONNX file that a path stands for."""
    if place.is_file():
        if place.suffix != ".onnx":
            do = "torch files may hold code: load them with torch, if you trust them. Export as onnx, or load the run."
            raise BadArgument(expected("an ONNX file or a folder", str(place), do))
        return place
    if is_checkpoint(place) or is_finalized(place) or (place / "checkpoints").is_dir():
        return None
    files = [file for file in sorted(place.iterdir()) if file.suffix in _EXPORTED]
    graphs = [file for file in files if file.suffix == ".onnx"]
    if len(graphs) > 1:
        raise BadArgument(expected("one ONNX file", f"{len(graphs)} in {place}", "Pass the path of the file."))
    if not graphs and files and (place / PREPROCESSING).is_file():
        do = "torch files may hold code: load them with torch, if you trust them. Export as onnx, or load the run."
        raise BadArgument(expected(f"an ONNX file in {place}", files[0].name, do))
    return graphs[0] if graphs else None


def _changes(record: TaskRecord, folder: Path | str, base: str | Path | None) -> dict[str, Any]:
    """Arguments that differ where the model is only used: weights and tokenizer come from the folder."""
    if isinstance(folder, str) or (is_adapter_folder(folder) and TaskRecord.read(folder) is None):
        return {}  # the record was made for it
    names = {*record.arguments, *record.opaque}
    saved = SavedAdapters.read(folder)
    is_adapter = saved is not None
    if base is not None and not is_adapter:
        raise BadArgument(expected("a base for an adapter alone", str(base), "This folder holds a whole model."))
    changes: dict[str, Any] = {}
    if "model_name" in names:
        has_tokenizer = saved is None or any((folder / name).is_file() for name in _TOKENIZERS)
        own = str(folder) if has_tokenizer else None  # that of the base
        changes = {name: own for name in ("tokenizer", "processor") if name in names}
        changes["attention"] = _safe_attention(record)
        if "on_adapter" in names:
            changes |= {"on_adapter": None, "base": None}
        if "rope_scaling" in names:  # the folder has it
            changes |= {"rope_scaling": None, "rope_factor": None}
        if not is_adapter:
            changes |= {"model_name": str(folder), "adapter": None, "model_kwargs": {}}
        elif not _is_safe(record.arguments.get("model_kwargs")):
            do = "Make the task yourself and pass it as task=."
            raise BadArgument(expected("model_kwargs that are numbers", record.arguments["model_kwargs"], do))
        else:
            changes |= {"model_name": str(folder), "adapter": None, "base": None if base is None else str(base)}
        if "cache_dir" in names:
            changes["cache_dir"] = None
        if is_base(record.arguments.get("reference")):
            changes["reference"] = "base"  # what was the start of the training is not in the folder
        if "teacher" in record.opaque:
            changes |= {"teacher": "base", "teacher_device": None}  # a model that predicts needs none
    if "backbone" in names:
        changes |= _vision_changes(record, is_adapter)
    if "augment" in record.opaque:  # it is for training
        changes["augment"] = None if record.task in ("SSL", "CLIP") else "none"
    return changes


def _keeps_reference(record: TaskRecord, folder: Path | str) -> bool:
    """Whether a task finds its reference model again: it was named, or is the base of the only adapter."""
    saved, reference = SavedAdapters.read(Path(folder)), record.arguments.get("reference")
    if not isinstance(reference, str) or not is_base(reference):
        return reference is not None
    if saved is None or saved.merged:
        return False
    return reference == "base" or (len(saved.active) == 1 and record.arguments.get("adapter") is not None)


def _safe_attention(record: TaskRecord) -> str | None:
    """The name of a kernel may be that of a repository, whose code transformers would run."""
    name = record.arguments.get("attention")
    return name if name in _ATTENTION else None


def _is_safe(options: Any) -> bool:
    """Whether options of `from_pretrained` cannot make it run code or open pickles. Numbers belong to the config."""
    values = options.values() if isinstance(options, Mapping) else [] if options is None else [options]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _vision_changes(record: TaskRecord, is_adapter: bool) -> dict[str, Any]:
    if ":" in str(record.arguments.get("backbone", "")):
        do = "Make the task yourself and pass it as task=."
        raise BadArgument(expected("a backbone of timm", record.arguments["backbone"], do))
    options = record.arguments.get("model_kwargs")
    # A file that timm would open; the weights are in the folder.
    kept = {k: v for k, v in options.items() if k != "checkpoint_path"} if isinstance(options, Mapping) else {}
    changes: dict[str, Any] = {"model_kwargs": kept}
    if "recipe" in record.arguments:
        changes["recipe"] = None  # its arguments are recorded
    if not is_adapter:
        changes |= {"pretrained": False, "checkpoint": None}
    return changes

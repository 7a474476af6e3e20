"""Exporting the model of a run with its preprocessing: in the graph, and as ``preprocessing.json`` beside the file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainformer.backends.torch.export import Signature, export_model
from trainformer.core.errors import BadArgument, expected
from trainformer.tasks.base import provides
from trainformer.utils.files import decode_json, write_atomically

if TYPE_CHECKING:
    from trainformer.run.torch.run import TorchRun

logger = logging.getLogger("trainformer")

FILE = "preprocessing.json"
_MODELS = "models"


class Export:
    """A model that is ready to be written: all of it on this rank."""

    def __init__(self, run: TorchRun, input_shape: tuple[int, ...] | None, preprocess: bool) -> None:
        task = self.task = run.task
        self.preprocess = preprocess
        model = run.unsharded_model()
        if preprocess:
            spec = getattr(task, "preprocessing", None)
            if spec is None:
                raise BadArgument(_no_preprocessing(task))
            if input_shape is not None:
                what = "no input_shape with preprocess=True"
                raise BadArgument(expected(what, input_shape, "The graph takes images of any size."))
            self.module: nn.Module = nn.Sequential(spec.module(), task.prediction_module(model))
            self.signature: Signature | None = Signature(
                (spec.channels, None, None), torch.uint8, "images", task.prediction_name
            )
            return
        shape = input_shape or getattr(task, "input_shape", None) or run.info.input_shape
        self.module = task.export_module(model) if provides(task, "export_module") else model
        self.signature = None if shape is None else Signature(tuple(shape))

    def write(self, path: Path, format: str) -> Path:
        """Write the file, and ``preprocessing.json`` if the task works on images; returns the path of the file."""
        if self.preprocess and format == "pytorch":
            do = "Pass format='onnx', 'torch.export' or 'torchscript'."
            raise BadArgument(expected("a format with a graph for preprocess=True", format, do))
        description = self._description()
        written = export_model(self.module, path, format, self.signature)
        if description is not None:
            self._write_description(written, format, description)
        return written

    def _description(self) -> dict[str, Any] | None:
        task = self.task
        if getattr(task, "prediction_name", None) is None:
            return None
        spec, names = task.preprocessing, getattr(task, "class_names", None)
        return {
            "task": type(task).__name__,
            **({"preprocessing": "unknown: trained on float images"} if spec is None else spec.as_dict()),
            "classes": None if names is None else list(names),
            "num_classes": getattr(task, "num_classes", None),
            "prediction": task.prediction_name,
            "activation": "softmax" if task.prediction_name == "probabilities" else None,
            "test_time_augmentation": getattr(task, "tta", 0) or None,
        }

    def _write_description(self, written: Path, format: str, description: dict[str, Any]) -> None:
        file = _file_for(written, description)
        models = _models_in(file)
        signature = self.signature
        models[written.name] = {
            "format": format,
            "preprocessing_in_graph": self.preprocess,
            "activation_in_graph": self.preprocess and description["activation"] is not None,
            "input": None
            if signature is None
            else {
                "name": signature.input,
                "shape": ["batch", *signature.shape],
                "dtype": str(signature.dtype).removeprefix("torch."),
            },
            "output": None if signature is None else signature.output,
        }
        here = {name: entry for name, entry in models.items() if (written.parent / name).is_file()}
        content = json.dumps({**description, _MODELS: here}, indent=1, ensure_ascii=False)
        write_atomically(file, content.encode())


def _no_preprocessing(task: Any) -> str:
    if getattr(task, "prediction_name", None) is None:
        what = "a task with one prediction per image to put the preprocessing in the graph"
        return expected(what, type(task).__name__, "Leave preprocess out.")
    return (
        "Expected a model that was trained on pixels (files, or uint8 tensors) to put the preprocessing in the graph, "
        "received one that was trained on float images, and only you know how they were made. Leave preprocess out."
    )


def own_file(model: Path) -> Path:
    """The description of one model alone, in a folder with models that need another preprocessing."""
    return model.with_name(f"{model.name}.{FILE}")


def _file_for(model: Path, description: dict[str, Any]) -> Path:
    """``preprocessing.json``, unless it describes another model in the folder that needs another preprocessing."""
    file = model.parent / FILE
    others = [name for name in _models_in(file) if name != model.name and (file.parent / name).is_file()]
    before = {name: value for name, value in _read(file).items() if name != _MODELS}
    if others and before != json.loads(json.dumps(description)):
        logger.warning("%s describes %s: that of %s is %s", file, others[0], model.name, own_file(model).name)
        return own_file(model)
    own_file(model).unlink(missing_ok=True)
    return file


def _models_in(file: Path) -> dict[str, Any]:
    models = _read(file).get(_MODELS)
    return models if isinstance(models, dict) else {}


def _read(file: Path) -> dict[str, Any]:
    try:
        content = decode_json(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

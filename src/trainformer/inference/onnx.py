"""`OnnxPredictor`: an exported ONNX file with its ``preprocessing.json``, run by onnxruntime. Needs no task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainformer.core.errors import BadArgument, DataError, check_count, expected
from trainformer.core.optional import require
from trainformer.data.pixels import image_tensor, with_channels
from trainformer.data.preprocessing import ImagePreprocessing
from trainformer.inference.inputs import RawImages, as_images
from trainformer.run.torch.exporting import FILE, own_file
from trainformer.utils.files import decode_json


class OnnxPredictor:
    """An exported model, from `trainformer.load`: predicts from raw images what the model predicted in training."""

    def __init__(self, file: Path, device: str | None = None, batch_size: int | None = None) -> None:
        runtime = require("onnxruntime", "onnx", "to run an exported model")
        self.source = file
        description, entry = _described(file)
        self._in_graph = bool(entry.get("preprocessing_in_graph"))
        self._activation = None if entry.get("activation_in_graph") else description.get("activation")
        if self._activation not in (None, "softmax"):
            raise DataError(expected("an activation of softmax or none", self._activation))
        self._preprocessing = ImagePreprocessing.from_dict(description)
        self._prediction = str(description.get("prediction"))
        names = description.get("classes")
        self.class_names = [str(name) for name in names] if isinstance(names, list) else None
        self.batch_size = batch_size or 32
        check_count("batch_size", self.batch_size)
        if description.get("test_time_augmentation") and not self._in_graph:
            do = "Export with preprocess=True, which has the views in the graph, or load the run."
            raise BadArgument(
                expected("a model without test-time augmentation", description["test_time_augmentation"], do)
            )
        self._session = _session(runtime, file, device)
        self._input = self._session.get_inputs()[0].name

    def __repr__(self) -> str:
        return f"OnnxPredictor({str(self.source)!r})"

    def __call__(self, inputs: Any, batch_size: int | None = None) -> Any:
        """See `predict`."""
        return self.predict(inputs, batch_size)

    def predict(self, inputs: Any, batch_size: int | None = None) -> Any:
        """The prediction for one image as a dict, or for a list of them as a list; see `Predictor.predict`."""
        size = batch_size or self.batch_size
        check_count("batch_size", size)
        listed, several = as_images(inputs)
        images = RawImages(listed, 3)
        rows: list[dict[str, Any]] = []
        for first in range(0, len(images), 1 if self._in_graph else size):
            numbers = range(first, min(first + (1 if self._in_graph else size), len(images)))
            outputs = self._outputs([images[number] for number in numbers])
            rows += [self._row(images.ids[number], row) for number, row in zip(numbers, outputs, strict=True)]
        return rows if several else rows[0]

    def _outputs(self, images: list[Any]) -> torch.Tensor:
        channels = self._preprocessing.channels
        if self._in_graph:  # one by one: sizes differ
            batch = image_tensor(with_channels(images[0], channels))[None]
        else:
            batch = torch.stack([self._preprocessing(image) for image in images])
        (output,) = self._session.run(None, {self._input: np.ascontiguousarray(batch.numpy())})
        result = torch.from_numpy(output)
        return result.softmax(-1) if self._activation == "softmax" else result

    def _row(self, name: Any, output: torch.Tensor) -> dict[str, Any]:
        if self._prediction != "probabilities":
            return {"id": name, self._prediction: output}
        probability, prediction = output.max(-1)
        named = {} if self.class_names is None else {"class": self.class_names[int(prediction)]}
        return {"id": name, **named, "prediction": prediction, "probability": probability, "probabilities": output}


def _described(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``preprocessing.json`` says, and what it says about this file."""
    beside = own_file(file) if own_file(file).is_file() else file.parent / FILE
    if not beside.is_file():
        raise DataError(expected(f"{FILE} beside {file.name}", "none", "Trainer.export writes it."))
    try:
        content = decode_json(beside.read_bytes())
        entry = content["models"][file.name]
        if not isinstance(entry, dict):
            raise TypeError("no description of the file")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"Expected {beside} to describe {file.name}, received something else ({error!r}).") from error
    return content, entry


def _session(runtime: Any, file: Path, device: str | None) -> Any:
    providers = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
    wanted = providers.get(str(device or "cpu").partition(":")[0])
    if wanted is None or wanted not in runtime.get_available_providers():
        raise BadArgument(expected("a device that onnxruntime has here", device, "Leave device out for the CPU."))
    try:
        return runtime.InferenceSession(str(file), providers=[wanted])
    except Exception as error:  # onnxruntime has a dozen exceptions of its own
        raise DataError(f"Expected a readable ONNX file, received {file}: {error}") from error

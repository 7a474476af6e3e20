"""Evaluation, prediction and embedding of data that somebody asks for: the run's own, or other data.

Owns which data are meant, how they are loaded, and what is said where there are none. Running the task over them is
left to `inference`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from trainformer.core.errors import BadArgument, DataError
from trainformer.core.types import DataSource
from trainformer.data.labels import align_classes, is_stream
from trainformer.run.torch.data import TrainingData, is_loader, is_open, load, make_source
from trainformer.run.torch.inference import Inference, Inputs
from trainformer.run.torch.parts import load_options
from trainformer.run.torch.settings import RunSettings


class Evaluation:
    """What a run can say of data. `val_source` are the batches of its validation data, if it has any."""

    def __init__(self, inference: Inference, settings: RunSettings, loaded: TrainingData) -> None:
        self.inference = inference
        self.task = inference.task
        self.settings = settings
        self.loaded = loaded
        self.val_source = None if loaded.val is None else self._source(loaded.val)
        self._looked: tuple[int, DataSource] | None = None  # a few of them

    def validate(self, most: int | None = None, model: nn.Module | None = None) -> dict[str, float]:
        """Metrics of the validation data or of its first `most` batches, with the model to be judged or another."""
        assert self.val_source is not None
        return self.inference.evaluate(self.val_source, most=most, model=model)

    def evaluate(self, data: Any = None, batch_size: int | None = None, most: int | None = None) -> dict[str, float]:
        """Metrics of the validation data, or of other data, whose classes are numbered as in training."""
        if data is not None:
            labelled = align_classes(load(self.task, data), self.loaded.info.class_names, is_open(self.task))
            return self.inference.evaluate(self._source(labelled, batch_size), most=most)
        if self.val_source is None:
            raise DataError(
                "There is no validation data to evaluate on. Pass val_data or val_split to the trainer, "
                "or data to evaluate()."
            )
        return self.validate(most)

    def predict(self, data: Any, batch_size: int | None = None) -> list[dict[str, Tensor]]:
        """One dict per sample, in input order."""
        # Every input has a row: what cannot be read is an error here, whatever training does with it.
        return self.inference.predict(self._source(load(self.task, data), batch_size, skip_bad=False))

    def embed(self, data: Any, most: int | None = None) -> dict[str, Tensor]:
        """Embeddings (and labels) of data: "train", "val", or anything that can be predicted for."""
        known = {"train": self.loaded.train, "val": self.loaded.val}
        chosen = known[data] if isinstance(data, str) and data in known else load(self.task, data)
        if chosen is None:
            raise DataError("There is no validation data to embed. Pass val_data or val_split, or data to embed().")
        rows = self.inference.rows(self._source(_thinned(chosen, most)))
        if "embedding" not in rows:
            raise BadArgument(
                f"{type(self.task).__name__} gives no embeddings: its predict_step returns {', '.join(rows)}. Return "
                "the embeddings of a batch as 'embedding', and the labels as 'label' where there are any."
            )
        return rows

    def look(self, most: int, inputs: Inputs) -> dict[str, Tensor]:
        """Inputs and predictions of at most so many samples of the validation data, evenly chosen."""
        if self.loaded.val is None:
            raise DataError("There is no validation data to look at. Pass val_data or val_split to the trainer.")
        if self._looked is None or self._looked[0] != most:
            self._looked = most, self._source(_thinned(self.loaded.val, most))
        rows = self.inference.rows(self._looked[1], inputs, most)
        return {name: values[:most] for name, values in rows.items()}

    def _source(self, data: Any, batch_size: int | None = None, **options: Any) -> DataSource:
        """Batches of loaded data in their order; the options replace those of the run."""
        size = batch_size or self.settings.eval_batch_size
        backend = self.inference.backend
        usual = load_options(self.settings, backend.device, backend.process_group, size)
        return make_source(self.task, data, replace(usual, **options), train=False)


def _thinned(data: Any, most: int | None) -> Any:
    """At most so many samples, evenly over the set, which may be sorted by class."""
    if most is None or is_loader(data) or is_stream(data) or len(data) <= most:
        return data
    places = torch.linspace(0, len(data) - 1, most, dtype=torch.float64).round().long().tolist()
    return Subset(data, places)

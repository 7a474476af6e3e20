"""What an evaluation or a prediction hands to users: arrays with one row per sample."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainformer.hf.collate import inner_model


class PredictionOutput(NamedTuple):
    """What `predict()` returns: arrays with one row per sample, and metrics."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class EvalPrediction:
    """What `compute_metrics` gets: arrays with one row per sample of the evaluation data."""

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        self.elements = tuple(part for part in (predictions, label_ids, inputs, losses) if part is not None)

    def __iter__(self) -> Any:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]


def arrays(rows: Mapping[str, Tensor], name: str) -> Any:
    """The rows of a name: one array, several of a nested output, or None."""
    found = [rows[key].numpy() for key in rows if key == name or key.startswith(f"{name}.")]
    if not found:
        return None
    return found[0] if len(found) == 1 else tuple(found)


def logits_of(outputs: Any, model: nn.Module, ignore_keys: Collection[str]) -> Any:
    """What a model says of a batch, without its loss and what nobody wants to collect (caches of attention)."""
    config = getattr(inner_model(model), "config", None)
    ignored = {"loss", "past_key_values", *ignore_keys, *getattr(config, "keys_to_ignore_at_inference", ())}
    if isinstance(outputs, Mapping):
        kept = tuple(value for key, value in outputs.items() if key not in ignored)
    elif isinstance(outputs, (list, tuple)):
        kept = tuple(outputs[1:])
    else:
        return outputs
    return kept[0] if len(kept) == 1 else kept


def label_arrays(labels: list[Tensor | None]) -> Any:
    """Labels as users know them: one tensor, several, or None."""
    known = tuple(label for label in labels if label is not None)
    if not known:
        return None
    return known[0] if len(known) == 1 else known

"""Outputs of models (loss and logits in any form), and the arrays that evaluations and predictions return."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.hf.collate import inner_model

_HINTS = {
    "loss": "Call the model with labels, or compute the loss from its logits (compute_loss_func).",
    "logits": "Return (loss, logits), a dict with 'logits', or an object with .logits.",
}


def logits_from_outputs(outputs: Any) -> Tensor:
    """The logits of a model's outputs: a tensor, `.logits`, ``["logits"]``, or the element of a tuple after the loss.

    A tuple that does not start with a scalar loss starts with the logits, as for a model called without labels.

    >>> import torch
    >>> logits_from_outputs((torch.tensor(0.5), torch.ones(2, 3))).shape
    torch.Size([2, 3])
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple | list):
        has_loss = len(outputs) > 1 and isinstance(outputs[0], Tensor) and outputs[0].numel() == 1
        return _tensor(outputs, "logits", outputs[1] if has_loss else (outputs[0] if outputs else None))
    return _tensor(outputs, "logits", _named(outputs, "logits"))


def loss_from_outputs(outputs: Any) -> Tensor:
    """The loss of a model's outputs: `.loss`, ``["loss"]``, the first element of a tuple, or a scalar tensor.

    >>> import torch
    >>> loss_from_outputs({"loss": torch.tensor(0.5)})
    tensor(0.5000)
    """
    if isinstance(outputs, Tensor):
        if outputs.numel() != 1:
            shape = f"a tensor of shape {tuple(outputs.shape)}"
            raise BadArgument(expected("outputs with a loss", shape, _HINTS["loss"]))
        return outputs
    if isinstance(outputs, tuple | list):
        return _tensor(outputs, "loss", outputs[0] if outputs else None)
    return _tensor(outputs, "loss", _named(outputs, "loss"))


def loss_and_logits_from_outputs(outputs: Any) -> tuple[Tensor, Tensor]:
    """Loss and logits of a model's outputs: the first two elements of a tuple, or `.loss` and `.logits`.

    >>> import torch
    >>> loss, logits = loss_and_logits_from_outputs((torch.tensor(0.5), torch.ones(2, 3), "states"))
    >>> loss.item(), tuple(logits.shape)
    (0.5, (2, 3))
    """
    if isinstance(outputs, tuple | list):
        loss, logits = (*outputs, None, None)[:2]
        return _tensor(outputs, "loss", loss), _tensor(outputs, "logits", logits)
    if isinstance(outputs, Tensor):
        raise BadArgument(expected("outputs with a loss and logits", "one tensor", _HINTS["logits"]))
    return loss_from_outputs(outputs), logits_from_outputs(outputs)


def _named(outputs: Any, name: str) -> Any:
    if isinstance(outputs, Mapping):  # includes the ModelOutput of transformers
        return outputs.get(name)
    return getattr(outputs, name, None)


def _tensor(outputs: Any, name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    found = "none" if value is None else f"a {type(value).__name__}"
    where = f"{found} in a {type(outputs).__name__}"
    if isinstance(outputs, Mapping):
        where += f" with {', '.join(map(str, outputs))}"
    elif isinstance(outputs, tuple | list):
        where += f" of {len(outputs)}"
    raise BadArgument(expected(f"outputs with {name} as a tensor", where, _HINTS[name]))


class PredictionOutput(NamedTuple):
    """The result of `predict()`: arrays with one row per sample, and metrics."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """The result of `evaluation_loop()`: predictions, labels, metrics with their prefix, and the number of samples."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]
    num_samples: int


class EvalPrediction:
    """The argument of `compute_metrics`: arrays with one row per evaluation sample."""

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


def has_loss(outputs: Any) -> bool:
    """Whether outputs contain a loss: a mapping or an object with one, or a scalar that is first or alone.

    >>> import torch
    >>> has_loss({"loss": None}), has_loss((torch.tensor(1.0), torch.ones(2)))
    (False, True)
    """
    if isinstance(outputs, tuple | list):
        outputs = outputs[0] if outputs else None
    if isinstance(outputs, Tensor):
        return outputs.ndim == 0
    return _named(outputs, "loss") is not None


def logits_of(outputs: Any, model: nn.Module, ignore_keys: Collection[str] | None, with_loss: bool = True) -> Any:
    """The outputs to collect: all but the loss and ignored keys, by default those that the model's config names."""
    if ignore_keys is None:
        config = getattr(inner_model(model), "config", None)
        ignore_keys = getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"]
    if isinstance(outputs, Mapping):
        ignored = {*ignore_keys, "loss"} if with_loss else {*ignore_keys}
        kept = tuple(value for key, value in outputs.items() if key not in ignored)
    elif isinstance(outputs, (list, tuple)):
        kept = tuple(outputs[1:]) if with_loss and has_loss(outputs) else tuple(outputs)
    else:
        return outputs
    return kept[0] if len(kept) == 1 else kept


def labels_of(labels: list[Any]) -> Any:
    """Labels as HF returns them: one tensor, a tuple of several, or None."""
    if not labels:
        return None
    return labels[0] if len(labels) == 1 else tuple(labels)


class TrainOutput(NamedTuple):
    """The result of `train()`."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


class CallableBool(int):
    """A bool that can be called: a method in HF, an attribute in Forgather."""

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))

"""Loss and logits out of whatever a model returns: a tensor, a tuple, a mapping, or an object with attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainformer.core.errors import BadArgument, expected

_HINTS = {
    "loss": "Call the model with labels, or compute the loss from its logits (compute_loss_func).",
    "logits": "Return (loss, logits), a dict with 'logits', or an object with .logits.",
}


def logits_from_outputs(outputs: Any) -> Tensor:
    """The logits: the tensor itself, `.logits`, ``["logits"]``, or of a tuple what comes after the loss.

    A tuple that does not begin with a loss (one number) begins with the logits, as that of a model without labels.

    >>> import torch
    >>> logits_from_outputs((torch.tensor(0.5), torch.ones(2, 3))).shape
    torch.Size([2, 3])
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple | list):
        behind_loss = len(outputs) > 1 and isinstance(outputs[0], Tensor) and outputs[0].numel() == 1
        return _tensor(outputs, "logits", outputs[1] if behind_loss else (outputs[0] if outputs else None))
    return _tensor(outputs, "logits", _named(outputs, "logits"))


def loss_from_outputs(outputs: Any) -> Tensor:
    """The loss: `.loss`, ``["loss"]``, the first of a tuple, or a tensor of one number itself.

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
    """Both: the first two of a tuple, which may be longer, or what `.loss` and `.logits` are.

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
    if isinstance(outputs, Mapping):  # transformers' ModelOutput is one, too
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

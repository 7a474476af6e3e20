"""What `eval_step` and `predict_step` return: values by name, NumPy's as torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from trainformer.core.errors import BadArgument
from trainformer.engine.metric_values import check_names


def metrics_by_name(outputs: Any, function: Callable[..., Any]) -> Mapping[str, Any]:
    """The values of a batch; rejects what has no names."""
    who = getattr(function, "__qualname__", "eval_step").replace("<locals>.", "")
    if outputs is None:
        raise BadArgument(f"Expected {who} to return a dict of metrics by name, received None. Does it lack a return?")
    check_names(outputs, who)
    if any(isinstance(value, (np.ndarray, np.generic)) for value in outputs.values()):
        return {name: _as_torch(value) for name, value in outputs.items()}
    return outputs  # type: ignore[no-any-return]


def _as_torch(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return torch.from_numpy(np.ascontiguousarray(value)) if is_numeric else value

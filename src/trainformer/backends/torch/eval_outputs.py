"""What `eval_step` and `predict_step` return: values to average and rows to collect, NumPy's as torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import Entry, EvalResult
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


def eval_result(outputs: Mapping[str, Any], entries: list[Entry], size: int, sums_rows: bool) -> EvalResult:
    """Outputs of a batch of `size` samples as values to average and rows to collect, with `entries` that were logged.

    `sums_rows`: the task does not reduce rows itself, so numbers with one row per sample are averaged.
    """
    rows: dict[str, Any] = {}
    if size == 0:  # padding: this rank computed a sample of another one to take part in collectives
        outputs = {n: v[:0] for n, v in outputs.items() if isinstance(v, list) or (isinstance(v, Tensor) and v.ndim)}
    for name, value in outputs.items():
        if isinstance(value, tuple) and len(value) == 2:
            entries.append(Entry(name, *value, is_mean=False))
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0):
            entries.append(Entry(name, value, size, is_mean=True))
        elif isinstance(value, Tensor) and len(value) == size:
            is_number = value.is_floating_point() or value.dtype == torch.bool
            if value.ndim == 1 and sums_rows and is_number:
                total = value.double().sum() if value.device.type != "mps" else value.sum()
                entries.append(Entry(name, total, size, is_mean=False))
            rows[name] = value.detach().cpu()
        elif isinstance(value, list) and len(value) == size:  # tensors of unequal shapes, one per sample
            rows[name] = [part.detach().cpu() for part in value]
        else:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            what = f"metric {name!r} to be a scalar, a (sum, weight) pair, or a tensor (or list) with {size} rows"
            raise BadArgument(expected(what, shape, "Return one of these from the task's step."))
    return EvalResult(entries, rows)


def _as_torch(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return torch.from_numpy(np.ascontiguousarray(value)) if is_numeric else value

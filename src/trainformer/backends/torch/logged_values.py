"""`log_metric`: values that a task logs from inside a step.

The backend runs every step inside a `StepScope`. What is logged there becomes entries of the step, like its loss: still
on the device, averaged by weight over micro-batches, ranks and the log interval, and saved with a checkpoint until they
are logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.types import Entry

_scope: ContextVar[StepScope | None] = ContextVar("trainformer_step_scope", default=None)

#: Values of a training record that the trainer logs itself.
_TAKEN = (
    *("loss", "grad_norm", "lr", "epoch", "samples_per_second", "tokens_per_second", "memory_gb", "save_seconds"),
    *("bad_samples", "skipped_steps", "loss_scale"),
)
_AVERAGED = "Values are averaged over the log interval in training, and over the dataset in evaluation."
#: Arguments of Lightning's `self.log`.
_ELSEWHERE = {
    "batch_size": "Pass weight=...; without it, the number of samples is used.",
    "on_step": f"{_AVERAGED} Trainer(log_every=1) logs every step.",
    "on_epoch": f"{_AVERAGED} Trainer(log_every='1epochs') logs once per epoch.",
    "reduce_fx": f"{_AVERAGED} Pass (sum, weight) as the value for another mean.",
    "sync_dist": "Values are always averaged over all ranks.",
    "sync_dist_group": "Values are always averaged over all ranks.",
    "rank_zero_only": "Values are always averaged over all ranks.",
    "prog_bar": "The progress bar shows the loss, the learning rate and the throughput.",
    "logger": "Trainer(log=...) chooses the loggers, which receive all values.",
    "enable_graph": "Values are always detached.",
    "add_dataloader_idx": "Values carry the name of their validation set.",
    "metric_attribute": "Log the number that the metric returns.",
}


def log_metric(name: str, value: Any, weight: Any = None, **unknown: Any) -> None:
    """Log a value from inside `train_step` or `eval_step`, as ``train/<name>`` or ``val/<name>``.

    `value` is a number or a scalar tensor, a mean over `weight` (default: the number of samples of the batch), or a
    pair ``(sum, weight)``. Nothing syncs with the device. Tasks that inherit from `TaskBase` can call ``self.log``.

    >>> import torch, trainformer
    >>> class Line:
    ...     def __init__(self):
    ...         self.model = torch.nn.Linear(1, 1)
    ...     def train_step(self, batch):
    ...         output = self.model(batch[0])
    ...         trainformer.log_metric("output", output.mean())
    ...         return (output ** 2).mean()
    ...     def eval_step(self, batch):
    ...         return {"loss": self.train_step(batch)}
    >>> trainer = trainformer.Trainer(Line(), (torch.ones(8, 1),), batch_size=4, epochs=1, log="none").fit()
    >>> "train/output" in trainer.state.log_history[-1]
    True
    """
    if unknown:
        first = next(iter(unknown))
        do = _ELSEWHERE.get(first) or did_you_mean(first, ["weight"])
        raise BadArgument(expected("the arguments name, value and weight to log a value", f"{first}=", do))
    if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
        return  # gradient checkpointing runs the forward pass again, whose values are logged already
    scope = _scope.get()
    if scope is None:
        raise BadArgument(
            f"Expected {name!r} to be logged inside train_step or eval_step, received it outside of a step. From a "
            "callback, call trainer.log_metrics({...}); from on_eval_end, return it; in JAX, return it with the loss."
        )
    scope.add(name, value, weight)


class StepScope:
    """Around the forward pass of a batch of `size` samples: `log_metric` adds to `entries`.

    `advice` says what to do instead where values cannot be collected.
    """

    __slots__ = ("_advice", "_entries", "_inner", "_prefix", "_size", "_token")

    def __init__(
        self, inner: AbstractContextManager[Any], entries: list[Entry], size: int, train: bool, advice: str | None
    ) -> None:
        self._inner = inner
        self._entries = entries
        self._size = size
        self._prefix = "train/" if train else "val/"
        self._advice = advice
        self._token: Token[StepScope | None] | None = None

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._token = _scope.set(self)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        assert self._token is not None
        _scope.reset(self._token)
        if kind is AttributeError and error.name in ("log", "log_dict"):
            error.add_note(
                "To log values of your own, let the task inherit from trainformer.TaskBase and call self.log(name, "
                "value), or call trainformer.log_metric(name, value) anywhere in the step."
            )
        return self._inner.__exit__(kind, error, traceback)

    def add(self, name: Any, value: Any, weight: Any) -> None:
        """Add a value after checking it."""
        if self._advice is not None:
            raise BadArgument(expected("no values of your own to be logged in this kind of run", name, self._advice))
        if not isinstance(name, str) or not name.strip():
            raise BadArgument(expected("log(name, value) to receive a name", name, _several(name)))
        name = name.removeprefix(self._prefix)
        if self._prefix == "train/" and name in _TAKEN:
            raise BadArgument(expected(f"a name that the trainer does not log itself, as it does train/{name}", name))
        is_mean = not isinstance(value, tuple)
        if not is_mean:
            if len(value) != 2 or weight is not None:
                raise BadArgument(expected(f"the pair (sum, weight), and no further weight, for {name!r}", value))
            value, weight = value
        value = _scalar(name, "value", value)
        weight = self._size if weight is None else _scalar(name, "weight", weight)
        if not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
            raise BadArgument(expected(f"the weight of {name!r} to be a number of at least 0", weight))
        if self._size:  # otherwise this rank computes padding
            self._entries.append(Entry(name, value, weight, is_mean))


def _scalar(name: str, what: str, value: Any) -> Any:
    """A number, or a detached scalar tensor."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, Tensor):
        do = "Take its mean."
        raise BadArgument(expected(f"the {what} of {name!r} to be a scalar", f"the shape {tuple(value.shape)}", do))
    try:
        return float(value)
    except (TypeError, ValueError):
        do = _several(value)
        if hasattr(value, "compute"):
            do = "Log the number that the metric returns for the batch, or return metric.compute() from on_eval_end."
        what = f"the {what} of {name!r} to be a number, a scalar tensor or a pair (sum, weight)"
        raise BadArgument(expected(what, type(value).__name__, do)) from None


def _several(value: Any) -> str:
    return "Call it once for each value." if isinstance(value, Mapping) else ""

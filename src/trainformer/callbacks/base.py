"""The callback protocol, the trainer API that callbacks see, and the list that dispatches events to callbacks."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainformer.callbacks.compat import CallbackAdapter, to_native, unwrap_callback
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.hooks import check_arguments, unknown_hooks
from trainformer.core.plugins import load_plugin, plugin_names
from trainformer.engine import Control, Event, LazyScalar, RunState
from trainformer.engine.metric_values import as_metrics

logger = logging.getLogger("trainformer")

# Callback method per event. Each takes the trainer, then the arguments of the event.
METHODS: dict[Event, str] = {
    Event.TRAIN_BEGIN: "on_train_begin",
    Event.EPOCH_BEGIN: "on_epoch_begin",
    Event.STEP_BEGIN: "on_step_begin",
    Event.SUBSTEP_END: "on_substep_end",
    Event.BEFORE_OPTIMIZER_STEP: "on_before_optimizer_step",
    Event.AFTER_OPTIMIZER_STEP: "on_after_optimizer_step",
    Event.STEP_END: "on_step_end",
    Event.LOG: "on_log",
    Event.EVAL_BEGIN: "on_validation_begin",
    Event.EVAL_END: "on_validation_end",
    Event.SAVE: "on_save",
    Event.EPOCH_END: "on_epoch_end",
    Event.TRAIN_END: "on_train_end",
    Event.ERROR: "on_error",
}

# Arguments of each after the trainer, so that a method with other ones is rejected before it is called.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("on_train_begin", "on_train_end", "on_validation_begin"), ()),
    "on_epoch_begin": ("epoch",),
    **dict.fromkeys(("on_step_begin", "on_substep_end"), ("step",)),
    **dict.fromkeys(("on_before_optimizer_step", "on_after_optimizer_step"), ("step",)),
    "on_step_end": ("step", "loss"),
    **dict.fromkeys(("on_log", "on_validation_end", "compute_metrics"), ("metrics",)),
    "on_save": ("path",),
    "on_epoch_end": ("epoch", "metrics"),
    "on_error": ("error",),
    "attach": (),
}
_OTHER_HOOKS = ("on_validation_batch_end", "on_validation_cleanup")


class Probe(Protocol):
    """Trial steps whose effects are undone; see `TrainerLike.sandbox`."""

    def batches(self) -> Iterator[Any]:
        """Training batches; starts over when the data is exhausted."""

    def step(self, batch: Any, lr: float | None = None) -> float:
        """Run one optimizer step on a batch, optionally at a given learning rate. Returns the loss."""


class WeightAverage(Protocol):
    """An average of the trained weights; see `TrainerLike.average_weights`."""

    @property
    def model(self) -> Any:
        """The model with the averaged weights."""

    @property
    def inference_model(self) -> Any:
        """What a callback returns from `inference_model()` to have it evaluated."""

    def update(self, weight: float) -> None:
        """Move the average towards the weights; with a weight of 1 it equals them."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class GradientNorms(Protocol):
    """Gradient norms before clipping; see `TrainerLike.gradient_norms`."""

    def take(self) -> tuple[list[float], dict[str, float]]:
        """The total norms of the steps since the last call, and the norms by parameter in the last step."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LinearProbe(Protocol):
    """A linear classifier that is trained beside the run; see `TrainerLike.linear_probe`."""

    classifier: Any

    def train(self, features: Any, labels: Any, num_classes: int) -> None:
        """One step on features (N, D) and labels (N,)."""

    def accuracy(self, features: Any, labels: Any) -> float | None:
        """The share of rows that are classified correctly; None before the first step."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Trace(Protocol):
    """A running trace of the profiler; see `TrainerLike.start_trace`."""

    def begin_step(self, step: int) -> None:
        """Mark the beginning of the `step`-th step."""

    def end_step(self) -> None:
        """Mark its end."""

    def stop(self) -> str:
        """Write the trace. Returns how to open it."""


class TrainerLike(Protocol):
    """The part of the trainer that callbacks may use, on torch and on JAX."""

    task: Any
    lr: float
    state: RunState
    control: Control
    is_main: bool
    is_local_main: bool
    total_steps: int | None
    active_optimizer: Any
    active_scheduler: Any
    current_loss: LazyScalar | None
    current_lr: float | None
    context: Any
    grad_norm: Any
    same_classes: bool
    train_dataloader: Any
    val_dataloader: Any
    val_sets: tuple[str, ...]
    evaluated_sets: tuple[str, ...]
    logger: Any
    output_folder: Path
    accelerator: str | None
    num_devices: int
    peak_memory_gb: float | None

    def was_set(self, name: str) -> bool: ...
    def stop(self, reason: str) -> None: ...
    def log_metrics(self, metrics: dict[str, float]) -> None: ...
    def record(self, kind: str, **content: Any) -> None: ...
    def learning_rates(self) -> list[float]: ...
    def gradient_norms(self, every: int) -> GradientNorms: ...
    def flops_per_sample(self) -> float | None: ...
    def average_weights(self, modules: Sequence[str] | None = None) -> WeightAverage: ...
    def step_features(self) -> tuple[Any, Any] | None: ...
    def knn_accuracy(self, queries: Any, gallery: Any, k: int, temperature: float) -> float: ...
    def linear_probe(self, lr: float, momentum: float, weight_decay: float) -> LinearProbe: ...
    def sample_images(self, max_samples: int, val_set: str | None = None) -> dict[str, np.ndarray]: ...
    def start_trace(self, folder: Path) -> Trace: ...
    def evaluate_without_ema(self, names: Sequence[str] = ()) -> dict[str, float]: ...
    def embed(self, data: Any = "val", max_samples: int | None = None) -> dict[str, Any]: ...
    def eval_mode(self) -> AbstractContextManager[None]: ...
    def save(self, path: str) -> str: ...
    def sandbox(self) -> AbstractContextManager[Probe]: ...


class Callback(Protocol):
    """Receives the events of a run. Define only the methods you need; no base class is required.

    Optional methods besides those below: `on_substep_end`, `on_before_optimizer_step`, `on_after_optimizer_step`,
    `on_log`, `on_validation_begin`, `on_save` and `on_error` (see `trainformer.engine.Event` for their order);
    `attach(trainer)`, called once when the trainer is built; and `compute_metrics(trainer, metrics)`, which adds
    metrics to an evaluation. Added metrics can be monitored like any other.
    """

    def on_train_begin(self, trainer: TrainerLike) -> None:
        """Before the first step."""

    def on_train_end(self, trainer: TrainerLike) -> None:
        """After the last step."""

    def on_epoch_begin(self, trainer: TrainerLike, epoch: int) -> None:
        """Before an epoch (counted from 0)."""

    def on_epoch_end(self, trainer: TrainerLike, epoch: int, metrics: dict[str, float]) -> None:
        """After an epoch, with the metrics of its evaluation if there was one."""

    def on_step_begin(self, trainer: TrainerLike, step: int) -> None:
        """Before an optimizer step, after `step` completed steps."""

    def on_step_end(self, trainer: TrainerLike, step: int, loss: LazyScalar) -> None:
        """After an optimizer step, the `step`-th. Reading `loss` as a float synchronises with the device."""

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        """After an evaluation, with metrics named ``val/...``."""

    def state_dict(self) -> dict[str, Any]:
        """State to store in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def make_callback(spec: Any) -> Any:
    """Build a callback from its name, or from ``{"name": ..., **options}``; other objects are returned unchanged.

    Names are the built-in callbacks in snake case, and those that installed packages register under the entry point
    group ``trainformer.callbacks``.

    >>> make_callback({"name": "early_stopping", "patience": 3}).patience
    3
    >>> make_callback("early_stoping")
    Traceback (most recent call last):
    trainformer.core.errors.BadArgument: Expected a callback to be ..., received 'early_stoping'. Did you mean ...
    """
    if not isinstance(spec, str | Mapping):
        return spec
    options: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise BadArgument(expected("a callback as {'name': ..., options}", spec))
    factory = _find_callback(name)
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        target = getattr(factory, "__name__", name)
        raise BadArgument(f"The options of the callback {name!r} do not fit {target}: {error}.") from error
    return factory(**options)


def _find_callback(name: str) -> Callable[..., Any]:
    from trainformer import callbacks  # exports lazily, so this imports only the module of the chosen callback

    classes = set(callbacks.__all__) - {"Callback", "CallbackList", "make_callback"}
    builtin = {re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", c).lower(): c for c in classes}
    if name in builtin:
        return getattr(callbacks, builtin[name])
    plugin = load_plugin("callbacks", name)
    if plugin is None:
        known = sorted({*builtin, *plugin_names("callbacks")})
        hint = did_you_mean(name, known)
        raise BadArgument(expected(f"a callback to be one of {', '.join(known)}, or an object", name, hint))
    if not callable(plugin):
        what = f"the plugin {name!r} to be a callback class, or a function that returns a callback"
        raise BadArgument(expected(what, type(plugin).__name__))
    return plugin


class CallbackList:
    """The callbacks of a run, in order. Callbacks can be given as objects or by name (see `make_callback`).

    >>> class Counter:
    ...     n = 0
    ...     def on_step_end(self, trainer, step, loss):
    ...         self.n += 1
    >>> counter = Counter()
    >>> CallbackList([counter]).on_step_end(None, 1, 0.5)
    >>> counter.n
    1
    """

    def __init__(self, callbacks: Any = None) -> None:
        self.callbacks: list[Any] = []
        self.shared: dict[str, Any] = {}  # state shared by the adapters of one framework
        if callbacks is None:
            callbacks = ()
        elif isinstance(callbacks, (str, Mapping)) or not isinstance(callbacks, Iterable):
            callbacks = (callbacks,)  # a single one
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> Any:
        """Append a callback, wrapped in an adapter if it was written for HF or mini. Returns what was stored."""
        if isinstance(callback, type):
            do = f"Write {callback.__name__}()."
            raise BadArgument(expected("a callback object", f"the class {callback.__name__}", do))
        callback = to_native(make_callback(callback), self.shared)
        _check_hooks(callback)
        self.callbacks.append(callback)
        return callback

    def remove(self, callback: Any) -> Any:
        """Remove a callback, or the first instance of a class. Returns the callback without adapter, or None."""
        for index, stored in enumerate(self.callbacks):
            found = unwrap_callback(stored)
            if (type(found) is callback) if isinstance(callback, type) else (found is callback):
                del self.callbacks[index]
                return found
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    def __len__(self) -> int:
        return len(self.callbacks)

    def compute_metrics(self, trainer: Any, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of an evaluation, with those that callbacks add."""
        for callback in self:
            if hasattr(callback, "compute_metrics"):
                who = f"{name_of(callback)}.compute_metrics"
                metrics = metrics | as_metrics(callback.compute_metrics(trainer, metrics), who)
        return metrics

    def named(self) -> dict[str, Any]:
        """Callbacks by a stable unique key: the class name, with ``#2``, ``#3``, ... for further instances."""
        keys: dict[str, Any] = {}
        for callback in self.callbacks:
            name = name_of(callback)
            number = 1 + sum(name_of(other) == name for other in keys.values())
            keys[name if number == 1 else f"{name}#{number}"] = callback
        return keys

    def state_dict(self) -> dict[str, Any]:
        """The states of all stateful callbacks."""
        return {key: cb.state_dict() for key, cb in self.named().items() if callable(getattr(cb, "state_dict", None))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of callbacks that have an entry in `state`; others keep their own."""
        for key, callback in self.named().items():
            if key in state and callable(getattr(callback, "load_state_dict", None)):
                callback.load_state_dict(state[key])

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in METHODS.values():
            raise AttributeError(name)

        def dispatch(trainer: Any, *args: Any) -> None:
            for callback in self.callbacks:
                if hasattr(callback, name):
                    getattr(callback, name)(trainer, *args)

        return dispatch


def was_left_out(trainer: Any, metric: str) -> bool:
    """Whether a metric belongs to a validation set that the current evaluation did not include."""
    names = [name for name in getattr(trainer, "val_sets", ()) if name not in trainer.evaluated_sets]
    own = metric.replace("val/without_ema/", "val/", 1)
    return any(own.startswith(f"val/{name}/") for name in names)


def _check_hooks(callback: Any) -> None:
    """Reject a callback without hooks or with hooks of other arguments; warn of hooks that nobody calls."""
    wrapped = unwrap_callback(callback)
    base = next((c for c in type(wrapped).__mro__ if c.__name__ in ("TrainerCallback", "BaseHook")), None)
    hooks = [*METHODS.values(), *_OTHER_HOOKS] if base is None else [n for n in dir(base) if n.startswith("on_")]
    unknown = unknown_hooks(wrapped, hooks) if wrapped is callback or base is not None else {}
    if wrapped is callback and not any(callable(getattr(callback, name, None)) for name in _ARGUMENTS):
        do = " ".join(f"It has {name}. {hint}" for name, hint in unknown.items())
        what = f"a callback with at least one of {', '.join(METHODS.values())}"
        raise BadArgument(expected(what, type(callback).__name__, do))
    for name, hint in unknown.items():
        logger.warning("%s.%s is never called: there is no such event. %s", type(wrapped).__name__, name, hint)
    if wrapped is callback:
        for name in (n for n in _ARGUMENTS if callable(getattr(callback, n, None))):
            check_arguments(callback, name, ("trainer", *_ARGUMENTS[name]))


class EveryNthEvaluation:
    """Mixin of callbacks that run at every `every`-th evaluation only, also across a resume."""

    every: int
    _evaluations = 0

    def on_train_begin(self, trainer: TrainerLike) -> None:
        if trainer.val_dataloader is None:
            logger.warning("%s does nothing: it runs at evaluations, and there is no validation data", name_of(self))

    def on_train_end(self, trainer: TrainerLike) -> None:
        if not self._evaluations and trainer.val_dataloader is not None:
            logger.warning("%s has done nothing: it runs at evaluations, and there was none", name_of(self))

    def is_due(self) -> bool:
        """Count an evaluation; whether it is an N-th one."""
        self._evaluations += 1
        return self._evaluations % self.every == 0

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self._evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evaluations = state["evaluations"]


def handlers_of(callback: Any, trainer: Any) -> dict[Event, Callable[..., None]]:
    """The event handlers of a callback, bound to the trainer."""
    if isinstance(callback, CallbackAdapter):
        return callback.handlers(trainer)
    found: dict[Event, Callable[..., None]] = {}
    for event, name in METHODS.items():
        method = getattr(callback, name, None)
        # Subclasses of the protocol inherit its empty methods; calling those would cost time.
        if callable(method) and getattr(method, "__func__", None) is not getattr(Callback, name, object()):
            found[event] = partial(method, trainer)
    return found


def name_of(callback: Any) -> str:
    """The name of a callback in logs and checkpoints."""
    return type(unwrap_callback(callback)).__name__

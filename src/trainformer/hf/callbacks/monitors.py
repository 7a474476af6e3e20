"""Callbacks that watch a run: `DivergenceDetector`, `GradLogger` and `PeakMemory`."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.backends.torch.gradient_norms import gradient_norm, named_gradients
from trainformer.callbacks.compat.huggingface_types import TrainerCallback, TrainerControl, TrainerState
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.hf.callbacks.common import is_evaluation, trainer_api
from trainformer.hf.callbacks.tensorboard import WritingCallback
from trainformer.utils.processes import peak_resident_bytes

logger = logging.getLogger("trainformer")

_DIVERGENCE_FLAGS = {"abort": "should_abort_without_save", "stop": "should_training_stop", "warn": None}
_NO_LAYER = "(outside the model)"
_ROOT = "(model)"
_MAX_NAMED = 3
_GIB = 2**30


class DivergenceDetector(TrainerCallback):
    """Detects divergence of a logged metric that should fall, and ends the run.

    It follows an exponential moving average of the metric, in which each new record has the weight ``1 - smoothing``.
    The limit is `factor` times the lowest average so far, and at least `min_rise` above it, so that noise around a
    small loss is ignored. An average above the limit for `patience` consecutive records, or a single NaN or infinity,
    is a divergence. The first `warmup` records are never judged.

    `action`: "abort" ends the run without another checkpoint, so the last one predates the divergence; "stop" ends it
    normally, with a checkpoint; "warn" only logs a warning. `metric` is a name in the logs: "loss", "eval_loss",
    "grad_norm", ...
    """

    def __init__(
        self,
        metric: str = "loss",
        factor: float = 2.0,
        patience: int = 3,
        *,
        action: str = "abort",
        smoothing: float = 0.8,
        min_rise: float = 0.1,
        warmup: int = 5,
    ) -> None:
        if action not in _DIVERGENCE_FLAGS:
            raise BadArgument(expected("DivergenceDetector's action to be 'abort', 'stop' or 'warn'", action))
        for name, value, fits, what in (
            ("factor", factor, factor > 1, "above 1"),
            ("patience", patience, patience >= 1, "at least 1"),
            ("smoothing", smoothing, 0 <= smoothing < 1, "from 0 and below 1"),
            ("min_rise", min_rise, min_rise >= 0, "at least 0"),
            ("warmup", warmup, warmup >= 0, "at least 0"),
        ):
            if not fits:
                raise BadArgument(expected(f"DivergenceDetector's {name} to be {what}", value))
        self.metric, self.factor, self.patience, self.action = metric, factor, patience, action
        self.smoothing, self.min_rise, self.warmup = smoothing, min_rise, warmup
        self._sum = 0.0  # exponentially weighted
        self._records = 0
        self._best = math.inf
        self._above = 0
        self._reported = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A new run warns again."""
        self._reported = False

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> Any:
        value = (logs or {}).get(self.metric)
        if value is None:
            return control
        if not math.isfinite(value):
            self._diverged(control, state, f"{self.metric} is {value}")
            return control
        self._records += 1
        self._sum = self.smoothing * self._sum + (1 - self.smoothing) * float(value)
        average = self._sum / (1 - self.smoothing**self._records)
        limit = self._best + max((self.factor - 1) * abs(self._best), self.min_rise)
        if self._records > self.warmup and average > limit:
            self._above += 1
            if self._above >= self.patience:
                bound = f"{limit:.4g} (lowest average: {self._best:.4g})"
                self._diverged(control, state, f"the average of {self.metric}, {average:.4g}, is above {bound}")
        else:
            self._above = 0
            self._reported = False
        self._best = min(self._best, average)
        return control

    def _diverged(self, control: TrainerControl, state: TrainerState, what: str) -> None:
        flag = _DIVERGENCE_FLAGS[self.action]
        if not self._reported:
            consequence = {"abort": "the run ends without another checkpoint", "stop": "the run ends"}
            then = consequence.get(self.action, "the run continues")
            logger.warning("DivergenceDetector: %s at step %d; %s", what, state.global_step, then)
            self._reported = True
        if flag is not None:
            # The control of transformers has no flag to abort.
            setattr(control, flag if hasattr(control, flag) else "should_training_stop", True)

    def state_dict(self) -> dict[str, Any]:
        best = self._best if math.isfinite(self._best) else None
        return {"sum": self._sum, "records": self._records, "best": best, "above": self._above}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum, self._records, self._above = state["sum"], state["records"], state["above"]
        self._best = math.inf if state["best"] is None else state["best"]


class GradLogger(WritingCallback):
    """Every `log_frequency` steps, logs the total gradient norm and the largest, smallest and mean norm of a layer.

    A layer is a module with parameters of its own; its norm is that of all of them together. The metrics are
    ``grad_norm_total``, ``grad_norm_max``, ``grad_norm_min`` and ``grad_norm_mean``. They are norms before clipping if
    the trainer exposes the norm before clipping, as those of trainformer do, otherwise norms after clipping.

    `track_layers`: modules whose norm is logged as ``grad_norm/<name>`` as well. A name is a module path or a part of
    one, in whole components: "layer.0" matches all of ``encoder.layer.0``, but neither ``encoder.layer.01`` nor
    ``encoder.layer.10``. "all" logs every layer.

    The metrics go to the log record of the step, or to a separate one, and to `summary_writer` (a writer or a folder).
    They cost one device synchronisation per record. A warning names layers whose norm is below `vanishing_threshold`
    or above `exploding_threshold`: at the first such record, then at the second, fourth, eighth, ...
    """

    def __init__(
        self,
        summary_writer: Any = None,
        log_frequency: int = 100,
        track_layers: Sequence[str] | str | None = None,
        vanishing_threshold: float = 1e-7,
        exploding_threshold: float = 1e3,
    ) -> None:
        if isinstance(log_frequency, bool) or not isinstance(log_frequency, int) or log_frequency < 1:
            raise BadArgument(expected("GradLogger's log_frequency to be a positive number of steps", log_frequency))
        if not 0 <= vanishing_threshold < exploding_threshold:
            what = "GradLogger's vanishing_threshold to be at least 0 and below its exploding_threshold"
            raise BadArgument(expected(what, (vanishing_threshold, exploding_threshold)))
        self.log_frequency = log_frequency
        self.tracks_all = track_layers == "all"
        names = [track_layers] if isinstance(track_layers, str) else list(track_layers or ())
        self.track_layers = [] if self.tracks_all else names
        self.vanishing_threshold, self.exploding_threshold = vanishing_threshold, exploding_threshold
        super().__init__(summary_writer)
        self._record: dict[str, float] = {}
        self._seen = {"vanishing": 0, "exploding": 0}  # number of records with such layers

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Check that the model has the tracked layers."""
        self._writer.open(state)
        layers = sorted({layer_of(name) for name, _ in model.named_parameters()})
        for name in self.track_layers:
            if not any(path_contains(name, layer) for layer in layers):
                paths = [layer.split(".") for layer in layers]
                known = [".".join(p[i:j]) for p in paths for i in range(len(p)) for j in range(i + 1, len(p) + 1)]
                hint = did_you_mean(name, known) or f"The model has {', '.join(layers[:8])}, ..."
                raise BadArgument(expected("track_layers to name modules of the model", name, hint))

    def on_pre_optimizer_step(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        step = state.global_step + 1  # the current step is not complete yet
        if step % self.log_frequency:
            return
        norms, total = layer_norms(model, optimizer, getattr(trainer_api(kwargs.get("trainer")), "grad_norm", None))
        if not norms:
            return
        values = list(norms.values())
        self._record = {
            "grad_norm_total": total,
            "grad_norm_max": max(values),
            "grad_norm_min": min(values),
            "grad_norm_mean": math.fsum(values) / len(values),
            **self._tracked(norms),
        }
        if state.is_world_process_zero:
            self._writer.add_scalars(self._record, step)
            self._warn(norms, step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Add to the log record of the same step, if there is one."""
        if logs is not None and not is_evaluation(logs):
            logs.update(self._record)
            self._record = {}

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Otherwise log a separate record before the next step."""
        if self._record:
            record, self._record = self._record, {}
            api = trainer_api(kwargs.get("trainer"))
            if api is not None:
                api.log_metrics(record)

    def _tracked(self, norms: dict[str, float]) -> dict[str, float]:
        if self.tracks_all:
            return {f"grad_norm/{layer}": norm for layer, norm in norms.items()}
        found = {}
        for name in self.track_layers:
            parts = [norm for layer, norm in norms.items() if path_contains(name, layer)]
            if parts:  # empty if the layer is frozen
                found[f"grad_norm/{name}"] = math.hypot(*parts)
        return found

    def _warn(self, norms: dict[str, float], step: int) -> None:
        low, high = self.vanishing_threshold, self.exploding_threshold
        vanishing = {layer: norm for layer, norm in norms.items() if norm < low}
        exploding = {layer: norm for layer, norm in norms.items() if not norm <= high}
        for kind, layers, bound in (
            ("vanishing", vanishing, f"below {low:g}"),
            ("exploding", exploding, f"above {high:g}"),
        ):
            if not layers:
                continue
            self._seen[kind] += 1
            if self._seen[kind].bit_count() == 1:  # 1, 2, 4, 8, ...
                worst = sorted(layers, key=lambda layer: layers[layer], reverse=kind == "exploding")
                shown = ", ".join(f"{layer} ({layers[layer]:.3g})" for layer in worst[:_MAX_NAMED])
                more = f" and {len(worst) - _MAX_NAMED} more" if len(worst) > _MAX_NAMED else ""
                logger.warning("GradLogger: %s gradients at step %d, %s: %s%s", kind, step, bound, shown, more)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen.update(state)


def layer_norms(
    model: nn.Module, optimizer: Any, norm_before_clipping: Tensor | None
) -> tuple[dict[str, float], float]:
    """The gradient norm of each layer, and the total norm, with one device synchronisation."""
    found = [(_NO_LAYER if name is None else layer_of(name), grad) for name, grad in named_gradients(model, optimizer)]
    if not found:
        return {}, 0.0
    before = norm_before_clipping
    scalars = [*(gradient_norm(grad) for _, grad in found), *([] if before is None else [before.detach()])]
    device = scalars[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    numbers = torch.stack([scalar.to(device, dtype) for scalar in scalars]).tolist()
    by_layer: dict[str, list[float]] = {}
    for (layer, _), number in zip(found, numbers, strict=False):
        by_layer.setdefault(layer, []).append(number)
    norms = {layer: math.hypot(*parts) for layer, parts in by_layer.items()}
    total = math.hypot(*norms.values())
    if before is None:
        return norms, total
    # Clipping scaled all gradients by one factor; the ratio of the total norms undoes it.
    undo_clipping = numbers[-1] / total if total > 0 and math.isfinite(total) else 1.0
    return {layer: norm * undo_clipping for layer, norm in norms.items()}, numbers[-1]


def layer_of(parameter: str) -> str:
    """The path of the module that a parameter belongs to.

    >>> layer_of("encoder.layer.0.weight"), layer_of("scale")
    ('encoder.layer.0', '(model)')
    """
    return parameter.rpartition(".")[0] or _ROOT


def path_contains(name: str, layer: str) -> bool:
    """Whether a module path contains a name, as whole components.

    >>> [path_contains("layer.0", path) for path in ("bert.layer.0.output", "bert.layer.01", "bert.layer.10")]
    [True, False, False]
    """
    return bool(name) and f".{name}." in f".{layer}."


class PeakMemory(WritingCallback):
    """Adds the peak memory since the last log record to each training record, in GiB.

    On CUDA: ``peak_memory_allocated`` (by tensors) and ``peak_memory_reserved`` (by the caching allocator). Reading
    them needs no device synchronisation. With ``reset=False`` they are the peaks since training began. On the CPU:
    ``peak_memory_resident``, the peak since the process started, as the system records no other. With `summary_writer`
    (a writer or a folder) they are also written there, under ``memory/``.
    """

    def __init__(self, summary_writer: Any = None, reset: bool = True) -> None:
        self.reset = reset
        super().__init__(summary_writer)
        self._device = torch.device("cpu")

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._writer.open(state)
        first = next(iter(model.parameters()), None) if model is not None else None
        self._device = first.device if first is not None else torch.device("cpu")
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs or is_evaluation(logs):
            return
        peaks = {"peak_memory_resident": peak_resident_bytes() / _GIB}
        if self._device.type == "cuda":
            peaks = {
                "peak_memory_allocated": torch.cuda.max_memory_allocated(self._device) / _GIB,
                "peak_memory_reserved": torch.cuda.max_memory_reserved(self._device) / _GIB,
            }
            if self.reset:
                torch.cuda.reset_peak_memory_stats(self._device)
        logs.update(peaks)
        if state.is_world_process_zero:
            self._writer.add_scalars({f"memory/{name}": value for name, value in peaks.items()}, state.global_step)

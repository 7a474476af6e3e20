"""`GradLogger`: norms of gradients, layer by layer, and a warning where they vanish or explode."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.backends.torch.gradients import is_dtensor
from trainformer.callbacks.compat.huggingface_types import TrainerCallback, TrainerControl, TrainerState
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.hf.callbacks.names import is_evaluation
from trainformer.hf.callbacks.running import run_of
from trainformer.hf.callbacks.writers import WriterHandle

logger = logging.getLogger("trainformer")

_ELSEWHERE = "(outside the model)"
_ROOT = "(model)"
_MOST_NAMED = 3


class GradLogger(TrainerCallback):
    """Every `log_frequency` steps: ``grad_norm_total``, and the largest, smallest and mean norm of a layer.

    A layer is a module that has parameters of its own; its norm is that of all of them together
    (``grad_norm_max``, ``grad_norm_min``, ``grad_norm_mean``). The norms are those before clipping where the trainer
    tells the norm before clipping, as trainformer's do; else those that are left.

    `track_layers`: names whose norm is logged, too, as ``grad_norm/<name>``. A name is a path of modules or a part of
    one, in whole words: "layer.0" is all of ``encoder.layer.0``, and nothing of ``encoder.layer.01`` or
    ``encoder.layer.10``. "all": every layer.

    The figures go to the log record of the step, or to one of their own, and to `summary_writer` (a writer or a
    folder). The device is waited for once per record, and in between nothing is looked at. A layer whose norm is
    below `vanishing_threshold` or above `exploding_threshold` is named in a warning: at the first record that
    shows it, then at the second, fourth, eighth, ...
    """

    sets_control = False

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
            words = "GradLogger's vanishing_threshold to be at least 0 and below its exploding_threshold"
            raise BadArgument(expected(words, (vanishing_threshold, exploding_threshold)))
        self.log_frequency = log_frequency
        self.tracks_all = track_layers == "all"
        names = [track_layers] if isinstance(track_layers, str) else list(track_layers or ())
        self.track_layers = [] if self.tracks_all else names
        self.vanishing_threshold, self.exploding_threshold = vanishing_threshold, exploding_threshold
        self._writer = WriterHandle(summary_writer, "GradLogger")
        self._record: dict[str, float] = {}
        self._seen = {"vanishing": 0, "exploding": 0}  # records that showed it

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """See that what is to be tracked exists."""
        self._writer.open(state)
        layers = sorted({layer_of(name) for name, _ in model.named_parameters()})
        for name in self.track_layers:
            if not any(is_part(name, layer) for layer in layers):
                known = [part for layer in layers for part in _parts(layer)]
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
        """Look at the gradients when it is time."""
        step = state.global_step + 1  # the step that is about to be completed
        if step % self.log_frequency:
            return
        norms, total = layer_norms(model, optimizer, getattr(run_of(kwargs.get("trainer")), "grad_norm", None))
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
        """Add to the record of the same step, where there is one."""
        if logs is not None and not is_evaluation(logs):
            logs.update(self._record)
            self._record = {}

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Else write a record of its own before the next step begins."""
        if self._record:
            record, self._record = self._record, {}
            run = run_of(kwargs.get("trainer"))
            if run is not None:
                run.log_metrics(record)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Everything is written."""
        self._writer.close()

    def _tracked(self, norms: dict[str, float]) -> dict[str, float]:
        if self.tracks_all:
            return {f"grad_norm/{layer}": norm for layer, norm in norms.items()}
        found = {}
        for name in self.track_layers:
            parts = [norm for layer, norm in norms.items() if is_part(name, layer)]
            if parts:  # none: frozen
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
                shown = ", ".join(f"{layer} ({layers[layer]:.3g})" for layer in worst[:_MOST_NAMED])
                more = f" and {len(worst) - _MOST_NAMED} more" if len(worst) > _MOST_NAMED else ""
                logger.warning("GradLogger: %s gradients at step %d, %s: %s%s", kind, step, bound, shown, more)

    def state_dict(self) -> dict[str, Any]:
        """How often it has been warned of."""
        return dict(self._seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._seen.update(state)


def layer_norms(
    model: nn.Module, optimizer: Any, norm_before_clipping: Tensor | None
) -> tuple[dict[str, float], float]:
    """The norm of each layer's gradients, and that of all; one wait for the device."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = [
        (layer_of(names[id(p)]) if id(p) in names else _ELSEWHERE, p.grad.detach())
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]
    if not found:
        return {}, 0.0
    before = norm_before_clipping
    numbers = _to_host([*(_norm(grad) for _, grad in found), *([] if before is None else [before.detach()])])
    by_layer: dict[str, list[float]] = {}
    for (layer, _), number in zip(found, numbers, strict=False):
        by_layer.setdefault(layer, []).append(number)
    norms = {layer: math.hypot(*parts) for layer, parts in by_layer.items()}
    total = math.hypot(*norms.values())
    if before is None:
        return norms, total
    # Clipping multiplied all by one factor: the ratio of the total norms undoes it.
    undo = numbers[-1] / total if total > 0 and math.isfinite(total) else 1.0
    return {layer: norm * undo for layer, norm in norms.items()}, numbers[-1]


def _norm(grad: Tensor) -> Tensor:
    norm: Any = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    return norm.full_tensor() if is_dtensor(norm) else norm


def _to_host(scalars: list[Tensor]) -> list[float]:
    device = scalars[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64  # which has no doubles
    return torch.stack([scalar.to(device, dtype) for scalar in scalars]).tolist()


def layer_of(parameter: str) -> str:
    """The path of the module that owns a parameter.

    >>> layer_of("encoder.layer.0.weight"), layer_of("scale")
    ('encoder.layer.0', '(model)')
    """
    return parameter.rpartition(".")[0] or _ROOT


def is_part(name: str, layer: str) -> bool:
    """Whether a name, in whole words, is part of a layer's path.

    >>> [is_part("layer.0", path) for path in ("bert.layer.0.output", "bert.layer.01", "bert.layer.10")]
    [True, False, False]
    """
    return bool(name) and f".{name}." in f".{layer}."


def _parts(path: str) -> Iterable[str]:
    words = path.split(".")
    return (".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))

"""Router losses of mixtures of experts, for tasks with causal language models."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from trainformer.core import BadArgument, Loss
from trainformer.core.errors import check_choice, expected
from trainformer.losses.router import (
    RouterStatistics,
    expert_load,
    load_balancing_loss,
    router_statistics,
    router_z_loss,
)
from trainformer.models.experts import Experts, experts_of
from trainformer.models.language import OutputStates
from trainformer.models.modes import eval_mode
from trainformer.models.neftune import real_tokens
from trainformer.tasks.language.neftune import NoisyEmbeddingsMixin
from trainformer.utils.distributed import all_reduce_sum, is_dtensor, is_padding, world_size

_SCOPES = ("step", "batch")


@dataclass(eq=False)
class RouterLossMixin(NoisyEmbeddingsMixin):
    """Adds the load-balancing loss of a mixture of experts to the loss, and logs how even the load is.

    `router_aux_loss_coef` is its weight; None takes the one of the model's config, 0 turns it off.
    `router_z_loss_coef` is that of the z-loss of the router's logits.

    `router_loss="step"` computes it from all tokens of an optimizer step, on all processes, so that neither gradient
    accumulation nor the number of processes change it; with accumulation this takes a second forward pass without
    gradients, which counts the tokens of each expert. `"batch"` computes it for each micro-batch of each process by
    itself, as transformers and TRL do, and averages with the weights of the loss.
    """

    _: KW_ONLY
    router_aux_loss_coef: float | None = None
    router_z_loss_coef: float = 0.0
    router_loss: str = "step"

    def _init_task(self) -> None:
        super()._init_task()
        check_choice("router_loss", self.router_loss, _SCOPES)
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
            if not number and not (value is None and name == "router_aux_loss_coef"):
                raise BadArgument(expected(f"{name} to be a number of at least 0", value))
        self._experts: Experts | None = None
        self._accumulates = False
        self._whole: tuple[RouterStatistics, Tensor] | None = None  # of the step, with its weight
        self._evaluated: RouterStatistics | None = None

    @property
    def _router_states(self) -> OutputStates:
        """The forward pass of the trained model, which keeps its router logits."""
        return self._states  # type: ignore[attr-defined, no-any-return]

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        self._accumulates = settings.accumulation_steps > 1
        self._strategy = settings.strategy if isinstance(settings.strategy, str) else ""
        return super().training_defaults(settings, chosen)

    def configure(self, info: Any) -> None:
        """Load the model, and ask it for its router logits if it is a mixture of experts."""
        super().configure(info)
        self._experts = experts_of(self.model)
        if self._experts is None:
            for name in ("router_aux_loss_coef", "router_z_loss_coef"):
                if getattr(self, name):
                    do = "Leave it out."
                    what = f"a mixture of experts that returns router logits for {name}={getattr(self, name)}"
                    raise BadArgument(expected(what, type(self.model).__name__, do))
        elif self._has_router_loss and getattr(self, "_strategy", "") == "pipeline":
            do = "Use another strategy, or pass router_aux_loss_coef=0."
            what = "a strategy with all layers on each rank for the router loss of a mixture of experts"
            raise BadArgument(expected(what, "pipeline", do))
        self._router_states.keeps_router_logits = self._experts is not None

    @property
    def aux_loss_coef(self) -> float:
        """The weight of the load-balancing loss: the argument, or that of the model's config."""
        if self.router_aux_loss_coef is not None:
            return self.router_aux_loss_coef
        return 0.0 if self._experts is None else self._experts.aux_loss_coef

    @property
    def _has_router_loss(self) -> bool:
        return bool(self.aux_loss_coef or self.router_z_loss_coef)

    # -- training ------------------------------------------------------------------------------------------

    @property
    def wants_window(self) -> bool:
        """Whether all micro-batches of a step must be known before the first."""
        return self._counts_experts

    @property
    def _counts_experts(self) -> bool:
        """Whether the tokens of each expert are counted before a step."""
        return self._experts is not None and self._accumulates and self._has_router_loss and self.router_loss == "step"

    @torch.no_grad()
    def begin_window(self, batches: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> None:
        """Count the tokens of each expert in the micro-batches of the next step. Those of size 0 are padding."""
        if not self._counts_experts:
            return
        if any(is_dtensor(p) for p in self.model.parameters()):
            what = "router_loss='batch' with gradient accumulation and sharded parameters"
            raise BadArgument(expected(what, self.router_loss, "Pass it, or accumulation_steps=1."))
        found: RouterStatistics | None = None
        weight: Tensor | None = None
        with eval_mode(self.model):
            for batch, size in zip(batches, sizes, strict=True):
                part = self._route(batch) if size else _without(self._route(batch))
                own = self._router_weight(batch).to(part.tokens) * bool(size)
                found, weight = (part, own) if found is None or weight is None else (found + part, weight + own)
        if found is not None and weight is not None:
            self._whole = _over_ranks(found, weight)

    def _route(self, batch: Mapping[str, Tensor]) -> RouterStatistics:
        """The statistics of a batch, from a forward pass."""
        with self._noisy(batch, in_eval=True):
            self._router_states(self.model, self._router_inputs(batch))
        return self._statistics(batch)

    def _router_inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the model gets of a batch."""
        return {name: batch[name].flatten(0, -2) for name in ("input_ids", "position_ids") if name in batch}

    def _router_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The weight of the loss of a batch."""
        return (batch["labels"][..., 1:] != -100).sum()

    def _statistics(self, batch: Mapping[str, Tensor]) -> RouterStatistics:
        """The statistics of the last forward pass, which was that of the batch."""
        assert self._experts is not None
        logits = self._router_states.router_logits
        if not logits:
            what = "a model that returns router logits"
            do = "Pass router_aux_loss_coef=0 to train without a router loss."
            raise BadArgument(expected(what, type(self.model).__name__, do))
        return router_statistics(logits, self._experts.per_token, real_tokens(batch))

    def _with_router_loss(self, loss: Loss, batch: Mapping[str, Tensor]) -> Loss:
        """Add the router losses to the loss of a batch, after its forward pass, and what to log."""
        if self._experts is None:
            return loss
        part = self._statistics(batch)
        whole, weight = self._whole_step(part, loss.weight)
        aux, z = load_balancing_loss(part, whole), router_z_loss(part, whole)
        found = {"router_aux_loss": aux, "router_z_loss": z} if self.router_z_loss_coef else {"router_aux_loss": aux}
        # The sum of the step is divided by its weight, which leaves the loss of the step.
        metrics = {name: (value.detach() * weight, loss.weight) for name, value in found.items()}
        loads = expert_load(whole)
        metrics |= {f"router_{name}": (value * loss.weight, loss.weight) for name, value in loads.items()}
        if not self._has_router_loss:
            return Loss(loss.sum, loss.weight, {**(loss.metrics or {}), **metrics}, loss.per_sample)
        total = loss.sum + weight * (self.aux_loss_coef * aux + self.router_z_loss_coef * z)
        return Loss(total, loss.weight, {**(loss.metrics or {}), **metrics}, loss.per_sample)

    def _whole_step(self, part: RouterStatistics, weight: Any) -> tuple[RouterStatistics, Tensor]:
        """The statistics and the weight that the loss is relative to."""
        if self._counts_experts and self._whole is not None:
            return self._whole
        own = torch.as_tensor(weight, device=part.tokens.device).to(part.tokens)
        if self.router_loss == "batch":
            return part.detached(), own
        return _over_ranks(part, own)

    # -- evaluation ----------------------------------------------------------------------------------------

    def on_eval_begin(self, dataset: Any, val_set: str) -> None:
        super().on_eval_begin(dataset, val_set)
        self._evaluated = None

    def _evaluate_router(self, batch: Mapping[str, Tensor]) -> None:
        """Add a batch of the validation data, after its forward pass."""
        if self._experts is not None:
            part = self._statistics(batch)
            part = _without(part) if is_padding() else part
            self._evaluated = part if self._evaluated is None else self._evaluated + part

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The router losses of the whole validation data: not part of its loss."""
        derived = super().derive_metrics(metrics)
        if self._evaluated is None:
            return derived
        whole, _ = _over_ranks(self._evaluated, self._evaluated.tokens)
        self._evaluated = None
        loads = {f"router_{name}": float(value) for name, value in expert_load(whole).items()}
        return {**derived, "router_aux_loss": float(load_balancing_loss(whole)), **loads}


def _over_ranks(part: RouterStatistics, weight: Tensor) -> tuple[RouterStatistics, Tensor]:
    """Statistics and weight of all processes, without gradients."""
    part = _without(part) if is_padding() else part.detached()
    if world_size() == 1:
        return part, weight.detach()
    weight = weight.detach() * (not is_padding())
    flat = all_reduce_sum(torch.cat([value.flatten() for value in (*part, weight)]))
    pieces = flat.split([value.numel() for value in (*part, weight)])
    *found, total = (piece.view_as(value) for piece, value in zip(pieces, (*part, weight), strict=True))
    return RouterStatistics(*found), total


def _without(part: RouterStatistics) -> RouterStatistics:
    return RouterStatistics(*(torch.zeros_like(value) for value in part.detached()))

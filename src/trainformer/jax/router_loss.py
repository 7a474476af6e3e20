"""The router losses of a mixture of experts, as part of the loss of a trainer for language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainformer.backends.jax.step import TOTALS, VALID
from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import Loss
from trainformer.losses.jax.router import (
    RouterStatistics,
    expert_load,
    layer_sums,
    load_balancing_loss,
    router_z_loss,
)
from trainformer.models.jax.block import RouterProbe

SCOPES = ("step", "batch")
_STATISTICS, _WEIGHT = "router", "router_weight"


@dataclass(frozen=True)
class RouterLoss:
    """The load-balancing loss and the z-loss with their weights, and the numbers of the loads.

    With `counts_first` the statistics of the whole step are in the totals of a batch: see `BaseTrainer.step_totals`.
    """

    aux_coef: float
    z_coef: float
    counts_first: bool

    @classmethod
    def of(cls, arguments: Any, config: Any, accumulation: int) -> RouterLoss | None:
        """The router losses of a model with this config; None if it has no experts."""
        own, z_coef = arguments.router_aux_loss_coef, arguments.router_z_loss_coef
        if not hasattr(config, "num_experts_per_tok"):
            for name in ("router_aux_loss_coef", "router_z_loss_coef"):
                if getattr(arguments, name):
                    what = f"a mixture of experts, and a trainer with a router loss, for {name}"
                    kind = f"{type(arguments).__name__}({name}={getattr(arguments, name)})"
                    raise BadArgument(expected(what, kind, "Leave it out."))
            return None
        aux_coef = config.router_aux_loss_coef if own is None else own
        has_loss = bool(aux_coef or z_coef)
        return cls(aux_coef, z_coef, has_loss and accumulation > 1 and arguments.router_loss == "step")

    def probe(self, batch: Mapping[str, Any], per_row: bool = False) -> RouterProbe:
        """What a forward pass of the batch needs to collect the statistics, of all of it or of each row."""
        return RouterProbe(partial(layer_sums, mask=_real_tokens(batch), over=(1,) if per_row else (0, 1)))

    def statistics(self, probe: RouterProbe, batch: Mapping[str, Any]) -> RouterStatistics:
        """The statistics of the batch after its forward pass."""
        choices, probabilities, z = probe.found
        return RouterStatistics(choices, probabilities, z, jnp.sum(_real_tokens(batch), dtype=jnp.float32))

    def totals(self, probe: RouterProbe, batch: Mapping[str, Any], weight: Any) -> dict[str, Any]:
        """What `add` needs of the whole step, summed over micro-batches; `weight` is that of the loss."""
        return {_STATISTICS: self.statistics(probe, batch), _WEIGHT: weight}

    def add(self, loss: Loss, probe: RouterProbe, batch: Mapping[str, Any]) -> Loss:
        """The loss of a batch with the router losses, after its forward pass, and what to log."""
        part = self.statistics(probe, batch)
        whole, weight = jax.lax.stop_gradient(part), loss.weight
        if self.counts_first:
            whole, weight = batch[TOTALS][_STATISTICS], batch[TOTALS][_WEIGHT]
        aux, z = load_balancing_loss(part, whole), router_z_loss(part, whole)
        found = {"router_aux_loss": aux} | ({"router_z_loss": z} if self.z_coef else {})
        # The sum of the step is divided by its weight, which leaves the loss of the step.
        metrics = {name: (value * weight, loss.weight) for name, value in found.items()}
        metrics |= {f"router_{name}": (value * loss.weight, loss.weight) for name, value in expert_load(whole).items()}
        total = loss.sum + weight * (self.aux_coef * aux + self.z_coef * z)
        return Loss(total, loss.weight, {**(loss.metrics or {}), **metrics}, loss.per_sample)


def router_rows(probe: RouterProbe, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The statistics of each row of an evaluation batch, after its forward pass."""
    parts = *(jnp.moveaxis(part, 0, 1) for part in probe.found), jnp.sum(_real_tokens(batch), axis=1)
    rows = len(batch["input_ids"])
    by_row = (jnp.sum(part.reshape(rows, -1, *part.shape[1:]), axis=1) for part in parts)  # pairs have two
    return {f"router_{name}": part for name, part in zip(RouterStatistics._fields, by_row, strict=True)}


def summarize_router(rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The load-balancing loss and the loads of a whole evaluation; nothing without experts."""
    if "router_tokens" not in rows:
        return {}
    whole = RouterStatistics(*(jnp.asarray(rows[f"router_{name}"].sum(axis=0)) for name in RouterStatistics._fields))
    loads = {f"router_{name}": float(value) for name, value in expert_load(whole).items()}
    return {"router_aux_loss": float(load_balancing_loss(whole, whole)), **loads}


def _real_tokens(batch: Mapping[str, Any]) -> jax.Array:
    """Which tokens (rows, sequence) are no padding; pairs count as two rows."""
    mask = batch["attention_mask"] if "attention_mask" in batch else jnp.ones_like(batch["input_ids"])
    if VALID in batch:
        mask = mask * batch[VALID].reshape(-1, *[1] * (mask.ndim - 1))
    return mask.reshape(-1, mask.shape[-1])

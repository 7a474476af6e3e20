"""Mixtures of experts of transformers: which models are some, and what their configurations say about routers."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class Experts(NamedTuple):
    """Experts of a layer, how many of them a token chooses, and the weight of the load-balancing loss."""

    number: int
    per_token: int
    aux_loss_coef: float


def experts_of(model: nn.Module) -> Experts | None:
    """The experts of a model that can return its router logits (Mixtral, Qwen-MoE, OLMoE, ...); None for others."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not hasattr(text, "output_router_logits"):
        return None
    number = _first(text, "num_local_experts", "num_experts", "moe_num_experts")
    per_token = _first(text, "num_experts_per_tok", "moe_k")
    if not number or not per_token:
        return None
    return Experts(number, per_token, float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0))


def _first(config: Any, *names: str) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)

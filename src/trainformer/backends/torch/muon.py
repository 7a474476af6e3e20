"""Muon for the hidden matrices of a model, with AdamW for everything else (Jordan et al. 2024).

An update of Muon is the momentum, orthogonalised by a few Newton-Schulz iterations. It is scaled to the RMS of AdamW's
updates, so that both share one learning rate and weight decay ("Muon is scalable for LLM training", 2025).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from trainformer.core.errors import BadArgument, check_count, expected

_ITERATION = (3.4445, -4.7750, 2.0315)  # of Jordan: singular values end up between 0.7 and 1.2 after five steps
_RMS = 0.2  # of AdamW's updates
_HEADS = re.compile(r"(^|\.)(lm_head|embed_out|head|classifier|score)(\.|$)")


Groups = list[dict[str, Any]]


def hidden_matrices(model: nn.Module) -> set[int]:
    """The ids of the parameters that Muon updates: matrices other than embeddings, convolutions and output layers.

    Output layers are what `get_output_embeddings()` returns, and modules called `head`, `lm_head`, `classifier`
    or `score`. Stacked matrices of experts, (experts, rows, columns), count as one matrix per expert.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    >>> hidden_matrices(model) == {id(model[1].weight)}
    True
    """
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    found, others = set(), set()
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            matrix = key == "weight" and p.ndim == 2
            experts = p.ndim == 3 and hasattr(module, "num_experts")
            outer = isinstance(module, nn.Embedding | _ConvNd) or module is head or _HEADS.search(name)
            (found if (matrix or experts) and not outer else others).add(id(p))
    return found - others  # a tied output layer is an embedding


def split_for_muon(groups: Groups, *models: nn.Module) -> Groups:
    """Param groups with the hidden matrices of the models apart, marked for `Muon`."""
    hidden = set().union(*(hidden_matrices(model) for model in models))
    split = [
        {**group, "params": [p for p in group["params"] if (id(p) in hidden) is muon], "muon": muon}
        for group in groups
        for muon in (True, False)
    ]
    return [group for group in split if group["params"]]


class Muon(torch.optim.AdamW):
    """Muon for param groups with ``muon=True``, which hold matrices; AdamW for the others.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    >>> optimizer = Muon(split_for_muon([{"params": list(model.parameters())}], model), lr=1e-3)
    >>> [(group["muon"], len(group["params"])) for group in optimizer.param_groups]
    [(True, 1), (False, 2)]

    `momentum`, `nesterov` and `ns_steps` are Muon's; `betas` and `eps` AdamW's.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise BadArgument(expected("momentum from 0 to less than 1", momentum, "0.95 is usual."))
        check_count("ns_steps", ns_steps)
        self._muon_defaults = {"muon": False, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, of matrices if it has ``muon=True``."""
        super().add_param_group({**self._muon_defaults, **param_group})
        added = self.param_groups[-1]
        shapes = [tuple(p.shape) for p in added["params"] if p.ndim < 2]
        if added["muon"] and shapes:
            self.param_groups.pop()
            raise BadArgument(expected("matrices in a group with muon=True", shapes[0], "Leave muon out for AdamW."))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of all groups."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            loss = super().step(closure)  # with the groups of AdamW
        finally:
            self.param_groups = groups
        found_inf = getattr(self, "found_inf", None)
        for group in groups:
            if group["muon"]:
                for alike in _by_shape(p for p in group["params"] if p.grad is not None):
                    self._orthogonal_step(alike, group, None if found_inf is None else found_inf == 0)
        return loss

    def _orthogonal_step(self, params: list[Tensor], group: dict[str, Any], is_finite: Tensor | None) -> None:
        """Update matrices of one shape together. Unless `is_finite`, nothing changes; the host does not read it."""
        for p in params:
            if not self.state[p]:
                step = torch.zeros((), device=p.device if group["fused"] else "cpu")  # AdamW expects it in every state
                self.state[p] |= {"step": step, "momentum_buffer": torch.zeros_like(p)}
        grads = torch.stack([p.grad for p in params])  # type: ignore[misc]
        before = torch.stack([self.state[p]["momentum_buffer"] for p in params])
        buffers = before.lerp(grads, 1 - group["momentum"])
        smooth = grads.lerp(buffers, group["momentum"]) if group["nesterov"] else buffers
        updates = orthogonalize(smooth, group["ns_steps"])
        rate: Any = group["lr"]
        if is_finite is not None:
            buffers, updates = torch.where(is_finite, buffers, before), torch.where(is_finite, updates, 0)
            rate = rate * is_finite
        scale = _RMS * math.sqrt(max(updates.shape[-2:]))
        for p, buffer, update in zip(params, buffers, updates, strict=True):
            self.state[p]["momentum_buffer"].copy_(buffer)
            self.state[p]["step"].add_(1)
            p.mul_(1 - rate * group["weight_decay"]).sub_(update.to(p.dtype) * (rate * scale))


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices, approximately: all singular values are moved towards 1.

    Matrices are the last two dimensions. Computed in bf16 on an accelerator, in at least fp32 on the CPU.

    >>> values = torch.linalg.svdvals(orthogonalize(torch.randn(8, 4)))
    >>> bool(((values > 0.3) & (values < 1.5)).all())
    True
    """
    a, b, c = _ITERATION
    x = matrices.to(torch.bfloat16) if matrices.device.type != "cpu" else matrices.to(_at_least_fp32(matrices.dtype))
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _by_shape(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Matrices that can be stacked: one batched product instead of one for each saves most launches on a GPU."""
    found: dict[Any, list[Tensor]] = {}
    for p in params:
        found.setdefault((p.shape, p.dtype, p.device), []).append(p)
    return list(found.values())

"""Norms of gradients before clipping: of whole steps, and of single parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.utils.distributed import is_dtensor


class GradientNorms:
    """The gradient norms of the steps since the last `take`, and those of all parameters in every `every`-th step.

    `record` is called before an optimizer step. Nothing waits for the device before `take`.
    """

    def __init__(self, model: Callable[[], nn.Module], backend: Any, every: int) -> None:
        self._model = model
        self._backend = backend
        self._every = every
        self._totals: list[Tensor] = []
        self._parameters: dict[str, Tensor] = {}

    def record(self, step: int) -> None:
        """Keep the norms of the step after `step` completed ones."""
        self._totals.append(self._backend.grad_norm)
        if (step + 1) % self._every:
            return
        grads = named_gradients(self._model(), self._backend.optimizer)
        norms = torch.stack([gradient_norm(grad).float() for _, grad in grads])
        # Clipping scaled all gradients by one factor; the ratio of the total norms undoes it.
        norms = norms * (self._totals[-1].float() / torch.linalg.vector_norm(norms).clamp_min(1e-30))
        names = [name or "a parameter of the loss" for name, _ in grads]
        self._parameters |= dict(zip(names, norms, strict=True))

    def take(self) -> tuple[list[float], dict[str, float]]:
        """The total norms of the steps since the last call, and the norms by parameter in the last step."""
        totals, parameters = self._totals, self._parameters
        self._totals, self._parameters = [], {}
        read = torch.stack([norm.float() for norm in (*totals, *parameters.values())]).tolist()
        return read[: len(totals)], dict(zip(parameters, read[len(totals) :], strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"norms": [float(norm) for norm in self._totals]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._totals = [torch.tensor(norm, device=self._backend.device) for norm in state["norms"]]


def named_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str | None, Tensor]]:
    """The gradients of all optimized parameters, with their names in the model (None: not part of it)."""
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [(names.get(id(p)), p.grad.detach()) for p in parameters]


def gradient_norm(grad: Tensor) -> Tensor:
    """The norm of a whole gradient in at least fp32; a collective operation if it is sharded."""
    norm: Any = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    return norm.full_tensor() if is_dtensor(norm) else norm

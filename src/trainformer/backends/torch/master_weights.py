"""Master weights: an optimizer that updates fp32 copies of parameters that the model keeps in bf16 or fp16.

Owns the copies and moving values between them and the model. Any other optimizer does the update; it gets the copies
instead of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.utils.distributed import local_tensors

Groups = list[dict[str, Any]]

_16BIT = (torch.bfloat16, torch.float16)
_COPIES = "master_weights"
#: Gradients are cast to fp32 for this many elements at a time: 256 MB, instead of 4 bytes for each parameter.
MAX_CHUNK = 64 * 1024 * 1024


def has_16bit_parameters(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether some parameters are in bf16 or fp16.

    >>> has_16bit_parameters([{"params": [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]}])
    True
    """
    return any(p.dtype in _16BIT for group in groups for p in group["params"])


class MasterWeights(torch.optim.Optimizer):
    """Wraps an optimizer (`inner`) so that it updates fp32 copies of 16-bit parameters, with its state in fp32.

    bf16 has 8 significant bits: a change of less than 1/512 of a weight is rounded away, and most changes are smaller.
    The copy keeps them, and the parameter is the rounded copy.

    From outside this is an optimizer of the model's parameters: `param_groups` holds them and what schedules change,
    and `state` holds the inner optimizer's state under them, with the copy as ``master``. Parameters in fp32 or wider
    are passed through. If a parameter is changed from outside (weights are loaded), its copy is updated.

    Args:
        groups: Param groups of the model.
        make: Creates the inner optimizer from groups.
        elementwise: Whether the inner optimizer updates each parameter on its own, so that a step can run in chunks.
    """

    inner: torch.optim.Optimizer

    def __init__(
        self, groups: Groups, make: Callable[[Groups], torch.optim.Optimizer], elementwise: bool = False
    ) -> None:
        copies = {id(p): _copy(p) for group in groups for p in group["params"]}
        self.inner = make([{**group, "params": [copies[id(p)] for p in group["params"]]} for group in groups])
        self._elementwise = elementwise
        own = zip(self.inner.param_groups, groups, strict=True)
        super().__init__([{**theirs, "params": list(group["params"])} for theirs, group in own], self.inner.defaults)
        parameters = [p for group in self.param_groups for p in group["params"]]
        #: The model's parameter and what the inner optimizer works on, in the order of `state_dict`.
        self._pairs: list[tuple[Tensor, Tensor]] = [(p, copies[id(p)]) for p in parameters]
        self._versions = {id(p): p._version for p in parameters}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the inner optimizer was created with all groups."""
        if hasattr(self, "_pairs"):
            raise NotImplementedError("Master weights take no further groups. Pass all of them to the constructor.")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the inner optimizer skips a step on the device if `found_inf` is set."""
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer on the copies, which are then rounded to the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p, copy in self._pairs:
            if copy is not p and p._version != self._versions[id(p)]:  # written from outside
                copy.copy_(torch.where(copy.to(p.dtype) == p, copy, p.to(copy.dtype)))
        self._push_groups()
        moving = [(p, copy, p.grad) for p, copy in self._pairs if p.grad is not None]
        for _, copy, _ in moving:
            copy.grad = None  # in fp32 the copy is the parameter itself; its chunk sets the gradient again
        try:
            for piece in self._chunks(moving):
                for _, copy, gradient in piece:
                    copy.grad = gradient.to(copy.dtype)
                self.inner.step()
                for _, copy, _ in piece:
                    copy.grad = None
        finally:
            for p, _, gradient in moving:
                p.grad = gradient
        self._pull_groups()
        rounded = [(p, copy) for p, copy, _ in moving if copy is not p]
        if rounded:
            torch._foreach_copy_(local_tensors([p for p, _ in rounded]), local_tensors([copy for _, copy in rounded]))
        self._versions |= {id(p): p._version for p, _ in rounded}
        return loss

    def _chunks(self, moving: list[Any]) -> Iterator[list[Any]]:
        piece: list[Any] = []
        size = 0
        for entry in moving:
            if self._elementwise and piece and size + entry[0].numel() > MAX_CHUNK:
                yield piece
                piece, size = [], 0
            piece.append(entry)
            size += entry[0].numel()
        yield piece

    def _push_groups(self) -> None:
        for name in ("found_inf", "grad_scale"):
            setattr(self.inner, name, getattr(self, name, None))
        for theirs, ours in zip(self.inner.param_groups, self.param_groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key != "params"})

    def _pull_groups(self) -> None:
        for theirs, ours in zip(self.inner.param_groups, self.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})

    @property  # type: ignore[override]
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The inner optimizer's state and the copy of each parameter that has been updated."""
        known = [(p, copy) for p, copy in self._pairs if self.inner.state.get(copy)]
        return {p: self.inner.state[copy] | ({} if copy is p else {"master": copy}) for p, copy in known}

    @state.setter
    def state(self, state: Any) -> None:
        pass  # torch's constructor sets an empty one

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict plus the copies, by parameter number."""
        self._push_groups()
        copies = {i: copy.detach() for i, (p, copy) in enumerate(self._pairs) if copy is not p}
        return {**self.inner.state_dict(), _COPIES: copies}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Without copies in it, from a run that had none, they start from the parameters."""
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != _COPIES})
        self._pull_groups()
        saved = state_dict.get(_COPIES, {})
        for i, (p, copy) in enumerate(self._pairs):
            if copy is not p:
                copy.copy_(saved.get(i, p))
        # Weights may be loaded before or after this: compare them all before the next step.
        self._versions = {id(p): -1 for p, _ in self._pairs}


def _copy(parameter: Tensor) -> Tensor:
    return nn.Parameter(parameter.detach().float()) if parameter.dtype in _16BIT else parameter

"""Master weights: an optimizer that works in fp32 on parameters that the model keeps in bf16 or fp16.

Owns the fp32 copies and their way to and from the model. The update itself is that of any other optimizer, which gets
the copies instead of the parameters and knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.utils.distributed import local_tensors

Groups = list[dict[str, Any]]

_SHORT = (torch.bfloat16, torch.float16)
_COPIES = "master_weights"
# Gradients are turned into fp32 for so many elements at a time: 256 MB, instead of 4 bytes for each parameter.
_MOST_PER_PIECE = 64 * 1024 * 1024


def are_short(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether parameters among these are kept in fewer than 32 bits.

    >>> are_short([{"params": [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]}])
    True
    """
    return any(p.dtype in _SHORT for group in groups for p in group["params"])


class MasterWeights(torch.optim.Optimizer):
    """Lets an optimizer (`inner`) work on fp32 copies of the parameters below fp32; its state is in fp32 as well.

    bf16 has 8 significant bits: a change of less than 1/512 of a weight is rounded away, and most changes are. The copy
    takes them all in, and the parameter is the copy, rounded.

    To everybody else this is an optimizer of the model's parameters: `param_groups` holds them and what schedules
    change, `state` has the inner optimizer's state under them, with the copy as ``master``. Parameters in fp32 or more
    are handed on as they are. Where a parameter was changed from outside (weights were loaded), its copy follows.

    Args:
        groups: Groups of the model's parameters.
        make: Makes the inner optimizer from groups.
        in_pieces: Whether the inner optimizer treats each parameter alone, so that a step may be made piece by piece.
    """

    inner: torch.optim.Optimizer

    def __init__(
        self, groups: Groups, make: Callable[[Groups], torch.optim.Optimizer], in_pieces: bool = False
    ) -> None:
        copies = {id(p): _copy(p) for group in groups for p in group["params"]}
        self.inner = make([{**group, "params": [copies[id(p)] for p in group["params"]]} for group in groups])
        self._in_pieces = in_pieces
        own = zip(self.inner.param_groups, groups, strict=True)
        super().__init__([{**theirs, "params": list(group["params"])} for theirs, group in own], self.inner.defaults)
        parameters = [p for group in self.param_groups for p in group["params"]]
        #: The model's parameter and what the inner optimizer works on, in the order of `state_dict`.
        self._pairs: list[tuple[Tensor, Tensor]] = [(p, copies[id(p)]) for p in parameters]
        self._versions = {id(p): p._version for p in parameters}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are known from the beginning: the inner optimizer has made its own of them."""
        if hasattr(self, "_pairs"):
            raise NotImplementedError("Master weights take no further groups. Pass all of them when it is made.")
        super().add_param_group(param_group)

    # -- the step ------------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a step is skipped on the device where `found_inf` says so; copies and parameters then stay."""
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer on the copies; the parameters are then the copies, rounded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_changes()
        self._hand_down()
        moving = [(p, copy, p.grad) for p, copy in self._pairs if p.grad is not None]
        for _, copy, _ in moving:
            copy.grad = None  # in fp32 that is the parameter itself; it has its turn in one piece only
        try:
            for piece in self._pieces(moving):
                for _, copy, gradient in piece:
                    copy.grad = gradient.to(copy.dtype)
                self.inner.step()
                for _, copy, _ in piece:
                    copy.grad = None
        finally:
            for p, _, gradient in moving:
                p.grad = gradient
        self._hand_up()
        rounded = [(p, copy) for p, copy, _ in moving if copy is not p]
        if rounded:
            torch._foreach_copy_(local_tensors([p for p, _ in rounded]), local_tensors([copy for _, copy in rounded]))
        self._versions |= {id(p): p._version for p, _ in rounded}
        return loss

    def _pieces(self, moving: list[Any]) -> Iterator[list[Any]]:
        piece: list[Any] = []
        size = 0
        for entry in moving:
            if self._in_pieces and piece and size + entry[0].numel() > _MOST_PER_PIECE:
                yield piece
                piece, size = [], 0
            piece.append(entry)
            size += entry[0].numel()
        yield piece

    def _follow_changes(self) -> None:
        """Where somebody else wrote to a parameter, the copy becomes what is there now, element by element."""
        for p, copy in self._pairs:
            if copy is not p and p._version != self._versions[id(p)]:
                copy.copy_(torch.where(copy.to(p.dtype) == p, copy, p.to(copy.dtype)))

    def _hand_down(self) -> None:
        for name in ("found_inf", "grad_scale"):
            setattr(self.inner, name, getattr(self, name, None))
        for theirs, ours in zip(self.inner.param_groups, self.param_groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key != "params"})

    def _hand_up(self) -> None:
        for theirs, ours in zip(self.inner.param_groups, self.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})

    # -- state ---------------------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The inner optimizer's state and the copy of each parameter that has been moved."""
        known = [(p, copy) for p, copy in self._pairs if self.inner.state.get(copy)]
        return {p: self.inner.state[copy] | ({} if copy is p else {"master": copy}) for p, copy in known}

    @state.setter
    def state(self, state: Any) -> None:
        pass  # torch's constructor begins with an empty one

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state as torch writes it, and beside it the copies, by the number of the parameter."""
        self._hand_down()
        copies = {i: copy.detach() for i, (p, copy) in enumerate(self._pairs) if copy is not p}
        return {**self.inner.state_dict(), _COPIES: copies}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back. A state without copies, from a run that had none, begins with those of the parameters."""
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != _COPIES})
        self._hand_up()
        saved = state_dict.get(_COPIES, {})
        for i, (p, copy) in enumerate(self._pairs):
            if copy is not p:
                copy.copy_(saved.get(i, p))
        # Weights may have been loaded, or will be: whatever differs is looked at before the next step.
        self._versions = {id(p): -1 for p, _ in self._pairs}


def _copy(parameter: Tensor) -> Tensor:
    return nn.Parameter(parameter.detach().float()) if parameter.dtype in _SHORT else parameter

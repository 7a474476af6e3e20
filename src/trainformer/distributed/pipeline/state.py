"""The state of a model whose layers are on different ranks, put together as one process would have it.

Owns moving tensors to rank 0, and numbering the parameters of all ranks as an optimizer of the whole model does: so a
checkpoint of a pipeline is an ordinary one, and ordinary ones are loaded. Nothing here knows of stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainformer.backends.torch.state import cloned
from trainformer.core.errors import DataError
from trainformer.distributed.optimizer_state import NamedParameters, renamed, unsharded_optimizer_state
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.sharded_state import meta_tree, named_tensors, with_tensors


def gathered(process_group: TorchProcessGroup, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks, on the host of rank 0; on the others their own. Every rank must take part.

    They travel one by one: nobody but rank 0 needs memory for more than its own.
    """
    listed = process_group.all_gather_object([(name, tuple(t.shape), t.dtype) for name, t in own.items()])
    if not process_group.is_main:
        for tensor in own.values():
            dist.send(tensor.detach().cpu().contiguous(), dst=0)
        return dict(own)
    whole = {name: tensor.detach().cpu() for name, tensor in own.items()}
    for source, entries in enumerate(listed[1:], 1):
        for name, shape, dtype in entries:
            whole[name] = torch.empty(shape, dtype=dtype)
            dist.recv(whole[name], src=source)
    return whole


class GatheredOptimizer:
    """The optimizers of all ranks as one, of the parameters of the whole model.

    Args:
        ranks: All of them must take part, here and in `state`.
        optimizer: That of this rank.
        named: Its parameters, by the names of the whole model.
        order: All names of the whole model, in its order.
    """

    def __init__(
        self,
        process_group: TorchProcessGroup,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, Tensor],
        order: list[str],
    ) -> None:
        self._ranks = process_group
        self._optimizer = optimizer
        self._own = NamedParameters(optimizer, named)
        self._here = set(named)
        names = {id(p): name for name, p in named.items()}
        everywhere = process_group.all_gather_object(
            [(_kind(group), [names[id(p)] for p in group["params"]]) for group in optimizer.param_groups]
        )
        # The rank with the most groups says in which order they come.
        groups: list[tuple[Any, set[str]]] = []
        for part in sorted(everywhere, key=len, reverse=True):
            for kind, members in part:
                home = next((found for known, found in groups if known == kind), None)
                if home is None:
                    home = set()
                    groups.append((kind, home))
                home.update(members)
        self._groups = [(kind, [name for name in order if name in found]) for kind, found in groups]
        self._names = dict(enumerate(name for _, group in self._groups for name in group))

    def state(self) -> dict[str, Any]:
        """The state of all ranks, as torch writes it, on rank 0; on the others their own, by name."""
        own = self._own.state_of(self._optimizer)
        tensors = dict(named_tensors(own))
        outlines = self._ranks.all_gather_object(meta_tree(own, tensors))
        whole = gathered(self._ranks, tensors)
        if not self._ranks.is_main:
            return own
        parts = [with_tensors(outline, whole) for outline in outlines]
        joined: dict[str, Any] = {}
        for part in parts:
            for key, entries in part.items():
                joined[key] = {**joined.get(key, {}), **entries} if isinstance(entries, Mapping) else entries
        options = {name: group for part in parts for group in part["param_groups"] for name in group["params"]}
        joined["param_groups"] = [{**options[names[0]], "params": names} for _, names in self._groups]
        return unsharded_optimizer_state(joined)

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what is this rank's of the state of all parameters."""
        self._own.load(self._optimizer, self._part(state))

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise if it does not fit."""
        self._own.check(self._part(state))

    def _part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a state that is about parameters of this rank, by name."""
        numbers = [p for group in state["param_groups"] for p in group["params"]]
        named: Mapping[str, Any] = state
        if not any(isinstance(p, str) for p in numbers):
            if len(numbers) != len(self._names):
                raise DataError(
                    f"The checkpoint's optimizer does not fit: it has {len(numbers)} parameters, the model here has "
                    f"{len(self._names)}. Nothing was loaded. To change the optimizer on purpose, name the "
                    "components to load without it."
                )
            named = renamed(state, self._names)
        part: dict[str, Any] = {}
        for key, entries in named.items():
            if key == "param_groups":
                groups = [{**g, "params": [n for n in g["params"] if n in self._here]} for g in entries]
                part[key] = [group for group in groups if group["params"]]
            elif isinstance(entries, Mapping):
                # A copy: torch keeps the tensors it is given and goes on to change them.
                part[key] = {n: cloned(value) for n, value in entries.items() if n in self._here}
            else:
                part[key] = entries
        return part


def _kind(group: Mapping[str, Any]) -> Any:
    """What tells groups apart: their options. Where weight decay is 0, matrices and vectors still have their own."""
    options = {key: value for key, value in group.items() if key != "params"}
    return options, all(p.ndim <= 1 for p in group["params"])

"""Checkpoints of a pipeline: the state of all stages, gathered on rank 0 as a single process would have it.

Owns moving tensors to rank 0, and numbering the parameters of all ranks like an optimizer of the full model does. So a
checkpoint of a pipeline is an ordinary one, and ordinary ones can be loaded. Nothing here knows about stages.
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
from trainformer.distributed.strategy import unsharded


def gather_on_main(process_group: TorchProcessGroup, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks on the host of rank 0; the others keep their own. A collective.

    Tensors are sent one by one: only rank 0 needs memory for more than its own.
    """
    listed = process_group.all_gather_object([(name, tuple(t.shape), t.dtype) for name, t in own.items()])
    if not process_group.is_main:
        for tensor in own.values():
            dist.send(tensor.detach().cpu().contiguous(), dst=0)
        return dict(own)
    found = {name: tensor.detach().cpu() for name, tensor in own.items()}
    for source, entries in enumerate(listed[1:], 1):
        for name, shape, dtype in entries:
            found[name] = torch.empty(shape, dtype=dtype)
            dist.recv(found[name], src=source)
    return found


class GatheredOptimizer:
    """The optimizers of all stages as one optimizer of the full model.

    Args:
        process_group: All ranks must take part, here and in `state_of`.
        optimizer: The optimizer of this rank.
        named: Its parameters, by their names in the full model.
        order: All parameter names of the full model, in order.
    """

    def __init__(
        self,
        process_group: TorchProcessGroup,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, Tensor],
        order: list[str],
    ) -> None:
        self._process_group = process_group
        self._parameters = NamedParameters(optimizer, named)
        self._own_names = set(named)
        names = {id(p): name for name, p in named.items()}
        own = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            # Groups of vectors have a weight decay of 0 of their own.
            key = options, all(p.ndim <= 1 for p in group["params"])
            own.append((key, [names[id(p)] for p in group["params"]]))
        everywhere = process_group.all_gather_object(own)
        # The rank with the most groups determines their order.
        groups: list[tuple[Any, set[str]]] = []
        for of_rank in sorted(everywhere, key=len, reverse=True):
            for key, members in of_rank:
                found = next((names for known, names in groups if known == key), None)
                if found is None:
                    found = set()
                    groups.append((key, found))
                found.update(members)
        self._groups = [[name for name in order if name in members] for _, members in groups]
        self._names = dict(enumerate(name for group in self._groups for name in group))

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of all ranks in torch's form, on rank 0; the others return their own, by name. A collective."""
        own = self._parameters.state_of(optimizer)
        tensors = dict(named_tensors(own))
        trees = self._process_group.all_gather_object(meta_tree(own, tensors))
        every_tensor = gather_on_main(self._process_group, tensors)
        if not self._process_group.is_main:
            return own
        states = [with_tensors(tree, every_tensor) for tree in trees]
        joined: dict[str, Any] = {}
        for state in states:
            for key, entries in state.items():
                joined[key] = {**joined.get(key, {}), **entries} if isinstance(entries, Mapping) else entries
        options = {name: group for state in states for group in state["param_groups"] for name in group["params"]}
        joined["param_groups"] = [{**options[names[0]], "params": names} for names in self._groups]
        return unsharded_optimizer_state(joined)

    def load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of the state of the full model."""
        self._parameters.load(optimizer, self._own_part(state))

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise if a state does not fit."""
        self._parameters.check(self._own_part(state))

    def _own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a state that concerns parameters of this rank, by name."""
        state = unsharded(state)
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
                groups = [{**g, "params": [n for n in g["params"] if n in self._own_names]} for g in entries]
                part[key] = [group for group in groups if group["params"]]
            elif isinstance(entries, Mapping):
                # A copy: torch keeps the tensors it is given and updates them in place.
                part[key] = {n: cloned(value) for n, value in entries.items() if n in self._own_names}
            else:
                part[key] = entries
        return part

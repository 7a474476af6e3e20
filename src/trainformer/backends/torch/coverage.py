"""Whether the optimizer and the loss are about the same parameters: otherwise weights never move, without an error."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.backends.torch.optimizers import modules_of, named_parameters
from trainformer.core.errors import BadArgument

logger = logging.getLogger("trainformer")


def check_optimizer(optimizer: torch.optim.Optimizer, task: Any) -> None:
    """Reject an optimizer that a user made for another model; warn if it holds too much or too little."""
    trained = named_parameters(task)
    held = {id(p) for module in modules_of(task).values() for p in module.parameters()}
    held |= {id(p) for p in trained.values()}
    given = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    foreign = [p for p in given if id(p) not in held]
    kind, owner = type(optimizer).__name__, type(task).__name__
    if foreign and len(foreign) == len(given):
        raise BadArgument(
            f"Expected an optimizer over parameters of the model that is trained, received {kind} over {len(foreign)} "
            "others: the model would never change. Make it after the model was replaced, copied or sharded; Trainer "
            "also takes a function: optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1)."
        )
    if foreign:
        logger.warning(
            "%s holds %d tensors that no module of %s has (%s): they are not part of checkpoints. Register them in "
            "its model.", kind, len(foreign), owner, _some([str(tuple(p.shape)) for p in foreign])
        )  # fmt: skip
    ids = {id(p) for p in given}
    missing = [name for name, p in trained.items() if id(p) not in ids]
    if missing and given:
        logger.warning(
            "%s holds %d of the %d trainable tensors of %s; these will not be trained: %s. If that is intended, set "
            "requires_grad_(False) on them, which also saves time and memory.",
            kind, len(trained) - len(missing), len(trained), owner, _some(missing),
        )  # fmt: skip


def unoptimized(loss: Tensor, task: Any, parameters: list[nn.Parameter]) -> list[str]:
    """Parameters that the loss depends on and that are not among those to be trained, by name or shape.

    They are the leaves of the autograd graph. Taken once per run: about a microsecond per node.
    """
    known = {id(p) for p in parameters}
    names = {id(p): f"{key}.{n}" for key, module in modules_of(task).items() for n, p in module.named_parameters()}
    found: dict[int, str] = {}
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            found[id(leaf)] = names.get(id(leaf), f"one of shape {tuple(leaf.shape)}")
        waiting.extend(following for following, _ in node.next_functions)
    return list(found.values())


def unoptimized_message(names: list[str]) -> str:
    """The warning for `unoptimized` parameters."""
    return (
        f"The loss depends on {len(names)} trainable tensors that no optimizer holds, so they will never change: "
        f"{_some(names)}. Register them in `model` (modules in a list need nn.ModuleList), yield them in "
        "`parameters()`, or freeze them with requires_grad_(False)."
    )


def _some(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

"""Strategies: how one model is trained by several processes. One small class each, behind one protocol."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.distributed.process_group import Launch, TorchProcessGroup
from trainformer.distributed.strategy import Strategy

__all__ = [
    "Launch",
    "Strategy",
    "TorchProcessGroup",
    "check_strategy",
    "is_first_process",
    "make_strategy",
    "strategy_names",
]


_HOMES = {
    "single": ("strategy", "Strategy"),
    "ddp": ("ddp", "DDP"),
    "fsdp": ("fsdp", "FSDP"),
    "tp": ("tensor_parallel", "TensorParallel"),
    "pipeline": ("pipeline", "Pipeline"),
    "accelerate": ("accelerate", "Accelerate"),
}


def strategy_names() -> list[str]:
    """Names that `make_strategy` knows."""
    return ["auto", *_HOMES]


def make_strategy(choice: Any) -> Strategy:
    """A strategy from a name, a mapping of a name and options, an `Accelerator`, or one that is made already.

    ``auto`` is ``ddp`` where several processes were started, or what ``accelerate launch`` was told, else ``single``.

    >>> make_strategy("auto").name
    'single'
    """
    if isinstance(choice, Strategy):
        return choice
    options = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    if type(choice).__name__ == "Accelerator":
        options = {"name": "accelerate", "accelerator": choice}
    name = options.pop("name", "auto")
    if name == "auto":
        name = "ddp" if are_several() else "single"
        if name == "ddp" and any(key.startswith("ACCELERATE_") for key in os.environ):
            asked = _asked_of_accelerate()
            name, options = asked.pop("name", name), {**asked, **options}
    if not isinstance(name, str) or name not in _HOMES:
        words = f"strategy to be one of {', '.join(map(repr, strategy_names()))}, or a mapping with that as its 'name'"
        raise BadArgument(expected(words, choice, did_you_mean(str(name), _HOMES)))
    module, class_name = _HOMES[name]
    strategy = getattr(import_module(f"{__name__}.{module}"), class_name)
    return strategy(**_known(strategy, name, options))


def _asked_of_accelerate() -> dict[str, Any]:
    """What ``accelerate launch`` was told beside the number of processes; it says it in the environment."""
    from trainformer.distributed.accelerate import launched_strategy

    return launched_strategy()


def check_strategy(choice: Any) -> None:
    """Raise if a strategy does not exist, or does not have these options."""
    make_strategy(choice)


def are_several() -> bool:
    """Whether other processes were started along with this one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return Launch.find().world_size > 1


def is_first_process() -> bool:
    """Whether this process is the one that prints and records, of those that were started together."""
    import torch.distributed as dist

    return (dist.get_rank() if dist.is_available() and dist.is_initialized() else Launch.find().rank) == 0


def _known(strategy: type[Strategy], name: str, options: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(strategy.__init__).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return options
    known = [p for p in parameters if p != "self"]
    for option in options:
        if option not in known:
            have = f"It has {', '.join(known)}." if known else "It has none."
            raise BadArgument(
                expected(f"options of the strategy {name!r}", option, f"{did_you_mean(option, known)} {have}".strip())
            )
    return options

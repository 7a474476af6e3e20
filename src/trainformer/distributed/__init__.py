"""Training strategies: how several processes train one model. One class per strategy, behind one interface."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.plugins import load_plugin, plugin_names
from trainformer.distributed.process_group import Launch, TorchProcessGroup
from trainformer.distributed.strategy import Strategy

__all__ = [
    "Launch",
    "Strategy",
    "TorchProcessGroup",
    "check_strategy",
    "is_main_process",
    "make_strategy",
    "strategy_names",
]


_BUILT_IN = {
    "single": ("strategy", "Strategy"),
    "ddp": ("ddp", "DDP"),
    "fsdp": ("fsdp", "FSDP"),
    "tp": ("tensor_parallel", "TensorParallel"),
    "pipeline": ("pipeline", "Pipeline"),
    "accelerate": ("accelerate", "Accelerate"),
}


def strategy_names() -> list[str]:
    """Names that `make_strategy` accepts, including those registered as entry points ``trainformer.strategies``."""
    return ["auto", *_BUILT_IN, *(name for name in plugin_names("strategies") if name not in _BUILT_IN)]


def make_strategy(choice: Any) -> Strategy:
    """A strategy from a name, a mapping with a name and options, an `Accelerator`, or an instance.

    ``auto`` means ``ddp`` if several processes were launched (or what ``accelerate launch`` was configured for), else
    ``single``. Installed packages can register further names under the entry point group ``trainformer.strategies``.

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
        name = "ddp" if _launch().world_size > 1 else "single"
        if name == "ddp" and any(key.startswith("ACCELERATE_") for key in os.environ):
            from trainformer.distributed.accelerate import strategy_from_environment

            launched = strategy_from_environment()
            name, options = launched.pop("name", name), {**launched, **options}
    strategy = _strategy_class(name, choice)
    parameters = inspect.signature(strategy.__init__).parameters
    known = [p for p in parameters if p != "self"]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options if not takes_any else ():
        if option not in known:
            have = f"It has {', '.join(known)}." if known else "It has none."
            do = f"{did_you_mean(option, known)} {have}".strip()
            raise BadArgument(expected(f"options of the strategy {name!r}", option, do))
    return strategy(**options)


def check_strategy(choice: Any) -> None:
    """Raise if a strategy does not exist or does not take these options."""
    make_strategy(choice)


def is_main_process() -> bool:
    """Whether this process has rank 0, also before the process group is initialised."""
    return _launch().rank == 0


def _launch() -> Launch:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return Launch(dist.get_rank(), dist.get_world_size(), 0)
    return Launch.find()


def _strategy_class(name: Any, choice: Any) -> type[Strategy]:
    if name in _BUILT_IN:
        module, class_name = _BUILT_IN[name]
        return getattr(import_module(f"{__name__}.{module}"), class_name)
    found = load_plugin("strategies", name) if isinstance(name, str) else None
    if found is None:
        names = strategy_names()
        what = f"strategy to be one of {', '.join(map(repr, names))}, or a mapping with that as its 'name'"
        raise BadArgument(expected(what, choice, did_you_mean(str(name), names)))
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        what = f"the plugin {name!r} of trainformer.strategies to be a subclass of trainformer.distributed.Strategy"
        raise BadArgument(expected(what, found))
    return found

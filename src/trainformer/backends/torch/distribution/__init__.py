"""Strategies: how one model is trained by several processes. One small class each, behind one protocol."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from trainformer.backends.torch.distribution.ranks import Launch, Ranks
from trainformer.backends.torch.distribution.strategy import Strategy
from trainformer.core.errors import BadArgument, did_you_mean, expected

__all__ = ["Launch", "Ranks", "Strategy", "check_strategy", "make_strategy", "strategy_names"]


def _classes() -> dict[str, type[Strategy]]:
    from trainformer.backends.torch.distribution.ddp import DDP

    return {"single": Strategy, "ddp": DDP}


def strategy_names() -> list[str]:
    """Names that `make_strategy` knows."""
    return ["auto", *_classes()]


def make_strategy(choice: Any) -> Strategy:
    """A strategy from a name, a mapping of a name and options, or one that is made already.

    ``auto`` is ``ddp`` where several processes were started, else ``single``.

    >>> make_strategy("auto").name
    'single'
    """
    if isinstance(choice, Strategy):
        return choice
    options = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    name = options.pop("name", "auto")
    classes = _classes()
    if name == "auto":
        name = "ddp" if are_several() else "single"
    if not isinstance(name, str) or name not in classes:
        words = f"strategy to be one of {', '.join(map(repr, strategy_names()))}, or a mapping with that as its 'name'"
        raise BadArgument(expected(words, choice, did_you_mean(str(name), classes)))
    return classes[name](**_known(classes[name], name, options))


def check_strategy(choice: Any) -> None:
    """Raise if a strategy does not exist, or does not have these options."""
    make_strategy(choice)


def are_several() -> bool:
    """Whether other processes were started along with this one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return Launch.find().world > 1


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

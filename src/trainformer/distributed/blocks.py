"""The blocks of a model: the parts that are divided over ranks one by one, each gathered only while it computes.

Owns the search. HuggingFace's models name theirs; in others, blocks are what a list of like modules repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from trainformer.core.errors import BadArgument, did_you_mean, expected

#: Names of classes, classes, or a function of (name, module); None: to be found. An empty sequence: no blocks.
Blocks = str | type | Callable[[str, nn.Module], bool] | Sequence[str | type] | None

# A repetition that holds less of the model than this (a head of two layers) is not what the model is made of.
_LEAST_SHARE = 0.1
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, wanted: Blocks = None, within: nn.Module | None = None) -> list[nn.Module]:
    """The blocks of a model, inner ones before those around them.

    A block that shares a parameter with a module outside (tied embeddings) is not among them: what is shared has to be
    gathered for both. `within` is everything there is, where that is more than the model.

    >>> layers = [nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2)]
    >>> [type(block).__name__ for block in find_blocks(nn.Sequential(nn.Linear(2, 4), nn.Sequential(*layers)))]
    ['TransformerEncoderLayer', 'TransformerEncoderLayer']
    """
    found = _find(model) if wanted is None else _chosen(model, wanted)
    everything = model if within is None else within
    return [b for b in reversed(found) if any(True for _ in b.parameters()) and _is_apart(b, everything)]


def _find(model: nn.Module) -> list[nn.Module]:
    named: set[str] = set()
    for module in model.modules():
        names = getattr(module, "_no_split_modules", None)
        named |= set(names) if isinstance(names, (list, tuple, set)) else set()
    by_name = [module for module in model.modules() if type(module).__name__ in named]
    return by_name or _repeated(model)


def _repeated(model: nn.Module) -> list[nn.Module]:
    """The children of the outermost lists of like modules that hold a good part of the model.

    Single layers are no blocks: what comes out of one is often changed in place (by a ReLU), and then torch does not
    see when its gradient is computed.
    """
    least = _LEAST_SHARE * sum(p.numel() for p in model.parameters())
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = [child for child in module if any(True for _ in child.parameters())]
        if len(children) < 2 or len({type(child) for child in children}) > 1 or not _computes(children[0]):
            continue
        if sum(p.numel() for p in module.parameters()) >= least:
            found += children
            inside |= {id(inner) for inner in module.modules()}
    return found


def _computes(module: nn.Module) -> bool:
    """Whether it is called as a whole, and has layers inside."""
    return not isinstance(module, _CONTAINERS) and any(True for _ in module.children())


def _chosen(model: nn.Module, wanted: Any) -> list[nn.Module]:
    if callable(wanted) and not isinstance(wanted, type):
        found = [module for name, module in model.named_modules() if wanted(name, module)]
        if not found:
            raise BadArgument(expected("blocks to choose modules of the model", "a function that chose none"))
    else:
        kinds = [wanted] if isinstance(wanted, (str, type)) else list(wanted)
        found = [module for module in model.modules() if _is_of(module, kinds)]
        for kind in kinds:
            _check_kind(kind, found, model)
    for module in found:
        if isinstance(module, _CONTAINERS):
            do = "Name what is in it: a list is never called, so it cannot be gathered when it computes."
            raise BadArgument(expected("blocks to be modules that compute", type(module).__name__, do))
    return found


def _is_of(module: nn.Module, kinds: Iterable[Any]) -> bool:
    return any(isinstance(module, kind) if isinstance(kind, type) else type(module).__name__ == kind for kind in kinds)


def _check_kind(kind: Any, found: list[nn.Module], model: nn.Module) -> None:
    if not isinstance(kind, (str, type)):
        raise BadArgument(expected("blocks to be names of classes, classes or a function of (name, module)", kind))
    if not any(_is_of(module, [kind]) for module in found):
        name = kind if isinstance(kind, str) else kind.__name__
        hint = did_you_mean(name, {type(module).__name__ for module in model.modules()})
        raise BadArgument(expected("blocks to name classes of modules in the model", name, hint))


def _is_apart(block: nn.Module, everything: nn.Module) -> bool:
    own = {id(p) for p in block.parameters()}
    inner = {id(module) for module in block.modules()}
    outside = (m for m in everything.modules() if id(m) not in inner)
    return not any(id(p) in own for m in outside for p in m.parameters(recurse=False))

"""Plans of tensor parallelism: which layers of a model are divided over ranks, and which way.

A plan names layers by patterns and says a style of each, in the words of transformers' models or as objects of
`torch.distributed.tensor.parallel`. Owns finding the layers and refusing what cannot be divided before anything is;
dividing them is left to `tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from trainformer.backends.torch.gradients import is_dtensor
from trainformer.core.errors import BadArgument, did_you_mean, expected

Plan = Mapping[str, str | ParallelStyle] | str | None

#: A layer that every rank has in full, and that sees a part of the activations: its gradients are to be added up.
SUMMED = "replicated_with_grad_allreduce"
_WHOLE = "replicate"
_GATHERED: Callable[[], ParallelStyle] = lambda: ColwiseParallel(output_layouts=Replicate())  # noqa: E731
_SPLIT: Callable[[], ParallelStyle] = lambda: RowwiseParallel(input_layouts=Replicate())  # noqa: E731
# Columns and rows are those of the mathematics, y = x A: a layer's weight is A transposed.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": RowwiseParallel,
    "rowwise_split_input": _SPLIT,
    "rowwise_rep": _SPLIT,
    "embedding_rowwise": _SPLIT,
    "embedding_colwise": _GATHERED,
}
# Styles with whole inputs and whole outputs, by layer and the dimension of its weight that is divided.
_FROM_OUTSIDE = {
    (nn.Embedding, 0): "embedding_rowwise",
    (nn.Embedding, 1): "embedding_colwise",
    (nn.Linear, 0): "colwise_gather_output",
    (nn.Linear, 1): "rowwise_split_input",
}


@dataclass(frozen=True)
class PlannedLayer:
    """A layer of the model and what becomes of it; `style` is None where it stays whole and gradients are added up."""

    name: str
    module: nn.Module
    style: ParallelStyle | None


def plan_layers(model: nn.Module, plan: Plan, size: int) -> list[PlannedLayer]:
    """The layers of a model that `size` ranks divide among themselves. The model is not changed."""
    if any(is_dtensor(p) for p in model.parameters()):
        do = "Build or load it anew, without tp_plan or distributed_config: the strategy divides it."
        raise BadArgument(expected("a model that is whole, to divide it over ranks", "one that is divided already", do))
    found = {layer.name: layer for layer in _matching(model, plan)}
    for name, module, dim in _sharing(model, found):
        found[name] = PlannedLayer(name, module, _STYLES[_FROM_OUTSIDE[_kind(name, module), dim]]())
    for layer in found.values():
        _check_sizes(model, layer, size)
    return list(found.values())


def check_plan(plan: Plan) -> None:
    """Raise if a plan is none, or has a style that does not exist."""
    if plan is None or plan == "auto":
        return
    if not isinstance(plan, Mapping) or not plan:
        do = "For instance {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}."
        raise BadArgument(expected("plan to be 'auto' or a mapping of patterns of layers to styles", plan, do))
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle) and style not in (*_STYLES, SUMMED, _WHOLE):
            known = (*_STYLES, SUMMED, _WHOLE)
            what = f"the style of {pattern} to be one of {', '.join(known)}, or a ParallelStyle of torch"
            raise BadArgument(expected(what, style, did_you_mean(str(style), known)))


def tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Parameters that several layers share: for each of them, its layers and its name in these."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                holders.setdefault(id(p), []).append((module, name))
    return [places for places in holders.values() if len(places) > 1]


def _matching(model: nn.Module, plan: Plan) -> Iterator[PlannedLayer]:
    by_hand = isinstance(plan, Mapping)
    rules = dict(plan) if isinstance(plan, Mapping) else _own_plan(model)
    check_plan(rules)
    modules = dict(model.named_modules())
    found = 0
    for pattern, style in rules.items():
        matching = [name for name in modules if name and _fits(name, pattern)]
        if not matching and by_hand:
            raise BadArgument(
                expected(
                    f"layers of {type(model).__name__} by the name of the plan's {pattern!r}",
                    "none",
                    _near(pattern, modules),
                )
            )
        found += len(matching)
        for name in matching if style != _WHOLE else ():
            made = None if style == SUMMED else style if isinstance(style, ParallelStyle) else _STYLES[style]()
            yield PlannedLayer(name, modules[name], made)
    if not found:
        raise _no_plan(model, f"a plan for other layers ({', '.join(list(rules)[:3])})")


def _own_plan(model: nn.Module) -> dict[str, Any]:
    """What the model itself says, as those of transformers do: of all of its layers, or of those of its base."""
    plan = getattr(model, "_tp_plan", None)
    if not plan:
        inner = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        within = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        plan = {f"{within}{pattern}": style for pattern, style in inner.items()}
    if not plan:
        raise _no_plan(model, "a model that says nothing of it")
    return dict(plan)


def _no_plan(model: nn.Module, received: str) -> BadArgument:
    do = "Pass plan={pattern of layers: 'colwise' or 'rowwise', ...}, or use strategy='fsdp', which needs none."
    return BadArgument(expected(f"a plan for dividing the layers of {type(model).__name__} over ranks", received, do))


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern names a layer; ``*`` stands for one part of the name, or some of it.

    >>> _fits("layers.3.up", "layers.*.up"), _fits("layers.3.mlp.up", "layers.*.up")
    (True, False)
    """
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _near(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    layers = [name for name, module in modules.items() if isinstance(module, (nn.Linear, nn.Embedding))]
    return (
        did_you_mean(pattern, layers) or f"Its layers are {', '.join(layers[:6])}{', ...' if len(layers) > 6 else ''}."
    )


def _sharing(model: nn.Module, found: Mapping[str, PlannedLayer]) -> Iterator[tuple[str, nn.Module, int]]:
    """Layers outside of the plan that have their weight in common with a planned one, and how that is divided."""
    names = {id(module): name for name, module in model.named_modules()}
    for places in tied_parameters(model):
        layers = [(names[id(module)], module) for module, _ in places]
        planned = {name: _divided_dim(found[name]) for name, _ in layers if name in found}
        dims = {dim for dim in planned.values() if dim is not None}
        if not dims:
            continue
        if len(dims) > 1 or None in planned.values():
            both = " and ".join(planned)
            raise BadArgument(expected(f"{both}, which share a weight, to be divided alike", "styles that differ"))
        for name, module in layers:
            if name not in found:
                yield name, module, min(dims)


def _divided_dim(layer: PlannedLayer) -> int | None:
    """The dimension of the weight that is divided; None where it stays whole or the style is not known."""
    if isinstance(layer.style, ColwiseParallel):
        return 1 if isinstance(layer.module, nn.Embedding) else 0
    if isinstance(layer.style, RowwiseParallel):
        return 0 if isinstance(layer.module, nn.Embedding) else 1
    return None


def _check_sizes(model: nn.Module, layer: PlannedLayer, size: int) -> None:
    """Layers whose neighbours compute with parts must have equal ones; what is gathered may be divided anyhow."""
    style, module, name = layer.style, layer.module, layer.name
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    _kind(name, module)
    if isinstance(style, ColwiseParallel) and style.output_layouts != (Replicate(),):
        width: Any = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
        heads = _heads(model, name, width)
        if heads is not None and heads % size:
            what = f"{name} to have a number of heads that {size} ranks can divide among themselves"
            raise BadArgument(expected(what, f"{heads} heads", _sizes_for(heads)))
    elif isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear) and style.input_layouts == (Shard(-1),):
        width = module.in_features
    else:
        return
    if width % size:
        raise BadArgument(expected(f"{name} to have a width that {size} ranks can divide", width, _sizes_for(width)))


def _heads(model: nn.Module, name: str, width: int) -> int | None:
    """Heads of a layer that belongs to attention, by what the module around it says of the size of one."""
    around: Any = model.get_submodule(name.rpartition(".")[0])
    each = getattr(around, "head_dim", None) or getattr(around, "head_size", None)
    return width // each if isinstance(each, int) and width % each == 0 else None


def _sizes_for(number: int) -> str:
    fit = [str(n) for n in range(2, min(number, 64) + 1) if number % n == 0]
    return f"{', '.join(fit)} ranks could hold one model." if fit else "Leave the layer out of the plan."


def _kind(name: str, module: nn.Module) -> type[nn.Module]:
    for kind in (nn.Linear, nn.Embedding):
        if isinstance(module, kind):
            return kind
    do = "Leave it out of the plan; adapters and quantization are best used with strategy='ddp' or 'fsdp'."
    raise BadArgument(expected(f"{name} to be a Linear or an Embedding, to divide it", type(module).__name__, do))

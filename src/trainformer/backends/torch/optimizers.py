"""Creating the optimizer from a name, factory or instance, with its param groups. Names are in `optimizer_names`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from trainformer.backends.torch.master_weights import MasterWeights, has_16bit_parameters
from trainformer.backends.torch.muon import split_for_muon
from trainformer.backends.torch.optimizer_names import is_elementwise, optimizer_by_name, uses_muon
from trainformer.core.errors import BadArgument, expected


def named_parameters(task: Any) -> dict[str, nn.Parameter]:
    """Trainable parameters of a task with names: those of the model first, then others such as those of the loss."""
    model: nn.Module = task.model
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = getattr(task, "parameters", None)
    given: Iterable[nn.Parameter] | None
    if hasattr(task, "configure_optimizers"):  # which must cover all of them
        held = [p for module in modules_of(task).values() for p in module.parameters()]
        given = [*held, *(p for p in vars(task).values() if isinstance(p, nn.Parameter))]
    else:
        given = parameters() if callable(parameters) else None
    if given is None:
        return named
    wanted = {id(p): p for p in given if p.requires_grad}
    chosen = {name: p for name, p in named.items() if id(p) in wanted}
    known = {id(p) for p in chosen.values()}
    for attribute, module in modules_of(task).items():
        if module is not model:
            for name, p in module.named_parameters(prefix=attribute):
                if id(p) in wanted and id(p) not in known:
                    chosen[name] = p
                    known.add(id(p))
    rest = [p for key, p in wanted.items() if key not in known]
    return chosen | {f"parameter_{i}": p for i, p in enumerate(rest)}


def params_of(params: Any) -> list[dict[str, Any]] | None:
    """Param groups of trainable parameters, from a module, parameters or param groups; None if it is none of these.

    >>> [len(group["params"]) for group in params_of(nn.Linear(2, 1))]
    [2]
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    if isinstance(params, nn.Parameter):
        params = [params]
    if not isinstance(params, Iterable) or isinstance(params, (str, Mapping)):
        return None
    items: list[Any] = list(params)
    if all(isinstance(p, torch.Tensor) for p in items):
        return [{"params": [p for p in items if p.requires_grad]}]
    if not all(isinstance(group, Mapping) and "params" in group for group in items):
        return None
    inner = [params_of(group["params"]) for group in items]
    if any(found is None or len(found) != 1 for found in inner):
        return None
    return [{**group, **found[0]} for group, found in zip(items, inner, strict=True) if found]


def modules_of(task: Any) -> dict[str, nn.Module]:
    """The modules a task holds, `model` first."""
    if isinstance(task, nn.Module):
        return {"model": cast(nn.Module, task.model), "task": task}
    others = {k: v for k, v in vars(task).items() if isinstance(v, nn.Module) and v is not task.model}
    return {"model": task.model, **{k.lstrip("_"): v for k, v in others.items()}}


def layer_scales(model: nn.Module, named: dict[str, nn.Parameter], decay: float) -> dict[str, float]:
    """Learning rate factor of each parameter: `decay` to the power of its layer's distance from the top.

    The layers come from timm's `group_matcher`, of the model or its `backbone`; other parts count as the top.
    """
    candidates = [model, getattr(model, "backbone", None)]
    body = next((m for m in candidates if isinstance(m, nn.Module) and hasattr(m, "group_matcher")), None)
    if body is None:
        what = "layer_decay with a model that has a group_matcher (timm models do)"
        raise BadArgument(expected(what, type(model).__name__, "Leave it out."))
    from timm.models import group_parameters

    groups = group_parameters(body, body.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    place = next(name for name, module in model.named_modules() if module is body)
    prefix = f"{place}." if place else ""
    top = max(groups.values())
    depth = {prefix + name: layer for name, layer in groups.items()}
    return {name: decay ** (top - depth.get(name, top)) for name in named}


def decay_groups(named: dict[str, nn.Parameter], weight_decay: float, skip: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay; biases, norms and the model's `no_weight_decay` without."""
    skip = set(skip)
    exempt = {name for name, p in named.items() if p.ndim <= 1 or name in skip}
    decayed = [p for name, p in named.items() if name not in exempt]
    others = [p for name, p in named.items() if name in exempt]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(
    spec: str | Mapping[str, Any] | Callable[..., Any] | torch.optim.Optimizer,
    task: Any,
    lr: float,
    weight_decay: float,
    layer_decay: float | None = None,
    params: list[dict[str, Any]] | None = None,
    names: Mapping[int, str] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer from a name, a mapping with a name and options, a class, a factory of the groups, or an instance.

    `params` are param groups of some of the task's parameters, whose names are in `names` by id; by default it is all.
    """
    if isinstance(spec, torch.optim.Optimizer):
        if layer_decay is not None:
            raise BadArgument(
                "Expected the optimizer by name for layer_decay, received an instance, whose groups are fixed."
            )
        return spec
    if params is None:
        named = named_parameters(task)
    else:
        named = {(names or {})[id(p)]: p for group in params for p in group["params"]}
    if not named:
        raise BadArgument(
            f"Expected {type(task).__name__} to have trainable parameters, received none: every parameter has "
            "requires_grad=False. Unfreeze a part of the model."
        )
    model_skips = getattr(task.model, "no_weight_decay", None)
    groups = decay_groups(named, weight_decay, model_skips() if callable(model_skips) else ())
    if params is not None and any(len(group) > 1 for group in params):
        groups = params  # groups with options of their own stay as they are
    if layer_decay is not None:
        scales = layer_scales(task.model, named, layer_decay)
        scale_of = {id(p): scales[name] for name, p in named.items()}
        # Each group gets one learning rate; those with the full rate come first.
        split = [
            {**group, "params": [p for p in group["params"] if scale_of[id(p)] == scale], "lr": lr * scale}
            for scale in sorted(set(scales.values()), reverse=True)
            for group in groups
        ]
        groups = [group for group in split if group["params"]]
    if isinstance(spec, str):
        spec = {"name": spec}
    if isinstance(spec, Mapping):
        if uses_muon(spec.get("name")):
            groups = split_for_muon(groups, *modules_of(task).values())
        return _named(dict(spec), groups, lr, weight_decay)
    make: Any = spec
    if isinstance(spec, type) and issubclass(spec, torch.optim.Optimizer):
        return make(groups, lr=lr)
    if callable(spec):
        made = make(groups)
        if isinstance(made, torch.optim.Optimizer):
            return made
        raise BadArgument(expected("the optimizer factory to return a torch Optimizer", made))
    raise BadArgument(expected("optimizer to be a name, a factory or an Optimizer", spec))


def _named(
    options: dict[str, Any], groups: list[dict[str, Any]], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimizer by name and options; 16-bit parameters get master weights unless ``master_weights=False``."""
    name, masters = options.pop("name", None), options.pop("master_weights", True)
    if not isinstance(name, str):
        raise BadArgument(expected("an optimizer with options to have a 'name'", {"name": name, **options}))
    if not isinstance(masters, bool):
        raise BadArgument(expected("master_weights to be True or False", masters))

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return optimizer_by_name(name, groups, lr, weight_decay, options)

    if masters and has_16bit_parameters(groups):
        return MasterWeights(groups, make, is_elementwise(name))
    return make(groups)

"""Optimizers by name, factory or instance, and the parameter groups they get."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from trainformer.core.errors import BadArgument, did_you_mean, expected

# Names people type. Options are those the optimizer is usually run with where torch's default is not.
_TORCH: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}


def named_parameters(task: Any) -> dict[str, nn.Parameter]:
    """Trainable parameters of a task with names: those of the model, then those of the loss and the like."""
    model: nn.Module = task.model
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = getattr(task, "parameters", None)
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


def modules_of(task: Any) -> dict[str, nn.Module]:
    """The modules a task holds, `model` first."""
    if isinstance(task, nn.Module):
        return {"model": cast(nn.Module, task.model), "task": task}
    found: dict[str, nn.Module] = {"model": task.model}
    others = {k: v for k, v in vars(task).items() if isinstance(v, nn.Module) and v is not task.model}
    found |= {k.lstrip("_"): v for k, v in others.items()}
    return found


def layer_scales(model: nn.Module, named: dict[str, nn.Parameter], decay: float) -> dict[str, float]:
    """What the rate of each parameter is multiplied by: `decay` to the power of its layers' distance from the top.

    The layers are those timm's models tell of themselves (`group_matcher`). A model that holds one as its `backbone`
    gets the scales there; its other parts are at the top.
    """
    candidates = [model, getattr(model, "backbone", None)]
    body = next((m for m in candidates if isinstance(m, nn.Module) and hasattr(m, "group_matcher")), None)
    if body is None:
        raise BadArgument(
            expected(
                "layer_decay with a model that tells its layers (timm's do)", type(model).__name__, "Leave it out."
            )
        )
    from timm.models import group_parameters

    groups = group_parameters(body, body.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    place = next(name for name, module in model.named_modules() if module is body)
    prefix = f"{place}." if place else ""
    top = max(groups.values())
    depth = {prefix + name: layer for name, layer in groups.items()}
    return {name: decay ** (top - depth.get(name, top)) for name in named}


def scaled_groups(groups: list[dict[str, Any]], scales: dict[int, float], lr: float) -> list[dict[str, Any]]:
    """Groups divided further, so that each has one scale of the rate; those with the full rate come first."""
    divided = [
        {**group, "params": [p for p in group["params"] if scales[id(p)] == scale], "lr": lr * scale}
        for scale in sorted(set(scales.values()), reverse=True)
        for group in groups
    ]
    return [group for group in divided if group["params"]]


def decay_groups(named: dict[str, nn.Parameter], weight_decay: float, skip: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay; biases, norms and what the model names in `no_weight_decay` without."""
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
) -> torch.optim.Optimizer:
    """An optimizer from a name, a name with options, a class, a factory (called with the groups) or an instance."""
    if isinstance(spec, torch.optim.Optimizer):
        if layer_decay is not None:
            raise BadArgument(
                "Expected the optimizer by name for layer_decay, received one that has its groups already."
            )
        return spec
    named = named_parameters(task)
    if not named:
        raise BadArgument(
            f"Expected {type(task).__name__} to have trainable parameters, received none: every parameter has "
            "requires_grad=False. Unfreeze a part of the model."
        )
    model_skips = getattr(task.model, "no_weight_decay", None)
    groups = decay_groups(named, weight_decay, model_skips() if callable(model_skips) else ())
    if layer_decay is not None:
        scales = layer_scales(task.model, named, layer_decay)
        groups = scaled_groups(groups, {id(p): scales[name] for name, p in named.items()}, lr)
    if isinstance(spec, str):
        return _by_name(spec, groups, lr, weight_decay, {})
    if isinstance(spec, Mapping):
        options = dict(spec)
        if not isinstance(options.get("name"), str):
            raise BadArgument(expected("an optimizer with options to have a 'name'", dict(spec)))
        return _by_name(options.pop("name"), groups, lr, weight_decay, options)
    make: Any = spec
    if isinstance(spec, type) and issubclass(spec, torch.optim.Optimizer):
        return make(groups, lr=lr)
    if callable(spec):
        made = make(groups)
        if isinstance(made, torch.optim.Optimizer):
            return made
        raise BadArgument(expected("the optimizer factory to return a torch Optimizer", made))
    raise BadArgument(expected("optimizer to be a name, a factory or an Optimizer", spec))


def _by_name(
    name: str, groups: list[dict[str, Any]], lr: float, weight_decay: float, given: dict[str, Any]
) -> torch.optim.Optimizer:
    key = name.lower()
    if key in _TORCH:
        cls, options = _TORCH[key]
        unknown = set(given) - set(inspect.signature(cls).parameters)
        if unknown:
            raise BadArgument(expected(f"options that {name} takes", ", ".join(sorted(unknown))))
        made = cls(groups, lr=lr, **{**_fastest(cls, groups), **options, **given})
        _fill_momentum(made)
        return made
    try:
        import timm.optim
    except ModuleNotFoundError:
        known, hint = list(_TORCH), "More names become available with: pip install 'trainformer[vision]'"
    else:
        known, hint = [*_TORCH, *map(str, timm.optim.list_optimizers())], ""
        if key in known:
            return timm.optim.create_optimizer_v2(groups, opt=key, lr=lr, weight_decay=weight_decay, **given)
    close = did_you_mean(key, known)
    raise BadArgument(expected("optimizer to be a known name", name, f"{close} {hint}".strip()))


def _fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Begin the momentum of a fused SGD at 0, which is what it would be.

    Left to itself it fails as soon as one parameter gets its first gradient later than another.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"] and not group["dampening"]:
            for p in group["params"]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)


def _fastest(cls: Any, groups: list[dict[str, Any]]) -> dict[str, bool]:
    """`fused=True` where the optimizer and every parameter allow it.

    One kernel instead of a dozen per tensor (a third of the time on a small MLP on the CPU), and it can be told on
    the device to skip a step, so that a non-finite gradient is stopped without waiting for the device.
    """
    parameters = [p for group in groups for p in group["params"]]
    fits = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    one_place = len({p.device for p in parameters}) == 1
    return {"fused": True} if "fused" in inspect.signature(cls).parameters and fits and one_place else {}

"""Optimizers by name: those of torch, bitsandbytes (8-bit or paged state), Muon, installed plugins, and timm.

Owns the names, the options of each, and whether the device can run it. `optimizers` builds the param groups.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.backends.torch.muon import Muon
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.core.plugins import load_plugin, plugin_names

logger = logging.getLogger("trainformer")

# Built-in names, with the usual options where they differ from torch's defaults.
TORCH_OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
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

# Classes of bitsandbytes, and the options that have an effect: it accepts others (nesterov, amsgrad, a momentum of
# RMSprop) and ignores them. LAMB and LARS are missing: with 8 bits it leaves the trust ratio out.
_ADAM, _LION = ("betas", "eps", "min_8bit_size"), ("betas", "min_8bit_size")
BITSANDBYTES_OPTIMIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "adam_8bit": ("Adam8bit", _ADAM),
    "adamw_8bit": ("AdamW8bit", _ADAM),
    "ademamix_8bit": ("AdEMAMix8bit", (*_ADAM, "alpha", "t_alpha", "t_beta3")),
    "lion_8bit": ("Lion8bit", _LION),
    "sgd_8bit": ("SGD8bit", ("momentum", "min_8bit_size")),
    "rmsprop_8bit": ("RMSprop8bit", ("alpha", "eps", "min_8bit_size")),
    "adagrad_8bit": ("Adagrad8bit", ("eps", "min_8bit_size")),
    "paged_adam": ("PagedAdam", ("betas", "eps")),
    "paged_adamw": ("PagedAdamW", ("betas", "eps")),
    "paged_lion": ("PagedLion", ("betas",)),
    "paged_adam_8bit": ("PagedAdam8bit", _ADAM),
    "paged_adamw_8bit": ("PagedAdamW8bit", _ADAM),
    "paged_lion_8bit": ("PagedLion8bit", _LION),
}
_BNB_OPTIONS: dict[str, dict[str, Any]] = {"SGD8bit": {"momentum": 0.9}}
_BNB_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Names of transformers.
_ALIASES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
    "paged_lion_32bit": "paged_lion",
    "rmsprop_bnb_8bit": "rmsprop_8bit",
}

_MUON = "muon"

Groups = list[dict[str, Any]]


def is_elementwise(name: str) -> bool:
    """Whether each parameter is updated on its own. Unknown for timm and plugins, hence False.

    >>> is_elementwise("AdamW"), is_elementwise("lamb")
    (True, False)
    """
    key = _canonical(name)
    return key in TORCH_OPTIMIZERS or key in BITSANDBYTES_OPTIMIZERS


def uses_muon(name: Any) -> bool:
    """Whether the optimizer of that name needs hidden matrices in groups of their own."""
    return isinstance(name, str) and _canonical(name) == _MUON


def optimizer_by_name(
    name: str, groups: Groups, lr: float, weight_decay: float, given: dict[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer of that name with options.

    Packages register further names under the entry point group ``trainformer.optimizers``: a subclass of
    `torch.optim.Optimizer`, or a function, called as ``plugin(groups, lr=..., weight_decay=..., **options)``.
    """
    for setting in {"params", "lr", "weight_decay"} & set(given):
        do = f"Pass {setting} to the Trainer." if setting != "params" else "The task decides what is trained."
        raise BadArgument(expected(f"options of {name} other than those of the run", setting, do))
    key = _canonical(name)
    if key in TORCH_OPTIMIZERS:
        return _torch(key, groups, lr, given)
    if key == _MUON:
        _check_options(key, given, ("momentum", "nesterov", "ns_steps", "betas", "eps"))
        return Muon(groups, lr=lr, weight_decay=weight_decay, **_fused(Muon, groups), **given)
    if key in BITSANDBYTES_OPTIMIZERS:
        return _bitsandbytes(key, groups, lr, given)
    plugin = load_plugin("optimizers", name)
    if plugin is not None:
        parameters = inspect.signature(plugin).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            _check_options(name, given, set(list(parameters)[1:]) - {"lr", "weight_decay"})
        made = plugin(groups, lr=lr, weight_decay=weight_decay, **given)
        if isinstance(made, torch.optim.Optimizer):
            return made
        raise BadArgument(expected(f"the plugin {name!r} of trainformer.optimizers to make a torch Optimizer", made))
    known, hint = [*TORCH_OPTIMIZERS, _MUON, *BITSANDBYTES_OPTIMIZERS, *plugin_names("optimizers")], ""
    try:
        import timm.optim
    except ModuleNotFoundError:
        hint = "More names become available with: pip install 'trainformer[vision]'"
    else:
        in_timm = list(map(str, timm.optim.list_optimizers()))
        if key in in_timm:
            try:
                return timm.optim.create_optimizer_v2(groups, opt=key, lr=lr, weight_decay=weight_decay, **given)
            except TypeError as error:
                raise BadArgument(expected(f"options that {name} takes", given, f"timm says: {error}")) from error
        known += in_timm
    close = did_you_mean(key, known)
    raise BadArgument(expected("optimizer to be a known name", name, f"{close} {hint}".strip()))


def _canonical(name: str) -> str:
    return _ALIASES.get(name.lower(), name.lower())


def _check_options(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    unknown, known = sorted(set(given) - set(known)), sorted(known)
    if unknown:
        hint = did_you_mean(unknown[0], known) or f"It takes {', '.join(known)}."
        raise BadArgument(expected(f"options that {name} takes", ", ".join(unknown), hint))


def _torch(key: str, groups: Groups, lr: float, given: dict[str, Any]) -> torch.optim.Optimizer:
    cls, options = TORCH_OPTIMIZERS[key]
    _check_options(key, given, set(inspect.signature(cls).parameters) - {"params", "lr", "weight_decay"})
    made = cls(groups, lr=lr, **{**_fused(cls, groups), **options, **given})
    for group in made.param_groups:
        if cls is torch.optim.SGD and group["fused"] and group["momentum"] and not group["dampening"]:
            # Momentum starts at 0, the value it would have. Otherwise a fused SGD fails as soon as one parameter gets
            # its first gradient later than another.
            for p in group["params"]:
                made.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return made


def _fused(cls: Any, groups: Groups) -> dict[str, bool]:
    """`fused=True` if the optimizer and every parameter support it.

    One kernel instead of a dozen per tensor (a third of the time on a small MLP on the CPU). It can also skip a step on
    the device, so that a non-finite gradient is stopped without a device sync.
    """
    parameters = [p for group in groups for p in group["params"]]
    supported = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    one_device = len({p.device for p in parameters}) == 1
    return {"fused": True} if "fused" in inspect.signature(cls).parameters and supported and one_device else {}


def _bitsandbytes(key: str, groups: Groups, lr: float, given: dict[str, Any]) -> torch.optim.Optimizer:
    class_name, known = BITSANDBYTES_OPTIMIZERS[key]
    _check_options(key, given, known)
    package = require("bitsandbytes.optim", "adapters", f"for the optimizer {key!r}")
    cls = getattr(package, class_name)
    options = {**_BNB_OPTIONS.get(class_name, {}), **given}
    parameters = [p for group in groups for p in group["params"]]
    for device, dtype in sorted({(p.device, p.dtype) for p in parameters}, key=str):
        _trial_step(key, cls, options, device, dtype)
    if not key.startswith("paged"):
        return cls(groups, lr=lr, **options)
    if all(p.device.type == "cpu" for p in parameters):
        logger.info("%s: no GPU memory to page out of; its state is in ordinary memory", key)
    return _paged(cls)(groups, lr=lr, **options)


def _trial_step(key: str, cls: Any, options: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    """Take a step with one small tensor: the only way to know what a device and a build of bitsandbytes support."""
    if dtype not in _BNB_DTYPES:
        do = "Use another optimizer, or a model in fp32 or bf16."
        raise BadArgument(expected(f"parameters in fp32, bf16 or fp16 for {key}", str(dtype), do))
    trial = nn.Parameter(torch.zeros(4096, device=device, dtype=dtype))  # the smallest size that is kept in 8 bits
    trial.grad = torch.zeros_like(trial)
    optimizer = cls([trial], lr=0.0, **options)
    optimizer._cpu_paged_warned = True
    try:
        optimizer.step()
    except Exception as error:
        # Missing kernels, libraries or device support each raise their own kind of error.
        what = f"a device on which bitsandbytes runs {key}"
        do = f"Use 'adamw' or 'adafactor', or a device of another kind. ({type(error).__name__}: {error})"
        raise BadArgument(expected(what, str(device), do)) from error


def _paged(cls: Any) -> Any:
    """A paged optimizer whose state stays paged after loading: bitsandbytes would move it to the GPU."""

    class Paged(cls):
        _cpu_paged_warned = True  # logged above

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Pages are never freed, so those of a replaced state are reused.
            self._spare: dict[Tensor, list[Tensor]] = {}

        def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
            spare = self._spare.get(p, [])
            fits = next((i for i, page in enumerate(spare) if page.dtype == dtype), None)
            return super().get_state_buffer(p, dtype) if fits is None else spare.pop(fits).zero_()

        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            for p, state in self.state.items():
                pages = [value for value in state.values() if getattr(value, "is_paged", False)]
                self._spare.setdefault(p, []).extend(pages)
            super().load_state_dict(state_dict, move_to_device=False)
            for p, state in self.state.items():
                for key, value in state.items():
                    if key in ("state1", "state2"):
                        state[key] = self.get_state_buffer(p, value.dtype).copy_(value)
                    elif isinstance(value, Tensor):
                        state[key] = value.to(p.device)

    Paged.__name__ = Paged.__qualname__ = cls.__name__
    return Paged

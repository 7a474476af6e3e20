"""DeepSpeed's ZeRO, as accelerate starts it: each rank keeps a part of the gradients and of the optimizer's state.

Owns an engine of DeepSpeed and its optimizer: what may be configured, the way gradients take from the engine to the run
and back, and the optimizer's state as a single process would have it. DeepSpeed adds gradients up, divides the update
over ranks and gathers the weights; the arithmetic of sums and weights, clipping and the schedule stay with the run. Its
own checkpoints are not used: to load them executes code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainformer.backends.torch import gradients
from trainformer.core.errors import BadArgument, expected
from trainformer.distributed.optimizer_state import unsharded_optimizer_state
from trainformer.distributed.strategy import check_groups, unsharded

_STAGES = {0: "strategy='ddp'", 3: "strategy='fsdp', which divides the weights as well"}
# They look at whole tensors; DeepSpeed makes Adagrad anew, without its groups.
_LOOK_AT_SHAPES = ("Adafactor", "Muon", "LBFGS", "Adagrad")


def check_config(config: dict[str, Any]) -> None:
    """Raise if a configuration of DeepSpeed takes something out of the run's hands."""
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage not in (1, 2):
        do = f"Use {_STAGES[stage]}." if stage in _STAGES else ""
        raise BadArgument(expected("DeepSpeed with ZeRO stage 1 or 2", stage, do))
    for name in ("offload_optimizer", "offload_param"):
        device = (zero.get(name) or {}).get("device", "none")
        if device not in ("none", None):
            do = "Use strategy={'name': 'fsdp', 'cpu_offload': True}."
            raise BadArgument(expected(f"DeepSpeed without {name}", device, do))
    for name in ("optimizer", "scheduler"):
        if name in config:
            kind = config[name].get("type", config[name])
            do = f"Remove it, and pass {name}=... to the trainer."
            raise BadArgument(expected(f"a DeepSpeed configuration without {name!r}", kind, do))
    for name in ("bf16", "fp16", "torch_autocast"):
        if (config.get(name) or {}).get("enabled") is True:
            do = "Remove it, and pass precision='bf16' to the trainer: weights stay in fp32."
            raise BadArgument(expected(f"a DeepSpeed configuration without {name!r}", "one that enables it", do))
    clip = config.get("gradient_clipping", "auto")
    if clip not in ("auto", None) and float(clip) > 0:
        do = f"Remove it, and pass gradient_clip={clip} to the trainer (max_grad_norm in trainformer.hf)."
        raise BadArgument(expected("a DeepSpeed configuration without 'gradient_clipping'", clip, do))


class Zero:
    """An engine of DeepSpeed in ZeRO stage 1 or 2 around everything a task trains.

    After the last backward pass of a step, the part of the gradients that this rank updates is the ``grad`` of the
    optimizer's parameters, like that of any others: the run takes its norm and scales it in place. Whoever drops a
    step sets it to None, and the engine forgets its own sums then.
    """

    def __init__(self, accelerator: Any, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _check_types(optimizer)
        for buffer in module.buffers():  # of parameters the engine takes care
            dist.broadcast(buffer, src=0)
        #: The groups of the model's parameters, as a single process has them.
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        config = accelerator.deepspeed_plugin.deepspeed_config
        sizes = ("train_micro_batch_size_per_gpu", "train_batch_size")
        #: Sizes of batches that the user has written there.
        self._said = {name: config[name] for name in sizes if config.get(name, "auto") != "auto"}
        if sizes[0] not in self._said:
            config[sizes[0]] = 1  # it counts samples by that, and nothing else
        config.pop("train_batch_size", None)
        config["gradient_clipping"] = 0.0
        self.engine, _ = accelerator.prepare(module, optimizer)
        self._sums = self.engine.optimizer
        self.optimizer = ZeroOptimizer(self)
        self._device = next(module.parameters()).device
        self._holds_gradients = False
        self.engine.set_gradient_accumulation_boundary(True)

    def check_batch(self, batch_size: int, process_group: int) -> None:
        """Raise if the configuration speaks of batches of another size than that of the run."""
        here = {"train_batch_size": batch_size, "train_micro_batch_size_per_gpu": batch_size / process_group}
        for name, said in self._said.items():
            if said != here[name]:
                what = (
                    f"DeepSpeed's {name!r} to be {here[name]:g}, for batch_size={batch_size} over {process_group} ranks"
                )
                raise BadArgument(expected(what, said, "Write 'auto' there, or change batch_size."))

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer, of whose parameters each is this rank's part of a group."""
        return self._sums.optimizer

    @property
    def _parts(self) -> list[Tensor]:
        return self._sums.single_partition_of_fp32_groups

    # -- a step --------------------------------------------------------------------------------------------

    def train_step(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A task's step, inside the engine's forward pass, in the run's precision."""
        kind = self._device.type

        def call(batch: Any) -> Any:
            # The engine turns autocast off that is not its own.
            autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

            def inside(batch: Any) -> Any:
                with autocast:
                    return function(batch)

            return self.engine(inside, batch)

        return call

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """The context of a micro-batch that is not the last of its step."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients; after the last micro-batch they are means over ranks, and each rank has its part."""
        if self._holds_gradients and self._parts[0].grad is None:
            self._forget()
        self.engine.backward(loss, scale_wrt_gas=False)
        self._holds_gradients = True
        is_last = self.engine.is_gradient_accumulation_boundary()
        for i, part in enumerate(self._parts):
            part.grad = self._gradient(i, part) if is_last else part.new_zeros(()).expand_as(part)

    def _gradient(self, i: int, part: Tensor) -> Tensor:
        """The sums of a group in one piece, which is theirs from now on."""
        flat = torch.zeros_like(part)
        pieces = [piece.reshape(-1) for piece in self._sums.averaged_gradients[i]]
        if pieces:
            found = torch.cat(pieces)
            flat[: len(found)] = found
        self._sums.averaged_gradients[i] = [flat]
        return flat

    def _forget(self) -> None:
        self._sums.zero_grad()
        for i in range(len(self._parts)):
            self._sums.averaged_gradients[i] = None
            self._sums.all_grad_tensors[i] = None
        self._holds_gradients = False

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm of all gradients: each element is on one rank."""
        square = gradients.total_norm(grads, uniform).double().square()
        dist.all_reduce(square)
        return square.sqrt().to(grads[0].dtype)

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """The whole gradient of a parameter, for somebody who looks at it. Every rank must take part."""
        for parameters, part in zip(self._groups, self._parts, strict=True):
            if any(p is parameter for p in parameters):
                return None if part.grad is None else _whole(part.grad, parameter, part)
        return parameter.grad

    def step(self) -> None:
        """Update this rank's part of the weights, and gather those of the others."""
        self._sums.refresh_fp32_params()  # somebody may have loaded weights, or changed them
        self.engine.step()
        self._holds_gradients = False

    # -- state ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as torch writes that of one process, on the host. Every rank must take part."""
        groups, state, first = [], {}, 0
        for group, parameters, part in zip(self.inner.param_groups, self._groups, self._parts, strict=True):
            numbers = list(range(first, first + len(parameters)))
            first += len(parameters)
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
            entries = self.inner.state.get(part, {})
            for number, parameter in zip(numbers, parameters, strict=True):
                if entries and parameter.requires_grad:
                    state[number] = {key: _whole(value, parameter, part) for key, value in entries.items()}
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state: Any) -> None:
        """Take it back: this rank keeps its part. It may come from any number of ranks and any strategy."""
        saved = unsharded_optimizer_state(unsharded(state))
        parts: dict[int, dict[str, Any]] = {}
        groups, first = [], 0
        for i, (group, parameters) in enumerate(zip(saved["param_groups"], self._groups, strict=True)):
            groups.append({**group, "params": [i]})
            known = [(p, saved["state"][first + n]) for n, p in enumerate(parameters) if first + n in saved["state"]]
            first += len(parameters)
            if known:
                parts[i] = {key: _part(key, known, self._parts[i]) for key in known[0][1]}
        self.inner.load_state_dict({"state": parts, "param_groups": groups})

    def check_state(self, state: Any) -> None:
        """Raise if it does not fit."""
        made_with: Any = SimpleNamespace(param_groups=[{"params": parameters} for parameters in self._groups])
        check_groups(made_with, unsharded_optimizer_state(unsharded(state)))


class ZeroOptimizer(torch.optim.Optimizer):
    """The optimizer of `Zero` to everybody else: schedules change its groups, and the run calls its `step`."""

    def __init__(self, zero: Zero) -> None:
        # torch's constructor would make groups of its own; here they are those of the inner optimizer.
        self._zero = zero
        self.defaults = zero.inner.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """One parameter per group: this rank's part of it."""
        return self._zero.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """What the optimizer knows of this rank's parts."""
        return self._zero.inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the weights on all ranks."""
        self._zero.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients."""
        for group in self.param_groups:
            for part in group["params"]:
                part.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state as a single process has it."""
        return self._zero.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Take it back."""
        self._zero.load_state_dict(state_dict)


def _check_types(optimizer: torch.optim.Optimizer) -> None:
    kinds = {p.dtype for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if kinds != {torch.float32}:
        what = "trained parameters in fp32 for DeepSpeed"
        do = "Convert the model with model.float(); precision='bf16' computes in bf16 nevertheless."
        raise BadArgument(expected(what, " and ".join(sorted(map(str, kinds))) or "none", do))
    inner = getattr(optimizer, "inner", optimizer)
    if type(inner).__name__ in _LOOK_AT_SHAPES or type(inner).__module__.startswith("bitsandbytes"):
        do = "Use 'adamw' or another of torch's that treats each number alone, or strategy='ddp'."
        raise BadArgument(expected("an optimizer that works on parts of parameters", type(inner).__name__, do))


def _places(parameter: Any) -> tuple[slice, slice] | None:
    """Which elements of a parameter this rank updates, and where they are in its part of the group."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    own, theirs = mapping.lp_fragment_address, mapping.hp_fragment_address
    return slice(own.start, own.start + own.numel), slice(theirs.start, theirs.start + theirs.numel)


def _whole(value: Any, parameter: Tensor, part: Tensor) -> Any:
    """A value of the state for one parameter; of tensors, every rank gives the elements that it has."""
    if not isinstance(value, Tensor) or value.shape != part.shape:
        # Of its own for each: torch counts the steps of every parameter, in place.
        return value.clone() if isinstance(value, Tensor) else value
    found = torch.zeros(parameter.numel(), dtype=value.dtype, device=value.device)
    places = _places(parameter)
    if places is not None:
        found[places[0]] = value[places[1]]
    dist.all_reduce(found)
    return found.reshape(parameter.shape).cpu()


def _part(key: str, known: list[tuple[Tensor, dict[str, Any]]], part: Tensor) -> Any:
    """One value of the state for this rank's part of a group, from those of its parameters."""
    first = known[0][1][key]
    # The number of steps is a scalar, as some parameters are.
    if key == "step" or not isinstance(first, Tensor) or any(s[key].shape != p.shape for p, s in known):
        return first.clone() if isinstance(first, Tensor) else first
    found = torch.zeros_like(part, dtype=first.dtype)
    for parameter, entries in known:
        places = _places(parameter)
        if places is not None:
            found[places[1]] = entries[key].reshape(-1)[places[0]].to(found.device)
    return found

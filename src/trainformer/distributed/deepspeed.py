"""DeepSpeed ZeRO 1 and 2, as Accelerate launches it: each rank keeps a shard of the gradients and optimizer state.

Owns a DeepSpeed engine and its optimizer: which configurations are accepted, moving gradients from the engine to the
run and back, and the optimizer state as a single process would have it. DeepSpeed reduces gradients, shards the update
and gathers the weights; (sum, weight) arithmetic, clipping and the schedule belong to the run. DeepSpeed's own
checkpoints are not used: loading them executes code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainformer.backends.torch import gradients
from trainformer.core.errors import BadArgument, expected
from trainformer.distributed.optimizer_state import unsharded_optimizer_state
from trainformer.distributed.strategy import check_groups

_STAGES = {0: "strategy='ddp'", 3: "strategy='fsdp', which shards the weights as well"}
# They need full tensors; DeepSpeed re-creates Adagrad without its groups.
_NEED_FULL_TENSORS = ("Adafactor", "Muon", "LBFGS", "Adagrad")


def check_config(config: dict[str, Any]) -> None:
    """Raise if a DeepSpeed configuration sets what the run controls."""
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
    """A DeepSpeed engine with ZeRO stage 1 or 2 around everything a task trains.

    After the last backward pass of a step, the shard of the gradients that this rank updates is the ``grad`` of the
    optimizer's parameters: the run computes its norm and scales it in place, as usual. Dropping a step sets it to
    None; the engine then resets its own sums.
    """

    def __init__(self, accelerator: Any, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _check_types(optimizer)
        for buffer in module.buffers():  # the engine broadcasts the parameters
            dist.broadcast(buffer, src=0)
        #: The param groups of the model, as a single process has them.
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        config = accelerator.deepspeed_plugin.deepspeed_config
        sizes = ("train_micro_batch_size_per_gpu", "train_batch_size")
        #: Batch sizes that the user's configuration sets.
        self._batch_sizes = {name: config[name] for name in sizes if config.get(name, "auto") != "auto"}
        if sizes[0] not in self._batch_sizes:
            config[sizes[0]] = 1  # only used to count samples
        config.pop("train_batch_size", None)
        config["gradient_clipping"] = 0.0
        self.engine, _ = accelerator.prepare(module, optimizer)
        self._sums = self.engine.optimizer
        self.optimizer = ZeroOptimizer(self)
        self._device = next(module.parameters()).device
        self._holds_gradients = False
        self.engine.set_gradient_accumulation_boundary(True)

    def check_batch(self, batch_size: int, world_size: int) -> None:
        """Raise if the configuration sets another batch size than the run."""
        here = {"train_batch_size": batch_size, "train_micro_batch_size_per_gpu": batch_size / world_size}
        for name, configured in self._batch_sizes.items():
            if configured != here[name]:
                what = f"DeepSpeed's {name!r} to be {here[name]:g}, for batch_size={batch_size} over {world_size} ranks"
                raise BadArgument(expected(what, configured, "Write 'auto' there, or change batch_size."))

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer, each of whose parameters is this rank's shard of a group."""
        return self._sums.optimizer

    @property
    def _shards(self) -> list[Tensor]:
        return self._sums.single_partition_of_fp32_groups

    # -- a step --------------------------------------------------------------------------------------------

    def train_step(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A task's step inside the engine's forward pass, in the run's precision."""
        kind = self._device.type

        def call(batch: Any) -> Any:
            # The engine disables any autocast but its own.
            autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

            def inside(batch: Any) -> Any:
                with autocast:
                    return function(batch)

            return self.engine(inside, batch)

        return call

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of every micro-batch but the last of a step: skip the gradient reduction."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients; after the last micro-batch they are averaged, and each rank has its shard."""
        if self._holds_gradients and self._shards[0].grad is None:
            self._sums.zero_grad()
            for i in range(len(self._shards)):
                self._sums.averaged_gradients[i] = self._sums.all_grad_tensors[i] = None
        self.engine.backward(loss, scale_wrt_gas=False)
        self._holds_gradients = True
        is_last = self.engine.is_gradient_accumulation_boundary()
        for i, shard in enumerate(self._shards):
            if not is_last:
                shard.grad = shard.new_zeros(()).expand_as(shard)
                continue
            # The reduced gradients of a group as one tensor, which the engine uses from now on.
            shard.grad = torch.zeros_like(shard)
            if pieces := [piece.reshape(-1) for piece in self._sums.averaged_gradients[i]]:
                found = torch.cat(pieces)
                shard.grad[: len(found)] = found
            self._sums.averaged_gradients[i] = [shard.grad]

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm of all gradients: each element is on one rank only."""
        square = gradients.total_norm(grads, uniform).double().square()
        dist.all_reduce(square)
        return square.sqrt().to(grads[0].dtype)

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """The full gradient of a parameter for inspection. A collective."""
        for parameters, shard in zip(self._groups, self._shards, strict=True):
            if any(p is parameter for p in parameters):
                return None if shard.grad is None else _full(shard.grad, parameter, shard)
        return parameter.grad

    def step(self) -> None:
        """Update this rank's shard of the weights, and gather the others."""
        self._sums.refresh_fp32_params()  # weights may have been loaded or changed
        self.engine.step()
        self._holds_gradients = False

    # -- state ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer state in torch's form for one process, on the host. A collective."""
        groups, state, first = [], {}, 0
        for group, parameters, shard in zip(self.inner.param_groups, self._groups, self._shards, strict=True):
            numbers = list(range(first, first + len(parameters)))
            first += len(parameters)
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
            entries = self.inner.state.get(shard, {})
            for number, parameter in zip(numbers, parameters, strict=True):
                if entries and parameter.requires_grad:
                    state[number] = {key: _full(value, parameter, shard) for key, value in entries.items()}
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Load this rank's shard of a state from any strategy and world size."""
        saved = unsharded_optimizer_state(state)
        shards: dict[int, dict[str, Any]] = {}
        groups, first = [], 0
        for i, (group, parameters) in enumerate(zip(saved["param_groups"], self._groups, strict=True)):
            groups.append({**group, "params": [i]})
            known = [(p, saved["state"][first + n]) for n, p in enumerate(parameters) if first + n in saved["state"]]
            first += len(parameters)
            if known:
                shards[i] = {key: _shard(key, known, self._shards[i]) for key in known[0][1]}
        self.inner.load_state_dict({"state": shards, "param_groups": groups})

    def check(self, state: Any) -> None:
        """Raise if a state does not fit."""
        check_groups([{"params": parameters} for parameters in self._groups], state)


class ZeroOptimizer(torch.optim.Optimizer):
    """The public optimizer of `Zero`: schedules change its groups, and the run calls its `step`."""

    def __init__(self, zero: Zero) -> None:
        # torch's constructor would create its own groups; these are those of the inner optimizer.
        self._zero = zero
        self.defaults = zero.inner.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """One parameter per group: this rank's shard of it."""
        return self._zero.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer state of this rank's shards."""
        return self._zero.inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        self._zero.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for shard in group["params"]:
                shard.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self._zero.state_of(self)

    def load_state_dict(self, state_dict: Any) -> None:
        self._zero.load(self, state_dict)


def _check_types(optimizer: torch.optim.Optimizer) -> None:
    kinds = {p.dtype for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if kinds != {torch.float32}:
        what = "trained parameters in fp32 for DeepSpeed"
        do = "Convert the model with model.float(); precision='bf16' still computes in bf16."
        raise BadArgument(expected(what, " and ".join(sorted(map(str, kinds))) or "none", do))
    inner = getattr(optimizer, "inner", optimizer)
    if type(inner).__name__ in _NEED_FULL_TENSORS or type(inner).__module__.startswith("bitsandbytes"):
        do = "Use 'adamw' or another elementwise optimizer of torch, or strategy='ddp'."
        raise BadArgument(expected("an optimizer that works on sharded parameters", type(inner).__name__, do))


def _places(parameter: Any) -> tuple[slice, slice] | None:
    """The elements of a parameter that this rank updates, and their position in its shard of the group."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    own, theirs = mapping.lp_fragment_address, mapping.hp_fragment_address
    return slice(own.start, own.start + own.numel), slice(theirs.start, theirs.start + theirs.numel)


def _full(value: Any, parameter: Tensor, shard: Tensor) -> Any:
    """A state entry of one parameter; tensors are assembled from the elements of all ranks."""
    if not isinstance(value, Tensor) or value.shape != shard.shape:
        # A copy for each parameter: torch counts steps in place.
        return value.clone() if isinstance(value, Tensor) else value
    found = torch.zeros(parameter.numel(), dtype=value.dtype, device=value.device)
    places = _places(parameter)
    if places is not None:
        found[places[0]] = value[places[1]]
    dist.all_reduce(found)
    return found.reshape(parameter.shape).cpu()


def _shard(key: str, known: list[tuple[Tensor, dict[str, Any]]], shard: Tensor) -> Any:
    """A state entry of this rank's shard of a group, from those of its parameters."""
    first = known[0][1][key]
    # `step` is a scalar, but so are some parameters.
    if key == "step" or not isinstance(first, Tensor) or any(s[key].shape != p.shape for p, s in known):
        return first.clone() if isinstance(first, Tensor) else first
    found = torch.zeros_like(shard, dtype=first.dtype)
    for parameter, entries in known:
        places = _places(parameter)
        if places is not None:
            found[places[1]] = entries[key].reshape(-1)[places[0]].to(found.device)
    return found

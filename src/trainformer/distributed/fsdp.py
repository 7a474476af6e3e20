"""Fully sharded data parallelism: every rank computes a part of each batch and keeps a part of each parameter.

Owns how the modules of a task are divided (`fully_shard`, block by block) and entered. Which modules are blocks is
found by `blocks`; state, copies and gradients of what is divided are the business of `divided`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from trainformer.backends.torch import gradients
from trainformer.core.errors import BadArgument, expected
from trainformer.distributed.blocks import Blocks, find_blocks
from trainformer.distributed.mesh import sharding_mesh
from trainformer.distributed.sharded_base import ShardedStrategy, all_reduce_gradients, materialize
from trainformer.distributed.step_module import StepModule

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What parameters are gathered in and gradients added up in, by the precision of the run; fp32: as they are.
_POLICIES = {
    "bf16": (torch.bfloat16, torch.float32),
    "fp8": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),
}


class FSDP(ShardedStrategy):
    """`torch.distributed.fsdp.fully_shard` on the blocks of every module that the task holds.

    Between steps each rank has its rows of every parameter, gradient and optimizer state. A block is whole on a rank
    only while it computes. The rest of the modules (embeddings, heads, losses) is whole for the time of a step. Bare
    parameters of the task and scalars are not divided.

    Args:
        blocks: Names of classes, classes, or a function of (name, module) that says what is a block. They are found if
            nothing is said; with ``()`` there are none.
        reshard_after_forward: Give a block back after its forward pass and gather it again for the backward pass. False
            needs more memory and less traffic; a number of ranks keeps it divided among so many.
        cpu_offload: Keep parameters, gradients and optimizer state on the host; the optimizer computes there.
        replicas: Hold the whole model so many times, divided within each group of neighbouring ranks (HSDP).
        param_dtype: What parameters are gathered and used in: "bf16", "fp16" or a dtype. By default that of the run's
            precision on CUDA, for models without BatchNorm; else they are gathered as they are.
        reduce_dtype: What gradients are added up in over ranks; by default fp32.
        sync_batchnorm: Take BatchNorm statistics over all ranks.
    """

    name = "fsdp"

    def __init__(
        self,
        *,
        blocks: Blocks = None,
        reshard_after_forward: bool | int = True,
        cpu_offload: bool = False,
        replicas: int = 1,
        param_dtype: str | torch.dtype | None = None,
        reduce_dtype: str | torch.dtype | None = None,
        sync_batchnorm: bool = True,
    ) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm)
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
            raise BadArgument(expected("replicas to be a positive integer", replicas))
        if not isinstance(reshard_after_forward, int) or reshard_after_forward < 0:
            raise BadArgument(expected("reshard_after_forward to be True, False or a number", reshard_after_forward))
        self.blocks = blocks
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.replicas = replicas
        self.param_dtype = _dtype("param_dtype", param_dtype)
        self.reduce_dtype = _dtype("reduce_dtype", reduce_dtype)
        #: Copies of the model that were made to be entered instead of it, by their identity (see `copy_model`).
        self._copies: dict[int, Any] = {}
        self._undivided: list[nn.Parameter] = []
        self._block_count = 0

    # -- set-up --------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Name, number of processes, how often they hold the model, and in how many blocks."""
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        blocks = "" if self._root is None else f", {self._block_count} blocks"
        return f"{super().describe()}{replicas}{blocks}"

    def _arrange(self, task: Any) -> DeviceMesh:
        return sharding_mesh(self.process_group, self._device, self.replicas)

    def _divide(self, root: StepModule) -> None:
        bare = {id(p) for p in root.rest}
        # A scalar has no rows, and a parameter that no module holds cannot be exchanged for a divided one.
        self._undivided = [p for p in root.parameters() if p.ndim == 0 or id(p) in bare]
        blocks = self._blocks_of(root)
        self._block_count = len(blocks)
        self._shard(root, blocks, self._undivided)

    def _divide_copy(self, made: nn.Module) -> nn.Module:
        holder = StepModule(_Holder(made))
        self._shard(holder, self._blocks_of(holder), [p for p in made.parameters() if p.ndim == 0])
        materialize(holder, torch.device("cpu") if self.cpu_offload else self._device)
        self._copies[id(made)] = holder
        return made

    def _blocks_of(self, root: StepModule) -> list[nn.Module]:
        if self.blocks is None:
            found = [block for part in root.parts.children() for block in find_blocks(part, within=root)]
        else:
            found = find_blocks(root, self.blocks)
        place = {id(module): i for i, module in enumerate(root.modules())}
        return sorted({id(b): b for b in found}.values(), key=lambda block: -place[id(block)])

    def _shard(self, root: nn.Module, blocks: list[nn.Module], undivided: list[nn.Parameter]) -> None:
        """Divide the blocks and then what is left; one block at a time is on the device in full."""
        offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if self.cpu_offload else OffloadPolicy()
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": self._policy(root),
            "offload_policy": offload,
            "ignored_params": set(undivided),
        }
        kept_whole = {id(p) for p in undivided}
        for module in (*blocks, root):
            own = [p for p in module.parameters() if not gradients.is_dtensor(p)]
            self._check_dtypes([p for p in own if id(p) not in kept_whole])
            self._place_alike(own, module)
            if module is root:
                fully_shard(module, **options)
            else:
                fully_shard(module, reshard_after_forward=self.reshard_after_forward, **options)

    def _policy(self, root: nn.Module) -> MixedPrecisionPolicy:
        if self.param_dtype is not None and self.precision not in _POLICIES:
            do = "Pass precision='bf16' to the trainer: layers and their inputs are then of one type."
            raise BadArgument(expected("param_dtype with a precision below fp32", self.precision, do))
        param, reduce = _POLICIES.get(self.precision, (None, None))
        # Autocast on CUDA gives every operation what it needs from parameters of 16 bits. On the CPU norms refuse them,
        # and BatchNorm wants its weights in the type of its statistics everywhere.
        if self._device.type == "cpu" or any(isinstance(m, _BatchNorm) for m in root.modules()):
            param = None
        return MixedPrecisionPolicy(self.param_dtype or param, self.reduce_dtype or reduce, cast_forward_inputs=False)

    def _check_dtypes(self, parameters: list[nn.Parameter]) -> None:
        kinds = {p.dtype for p in parameters if p.requires_grad}
        if len(kinds) > 1:
            what = "trained parameters of one type, to exchange them together"
            do = "Convert the model, with model.float() for instance."
            raise BadArgument(expected(what, " and ".join(sorted(map(str, kinds))), do))

    # -- a step --------------------------------------------------------------------------------------------

    def train_step(self) -> Callable[[Any], Any] | None:
        """The task's step, inside the forward pass of what holds its modules."""
        root, task = self._root, self.task
        if root is None:
            return None
        # What is called has the batch inside: torch would take it apart to look for tensors to move.
        return lambda batch: root(lambda _: task.train_step(batch), None)

    def no_sync(self) -> AbstractContextManager[Any]:
        """No exchange of gradients: they are kept in full until the last micro-batch of the step."""
        return super().no_sync() if self._root is None else self._without_exchange()

    @contextmanager
    def _without_exchange(self) -> Iterator[None]:
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def _average_rest(self) -> None:
        """Those of parameters that are not divided."""
        trained = [p for p in self._undivided if p.requires_grad]
        for p in trained:
            if p.grad is None:  # of another micro-batch's making on other ranks, perhaps
                p.grad = torch.zeros_like(p)
        all_reduce_gradients([p.grad for p in trained], None, self.gradient_divide_factor)

    # -- evaluation ----------------------------------------------------------------------------------------

    def infer(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Call a function of the task where all of its modules can be called; afterwards all are divided again."""
        if self._root is None:
            return function(batch)
        stand_in = self._copies.get(id(self.task.model))
        try:
            if stand_in is None:
                return self._root(lambda _: function(batch), None)
            return self._root(lambda _: stand_in(lambda _: function(batch), None), None)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        roots = () if self._root is None else (self._root, *self._copies.values())
        for root in roots:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


class _Holder:
    """A task that is nothing but a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def _dtype(option: str, value: Any) -> torch.dtype | None:
    found = _DTYPES.get(value, value) if isinstance(value, str) else value
    if found is None or isinstance(found, torch.dtype):
        return found
    raise BadArgument(expected(f"{option} to be 'bf16', 'fp16', 'fp32' or a torch dtype", value))

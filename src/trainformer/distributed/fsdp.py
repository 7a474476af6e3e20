"""Fully sharded data parallel (FSDP2): every rank computes a shard of each batch and keeps a shard of each parameter.

Owns which modules are sharded together (the blocks of a model, found by `find_blocks`) and how they are entered.
Everything that does not depend on how a model is sharded is in `sharded_base`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.distributed.ddp import all_reduce_gradients
from trainformer.distributed.sharded_base import (
    REPLICA,
    SHARD,
    ShardedStrategy,
    divisors,
    materialize,
)
from trainformer.distributed.strategy import StepModule
from trainformer.utils.distributed import is_dtensor

#: Class names, classes, or a function of (name, module); None: detect them. An empty sequence: no blocks.
Blocks = str | type | Callable[[str, nn.Module], bool] | Sequence[str | type] | None

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# dtype of all-gathered parameters and of reduced gradients, by the precision of the run; fp32: unchanged.
_POLICIES = {
    **dict.fromkeys(("bf16", "fp8"), (torch.bfloat16, torch.float32)),
    "fp16": (torch.float16, torch.float32),
}


class FSDP(ShardedStrategy):
    """`torch.distributed.fsdp.fully_shard` on the blocks of every module that the task holds.

    Between steps each rank holds its rows of every parameter, gradient and optimizer state. A block is all-gathered
    only while it computes; the other modules (embeddings, heads, losses) stay gathered during a step. Bare parameters
    of the task and scalars are not sharded.

    Args:
        blocks: Class names, classes, or a function of (name, module) that selects the blocks. Detected by default;
            ``()`` means none.
        reshard_after_forward: Free a block after its forward pass and gather it again for the backward pass. False
            needs more memory and less communication; a number of ranks reshards to a group of that size.
        cpu_offload: Keep parameters, gradients and optimizer state on the host; the optimizer runs there.
        replicas: Number of model replicas, each sharded over consecutive ranks (HSDP).
        param_dtype: dtype in which parameters are gathered and used: "bf16", "fp16" or a dtype. By default that of the
            run's precision on CUDA for models without BatchNorm; else parameters are gathered as they are.
        reduce_dtype: dtype in which gradients are reduced; fp32 by default.
        sync_batchnorm: Compute BatchNorm statistics over all ranks.
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
        #: Sharded roots of model copies that can be entered instead of the model, by id (see `copy_model`).
        self._copies: dict[int, Any] = {}
        self._unsharded: list[nn.Parameter] = []
        self._block_count = 0
        self._is_in_forward = False

    # -- set-up --------------------------------------------------------------------------------------------

    def describe(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        blocks = "" if self._root is None else f", {self._block_count} blocks"
        return f"{super().describe()}{replicas}{blocks}"

    def _make_mesh(self, task: Any) -> DeviceMesh:
        """One dimension, or two with replicas. Consecutive ranks, usually of one machine, shard one replica."""
        world_size = self.process_group.world_size
        if world_size % self.replicas:
            do = f"{world_size} processes can hold {divisors(world_size)} replicas."
            raise BadArgument(expected("replicas to divide the number of processes", self.replicas, do))
        if self.replicas == 1:
            return init_device_mesh(self._device.type, (world_size,), mesh_dim_names=(SHARD,))
        grid = (self.replicas, world_size // self.replicas)
        return init_device_mesh(self._device.type, grid, mesh_dim_names=(REPLICA, SHARD))

    def _shard(self, root: StepModule) -> None:
        bare = {id(p) for p in root.rest}
        # A scalar has no rows, and a parameter that no module holds cannot be replaced by a DTensor.
        self._unsharded = [p for p in root.parameters() if p.ndim == 0 or id(p) in bare]
        blocks = self._blocks_of(root)
        self._block_count = len(blocks)
        self._fully_shard(root, blocks, self._unsharded)

    def _shard_copy(self, made: nn.Module) -> nn.Module:
        root = StepModule(SimpleNamespace(model=made))
        self._fully_shard(root, self._blocks_of(root), [p for p in made.parameters() if p.ndim == 0])
        materialize(root, torch.device("cpu") if self.cpu_offload else self._device)
        self._copies[id(made)] = root
        return made

    def _blocks_of(self, root: StepModule) -> list[nn.Module]:
        if self.blocks is None:
            found = [block for part in root.parts.children() for block in find_blocks(part, within=root)]
        else:
            found = find_blocks(root, self.blocks)
        position = {id(module): i for i, module in enumerate(root.modules())}
        return sorted({id(b): b for b in found}.values(), key=lambda block: -position[id(block)])

    def _fully_shard(self, root: nn.Module, blocks: list[nn.Module], unsharded: list[nn.Parameter]) -> None:
        """Shard the blocks, then the rest; only one block at a time is on the device in full."""
        offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if self.cpu_offload else OffloadPolicy()
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": self._mixed_precision(root),
            "offload_policy": offload,
            "ignored_params": set(unsharded),
        }
        ignored = {id(p) for p in unsharded}
        for module in (*blocks, root):
            own = [p for p in module.parameters() if not is_dtensor(p)]
            kinds = {p.dtype for p in own if id(p) not in ignored and p.requires_grad}
            if len(kinds) > 1:
                what = "trainable parameters of one dtype, which FSDP gathers together"
                do = "Convert the model, with model.float() for instance."
                raise BadArgument(expected(what, " and ".join(sorted(map(str, kinds))), do))
            self._broadcast_from_rank_0(own, module)
            if module is root:
                fully_shard(module, **options)
            else:
                fully_shard(module, reshard_after_forward=self.reshard_after_forward, **options)
                self._refuse_nested_backward(module)

    def _mixed_precision(self, root: nn.Module) -> MixedPrecisionPolicy:
        if self.param_dtype is not None and self.precision not in _POLICIES:
            do = "Pass precision='bf16' to the trainer: layers and their inputs then have the same dtype."
            raise BadArgument(expected("param_dtype with a precision below fp32", self.precision, do))
        param, reduce = _POLICIES.get(self.precision, (None, None))
        # Autocast on CUDA casts 16-bit parameters as each operation needs. On the CPU norms refuse them, and BatchNorm
        # needs its weights in the dtype of its statistics everywhere.
        if self._device.type == "cpu" or any(isinstance(m, _BatchNorm) for m in root.modules()):
            param = None
        return MixedPrecisionPolicy(self.param_dtype or param, self.reduce_dtype or reduce, cast_forward_inputs=False)

    # -- a step --------------------------------------------------------------------------------------------

    def use_several_optimizers(self) -> None:
        """The backward pass reduces all gradients; the step uses those of one optimizer and drops the others."""

    def wrapped(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return function if self._root is None else lambda batch: self._enter(function, batch)

    def _enter(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Call a function of a batch inside the root's forward pass."""
        self._is_in_forward = True
        try:
            # The batch is in the closure: as an argument, torch would search it for tensors to move.
            return self._root(lambda _: function(batch), None)
        finally:
            self._is_in_forward = False

    def _refuse_nested_backward(self, block: nn.Module) -> None:
        """Make a backward pass through a block raise while a loss is computed (a gradient penalty).

        FSDP would reduce and free the block in the middle of the step, and the gradients would be wrong.
        """
        state = block._get_fsdp_state()  # type: ignore[operator]
        pre_backward = state._pre_backward

        def checked(grad: Tensor) -> Tensor:
            if self._is_in_forward:
                raise BadArgument(
                    "Expected no backward pass while a loss is computed, received one through a block sharded by FSDP "
                    "(torch.autograd.grad, for a gradient penalty?). Use strategy={'name': 'fsdp', 'blocks': ()}, "
                    "which gathers the whole model at once, or 'ddp'."
                )
            return pre_backward(grad)

        state._pre_backward = checked

    def backward_into(self, loss: Tensor, scaler: torch.amp.GradScaler | None, parameters: list[nn.Parameter]) -> None:
        if self._root is None:
            super().backward_into(loss, scaler, parameters)
        else:  # sharded parameters are not leaves of the graph
            self.backward(loss, scaler)

    def train_step(self) -> Callable[[Any], Any] | None:
        task = self.task
        return None if self._root is None else lambda batch: self._enter(task.train_step, batch)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate full, unreduced gradients until the last micro-batch of the step."""
        root = self._root
        if root is not None:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if root is not None:
                root.set_requires_gradient_sync(True)

    def _reduce_remaining_gradients(self) -> None:
        trained = [p for p in self._unsharded if p.requires_grad]
        for p in trained:
            if p.grad is None:  # other ranks may have used it in another micro-batch
                p.grad = torch.zeros_like(p)
        all_reduce_gradients([p.grad for p in trained], None, self.gradient_divide_factor)

    # -- evaluation ----------------------------------------------------------------------------------------

    def infer(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Call a function inside the root's forward pass, and reshard everything afterwards."""
        if self._root is None:
            return function(batch)
        copied = self._copies.get(id(self.task.model))
        try:
            if copied is None:
                return self._root(lambda _: function(batch), None)
            return self._root(lambda _: copied(lambda _: function(batch), None), None)
        finally:
            self._reshard()

    def _reshard(self) -> None:
        roots = () if self._root is None else (self._root, *self._copies.values())
        for root in roots:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _dtype(option: str, value: Any) -> torch.dtype | None:
    found = _DTYPES.get(value, value) if isinstance(value, str) else value
    if found is None or isinstance(found, torch.dtype):
        return found
    raise BadArgument(expected(f"{option} to be 'bf16', 'fp16', 'fp32' or a torch dtype", value))


# -- blocks ------------------------------------------------------------------------------------------------

# A repetition that holds less of the model than this (a head of two layers) is not what the model is made of.
_MIN_SHARE = 0.1
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, wanted: Blocks = None, within: nn.Module | None = None) -> list[nn.Module]:
    """The blocks of a model, inner ones first: modules that FSDP shards one by one.

    Hugging Face models name theirs (`_no_split_modules`); in others, blocks are the repeated modules of a list. A
    block that shares a parameter with a module outside (tied embeddings) is left out, because both need the parameter
    gathered. `within` is the module that holds everything, if that is more than the model.

    >>> layers = [nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2)]
    >>> [type(block).__name__ for block in find_blocks(nn.Sequential(nn.Linear(2, 4), nn.Sequential(*layers)))]
    ['TransformerEncoderLayer', 'TransformerEncoderLayer']
    """
    if wanted is None:
        named = [getattr(module, "_no_split_modules", None) for module in model.modules()]
        names = {name for given in named if isinstance(given, (list, tuple, set)) for name in given}
        found = [module for module in model.modules() if type(module).__name__ in names] or _repeated(model)
    else:
        found = _select(model, wanted)
    holders: dict[int, set[int]] = {}  # of each parameter
    for module in (model if within is None else within).modules():
        for p in module.parameters(recurse=False):
            holders.setdefault(id(p), set()).add(id(module))

    def is_separate(block: nn.Module) -> bool:
        own, inner = list(block.parameters()), {id(module) for module in block.modules()}
        return bool(own) and all(holders[id(p)] <= inner for p in own)

    return [block for block in reversed(found) if is_separate(block)]


def _repeated(model: nn.Module) -> list[nn.Module]:
    """Children of the outermost lists of modules of one class that hold a good part of the model.

    Single layers are no blocks: their output is often changed in place (by a ReLU), and then FSDP's backward hooks
    do not fire.
    """
    least = _MIN_SHARE * sum(p.numel() for p in model.parameters())
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = [child for child in module if any(True for _ in child.parameters())]
        if len(children) < 2 or len({type(child) for child in children}) > 1:
            continue
        if isinstance(children[0], _CONTAINERS) or not any(True for _ in children[0].children()):
            continue
        if sum(p.numel() for p in module.parameters()) >= least:
            found += children
            inside |= {id(inner) for inner in module.modules()}
    return found


def _select(model: nn.Module, wanted: Any) -> list[nn.Module]:
    if callable(wanted) and not isinstance(wanted, type):
        found = [module for name, module in model.named_modules() if wanted(name, module)]
        if not found:
            raise BadArgument(expected("blocks to select modules of the model", "a function that selected none"))
    else:
        kinds = [wanted] if isinstance(wanted, (str, type)) else list(wanted)
        found = [module for module in model.modules() if _is_of(module, kinds)]
        for kind in kinds:
            if not isinstance(kind, (str, type)):
                raise BadArgument(expected("blocks to be class names, classes or a function of (name, module)", kind))
            if not any(_is_of(module, [kind]) for module in found):
                name = kind if isinstance(kind, str) else kind.__name__
                hint = did_you_mean(name, {type(module).__name__ for module in model.modules()})
                raise BadArgument(expected("blocks to name classes of modules in the model", name, hint))
    for module in found:
        if isinstance(module, _CONTAINERS):
            do = "Name the modules in it: a list has no forward pass in which it could be gathered."
            raise BadArgument(expected("blocks to be modules with a forward pass", type(module).__name__, do))
    return found


def _is_of(module: nn.Module, kinds: Iterable[Any]) -> bool:
    return any(isinstance(module, kind) if isinstance(kind, type) else type(module).__name__ == kind for kind in kinds)

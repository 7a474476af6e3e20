"""Fully sharded data parallelism: every rank computes a part of each batch and keeps a part of each parameter.

Owns how the modules of a task are divided (`fully_shard`, block by block), entered, copied and put together again, and
what gradients need that are divided. Which modules are blocks is found by `blocks`, files are written by
`sharded_state`, and optimizers are known by names in `optimizer_state`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from trainformer.backends.torch import gradients
from trainformer.backends.torch.distribution.blocks import Blocks, find_blocks
from trainformer.backends.torch.distribution.ddp import DataParallel
from trainformer.backends.torch.distribution.mesh import SHARD, sharding_mesh
from trainformer.backends.torch.distribution.optimizer_state import NamedParameters
from trainformer.backends.torch.distribution.sharded_state import fitted
from trainformer.backends.torch.distribution.shared_batchnorm import share_batchnorm as share_statistics
from trainformer.backends.torch.distribution.step_module import StepModule
from trainformer.backends.torch.optimizers import modules_of, named_parameters
from trainformer.backends.torch.state_trees import check_fits
from trainformer.core.errors import BadArgument, expected
from trainformer.engine.checkpoint import SharingPattern

logger = logging.getLogger("trainformer")

_SHORT = (torch.bfloat16, torch.float16)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What parameters are gathered in and gradients added up in, by the precision of the run; fp32: as they are.
_POLICIES = {
    "bf16": (torch.bfloat16, torch.float32),
    "fp8": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),
}


class FSDP(DataParallel):
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
        share_batchnorm: Take BatchNorm statistics over all ranks.
    """

    name = "fsdp"
    sharing = SharingPattern.PER_RANK
    divides_state = True

    def __init__(
        self,
        *,
        blocks: Blocks = None,
        reshard_after_forward: bool | int = True,
        cpu_offload: bool = False,
        replicas: int = 1,
        param_dtype: str | torch.dtype | None = None,
        reduce_dtype: str | torch.dtype | None = None,
        share_batchnorm: bool = True,
    ) -> None:
        super().__init__(share_batchnorm=share_batchnorm)
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
        self._root: Any = None
        #: Copies of the model that were made to be entered instead of it, by their identity (see `copy_model`).
        self._copies: dict[int, Any] = {}
        self._outline: nn.Module | None = None
        self._undivided: list[nn.Parameter] = []
        self._divided_blocks = 0
        self._is_last = False
        self._weights: Callable[[], dict[str, Any]] | None = None
        self._device = torch.device("cpu")

    # -- set-up --------------------------------------------------------------------------------------------

    def prepare(self, task: Any, device: torch.device) -> None:
        """Divide every module of the task. Weights are those of rank 0."""
        if self.ranks.is_alone:
            # Nothing is divided, so state is that of any single process.
            self.sharing, self.divides_state = SharingPattern.GLOBAL, False
            super().prepare(task, device)
            return
        self.task, self._device = task, device
        self._mesh = sharding_mesh(self.ranks, device, self.replicas)
        self._refuse_quantized(task)
        self._outline = _outline(task.model)
        self._share_statistics(task)
        root = StepModule(task)
        bare = {id(p) for p in root.rest}
        # A scalar has no rows, and a parameter that no module holds cannot be exchanged for a divided one.
        self._undivided = [p for p in root.parameters() if p.ndim == 0 or id(p) in bare]
        self._root = self._divide(root, self._blocks_of(root))
        logger.info(
            "%s: %d blocks are gathered one by one, and the rest for each step", self.name, self._divided_blocks
        )

    def connect(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Refuse optimizers that would compute something else from a part of a parameter than from the whole."""
        if self._root is None:
            return optimizer
        inner = getattr(optimizer, "inner", optimizer)
        kind = type(inner)
        if isinstance(inner, torch.optim.Adafactor) or kind.__module__.startswith("bitsandbytes"):
            do = "Use 'adamw' or another of torch's, or strategy='ddp'."
            raise BadArgument(expected("an optimizer that works on parts of parameters", kind.__name__, do))
        if not kind.__module__.startswith("torch."):
            logger.warning(
                "%s is not one of torch's: its first step shows if it can be divided over ranks", kind.__name__
            )
        if isinstance(inner, (torch.optim.SGD, torch.optim.Adagrad)):
            # torch has no fused update of divided tensors for these two.
            for group in (*inner.param_groups, *optimizer.param_groups):
                group["fused"] = None
            inner._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        self._parameters = NamedParameters(optimizer, named_parameters(self.task))
        return optimizer

    def describe(self) -> str:
        """Name, number of processes, and how often they hold the model."""
        text = super().describe()
        return f"{text}, {self.replicas} replicas" if self.replicas > 1 else text

    def _refuse_quantized(self, task: Any) -> None:
        for part, module in modules_of(task).items():
            for name, p in module.named_parameters():
                if not p.is_floating_point():
                    what = "floating-point parameters, to divide them over ranks"
                    do = "Load the model without quantization, or use strategy='ddp'."
                    raise BadArgument(expected(what, f"{part}.{name} of {p.dtype}", do))

    def _share_statistics(self, task: Any) -> None:
        if not self.shares_batchnorm:
            return
        for module in modules_of(task).values():
            for part in module.modules():
                if isinstance(part, _BatchNorm):
                    part.to(self._device)
            share_statistics(module)

    def _blocks_of(self, root: nn.Module) -> list[nn.Module]:
        if self.blocks is None:
            found = [block for part in root.parts.children() for block in find_blocks(part, within=root)]  # type: ignore[union-attr]
        else:
            found = find_blocks(root, self.blocks)
        place = {id(module): i for i, module in enumerate(root.modules())}
        return sorted({id(b): b for b in found}.values(), key=lambda block: -place[id(block)])

    def _divide(self, root: nn.Module, blocks: list[nn.Module]) -> Any:
        """Divide the blocks and then what is left; one block at a time is on the device in full."""
        undivided = {id(p) for p in self._undivided}
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": self._policy(root),
            "offload_policy": CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
            if self.cpu_offload
            else OffloadPolicy(),
            "ignored_params": set(self._undivided),
        }
        for module in (*blocks, root):
            own = [p for p in module.parameters() if not gradients.is_divided(p)]
            self._check_dtypes([p for p in own if id(p) not in undivided])
            self._place_alike(own, module)
            if module is root:
                fully_shard(module, **options)
            else:
                fully_shard(module, reshard_after_forward=self.reshard_after_forward, **options)
        self._divided_blocks = len(blocks)
        return root

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

    def _place_alike(self, parameters: Iterable[nn.Parameter], module: nn.Module) -> None:
        """Put tensors on the device, with the values of rank 0."""
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = buffer.to(self._device)
        present = [p for p in parameters if not p.is_meta]
        for p in present:
            p.data = p.data.to(self._device)
        with torch.no_grad():
            for tensor in (*present, *module.buffers()):
                dist.broadcast(tensor, src=0)

    # -- a step --------------------------------------------------------------------------------------------

    def train_step(self) -> Callable[[Any], Any]:
        """The task's step, inside the forward pass of what holds its modules."""
        root, task = self._root, self.task
        if root is None:
            return task.train_step
        # What is called has the batch inside: torch would take it apart to look for tensors to move.
        return lambda batch: root(lambda _: task.train_step(batch), None)

    @contextmanager
    def _without_exchange(self) -> Iterator[None]:
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def apart(self) -> AbstractContextManager[Any]:
        """No exchange of gradients: they are kept in full until the last micro-batch of the step."""
        return super().apart() if self._root is None else self._without_exchange()

    def send(self, loss: Tensor, values: Tensor) -> Tensor:
        """An exchange of their own; it runs while gradients are computed."""
        self._is_last = True
        return super().send(loss, values)

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """Compute gradients. Those of parameters that are not divided are averaged here."""
        super().backward(loss, scaler)
        if self._is_last:
            self._is_last = False
            self._average_undivided()

    def _average_undivided(self) -> None:
        for p in self._undivided:
            if p.requires_grad:
                if p.grad is None:  # of another micro-batch's making on other ranks, perhaps
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
                p.grad /= self.averaged_over

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm of all gradients: squares of parts are added up over the ranks that hold the other parts."""
        if self._root is None:
            return super().total_norm(grads, uniform)
        divided = gradients.local_parts([g for g in grads if gradients.is_divided(g)])
        whole = [g for g in grads if not gradients.is_divided(g)]
        squares = [_square(g) for g in (divided, whole) if g]
        if divided:
            dist.all_reduce(squares[0], group=self._mesh.get_group(SHARD))
        total = squares[0] if len(squares) == 1 else squares[0] + squares[1].to(squares[0].device)
        return total.sqrt().to(self._device, torch.promote_types(grads[0].dtype, torch.float32))

    def agree_on_overflow(self, found: Tensor) -> None:
        """Any rank's overflow is that of all."""
        if self._root is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX)

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

    # -- state ---------------------------------------------------------------------------------------------

    def model_state(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The weights, of which this rank has its parts."""
        self._give_back()
        self._weights = plain
        return plain()

    def load_model_state(self, state: Any, plain: Callable[[Any], Any]) -> None:
        """Take weights back that were divided in any way, or not at all."""
        if self._root is None:
            super().load_model_state(state, plain)
            return
        self._give_back()
        # Asked for, if ever it was, the task has said how it gives its weights; else they are the model's own.
        current = (self._weights or self.task.model.state_dict)()
        plain(fitted(state, current))

    def check_model_state(self, state: Any, plain: Callable[[], dict[str, Any]]) -> None:
        """Raise if names or shapes do not fit. Nothing is read for it."""
        check_fits(self.model_state(plain), state, "model")

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state by names, of which this rank has its parts."""
        return super().optimizer_state(optimizer) if self._root is None else self._parameters.state_of(optimizer)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Take it back, whichever way it was divided."""
        if self._root is None:
            super().load_optimizer_state(optimizer, state)
        else:
            self._parameters.load(optimizer, state)

    def check_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Raise if it is the state of other parameters."""
        if self._root is None:
            super().check_optimizer_state(optimizer, state)
        else:
            self._parameters.check(state)

    @torch.no_grad()
    def whole_model(self) -> nn.Module:
        """A copy of the model on the host with all of its weights. Every rank must take part."""
        model = self.task.model
        if self._root is None:
            return model
        self._give_back()
        outline = self._outline_of_model()
        weights: dict[int, Any] = {}
        for (_, p), (_, blank) in zip(model.named_parameters(), outline.named_parameters(), strict=True):
            full = p.full_tensor() if gradients.is_divided(p) else p  # type: ignore[operator]
            weights[id(blank)] = nn.Parameter(full.detach().to("cpu", copy=True), requires_grad=p.requires_grad)
        made = copy.deepcopy(outline, weights)
        _copy_buffers(made, model)
        return made.cpu().train(model.training)

    @torch.no_grad()
    def copy_model(self) -> nn.Module:
        """A second model with the same weights, at least in fp32, divided like the first; for averages of weights.

        As `task.model` it can be evaluated through `infer`. `copy.deepcopy` refuses a divided model.
        """
        model = self.task.model
        if self._root is None:
            return copy.deepcopy(model)
        self._give_back()
        made = copy.deepcopy(self._outline_of_model())
        for p in made.parameters():
            p.data = p.data.float() if p.dtype in _SHORT else p.data
        trained, self._undivided = self._undivided, [p for p in made.parameters() if p.ndim == 0]
        holder = StepModule(_Holder(made))
        root = self._divide(holder, find_blocks(made) if self.blocks is None else self._blocks_of(holder))
        self._undivided = trained
        _materialize(root, torch.device("cpu") if self.cpu_offload else self._device)
        weights = dict(model.named_parameters())
        for name, p in made.named_parameters():
            p.copy_(weights[name])
        _copy_buffers(made, model)
        self._copies[id(made)] = root
        return made

    def _outline_of_model(self) -> nn.Module:
        if self._outline is None:
            raise BadArgument(
                f"{type(self.task.model).__name__} cannot be copied with copy.deepcopy, so a model with all of its "
                "weights cannot be made while it is divided over ranks. Export it from a checkpoint, in one process."
            )
        return self._outline


class _Holder:
    """A task that is nothing but a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def _dtype(option: str, value: Any) -> torch.dtype | None:
    found = _DTYPES.get(value, value) if isinstance(value, str) else value
    if found is None or isinstance(found, torch.dtype):
        return found
    raise BadArgument(expected(f"{option} to be 'bf16', 'fp16', 'fp32' or a torch dtype", value))


def _square(grads: list[Tensor]) -> Tensor:
    return gradients.total_norm(grads, gradients.are_uniform(grads)).double().square()


def _outline(model: nn.Module) -> nn.Module | None:
    """A copy of a model whose parameters have shapes and no memory; None where the model cannot be copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        logger.debug("%s cannot be copied: %s", type(model).__name__, error)
        return None


def _materialize(root: nn.Module, device: torch.device) -> None:
    """Give divided parameters memory; those that are tied stay so, unlike with `to_empty`."""
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
                module._parameters[name] = made[id(p)]
    root._apply(lambda tensor: tensor)  # torch takes notice of the new ones


def _copy_buffers(made: nn.Module, model: nn.Module) -> None:
    for copied, own in zip(made.buffers(), model.buffers(), strict=True):
        copied.copy_(own)

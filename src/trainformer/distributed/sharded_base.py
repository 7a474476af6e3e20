"""What strategies share under which each rank has a part of the model.

Owns what does not depend on how a model is divided: beginning with the weights of rank 0, gradients of which some are
parts and some are whole, an optimizer whose parameters are known by name, and state, copies and whole models made of
parts. Dividing is left to `fsdp` and `tensor_parallel`, and files to `sharded_state`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from trainformer.backends.torch import gradients
from trainformer.backends.torch.optimizers import modules_of, named_parameters
from trainformer.backends.torch.state import check_fits
from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import SharingPattern
from trainformer.distributed.ddp import DataParallel
from trainformer.distributed.mesh import SHARD
from trainformer.distributed.optimizer_state import NamedParameters
from trainformer.distributed.sharded_state import resharded
from trainformer.distributed.step_module import StepModule
from trainformer.distributed.strategy import upcast_to_fp32
from trainformer.distributed.sync_batchnorm import convert_sync_batchnorm as share_statistics

logger = logging.getLogger("trainformer")

#: Gradients are exchanged in messages of about so many bytes; as much memory is needed beside them.
_MESSAGE = 64 << 20


class ShardedStrategy(DataParallel):
    """A model in parts. Subclasses say who has which (`_arrange`, `_divide`, `_divide_copy`).

    SingleProcess, a rank has all of it: then nothing here is different from the strategy of a single process.
    """

    sharing = SharingPattern.PER_RANK
    shards_state = True
    _mesh: DeviceMesh
    _parameters: NamedParameters

    def __init__(self, *, sync_batchnorm: bool = True) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm)
        #: Everything the task holds, divided; None where there is nobody to divide it with.
        self._root: Any = None
        self._device = torch.device("cpu")
        self._outline: nn.Module | None = None
        self._weights: Callable[[], dict[str, Any]] | None = None
        self._is_last = False

    # -- for subclasses ------------------------------------------------------------------------------------

    def _arrange(self, task: Any) -> DeviceMesh:
        """Ranks as a grid. Also refuse what cannot be divided: nothing has been changed yet."""
        raise NotImplementedError

    def _divide(self, root: StepModule) -> None:
        """Divide what the task holds, in place."""
        raise NotImplementedError

    def _divide_copy(self, made: nn.Module) -> nn.Module:
        """Divide a second model like the first, and give it memory; its parameters have none."""
        raise NotImplementedError

    def _average_rest(self) -> None:
        """Make those gradients means over ranks that nobody has exchanged in the backward pass."""

    def _give_back(self) -> None:
        """Let go of what is whole only for a while."""

    # -- set-up --------------------------------------------------------------------------------------------

    def prepare(self, task: Any, device: torch.device) -> None:
        """Divide the modules of the task. Weights are those of rank 0."""
        if self.process_group.is_single_process:
            # Nothing is divided, so state is that of any single process.
            self.sharing, self.shards_state = SharingPattern.GLOBAL, False
            super().prepare(task, device)
            return
        self.task, self._device = task, device
        _refuse_quantized(task)
        self._mesh = self._arrange(task)
        self._outline = _outline(task.model)
        self._share_statistics(task)
        self._root = StepModule(task)
        self._divide(self._root)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
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

    def _share_statistics(self, task: Any) -> None:
        if not self.syncs_batchnorm:
            return
        for module in modules_of(task).values():
            for part in module.modules():
                if isinstance(part, _BatchNorm):
                    part.to(self._device)
            share_statistics(module)

    def _place_alike(self, parameters: Iterable[nn.Parameter], module: nn.Module) -> None:
        """Put parameters, and the buffers of a module, on the device, with the values of rank 0."""
        _place_buffers(module, self._device)
        present = [p for p in parameters if not p.is_meta]
        for p in present:
            p.data = p.data.to(self._device)
        with torch.no_grad():
            for tensor in (*present, *module.buffers()):
                dist.broadcast(tensor, src=0)

    # -- a step --------------------------------------------------------------------------------------------

    def piggyback_stats(self, loss: Any, values: Tensor) -> Any:
        """An exchange of their own; it runs while gradients are computed."""
        self._is_last = True
        return super().piggyback_stats(loss, values)

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """Compute gradients. With the last micro-batch of a step they become means over ranks."""
        super().backward(loss, scaler)
        if self._is_last:
            self._is_last = False
            self._average_rest()

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm of all gradients: squares of parts are added up over the ranks that hold the other parts.

        What is whole on every rank counts once.
        """
        if self._root is None:
            return super().total_norm(grads, uniform)
        parts = gradients.local_tensors([g for g in grads if is_sharded(g)])
        whole = gradients.local_tensors([g for g in grads if not is_sharded(g)])
        squares = [_square(g) for g in (parts, whole) if g]
        if parts:
            dist.all_reduce(squares[0], group=self._mesh.get_group(SHARD))
        total = squares[0] if len(squares) == 1 else squares[0] + squares[1].to(squares[0].device)
        return total.sqrt().to(self._device, torch.promote_types(grads[0].dtype, torch.float32))

    def sync_found_inf(self, found: Tensor) -> None:
        """Any rank's overflow is that of all."""
        if self._root is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX)

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
        plain(resharded(state, current))

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
    def unsharded_model(self) -> nn.Module:
        """A copy of the model on the host with all of its weights. Every rank must take part."""
        model = self.task.model
        if self._root is None:
            return model
        self._give_back()
        outline = self._outline_of_model()
        weights: dict[int, Any] = {}
        for (_, p), (_, blank) in zip(model.named_parameters(), outline.named_parameters(), strict=True):
            full = p.full_tensor() if gradients.is_dtensor(p) else p  # type: ignore[operator]
            weights[id(blank)] = nn.Parameter(full.detach().to("cpu", copy=True), requires_grad=p.requires_grad)
        made = copy.deepcopy(outline, weights)
        _copy_buffers(made, model)
        return made.cpu().train(model.training)

    @torch.no_grad()
    def copy_model(self) -> nn.Module:
        """A second model with the same weights, at least in fp32, divided like the first; for averages of weights.

        As `task.model` it can be evaluated through `infer`. `copy.deepcopy` refuses a divided model.
        """
        if self._root is None:
            return super().copy_model()
        model = self.task.model
        self._give_back()
        made = upcast_to_fp32(copy.deepcopy(self._outline_of_model()))
        _place_buffers(made, self._device)
        made = self._divide_copy(made)
        weights = dict(model.named_parameters())
        for name, p in made.named_parameters():
            p.copy_(weights[name])
        _copy_buffers(made, model)
        return made

    def _outline_of_model(self) -> nn.Module:
        if self._outline is None:
            raise BadArgument(
                f"{type(self.task.model).__name__} cannot be copied with copy.deepcopy, so a model with all of its "
                "weights cannot be made while it is divided over ranks. Export it from a checkpoint, in one process."
            )
        return self._outline


def is_sharded(tensor: Any) -> bool:
    """Whether this rank has less than all of a tensor. Also one that knows of ranks may be whole on each."""
    return gradients.is_dtensor(tensor) and any(not how.is_replicate() for how in tensor.placements)


def all_reduce_gradients(grads: Iterable[Any], group: Any, divisor: int) -> None:
    """Replace gradients by their sums over the ranks of a group, divided by a number."""
    for bucket in _buckets(gradients.local_tensors(list(grads))):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat, group=group)
        flat /= divisor
        pieces = flat.split([grad.numel() for grad in bucket])
        torch._foreach_copy_(bucket, [piece.view(grad.shape) for piece, grad in zip(pieces, bucket, strict=True)])


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and one message at a time. Every rank makes the same of the same shapes."""
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        bucket: list[Tensor] = []
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > _MESSAGE:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def materialize(root: nn.Module, device: torch.device) -> None:
    """Give divided parameters memory; those that are tied stay so, unlike with `to_empty`."""
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
                module._parameters[name] = made[id(p)]
    root._apply(lambda tensor: tensor)  # torch takes notice of the new ones


def _square(grads: list[Tensor]) -> Tensor:
    return gradients.total_norm(grads, gradients.are_uniform(grads)).double().square()


def _refuse_quantized(task: Any) -> None:
    for part, module in modules_of(task).items():
        for name, p in module.named_parameters():
            if not p.is_floating_point():
                what = "floating-point parameters, to divide them over ranks"
                do = "Load the model without quantization, or use strategy='ddp'."
                raise BadArgument(expected(what, f"{part}.{name} of {p.dtype}", do))


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


def _place_buffers(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


def _copy_buffers(made: nn.Module, model: nn.Module) -> None:
    for copied, own in zip(made.buffers(), model.buffers(), strict=True):
        copied.copy_(own)

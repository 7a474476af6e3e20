"""Base of the strategies that shard a model over ranks (FSDP and tensor parallelism).

Owns what does not depend on how a model is sharded: starting from the weights of rank 0, gradients of which some are
sharded and some replicated, optimizer state by parameter name, and state, copies and full models assembled from
shards. `fsdp` and `tensor_parallel` do the sharding; `sharded_state` owns the files.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from trainformer.backends.torch import gradients
from trainformer.backends.torch.muon import Muon
from trainformer.backends.torch.optimizers import modules_of, named_parameters
from trainformer.backends.torch.state import check_fits
from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import SharingPattern
from trainformer.distributed.ddp import DataParallel
from trainformer.distributed.optimizer_state import NamedParameters
from trainformer.distributed.sharded_state import resharded
from trainformer.distributed.strategy import StepModule, upcast_to_fp32
from trainformer.distributed.sync_batchnorm import convert_sync_batchnorm
from trainformer.utils.distributed import is_dtensor, local_tensors

logger = logging.getLogger("trainformer")

#: Dimensions of the device mesh: ranks that shard one model, and ranks that hold the same shard.
REPLICA, SHARD = "replica", "shard"


class ShardedStrategy(DataParallel):
    """A model sharded over ranks. Subclasses implement `_make_mesh`, `_shard` and `_shard_copy`.

    With a single process nothing is sharded, and everything works as in the base strategy.
    """

    sharing = SharingPattern.PER_RANK
    shards_state = True
    _mesh: DeviceMesh

    def __init__(self, *, sync_batchnorm: bool = True) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm)
        #: Everything the task holds, sharded; None with a single process.
        self._root: Any = None
        self._device = torch.device("cpu")
        self._meta_model: nn.Module | None = None
        self._state_dict: Callable[[], dict[str, Any]] | None = None
        self._is_last_backward = False

    # -- for subclasses ------------------------------------------------------------------------------------

    def _make_mesh(self, task: Any) -> DeviceMesh:
        """The device mesh. Also refuses models that cannot be sharded: nothing has been changed yet."""
        raise NotImplementedError

    def _shard(self, root: StepModule) -> None:
        """Shard everything the task holds, in place."""
        raise NotImplementedError

    def _shard_copy(self, made: nn.Module) -> nn.Module:
        """Shard a second model, whose parameters are on the meta device, like the first, and allocate its memory."""
        raise NotImplementedError

    def _reduce_remaining_gradients(self) -> None:
        """Average the gradients that the backward pass has not reduced."""

    def _reshard(self) -> None:
        """Free parameters that are still gathered."""

    # -- set-up --------------------------------------------------------------------------------------------

    def prepare(self, task: Any, device: torch.device) -> None:
        """Shard the task's modules. All ranks start from the weights of rank 0."""
        if self.process_group.is_single_process:
            self.sharing, self.shards_state = SharingPattern.GLOBAL, False
            super().prepare(task, device)
            return
        self.task, self._device = task, device
        for part, module in modules_of(task).items():
            for name, p in module.named_parameters():
                if not p.is_floating_point():
                    what = "floating-point parameters, which can be sharded"
                    do = "Load the model without quantization, or use strategy='ddp'."
                    raise BadArgument(expected(what, f"{part}.{name} of {p.dtype}", do))
        self._mesh = self._make_mesh(task)
        self._meta_model = _meta_copy(task.model)
        for module in modules_of(task).values() if self.sync_batchnorm else ():
            for layer in module.modules():
                if isinstance(layer, _BatchNorm):
                    layer.to(device)
            convert_sync_batchnorm(module)
        self._root = StepModule(task)
        self._shard(self._root)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Refuse optimizers whose update of a shard differs from that of the full parameter."""
        if self._root is None:
            return optimizer
        inner = getattr(optimizer, "inner", optimizer)
        kind = type(inner)
        if isinstance(inner, torch.optim.Adafactor | Muon) or kind.__module__.startswith("bitsandbytes"):
            do = "Use 'adamw' or another optimizer of torch, or strategy='ddp'."
            raise BadArgument(expected("an optimizer that works on sharded parameters", kind.__name__, do))
        if not kind.__module__.startswith("torch."):
            logger.warning(
                "%s is not an optimizer of torch: its first step shows whether it works on sharded parameters",
                kind.__name__,
            )
        if isinstance(inner, (torch.optim.SGD, torch.optim.Adagrad)):
            # torch has no fused update of DTensors for these two.
            for group in (*inner.param_groups, *optimizer.param_groups):
                group["fused"] = None
            inner._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        self.optimizer_states[id(optimizer)] = NamedParameters(optimizer, named_parameters(self.task))
        return optimizer

    def _broadcast_from_rank_0(self, parameters: Iterable[nn.Parameter], module: nn.Module) -> None:
        """Move parameters, and the buffers of a module, to the device, with the values of rank 0."""
        _place_buffers(module, self._device)
        present = [p for p in parameters if not p.is_meta]
        for p in present:
            p.data = p.data.to(self._device)
        with torch.no_grad():
            for tensor in (*present, *module.buffers()):
                dist.broadcast(tensor, src=0)

    # -- a step --------------------------------------------------------------------------------------------

    def piggyback_stats(self, loss: Any, stats: Tensor) -> Any:
        self._is_last_backward = True
        return super().piggyback_stats(loss, stats)

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """Compute gradients; with the last micro-batch of a step, average them over ranks."""
        super().backward(loss, scaler)
        if self._is_last_backward:
            self._is_last_backward = False
            self._reduce_remaining_gradients()

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm of all gradients: squares of shards are summed over ranks, replicated gradients count once."""
        if self._root is None:
            return super().total_norm(grads, uniform)
        sharded = local_tensors([g for g in grads if is_sharded(g)])
        replicated = local_tensors([g for g in grads if not is_sharded(g)])
        groups = [group for group in (sharded, replicated) if group]
        squares = [gradients.total_norm(g, gradients.are_uniform(g)).double().square() for g in groups]
        if sharded:
            dist.all_reduce(squares[0], group=self._mesh.get_group(SHARD))
        total = squares[0] if len(squares) == 1 else squares[0] + squares[1].to(squares[0].device)
        return total.sqrt().to(self._device, torch.promote_types(grads[0].dtype, torch.float32))

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient put together from its shards."""
        grad: Any = parameter.grad
        return grad.full_tensor() if is_dtensor(grad) else grad

    def sync_found_inf(self, found_inf: Tensor) -> None:
        if self._root is not None:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)

    # -- state ---------------------------------------------------------------------------------------------

    def model_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._reshard()
        self._state_dict = state_dict
        return state_dict()

    def load_model_state(self, state: Any, load: Callable[[Any], Any]) -> None:
        """Load weights that were sharded in any way, or not at all."""
        if self._root is None:
            super().load_model_state(state, load)
            return
        self._reshard()
        # A task may have its own state dict, seen by an earlier `model_state`; else it is that of the model.
        current = (self._state_dict or self.task.model.state_dict)()
        load(resharded(state, current))

    def check_model_state(self, state: Any, state_dict: Callable[[], dict[str, Any]]) -> None:
        """Raise if names or shapes do not fit. Reads no tensors."""
        check_fits(self.model_state(state_dict), state, "model")

    @torch.no_grad()
    def unsharded_model(self) -> nn.Module:
        """A copy of the model on the host with all of its weights. A collective: every rank must call it."""
        model = self.task.model
        if self._root is None:
            return model
        self._reshard()
        meta = self._require_meta_model()
        weights: dict[int, Any] = {}
        for (_, p), (_, blank) in zip(model.named_parameters(), meta.named_parameters(), strict=True):
            full = p.full_tensor() if is_dtensor(p) else p  # type: ignore[operator]
            weights[id(blank)] = nn.Parameter(full.detach().to("cpu", copy=True), requires_grad=p.requires_grad)
        made = copy.deepcopy(meta, weights)
        _copy_buffers(made, model)
        return made.cpu().train(model.training)

    @torch.no_grad()
    def copy_model(self) -> nn.Module:
        """A second model with the same weights, in fp32 or wider, sharded like the first; for weight averaging (EMA).

        Set as `task.model` it can be evaluated through `infer`. (`copy.deepcopy` refuses a sharded model.)
        """
        if self._root is None:
            return super().copy_model()
        model = self.task.model
        self._reshard()
        made = upcast_to_fp32(copy.deepcopy(self._require_meta_model()))
        _place_buffers(made, self._device)
        made = self._shard_copy(made)
        weights = dict(model.named_parameters())
        for name, p in made.named_parameters():
            p.copy_(weights[name])
        _copy_buffers(made, model)
        return made

    def _require_meta_model(self) -> nn.Module:
        if self._meta_model is None:
            raise BadArgument(
                f"Expected a model that copy.deepcopy can copy, received {type(self.task.model).__name__}, which it "
                "cannot: an unsharded copy is impossible. Export it from a checkpoint, in one process."
            )
        return self._meta_model


def divisors(number: int) -> str:
    """The divisors of a number, for error messages.

    >>> divisors(6)
    '1, 2, 3, 6'
    """
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def is_sharded(tensor: Any) -> bool:
    """Whether this rank holds less than all of a tensor. A DTensor may also be replicated."""
    return is_dtensor(tensor) and any(not placement.is_replicate() for placement in tensor.placements)


def materialize(root: nn.Module, device: torch.device) -> None:
    """Allocate memory for sharded meta parameters. Unlike `to_empty`, tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
                module._parameters[name] = made[id(p)]
    root._apply(lambda tensor: tensor)  # FSDP picks up the new parameters


def _meta_copy(model: nn.Module) -> nn.Module | None:
    """A copy of a model with parameters on the meta device; None if the model cannot be copied."""
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

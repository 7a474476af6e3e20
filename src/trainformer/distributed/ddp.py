"""Distributed data parallel: every rank holds the full model and a shard of each batch; gradients are averaged.

`DistributedDataParallel` all-reduces the gradients, overlapped with the backward pass. The few other numbers that ranks
share per step (weight and sum of the losses, pending requests) travel in the same all-reduce, as the gradient of a
parameter that nobody trains. So a step needs no extra collective.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainformer.backends.torch.optimizers import modules_of, named_parameters
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.types import SharingPattern
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.strategy import StepModule, Strategy
from trainformer.distributed.sync_batchnorm import convert_sync_batchnorm
from trainformer.utils.distributed import local_tensors, set_data_parallel_group

logger = logging.getLogger("trainformer")

#: Numbers that ranks sum per step: weight of the losses, their sum, and how many ranks have a request.
STATS = 3

#: Gradients are all-reduced in buckets of about this many bytes, which is also the extra memory needed.
_BUCKET = 64 << 20

#: Arguments of `DistributedDataParallel` that users cannot set.
_RESERVED = (
    *("self", "module", "device_ids", "output_device", "dim"),
    *("process_group", "device_mesh", "gradient_as_bucket_view"),
)


class DataParallel(Strategy):
    """Base of the strategies in which ranks compute different shards of a batch."""

    def __init__(self, *, sync_batchnorm: bool = True) -> None:
        super().__init__()
        self.sync_batchnorm = sync_batchnorm
        self._sums: Tensor | None = None

    def setup_environment(self, device: Any, timeout: float) -> torch.device:
        """Join the process group. On CUDA each rank takes the device of its local rank."""
        set_data_parallel_group(None)  # an earlier run in this process may have set one
        self.process_group = TorchProcessGroup.join(device, timeout)
        return self.process_group.local_device(device)

    @property
    def gradient_divide_factor(self) -> int:
        return self.process_group.dp_world_size

    def describe(self) -> str:
        return f"{self.name} over {self.process_group.world_size} processes"

    def _place(self, task: Any, device: torch.device) -> None:
        """Move modules to the device, and synchronise their BatchNorm statistics."""
        super().prepare(task, device)
        if self.sync_batchnorm and self.process_group.dp_world_size > 1:
            converted = sum(convert_sync_batchnorm(module) for module in modules_of(task).values())
            if converted:
                logger.info("%d BatchNorm layers compute their statistics over all ranks", converted)

    def piggyback_stats(self, loss: Any, stats: Tensor) -> Any:
        """A separate asynchronous all-reduce that overlaps with the backward pass."""
        self._sums = stats.clone()
        self._work = dist.all_reduce(self._sums, async_op=True)
        return loss

    def reduced_stats(self, scaler: torch.amp.GradScaler | None) -> Tensor | None:
        if self._sums is not None:
            self._work.wait()
        sums, self._sums = self._sums, None
        return sums


class DDP(DataParallel):
    """`torch.nn.parallel.DistributedDataParallel` around everything the task trains.

    Args:
        sync_batchnorm: Compute BatchNorm statistics over all ranks, so that the world size does not change the result.
        find_unused_parameters: Find parameters without a gradient in every step (for models that skip parts of
            themselves); costs a traversal of the graph and a collective.
        options: Further arguments of `DistributedDataParallel`, such as ``bucket_cap_mb``.
    """

    name = "ddp"
    sharing = SharingPattern.REPLICATED

    def __init__(self, *, sync_batchnorm: bool = True, find_unused_parameters: bool = False, **options: Any) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm)
        signature = inspect.signature(DistributedDataParallel.__init__)
        known = [name for name in signature.parameters if name not in _RESERVED]
        for option in options:
            if option not in known:
                have = ["sync_batchnorm", "find_unused_parameters", *known]
                do = f"{did_you_mean(option, have)} It has {', '.join(have)}.".strip()
                raise BadArgument(expected("options of the strategy 'ddp'", option, do))
        self.find_unused_parameters = find_unused_parameters
        self.options = options
        self._wrapped: Any = None
        self._stats: nn.Parameter | None = None
        self._trained: dict[str, nn.Parameter] = {}
        self._unused: list[nn.Parameter] = []
        self._reduces_in_backward = True

    def use_several_optimizers(self) -> None:
        """Gradients are averaged after the backward pass: torch's wrapper expects one of all parameters each time."""
        if type(self) is not DDP:
            super().use_several_optimizers()
        if self.options:
            what = "no options of DistributedDataParallel for a task with several optimizers, which does not use it"
            raise BadArgument(expected(what, ", ".join(self.options)))
        self._reduces_in_backward = False

    def prepare(self, task: Any, device: torch.device) -> None:
        """Move the modules to the device and wrap what is trained."""
        self._place(task, device)
        if self.process_group.is_single_process:
            return
        module = StepModule(task)
        if not self._reduces_in_backward:
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, src=0)
            return
        if self._can_piggyback:
            wide = all(p.dtype == torch.float64 for p in module.parameters() if p.requires_grad)
            module.stats = nn.Parameter(torch.zeros(STATS, device=device, dtype=torch.float64 if wide else None))
            self._stats = module.stats
            if not self.options.get("static_graph"):
                self._trained = {name: p for name, p in named_parameters(task).items() if p.requires_grad}
        self._wrapped = self._wrap(module)

    @property
    def _can_piggyback(self) -> bool:
        """Whether DDP reduces gradients unchanged, including that of a parameter no output depends on."""
        return not self.find_unused_parameters

    def _wrap(self, module: nn.Module) -> nn.Module:
        # torch 2.13 renamed the argument and warns about the old name.
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        chosen: dict[str, Any] = {buffers: not self.sync_batchnorm, **self.options}
        if buffers == "broadcast_buffers" and not chosen[buffers] and chosen.get("init_sync", True):
            # Before 2.13 the initial broadcast leaves buffers out if they are not broadcast in every forward pass.
            for buffer in module.buffers():
                dist.broadcast(buffer.data, group=chosen.get("process_group"), group_src=0)
        return DistributedDataParallel(
            module,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,
            **chosen,
        )

    def train_step(self) -> Callable[[Any], Any] | None:
        wrapped, task = self._wrapped, self.task
        return None if wrapped is None else lambda batch: wrapped(task.train_step, batch)

    def no_sync(self) -> AbstractContextManager[Any]:
        return super().no_sync() if self._wrapped is None else self._wrapped.no_sync()

    def reduce_gradients(self, parameters: list[nn.Parameter], names: Mapping[int, str]) -> None:
        if self.process_group.is_single_process:
            return
        missing = [p for p in parameters if p.grad is None]
        if missing and not self.find_unused_parameters:
            raise _unused_parameters([names[id(p)] for p in missing], self.process_group.rank)
        for p in missing:
            p.grad = torch.zeros_like(p)
        all_reduce_gradients([p.grad for p in parameters], None, self.gradient_divide_factor)

    def piggyback_stats(self, loss: Any, stats: Tensor) -> Any:
        """Make the numbers the gradient of a parameter that nobody trains; DDP reduces it with the others."""
        if self._stats is None:
            return super().piggyback_stats(loss, stats)
        self._stats.grad = None  # left over from a dropped step
        loss = loss + (self._stats * stats.to(self._stats.dtype)).sum().to(loss.dtype)
        # Parameters that the task declares unused take part with zero gradients, which `reduced_stats` drops.
        unused = getattr(self.task, "unused_parameters", tuple)
        self._unused = [p for p in unused() or () if p.requires_grad]
        return sum(((p * 0).sum().to(loss.dtype) for p in self._unused), start=loss)

    def reduced_stats(self, scaler: torch.amp.GradScaler | None) -> Tensor | None:
        if self._stats is None:
            return super().reduced_stats(scaler)
        if any(p.grad is None for p in self._trained.values()):
            # DDP itself raises one step later, when this step has already used gradients of a single rank.
            unused = [name for name, p in self._trained.items() if p.grad is None]
            raise _unused_parameters(unused, self.process_group.rank)
        for parameter in self._unused:
            parameter.grad = None
        means, self._stats.grad = self._stats.grad, None
        if means is None:
            return None
        sums = means.double() * self.process_group.dp_world_size
        scale = None if scaler is None else scaler._get_scale_async()
        return sums if scale is None else sums / scale


def all_reduce_gradients(grads: Iterable[Any], group: Any, divisor: int) -> None:
    """Replace gradients by their sums over the ranks of a group, divided by a number."""
    for bucket in _buckets(local_tensors(list(grads))):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat, group=group)
        flat /= divisor
        pieces = flat.split([grad.numel() for grad in bucket])
        torch._foreach_copy_(bucket, [piece.view(grad.shape) for piece, grad in zip(pieces, bucket, strict=True)])


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype in buckets. Every rank forms the same buckets from the same shapes."""
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        bucket: list[Tensor] = []
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def _unused_parameters(names: list[str], rank: int) -> BadArgument:
    some = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return BadArgument(
        f"Expected a gradient for every trainable parameter, received none for {some} on rank {rank}: DDP cannot "
        "all-reduce unused parameters. Use them in train_step, set requires_grad=False before creating the trainer, or "
        "pass strategy={'name': 'ddp', 'find_unused_parameters': True} if this is intended."
    )

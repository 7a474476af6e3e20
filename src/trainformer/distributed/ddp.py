"""Data parallelism: every rank has the whole model, computes a part of each batch, and gradients are averaged.

The exchange of gradients is that of `DistributedDataParallel`, overlapped with the backward pass. What ranks have to
know of each other's step beside gradients (the weight of the losses, their sum, whether somebody asks for something)
travels with them, as the gradient of a parameter that nobody trains: no step has an exchange of its own for it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainformer.backends.torch.optimizers import modules_of, named_parameters
from trainformer.backends.torch.placement import resolve_device
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.types import SharingPattern
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.step_module import StepModule
from trainformer.distributed.strategy import Strategy
from trainformer.distributed.sync_batchnorm import convert_sync_batchnorm
from trainformer.utils.distributed import set_data_parallel_group

logger = logging.getLogger("trainformer")

#: How many numbers ranks tell each other per step: the weight of the losses, their sum, and how many ask for something.
MESSAGE = 3

#: Arguments of `DistributedDataParallel` that are not a user's to choose.
_OURS = (
    *("self", "module", "device_ids", "output_device", "dim"),
    *("process_group", "device_mesh", "gradient_as_bucket_view"),
)


class DataParallel(Strategy):
    """What strategies share in which ranks compute different parts of a batch."""

    def __init__(self, *, sync_batchnorm: bool = True) -> None:
        super().__init__()
        self.syncs_batchnorm = sync_batchnorm
        self._sums: Tensor | None = None

    def setup_environment(self, device: Any, timeout: float) -> torch.device:
        """Meet the other ranks. On CUDA each rank has the device of its number on the machine."""
        set_data_parallel_group(None)  # another run of this process may have set one
        self.process_group = TorchProcessGroup.join(device, timeout)
        return device_of(self.process_group, device)

    @property
    def gradient_divide_factor(self) -> int:
        """All ranks that have data of their own."""
        return self.process_group.dp_world_size

    def describe(self) -> str:
        """Name and number of processes."""
        return f"{self.name} over {self.process_group.world_size} processes"

    def _place(self, task: Any, device: torch.device) -> None:
        """Modules on the device, with statistics of whole batches."""
        super().prepare(task, device)
        if self.syncs_batchnorm and self.process_group.dp_world_size > 1:
            shared = sum(convert_sync_batchnorm(module) for module in modules_of(task).values())
            if shared:
                logger.info("%d BatchNorm layers take their statistics over all ranks", shared)

    def piggyback_stats(self, loss: Any, values: Tensor) -> Any:
        """An exchange of their own; it runs while gradients are computed."""
        self._sums = values.clone()
        self._work = dist.all_reduce(self._sums, async_op=True)
        return loss

    def reduced_stats(self, scaler: torch.amp.GradScaler | None) -> Tensor | None:
        """The sums over ranks."""
        if self._sums is not None:
            self._work.wait()
        sums, self._sums = self._sums, None
        return sums


class DDP(DataParallel):
    """`torch.nn.parallel.DistributedDataParallel` around everything the task trains.

    Args:
        sync_batchnorm: Take BatchNorm statistics over all ranks, so that their number does not change the result.
        find_unused_parameters: Look in every step which parameters get a gradient (for models that skip parts of
            themselves); costs a walk through the graph and an exchange.
        options: Further arguments of `DistributedDataParallel`, such as ``bucket_cap_mb``.
    """

    name = "ddp"
    sharing = SharingPattern.REPLICATED

    def __init__(self, *, sync_batchnorm: bool = True, find_unused_parameters: bool = False, **options: Any) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm)
        known = [name for name in inspect.signature(DistributedDataParallel.__init__).parameters if name not in _OURS]
        for option in options:
            if option not in known:
                have = ["sync_batchnorm", "find_unused_parameters", *known]
                do = f"{did_you_mean(option, have)} It has {', '.join(have)}.".strip()
                raise BadArgument(expected("options of the strategy 'ddp'", option, do))
        self.find_unused_parameters = find_unused_parameters
        self.options = options
        self._wrapped: Any = None
        self._message: nn.Parameter | None = None
        self._trained: dict[str, nn.Parameter] = {}
        self._resting: list[nn.Parameter] = []

    def prepare(self, task: Any, device: torch.device) -> None:
        """Put the modules on the device and wrap what is trained."""
        self._place(task, device)
        if self.process_group.is_single_process:
            return
        module = StepModule(task)
        if self._lets_messages_travel:
            wide = all(p.dtype == torch.float64 for p in module.parameters() if p.requires_grad)
            module.message = nn.Parameter(torch.zeros(MESSAGE, device=device, dtype=torch.float64 if wide else None))
            self._message = module.message
            if not self.options.get("static_graph"):
                self._trained = {name: p for name, p in named_parameters(task).items() if p.requires_grad}
        self._wrapped = self._wrap(module)

    @property
    def _lets_messages_travel(self) -> bool:
        """Whether gradients arrive as they are, and those of a parameter that no output depends on arrive as well."""
        return not self.find_unused_parameters

    def _wrap(self, module: nn.Module) -> nn.Module:
        # torch 2.13 has renamed the argument, and warns of the old name.
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        chosen: dict[str, Any] = {buffers: not self.syncs_batchnorm, **self.options}
        return DistributedDataParallel(
            module,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,
            **chosen,
        )

    def train_step(self) -> Callable[[Any], Any] | None:
        """The task's step, inside the wrapper's forward pass."""
        wrapped, task = self._wrapped, self.task
        return None if wrapped is None else lambda batch: wrapped(task.train_step, batch)

    def no_sync(self) -> AbstractContextManager[Any]:
        """No exchange of gradients."""
        return super().no_sync() if self._wrapped is None else self._wrapped.no_sync()

    def piggyback_stats(self, loss: Any, values: Tensor) -> Any:
        """Let the numbers travel as the gradient of the parameter that nobody trains."""
        if self._message is None:
            return super().piggyback_stats(loss, values)
        self._message.grad = None  # of a step that was given up
        loss = loss + (self._message * values.to(self._message.dtype)).sum().to(loss.dtype)
        # Parameters that the task declares unused take part with gradients of zero, which are then dropped.
        unused = getattr(self.task, "unused_parameters", tuple)
        self._resting = [p for p in unused() or () if p.requires_grad]
        return sum(((p * 0).sum().to(loss.dtype) for p in self._resting), start=loss)

    def reduced_stats(self, scaler: torch.amp.GradScaler | None) -> Tensor | None:
        """Their sums: gradients are means over ranks."""
        if self._message is None:
            return super().reduced_stats(scaler)
        if any(p.grad is None for p in self._trained.values()):
            self._explain_unused()
        for parameter in self._resting:
            parameter.grad = None
        means, self._message.grad = self._message.grad, None
        if means is None:
            return None
        sums = means.double() * self.process_group.dp_world_size
        scale = None if scaler is None else scaler._get_scale_async()
        return sums if scale is None else sums / scale

    def _explain_unused(self) -> None:
        """Torch would say so at the next step; by then this one had been made with gradients of one rank."""
        unused = [name for name, p in self._trained.items() if p.grad is None]
        some = ", ".join(unused[:6]) + (f" and {len(unused) - 6} more" if len(unused) > 6 else "")
        raise BadArgument(
            f"Expected a gradient for every trainable parameter, received none for {some}: "
            "ranks would wait for each other's. Use them in train_step, set requires_grad=False before the trainer is "
            "made, or pass strategy={'name': 'ddp', 'find_unused_parameters': True} if it is on purpose."
        )


def device_of(process_group: TorchProcessGroup, device: Any) -> torch.device:
    """The device of this rank: on CUDA the one of its number on this machine, unless one is named in full."""
    named = None if device is None or device == "auto" else torch.device(device)
    if named is not None and (named.type != "cuda" or named.index is not None):
        return resolve_device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", process_group.local_rank % torch.cuda.device_count())
    return resolve_device(device)

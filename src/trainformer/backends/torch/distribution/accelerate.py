"""Data parallelism by accelerate: an `Accelerator` wraps what the task trains, and differentiates its losses.

The Accelerator says on which device, with which options of `DistributedDataParallel` and with which hooks gradients are
exchanged. Data, accumulation, precision, clipping and checkpoints stay with the run. What takes the optimizer step or
the parameters out of its hands (DeepSpeed, Megatron-LM, FSDP as a plugin) is refused.
"""

from __future__ import annotations

import inspect
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainformer.backends.torch.distribution.ddp import DDP
from trainformer.backends.torch.distribution.ranks import Ranks
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require

_REFUSED = {
    "DEEPSPEED": "Use strategy='fsdp', which divides a model over processes as ZeRO does.",
    "FSDP": "Use strategy='fsdp', which has checkpoints that go on with any number of processes.",
    "MEGATRON_LM": "Use strategy='tp' or 'pipeline'.",
    "TP": "Use strategy='tp'.",
}


class Accelerate(DDP):
    """An `Accelerator` of accelerate.

    Args:
        accelerator: One that is made already. By default one is made when the run begins.
        share_batchnorm: Take BatchNorm statistics over all ranks, so that their number does not change the result.
        options: Arguments of the `Accelerator` to make, such as ``kwargs_handlers``.
    """

    name = "accelerate"

    def __init__(self, *, accelerator: Any = None, share_batchnorm: bool = True, **options: Any) -> None:
        super().__init__(share_batchnorm=share_batchnorm)
        self._made_by_us = accelerator is None
        self.accelerator = accelerator
        self.arguments = options
        if accelerator is not None:
            if options:
                do = "Set them where you make the Accelerator."
                raise BadArgument(expected("no options with an Accelerator that is made already", list(options), do))
            _check(accelerator)
        else:
            _check_options(options)

    def join(self, device: Any, timeout: float) -> torch.device:
        """Meet the other ranks, unless the Accelerator has done so. Its device is ours."""
        if self._made_by_us:
            return super().join(device, timeout)
        self.ranks = Ranks.join(device, timeout)
        theirs = self.accelerator.device
        if device not in (None, "auto") and torch.device(device).type != theirs.type:
            do = "Leave it out, or make the Accelerator for it (cpu=True)."
            raise BadArgument(expected(f"device to be that of the Accelerator, {theirs}", device, do))
        if not self.ranks.is_alone and theirs.type == "cuda" and "cpu:gloo" not in str(dist.get_backend_config()):
            raise BadArgument(
                "Expected processes that can exchange values on the host as well, received a group of "
                f"{dist.get_backend()} alone. Call torch.distributed.init_process_group('cpu:gloo,cuda:nccl') before "
                "you make the Accelerator, or pass strategy='accelerate' and let it be made."
            )
        return theirs

    def prepare(self, task: Any, device: torch.device) -> None:
        """Put the modules on the device, and let the Accelerator wrap what is trained."""
        if self._made_by_us:
            self.accelerator = self._make(device)
            _check(self.accelerator)
        else:
            _check_precision(self.accelerator.mixed_precision, self.precision)
        super().prepare(task, device)

    @property
    def _lets_messages_travel(self) -> bool:
        """Whether the Accelerator's hooks leave gradients as they are."""
        return not _changes_gradients(self.accelerator.ddp_handler)

    def _wrap(self, module: nn.Module) -> nn.Module:
        return self.accelerator.prepare_model(module, device_placement=False)

    def _make(self, device: torch.device) -> Any:
        options = dict(self.arguments)
        wanted = options.pop("mixed_precision", None) or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        _check_precision(str(wanted), self.precision)
        if not self.ranks.is_alone:
            # It looks nowhere else, and Slurm, say, has words of its own.
            ranks = self.ranks
            said = {"RANK": ranks.rank, "WORLD_SIZE": ranks.world, "LOCAL_RANK": ranks.local_rank}
            if "MASTER_ADDR" not in os.environ:
                said["LOCAL_WORLD_SIZE"] = ranks.world
            for name, value in said.items():
                os.environ.setdefault(name, str(value))
        try:
            # The run has its own autocast and its own scaling of losses.
            return _accelerate().Accelerator(**{"cpu": device.type == "cpu", "mixed_precision": "no", **options})
        except ValueError as error:
            do = "Pass the Accelerator that this program has made before, or strategy='ddp'."
            raise BadArgument(expected("arguments that an Accelerator takes", f"{error}", do)) from error

    def connect(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the Accelerator know the optimizer. Its wrapper of it would add only what the run does itself."""
        if self._wrapped is not None:
            self.accelerator.prepare_optimizer(optimizer, device_placement=False)
        return optimizer

    def apart(self) -> AbstractContextManager[Any]:
        """No exchange of gradients."""
        return super().apart() if self._wrapped is None else self.accelerator.no_sync(self._wrapped)

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """Compute gradients."""
        self.accelerator.backward(loss if scaler is None else scaler.scale(loss))


def _accelerate() -> Any:
    return require("accelerate", "accelerate", "for strategy='accelerate'")


def _check_options(options: dict[str, Any]) -> None:
    known = [name for name in inspect.signature(_accelerate().Accelerator.__init__).parameters if name != "self"]
    for name in options:
        if name not in known:
            raise BadArgument(expected("options of an Accelerator", name, did_you_mean(name, known)))
    if (options.get("gradient_accumulation_steps") or 1) != 1:
        _refuse_accumulation(options["gradient_accumulation_steps"])


def _check(accelerator: Any) -> None:
    kind = accelerator.distributed_type.name
    if kind in _REFUSED:
        raise BadArgument(expected("an Accelerator that leaves the optimizer step to the run", kind, _REFUSED[kind]))
    if accelerator.gradient_accumulation_steps != 1:
        _refuse_accumulation(accelerator.gradient_accumulation_steps)


def _refuse_accumulation(steps: int) -> None:
    do = f"Pass it to the trainer: accumulation_steps={steps} (gradient_accumulation_steps in trainformer.hf)."
    raise BadArgument(expected("an Accelerator with gradient_accumulation_steps=1", steps, do))


def _check_precision(theirs: str, ours: str) -> None:
    if theirs == "no" or theirs == ours == "bf16":
        return
    if theirs == ours:
        do = "The run scales the losses itself: make the Accelerator with mixed_precision='no'."
    else:
        do = f"Make it with mixed_precision='no', and pass precision={theirs!r} to the trainer if you mean that."
    raise BadArgument(expected(f"an Accelerator in the precision of the run ({ours})", theirs, do))


def _changes_gradients(handler: Any) -> bool:
    """Whether gradients may be skipped or rounded on their way: numbers of the step must then travel by themselves."""
    if handler is None:
        return False
    return handler.find_unused_parameters or handler.static_graph or handler.comm_hook.name != "NO"

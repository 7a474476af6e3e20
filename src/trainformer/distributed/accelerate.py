"""Data parallelism by accelerate: an `Accelerator` wraps what the task trains, and differentiates its losses.

The Accelerator says on which device, with which options of `DistributedDataParallel` and with which hooks gradients are
exchanged. Data, accumulation, precision, clipping and checkpoints stay with the run. DeepSpeed, which divides the
optimizer over ranks, is driven by `accelerate_engine`. What takes the parameters out of the run's hands (Megatron-LM,
FSDP as a plugin) is refused.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.distributed.ddp import DDP
from trainformer.distributed.deepspeed import Zero, check_config
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.step_module import StepModule

_REFUSED = {
    "FSDP": "Use strategy='fsdp', which has checkpoints that go on with any number of processes.",
    "MEGATRON_LM": "Use strategy='tp' or 'pipeline'.",
    "TP": "Use strategy='tp'.",
}


class Accelerate(DDP):
    """An `Accelerator` of accelerate.

    Args:
        accelerator: One that is made already. By default one is made when the run begins.
        sync_batchnorm: Take BatchNorm statistics over all ranks, so that their number does not change the result.
        options: Arguments of the `Accelerator` to make, such as ``kwargs_handlers``.
    """

    name = "accelerate"

    def __init__(self, *, accelerator: Any = None, sync_batchnorm: bool = True, **options: Any) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm)
        self._made_by_us = accelerator is None
        self.accelerator = accelerator
        self.arguments = options
        self._zero: Zero | None = None
        if accelerator is not None:
            if options:
                do = "Set them where you make the Accelerator."
                raise BadArgument(expected("no options with an Accelerator that is made already", list(options), do))
            _check(accelerator)
        else:
            _check_options(options)
            if _says("ACCELERATE_USE_FSDP"):
                do = f"Pass strategy={launched_strategy()}."
                raise BadArgument(expected("a launch that leaves the parameters to the run", "--use_fsdp", do))

    def setup_environment(self, device: Any, timeout: float) -> torch.device:
        """Meet the other ranks, unless the Accelerator has done so. Its device is ours."""
        if self._made_by_us:
            return super().setup_environment(device, timeout)
        self.process_group = TorchProcessGroup.join(device, timeout)
        theirs = self.accelerator.device
        if device not in (None, "auto") and torch.device(device).type != theirs.type:
            do = "Leave it out, or make the Accelerator for it (cpu=True)."
            raise BadArgument(expected(f"device to be that of the Accelerator, {theirs}", device, do))
        if (
            not self.process_group.is_single_process
            and theirs.type == "cuda"
            and "cpu:gloo" not in str(dist.get_backend_config())
        ):
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
        if not self._divides_optimizer:
            super().prepare(task, device)
            return
        if self.precision == "fp16":
            do = "Pass precision='bf16' or 'no'."
            raise BadArgument(expected("a precision that needs no scaling of losses, with DeepSpeed", "fp16", do))
        self._place(task, device)

    @property
    def _divides_optimizer(self) -> bool:
        """Whether DeepSpeed does; of one process there is nothing to divide."""
        return _kind(self.accelerator) == "DEEPSPEED" and not self.process_group.is_single_process

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
        if not self.process_group.is_single_process:
            # It looks nowhere else, and Slurm, say, has words of its own.
            process_group = self.process_group
            said = {
                "RANK": process_group.rank,
                "WORLD_SIZE": process_group.world_size,
                "LOCAL_RANK": process_group.local_rank,
            }
            if "MASTER_ADDR" not in os.environ:
                said["LOCAL_WORLD_SIZE"] = process_group.world_size
            for name, value in said.items():
                os.environ.setdefault(name, str(value))
        # Told to stay on the CPU it would leave DeepSpeed out without a word; on a host without GPUs it does stay.
        chosen = {} if _wants_deepspeed(options) else {"cpu": device.type == "cpu"}
        try:
            # The run has its own autocast and its own scaling of losses.
            return _accelerate().Accelerator(**{**chosen, "mixed_precision": "no", **options})
        except ValueError as error:
            do = "Pass the Accelerator that this program has made before, or strategy='ddp'."
            raise BadArgument(expected("arguments that an Accelerator takes", f"{error}", do)) from error

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the Accelerator know the optimizer. Its wrapper of it would add only what the run does itself."""
        if self._divides_optimizer:
            self._zero = Zero(self.accelerator, StepModule(self.task), optimizer)
            return self._zero.optimizer
        if self._wrapped is not None:
            self.accelerator.prepare_optimizer(optimizer, device_placement=False)
        return optimizer

    def describe(self) -> str:
        """Name, number of processes, and what of DeepSpeed is at work."""
        text = super().describe()
        return text if self._zero is None else f"{text}, DeepSpeed ZeRO-{self._zero.engine.zero_optimization_stage()}"

    # -- a step --------------------------------------------------------------------------------------------

    def train_step(self) -> Callable[[Any], Any] | None:
        """The task's step, inside the wrapper's forward pass."""
        if self._zero is None:
            return super().train_step()
        self._zero.check_batch(
            round(self.reference * self.process_group.dp_world_size), self.process_group.dp_world_size
        )
        return self._zero.train_step(self.task.train_step)

    def no_sync(self) -> AbstractContextManager[Any]:
        """No exchange of gradients."""
        if self._zero is not None:
            return self._zero.no_sync()
        return super().no_sync() if self._wrapped is None else self.accelerator.no_sync(self._wrapped)

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """Compute gradients."""
        if self._zero is not None:
            self._zero.backward(loss)  # the Accelerator's own way would take the optimizer step at once
        else:
            self.accelerator.backward(loss if scaler is None else scaler.scale(loss))

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm of all gradients."""
        return super().total_norm(grads, uniform) if self._zero is None else self._zero.total_norm(grads, uniform)

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient of a parameter, whole. Every rank must take part."""
        return parameter.grad if self._zero is None else self._zero.full_gradient(parameter)

    # -- state ---------------------------------------------------------------------------------------------

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Take it back, from any strategy and number of ranks."""
        if self._zero is None:
            super().load_optimizer_state(optimizer, state)
        else:
            self._zero.load_state_dict(state)

    def check_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Raise if it does not fit."""
        if self._zero is None:
            super().check_optimizer_state(optimizer, state)
        else:
            self._zero.check_state(state)


def launched_strategy() -> dict[str, Any]:
    """The strategy that ``accelerate launch`` was told to use, with its options; empty where that is plain DDP.

    What it was told and the run cannot do is refused, instead of ignored.
    """
    for name, option, do in (
        ("ACCELERATE_USE_MEGATRON_LM", "--use_megatron_lm", _REFUSED["MEGATRON_LM"]),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "--use_parallelism_config", "Use strategy='tp' or 'fsdp'."),
    ):
        if _says(name):
            raise BadArgument(expected("options of `accelerate launch` that the run knows", option, do))
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        do = "Pass compile=True to the trainer."
        raise BadArgument(
            expected("`accelerate launch` without --dynamo_backend", os.environ["ACCELERATE_DYNAMO_BACKEND"], do)
        )
    if _says("ACCELERATE_USE_FSDP"):
        _accelerate()
        from accelerate.utils import FullyShardedDataParallelPlugin

        return as_fsdp(FullyShardedDataParallelPlugin())
    # The Accelerator reads the rest of the environment, and its precision is compared with that of the run.
    is_more = _says("ACCELERATE_USE_DEEPSPEED") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
    return {"name": "accelerate"} if is_more else {}


def as_fsdp(plugin: Any) -> dict[str, Any]:
    """The strategy 'fsdp' with the options of accelerate's plugin for it."""
    said = plugin.reshard_after_forward
    said = plugin.sharding_strategy if said is None else said
    # FSDP 1 has names for it.
    reshard = said if isinstance(said, bool) else {"FULL_SHARD": True, "SHARD_GRAD_OP": False}.get(said.name)
    if reshard is None:
        do = "Pass strategy={'name': 'fsdp', 'replicas': ...} for a hybrid one, or 'ddp' for none."
        raise BadArgument(expected("FULL_SHARD or SHARD_GRAD_OP of FSDP", said.name, do))
    if plugin.activation_checkpointing:
        do = "Pass gradient_checkpointing=True to the trainer."
        raise BadArgument(expected("FSDP without activation_checkpointing", True, do))
    offload = getattr(plugin.cpu_offload, "offload_params", type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy")
    options: dict[str, Any] = {"name": "fsdp", "reshard_after_forward": reshard, "cpu_offload": bool(offload)}
    blocks = plugin.transformer_cls_names_to_wrap
    return {**options, "blocks": list(blocks)} if blocks else options


def _accelerate() -> Any:
    return require("accelerate", "accelerate", "for strategy='accelerate'")


def _check_options(options: dict[str, Any]) -> None:
    known = [name for name in inspect.signature(_accelerate().Accelerator.__init__).parameters if name != "self"]
    for name in options:
        if name not in known:
            raise BadArgument(expected("options of an Accelerator", name, did_you_mean(name, known)))
    if (options.get("gradient_accumulation_steps") or 1) != 1:
        _refuse_accumulation(options["gradient_accumulation_steps"])


def _kind(accelerator: Any) -> str:
    return accelerator.distributed_type.name


def _says(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def _wants_deepspeed(options: dict[str, Any]) -> bool:
    given = options.get("deepspeed_plugin") or options.get("deepspeed_plugins")
    return given is not None or _says("ACCELERATE_USE_DEEPSPEED")


def _check(accelerator: Any) -> None:
    kind = _kind(accelerator)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        do = f"Pass strategy={as_fsdp(plugin)}."
        raise BadArgument(expected("an Accelerator that leaves the parameters to the run", "one for FSDP", do))
    if kind in _REFUSED:
        raise BadArgument(expected("an Accelerator that leaves the optimizer step to the run", kind, _REFUSED[kind]))
    if accelerator.gradient_accumulation_steps != 1:
        _refuse_accumulation(accelerator.gradient_accumulation_steps)
    if kind == "DEEPSPEED":
        config = accelerator.deepspeed_plugin.deepspeed_config
        check_config(config)
        if config.get("gradient_accumulation_steps", "auto") not in ("auto", 1):
            _refuse_accumulation(config["gradient_accumulation_steps"])


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

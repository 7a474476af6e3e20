"""Data parallelism through Accelerate: an `Accelerator` wraps what the task trains and runs the backward pass.

The Accelerator chooses the device, the options of `DistributedDataParallel` and its communication hooks. Data, gradient
accumulation, precision, clipping and checkpoints belong to the run. `deepspeed` drives DeepSpeed, which shards the
optimizer. Backends that take the parameters out of the run's hands (Megatron-LM, the FSDP plugin) are refused.
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
from trainformer.distributed.strategy import StepModule

_REFUSED = {
    "FSDP": "Use strategy='fsdp', whose checkpoints resume with any number of processes.",
    "MEGATRON_LM": "Use strategy='tp' or 'pipeline'.",
    "TP": "Use strategy='tp'.",
}


class Accelerate(DDP):
    """An `Accelerator` of Hugging Face Accelerate.

    Args:
        accelerator: An existing instance. By default one is created when the run starts.
        sync_batchnorm: Compute BatchNorm statistics over all ranks, so that the world size does not change the result.
        options: Arguments of the `Accelerator` to create, such as ``kwargs_handlers``.
    """

    name = "accelerate"

    def __init__(self, *, accelerator: Any = None, sync_batchnorm: bool = True, **options: Any) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm)
        self._creates_accelerator = accelerator is None
        self.accelerator = accelerator
        self.arguments = options
        self._zero: Zero | None = None
        if accelerator is not None:
            if options:
                do = "Set them where you create the Accelerator."
                raise BadArgument(expected("no options with an existing Accelerator", list(options), do))
            _check(accelerator)
        else:
            _check_options(options)
            if _is_set("ACCELERATE_USE_FSDP"):
                do = f"Pass strategy={strategy_from_environment()}."
                raise BadArgument(expected("a launch without FSDP", "--use_fsdp", do))

    def setup_environment(self, device: Any, timeout: float) -> torch.device:
        """Join the process group, unless the Accelerator has. Uses the Accelerator's device."""
        if self._creates_accelerator:
            return super().setup_environment(device, timeout)
        self.process_group = TorchProcessGroup.join(device, timeout)
        theirs = self.accelerator.device
        if device not in (None, "auto") and torch.device(device).type != theirs.type:
            do = "Leave it out, or create the Accelerator for it (cpu=True)."
            raise BadArgument(expected(f"device to be that of the Accelerator, {theirs}", device, do))
        if (
            not self.process_group.is_single_process
            and theirs.type == "cuda"
            and "cpu:gloo" not in str(dist.get_backend_config())
        ):
            raise BadArgument(
                f"Expected a process group with a CPU backend as well, received one with {dist.get_backend()} only. "
                "Call torch.distributed.init_process_group('cpu:gloo,cuda:nccl') before creating the Accelerator, or "
                "pass strategy='accelerate' without one."
            )
        return theirs

    def prepare(self, task: Any, device: torch.device) -> None:
        """Move the modules to the device, and let the Accelerator wrap what is trained."""
        if self._creates_accelerator:
            self.accelerator = self._create(device)
            _check(self.accelerator)
        else:
            _check_precision(self.accelerator.mixed_precision, self.precision)
        if not self._uses_deepspeed:
            super().prepare(task, device)
            return
        if self.precision == "fp16":
            do = "Pass precision='bf16' or 'no'."
            raise BadArgument(expected("a precision without loss scaling, with DeepSpeed", "fp16", do))
        self._place(task, device)

    @property
    def _uses_deepspeed(self) -> bool:
        kind = self.accelerator.distributed_type.name
        return kind == "DEEPSPEED" and not self.process_group.is_single_process

    @property
    def _can_piggyback(self) -> bool:
        """Whether DDP neither skips nor rounds gradients: else the stats of a step need their own all-reduce."""
        handler = self.accelerator.ddp_handler
        if handler is None:
            return True
        return not (handler.find_unused_parameters or handler.static_graph or handler.comm_hook.name != "NO")

    def _wrap(self, module: nn.Module) -> nn.Module:
        return self.accelerator.prepare_model(module, device_placement=False)

    def _create(self, device: torch.device) -> Any:
        options = dict(self.arguments)
        wanted = options.pop("mixed_precision", None) or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        _check_precision(str(wanted), self.precision)
        if not self.process_group.is_single_process:
            # Accelerate reads torchrun's variables only; Slurm, for instance, sets others.
            group = self.process_group
            variables = {"RANK": group.rank, "WORLD_SIZE": group.world_size, "LOCAL_RANK": group.local_rank}
            if "MASTER_ADDR" not in os.environ:
                variables["LOCAL_WORLD_SIZE"] = group.world_size
            for name, value in variables.items():
                os.environ.setdefault(name, str(value))
        # With cpu=True Accelerate silently ignores DeepSpeed; without GPUs it uses the CPU anyway.
        plugin = options.get("deepspeed_plugin") or options.get("deepspeed_plugins")
        wants_deepspeed = plugin is not None or _is_set("ACCELERATE_USE_DEEPSPEED")
        chosen = {} if wants_deepspeed else {"cpu": device.type == "cpu"}
        try:
            # The run has its own autocast and loss scaling.
            return _accelerate().Accelerator(**{**chosen, "mixed_precision": "no", **options})
        except ValueError as error:
            do = "Pass the Accelerator that this program created before, or strategy='ddp'."
            raise BadArgument(expected("arguments that an Accelerator takes", f"{error}", do)) from error

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Register the optimizer. The Accelerator's wrapper is not used: the run does what it would add."""
        if self._uses_deepspeed:
            self._zero = Zero(self.accelerator, StepModule(self.task), optimizer)
            self.optimizer_states[id(self._zero.optimizer)] = self._zero
            return self._zero.optimizer
        if self._wrapped is not None:
            self.accelerator.prepare_optimizer(optimizer, device_placement=False)
        return optimizer

    def describe(self) -> str:
        text = super().describe()
        return text if self._zero is None else f"{text}, DeepSpeed ZeRO-{self._zero.engine.zero_optimization_stage()}"

    def train_step(self) -> Callable[[Any], Any] | None:
        if self._zero is None:
            return super().train_step()
        self._zero.check_batch(
            round(self.reference * self.process_group.dp_world_size), self.process_group.dp_world_size
        )
        return self._zero.train_step(self.task.train_step)

    def no_sync(self) -> AbstractContextManager[Any]:
        if self._zero is not None:
            return self._zero.no_sync()
        return super().no_sync() if self._wrapped is None else self.accelerator.no_sync(self._wrapped)

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        if self._zero is not None:
            self._zero.backward(loss)  # Accelerator.backward would take the optimizer step at once
        else:
            self.accelerator.backward(loss if scaler is None else scaler.scale(loss))

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        return super().total_norm(grads, uniform) if self._zero is None else self._zero.total_norm(grads, uniform)

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        return parameter.grad if self._zero is None else self._zero.full_gradient(parameter)


def strategy_from_environment() -> dict[str, Any]:
    """The strategy that ``accelerate launch`` was configured for, with its options; empty for plain DDP.

    Options that the run does not support are refused instead of ignored.
    """
    for name, option, do in (
        ("ACCELERATE_USE_MEGATRON_LM", "--use_megatron_lm", _REFUSED["MEGATRON_LM"]),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "--use_parallelism_config", "Use strategy='tp' or 'fsdp'."),
    ):
        if _is_set(name):
            raise BadArgument(expected("options of `accelerate launch` that are supported", option, do))
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        do = "Pass compile=True to the trainer."
        what = "`accelerate launch` without --dynamo_backend"
        raise BadArgument(expected(what, os.environ["ACCELERATE_DYNAMO_BACKEND"], do))
    if _is_set("ACCELERATE_USE_FSDP"):
        _accelerate()
        from accelerate.utils import FullyShardedDataParallelPlugin

        return as_fsdp(FullyShardedDataParallelPlugin())
    # The Accelerator reads the rest of the environment; its precision is compared with that of the run.
    is_needed = _is_set("ACCELERATE_USE_DEEPSPEED") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
    return {"name": "accelerate"} if is_needed else {}


def as_fsdp(plugin: Any) -> dict[str, Any]:
    """The strategy 'fsdp' with the options of Accelerate's FSDP plugin."""
    choice = plugin.reshard_after_forward
    choice = plugin.sharding_strategy if choice is None else choice
    # FSDP 1 has names for it.
    reshard = choice if isinstance(choice, bool) else {"FULL_SHARD": True, "SHARD_GRAD_OP": False}.get(choice.name)
    if reshard is None:
        do = "Pass strategy={'name': 'fsdp', 'replicas': ...} for hybrid sharding, or 'ddp' for none."
        raise BadArgument(expected("FULL_SHARD or SHARD_GRAD_OP of FSDP", choice.name, do))
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


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def _check(accelerator: Any) -> None:
    kind = accelerator.distributed_type.name
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        do = f"Pass strategy={as_fsdp(plugin)}."
        raise BadArgument(expected("an Accelerator without the FSDP plugin", "one with it", do))
    if kind in _REFUSED:
        raise BadArgument(expected("an Accelerator for DDP or DeepSpeed", kind, _REFUSED[kind]))
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
        do = "The run does the loss scaling: create the Accelerator with mixed_precision='no'."
    else:
        do = f"Create it with mixed_precision='no', and pass precision={theirs!r} to the trainer if intended."
    raise BadArgument(expected(f"an Accelerator with the precision of the run ({ours})", theirs, do))

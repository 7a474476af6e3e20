"""What a strategy is: how one model is trained by several processes. The base class is the one for a single process.

A strategy is asked in this order: `join` (meet the other ranks, say which device is ours), `prepare` (wrap or divide
the task's modules, before the optimizer is made), then per step `train_step`, `apart`, `send`, `backward`, `received`,
`total_norm`, and now and then for state. The task's own attribute `model` stays the plain model: wrappers live here,
so that nobody else has to unwrap anything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.backends.torch import gradients
from trainformer.backends.torch.optimizers import modules_of
from trainformer.backends.torch.placement import resolve_device
from trainformer.backends.torch.state import check_fits, cloned
from trainformer.core.errors import DataError
from trainformer.core.types import SharingPattern
from trainformer.distributed.optimizer_state import unsharded_optimizer_state
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.sharded_state import ShardedState


class Strategy:
    """One process, one device. The others say what they do otherwise.

    After a backward pass, gradients are averaged over `gradient_divide_factor` ranks.
    """

    name = "single"
    #: Who writes the weights and the optimizer's state (see `StateComponent`).
    sharing = SharingPattern.GLOBAL
    #: Whether each rank has a part of them, and writes that: then their format is "sharded".
    shards_state = False

    def __init__(self) -> None:
        self.process_group = TorchProcessGroup()
        self.task: Any = None
        self.reference = 1.0  # what each rank divides its sums by before it differentiates them; set by the backend
        self.precision = "no"  # of the run, likewise: no, bf16 or fp16

    # -- set-up --------------------------------------------------------------------------------------------

    def setup_environment(self, device: Any, timeout: float) -> torch.device:
        """Meet the other ranks, the first time; the device of this one."""
        return resolve_device(device)

    def prepare(self, task: Any, device: torch.device) -> None:
        """Put the task's modules on the device, and wrap or divide them. The optimizer is made afterwards."""
        self.task = task
        for module in modules_of(task).values():
            module.to(device)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Take notice of the optimizer; the one to use from now on."""
        return optimizer

    @property
    def gradient_divide_factor(self) -> int:
        """By how many ranks gradients were divided when they were added up."""
        return 1

    @property
    def random_stream(self) -> int:
        """Ranks of one number draw the same random numbers: those that compute the same layers on the same data."""
        return self.process_group.dp_rank

    def count_parameters(self, parameters: Iterable[Tensor]) -> int:
        """Elements of the parameters of this rank, and of those that only others have."""
        return sum(p.numel() for p in parameters)

    def describe(self) -> str:
        """The strategy in a few words, for the log."""
        return self.name

    # -- a step --------------------------------------------------------------------------------------------

    def train_step(self) -> Callable[[Any], Any] | None:
        """The task's `train_step`, called in a way that lets ranks exchange gradients. None: as it is."""
        return None

    def no_sync(self) -> AbstractContextManager[Any]:
        """The context of a micro-batch that is not the last of its step: ranks keep their gradients to themselves."""
        return nullcontext()

    def piggyback_stats(self, loss: Any, values: Tensor) -> Any:
        """Tell the other ranks a few numbers of this step along with the gradients; the loss to differentiate.

        The loss is None where gradients were computed already.
        """
        return loss

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """Compute gradients."""
        (loss if scaler is None else scaler.scale(loss)).backward()

    def reduced_stats(self, scaler: torch.amp.GradScaler | None) -> Tensor | None:
        """The sums over ranks of what was sent with the step's last micro-batch. None: there is nobody else."""
        return None

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm of all gradients, those on other ranks included."""
        return gradients.total_norm(grads, uniform)

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient of a parameter, for somebody who looks at it. Every rank must take part."""
        return parameter.grad

    def sync_found_inf(self, found: Tensor) -> None:
        """Make the flag of fp16's loss scaling that of all ranks, in place."""

    # -- evaluation ----------------------------------------------------------------------------------------

    def infer(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Call a function of the task, such as `eval_step`, without gradients."""
        return function(batch)

    # -- state ---------------------------------------------------------------------------------------------

    def model_state(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The weights as this rank writes them; `plain` is how they are taken where nothing is divided."""
        return plain()

    def load_model_state(self, state: Any, plain: Callable[[Any], Any]) -> None:
        """Take weights back: whole ones, or a `ShardedState`."""
        plain(unsharded(state))

    def check_model_state(self, state: Any, plain: Callable[[], dict[str, Any]]) -> None:
        """Raise if weights do not fit, before anything is changed."""
        check_fits(plain(), unsharded(state), "model")

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state as this rank writes it."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Take it back. A copy: torch keeps the tensors it is given and goes on to change them."""
        optimizer.load_state_dict(cloned(unsharded_optimizer_state(unsharded(state))))

    def check_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Raise if it does not fit."""
        check_groups(optimizer, unsharded_optimizer_state(unsharded(state)))

    def copy_model(self) -> nn.Module:
        """A second model with the same weights, at least in fp32; for averages of weights."""
        return upcast_to_fp32(copy.deepcopy(self.task.model))

    def unsharded_model(self) -> nn.Module:
        """The model with all of its weights on this rank, to be exported. Every rank must take part."""
        return self.task.model


def upcast_to_fp32(model: nn.Module) -> nn.Module:
    """The same model, with parameters of 16 bits made fp32."""
    for p in model.parameters():
        if p.dtype in (torch.float16, torch.bfloat16):
            p.data = p.data.float()
    return model


def unsharded(state: Any) -> Any:
    """A state that was written in parts, put together; any other as it is."""
    return state.unsharded() if isinstance(state, ShardedState) else state


def check_groups(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Raise if an optimizer's state has other groups of parameters."""
    here = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if here != saved:
        raise DataError(
            f"The checkpoint's optimizer does not fit: it has groups of {saved} tensors, the one here of {here}. "
            "Nothing was loaded. To change the optimizer on purpose, name the components to load without it."
        )

"""The interface of a strategy: how several processes train one model. The base class trains in a single process.

The backend calls a strategy in this order: `setup_environment` (join the process group, pick the device), `prepare`
(wrap or shard the task's modules), `prepare_optimizer`; then in every step `train_step`, `no_sync`, `piggyback_stats`,
`backward`, `reduced_stats`, `total_norm`; and the state methods to save and resume. The task's attribute `model`
remains the plain model: wrappers such as DDP live in the strategy, so nobody has to unwrap anything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.backends.torch import gradients
from trainformer.backends.torch.optimizers import modules_of, named_parameters
from trainformer.backends.torch.placement import resolve_device
from trainformer.backends.torch.state import check_fits, cloned
from trainformer.core.errors import BadArgument, DataError
from trainformer.core.types import SharingPattern
from trainformer.distributed.optimizer_state import unsharded_optimizer_state
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.sharded_state import ShardedState


class Strategy:
    """One process, one device. Subclasses override what they do differently."""

    name = "single"
    #: Which ranks write the weights and the optimizer state (see `StateComponent`).
    sharing = SharingPattern.GLOBAL
    #: Whether each rank holds and writes its own shard of them (checkpoint format "sharded").
    shards_state = False

    def __init__(self) -> None:
        self.process_group = TorchProcessGroup()
        self.task: Any = None
        #: By id of an optimizer: saves and loads its state on all ranks, if one rank holds a part of it only; see
        #: `NamedParameters`.
        self.optimizer_states: dict[int, Any] = {}
        self.reference = 1.0  # each rank divides loss sums by this before the backward pass; set by the backend
        self.precision = "no"  # no, bf16, fp16 or fp8; set by the backend

    # -- set-up --------------------------------------------------------------------------------------------

    def setup_environment(self, device: Any, timeout: float) -> torch.device:
        """Join the process group, once. Returns the device of this rank."""
        return resolve_device(device)

    def prepare(self, task: Any, device: torch.device) -> None:
        """Move the task's modules to the device and wrap or shard them. Runs before the optimizer is created."""
        self.task = task
        for module in modules_of(task).values():
            module.to(device)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Check or wrap the optimizer. Returns the one to use from now on."""
        return optimizer

    @property
    def gradient_divide_factor(self) -> int:
        """Number of ranks that gradients are averaged over by the backward pass."""
        return 1

    @property
    def random_stream(self) -> int:
        """Ranks with the same number draw the same random numbers: those that compute the same layers and samples."""
        return self.process_group.dp_rank

    def count_parameters(self, parameters: Iterable[Tensor]) -> int:
        """Number of parameter elements over all ranks, counting each once."""
        return sum(p.numel() for p in parameters)

    def describe(self) -> str:
        """A short description for the log."""
        return self.name

    # -- a step --------------------------------------------------------------------------------------------

    def use_several_optimizers(self) -> None:
        """Prepare for a task that updates several optimizers per step, each with a part of the parameters.

        Called before `prepare`. Such a run calls `wrapped` and `backward_into`, and `reduce_gradients` before each
        update, instead of `train_step` and `backward`. Strategies that cannot do that raise.
        """
        if type(self) is not Strategy:
            raise BadArgument(
                f"Expected strategy to be 'single', 'ddp' or 'fsdp' for a task with several optimizers, received "
                f"{self.name!r}."
            )

    def wrapped(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function of a batch inside the wrapper that gathers parameters."""
        return function

    def backward_into(self, loss: Tensor, scaler: torch.amp.GradScaler | None, parameters: list[nn.Parameter]) -> None:
        """Compute the gradients of some parameters only."""
        (loss if scaler is None else scaler.scale(loss)).backward(inputs=parameters)

    def reduce_gradients(self, parameters: list[nn.Parameter], names: Mapping[int, str]) -> None:
        """Average gradients over ranks, if the backward pass has not done that."""

    def train_step(self) -> Callable[[Any], Any] | None:
        """The task's `train_step` inside the wrapper that reduces gradients; None to call the task directly."""
        return None

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context of every micro-batch but the last of a step (gradient accumulation): skip the gradient all-reduce."""
        return nullcontext()

    def piggyback_stats(self, loss: Any, stats: Tensor) -> Any:
        """Start to sum a few numbers of this step over ranks, if possible in the same all-reduce as the gradients.

        Called before the last backward pass of a step. Returns the loss to differentiate; `loss` is None if the
        gradients have been computed already.
        """
        return loss

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """Compute gradients."""
        (loss if scaler is None else scaler.scale(loss)).backward()

    def reduced_stats(self, scaler: torch.amp.GradScaler | None) -> Tensor | None:
        """The sums over ranks of what `piggyback_stats` was given; None with a single process."""
        return None

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm of all gradients, including those held by other ranks."""
        return gradients.total_norm(grads, uniform)

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient of a parameter for inspection. A collective: every rank must call it."""
        return parameter.grad

    def sync_found_inf(self, found_inf: Tensor) -> None:
        """Combine the overflow flag of fp16 loss scaling over ranks, in place."""

    # -- evaluation ----------------------------------------------------------------------------------------

    def infer(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Call a function of the task, such as `eval_step`, without gradients."""
        return function(batch)

    # -- state ---------------------------------------------------------------------------------------------

    def model_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The weights as this rank writes them; `state_dict` returns those of the plain model."""
        return state_dict()

    def load_model_state(self, state: Any, load: Callable[[Any], Any]) -> None:
        """Load weights: an ordinary state dict or a `ShardedState`."""
        load(unsharded(state))

    def check_model_state(self, state: Any, state_dict: Callable[[], dict[str, Any]]) -> None:
        """Raise if weights do not fit, before anything is changed."""
        check_fits(state_dict(), unsharded(state), "model")

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer state as this rank writes it."""
        states = self.optimizer_states.get(id(optimizer))
        return optimizer.state_dict() if states is None else states.state_of(optimizer)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Load a copy of an optimizer state: torch keeps the tensors it is given and updates them in place."""
        states = self.optimizer_states.get(id(optimizer))
        if states is None:
            optimizer.load_state_dict(cloned(unsharded_optimizer_state(state)))
        else:
            states.load(optimizer, state)

    def check_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Raise if an optimizer state does not fit."""
        states = self.optimizer_states.get(id(optimizer))
        if states is None:
            check_groups(optimizer.param_groups, state)
        else:
            states.check(state)

    def copy_model(self) -> nn.Module:
        """A second model with the same weights, in fp32 or wider; for weight averaging (EMA)."""
        return upcast_to_fp32(copy.deepcopy(self.task.model))

    def unsharded_model(self) -> nn.Module:
        """The model with all of its weights, for export. A collective: every rank must call it."""
        return self.task.model


class StepModule(nn.Module):
    """Everything a task trains, as one module whose forward pass calls a function: ``module(function, batch)``.

    DDP and FSDP wrap this module, so a task may call its model or parts of it in any way, and every parameter it trains
    is covered, including those of the loss.
    """

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name.replace(".", "_"): module for name, module in modules_of(task).items()})
        known = {id(p) for p in self.parts.parameters()}
        # Bare parameters of the task, such as a temperature.
        self.rest = nn.ParameterList([p for p in named_parameters(task).values() if id(p) not in known])

    def forward(self, function: Callable[[Any], Any], batch: Any) -> Any:
        return function(batch)


def upcast_to_fp32(model: nn.Module) -> nn.Module:
    """Convert 16-bit parameters to fp32, in place."""
    for p in model.parameters():
        if p.dtype in (torch.float16, torch.bfloat16):
            p.data = p.data.float()
    return model


def unsharded(state: Any) -> Any:
    """A `ShardedState` read in full; any other state as it is."""
    return state.unsharded() if isinstance(state, ShardedState) else state


def check_groups(groups: list[dict[str, Any]], state: Any) -> None:
    """Raise if an optimizer state has other parameter groups."""
    here = [len(group["params"]) for group in groups]
    saved = [len(group["params"]) for group in unsharded_optimizer_state(state)["param_groups"]]
    if here != saved:
        raise DataError(
            f"The checkpoint's optimizer does not fit: it has groups of {saved} tensors, the one here of {here}. "
            "Nothing was loaded. To change the optimizer on purpose, name the components to load without it."
        )

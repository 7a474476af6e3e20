"""`BaseTrainer`: the subclass-style way in. Thin: what its methods build is handed to a session."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim.lr_scheduler import LRScheduler

from trainformer.backends.torch import restore_random
from trainformer.backends.torch.placement import resolve_device
from trainformer.callbacks.compat.mini import BaseHook, unwrap
from trainformer.checkpointing.checkpointer import load_components
from trainformer.core.errors import BadArgument, DataError, NonFiniteError, expected
from trainformer.data.order import sample_key, seed_generators
from trainformer.engine import RunState
from trainformer.mini.adapter import checked_scheduler
from trainformer.mini.hooks.checkpointing import CheckpointingHook
from trainformer.mini.running import MiniRun, make_run
from trainformer.run.fit import fit
from trainformer.run.logging import console_messages
from trainformer.run.torch.preflight import CheckReport, check_run
from trainformer.utils.distributed import rank

#: What is built, in this order, by the method `build_<name>`. What one of them uses of another is built before it.
_PARTS = ("data_loader", "model", "optimizer", "lr_scheduler", "grad_scaler", "hooks")


class NonFiniteGradients(NonFiniteError, RuntimeError):
    """A loss or gradient was not finite, and no retry was left. The weights are those of the last good step."""


class BaseTrainer:
    """Trains what its subclass builds. Implement `build_data_loader`, `build_model`, `build_optimizer` and `forward`.

    >>> class Line(BaseTrainer):
    ...     def build_data_loader(self):
    ...         x = torch.linspace(-1, 1, 32)[:, None]
    ...         return [(x, 2 * x + 1)]
    ...     def build_model(self):
    ...         return nn.Linear(1, 1)
    ...     def build_optimizer(self):
    ...         return torch.optim.SGD(self.model.parameters(), lr=0.3)
    ...     def forward(self, input):
    ...         x, y = input
    ...         return nn.functional.mse_loss(self.model(x), y), {}
    >>> trainer = Line(max_steps=100, device="cpu")
    >>> trainer.train()
    >>> trainer.step, round(trainer.model.weight.item(), 2)
    (100, 2.0)
    """

    data_loader: Iterable[Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: LRScheduler | None
    grad_scaler: torch.amp.GradScaler
    hooks: list[Any]

    def __init__(
        self,
        max_steps: int,
        grad_clip: float | None = None,
        max_non_finite_grad_retries: int | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        workspace: str | os.PathLike[str] | None = None,
        device: torch.device | str | int = "cuda",
        no_sync_accumulate: bool = True,
        state_dict_options: StateDictOptions | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        if hasattr(type(self), "_run_step"):
            raise BadArgument(
                f"{type(self).__name__} overrides _run_step, but the steps of this library are those of its one loop. "
                "Put what belongs around a step into hooks, and what belongs into it into forward()."
            )
        self.max_steps = _whole("max_steps", max_steps, least=1)
        self.grad_clip = grad_clip
        self.max_non_finite_grad_retries = _optional("max_non_finite_grad_retries", max_non_finite_grad_retries, 0)
        self.mixed_precision = mixed_precision
        self.gradient_accumulation_steps = _optional("gradient_accumulation_steps", gradient_accumulation_steps, 1) or 1
        self.workspace = None if workspace is None else Path(workspace)
        self.device = _device(device)
        self.no_sync_accumulate = no_sync_accumulate
        self.state_dict_options = state_dict_options
        self.logger = logger or logging.getLogger(f"trainformer.mini.{type(self).__name__}")
        self.step_info: dict[str, Any] = {}
        self._run: MiniRun | None = None
        self._data_seed = -1
        self._in_step = False
        self._restored = False
        self._random: dict[str, Any] | None = None
        self._under_way: list[str] = []
        if mixed_precision not in (None, "fp16", "bf16"):
            raise BadArgument(expected("mixed_precision to be 'fp16', 'bf16' or None", mixed_precision))
        if grad_clip is not None and (isinstance(grad_clip, bool) or not _is_positive(grad_clip)):
            raise BadArgument(expected("grad_clip to be a positive number or None", grad_clip))

    # -- what a subclass says ------------------------------------------------------------------------------

    def build_data_loader(self) -> Iterable[Any]:
        """Return an iterable of batches. It begins anew when it has ended before `max_steps`."""
        raise NotImplementedError(self._demand("build_data_loader(self)", "an iterable of batches"))

    def build_model(self) -> nn.Module:
        """Return the model, placed and wrapped as you want it."""
        raise NotImplementedError(self._demand("build_model(self)", "the model"))

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of ``self.model.parameters()``."""
        raise NotImplementedError(self._demand("build_optimizer(self)", "the optimizer"))

    def forward(self, input: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """The loss of a batch (None: learn nothing from it) and a nested dict of numbers to record."""
        raise NotImplementedError(self._demand("forward(self, input)", "(loss, records)"))

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Return a scheduler, which is stepped once per optimizer step."""
        return None

    def build_grad_scaler(self) -> torch.amp.GradScaler:
        """Return the scaler of the loss; it is at work if it is enabled."""
        return torch.amp.GradScaler(self.device.type, enabled=self.mixed_precision == "fp16")

    def build_hooks(self) -> list[Any]:
        """Return hooks, in the order in which they run; native and HuggingFace callbacks may be among them."""
        return []

    def log(self, records: dict[str, Any], dry_run: bool = False) -> None:
        """Log metrics: tell the hooks. With `dry_run` nothing is written, as on ranks other than the first."""
        for hook in self.hooks:
            if isinstance(hook, BaseHook):
                hook.on_log(self, records, dry_run or rank() > 0)

    def log_images(self, records: dict[str, Any], dry_run: bool = False) -> None:
        """Log images (PIL images, arrays or tensors) by name: tell the hooks."""
        for hook in self.hooks:
            if isinstance(hook, BaseHook):
                hook.on_log_images(self, records, dry_run or rank() > 0)

    # -- doing ---------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train up to `max_steps`, from wherever the state is. Called again after raising `max_steps`, it goes on."""
        with console_messages(Console(), enabled=rank() == 0), _speaking_mini():
            self._build()
            run = self._built_run()
            run.settings.max_steps = _whole("max_steps", self.max_steps, least=1)
            if not self._restored:
                self._restored = True
                done = False  # the newest of all files is taken, whichever hook wrote it
                for hook in sorted(self._checkpointing(), key=lambda hook: -hook.newest_step(self)):
                    done |= hook.restore(self, wanted=not done)
            if self._random is not None:  # of the state that was loaded; much may have been drawn since
                restore_random(self._random)
                self._random = None
            try:
                fit(run)
            finally:
                self._in_step = False

    def check(self, raise_on_failure: bool = True) -> CheckReport:
        """See in seconds whether this run will work; model, optimizer, random numbers and position stay as they are."""
        if isinstance(self.data_loader, Iterator):
            do = "Return a DataLoader or a list, which begin anew."
            raise BadArgument(expected("data that can be looked at before they are trained on", "a generator", do))
        with _speaking_mini():
            self._build()
            return check_run(self._built_run(), raise_on_failure)

    def _build(self) -> None:
        """Build everything that is not built yet."""
        if self._run is not None:
            return
        for name in _PARTS:
            getattr(self, name)
        self._run = make_run(self)
        self._run.connect()

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is not there yet: a part is built when it is first used, and is a plain attribute then.
        if name not in _PARTS or "_under_way" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        under_way = self._under_way
        if name in under_way:
            around = " -> ".join(f"build_{part}()" for part in [*under_way[under_way.index(name) :], name])
            raise BadArgument(f"Expected self.{name} to be used after it was built, received {around}.")
        under_way.append(name)
        if self._data_seed < 0:  # the order of the data is seeded as the program is before anything is built
            self._data_seed = torch.initial_seed() % 2**32
        try:
            built = _CHECKS[name](getattr(self, f"build_{name}")())
        finally:
            under_way.remove(name)
        setattr(self, name, built)
        return built

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole state of the run: model, optimizer, schedule, scaler, position, random numbers, hooks.

        Tensors and plain values only, so that `torch.load` reads it back as it is. As everywhere in torch, the tensors
        are those at work, not copies.
        """
        self._build()
        return {c.key: c.stateful.state_dict() for c in self._built_run().components()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state: of `state_dict()`, or of a checkpoint's file."""
        states = state_dict.get("components", state_dict)
        if not isinstance(states, Mapping) or "run" not in states:
            do = "Weights alone go into trainer.unwrapped_model.load_state_dict()."
            raise DataError(expected("the state of a run, as state_dict() gives it", sorted(map(str, state_dict)), do))
        self._build()
        run = self._built_run()
        load_components(run.components(), dict(states))
        run.state.stopped = []  # loaded on purpose, to go on
        self._random = states.get("rng")
        if rank() > 0:
            # The file holds the random numbers of the first rank. The others draw their own.
            seed_generators(sample_key(self._data_seed, self.step, rank()))
            self._random = None

    def _take_seed(self, seed: int) -> None:
        self._data_seed = seed
        source: Any = self._built_run().train_source
        source.seed = seed

    # -- looking -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The current step: 0 before training, 1 in the first `forward()`, and after a step its number."""
        return 0 if self._run is None else self._run.state.step + self._in_step

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model inside `torch.compile`, DDP, FSDP and averages."""
        return unwrap(model)

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model being trained, without wrappers."""
        return unwrap(self.model)

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal is ending this process; the run goes on in another one."""
        return self._run is not None and self._run.control.ending_signal is not None

    def stop(self, reason: str = "the trainer was asked to") -> None:
        """End training after the current step."""
        self._built_run().stop(reason)

    @property
    def _run_state(self) -> RunState:
        return self._built_run().state

    def _built_run(self) -> MiniRun:
        assert self._run is not None
        return self._run

    def _checkpointing(self) -> list[CheckpointingHook]:
        return [hook for hook in self.hooks if isinstance(hook, CheckpointingHook)]

    def _demand(self, method: str, what: str) -> str:
        return f"Expected {type(self).__name__} to implement {method}, received none. It returns {what}."


# -- checks ------------------------------------------------------------------------------------------------


def _of_kind(method: str, kind: type) -> Callable[[Any], Any]:
    def check(built: Any) -> Any:
        if not isinstance(built, kind):
            raise BadArgument(expected(f"{method}() to return a {kind.__name__}", type(built).__name__))
        return built

    return check


def _checked_hooks(hooks: Any) -> list[Any]:
    if not isinstance(hooks, (list, tuple)):
        do = "Return [] for none."
        raise BadArgument(expected("build_hooks() to return a list of hooks", type(hooks).__name__, do))
    return list(hooks)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "data_loader": lambda loader: loader,
    "model": _of_kind("build_model", nn.Module),
    "optimizer": _of_kind("build_optimizer", torch.optim.Optimizer),
    "lr_scheduler": checked_scheduler,
    "grad_scaler": lambda scaler: scaler,
    "hooks": _checked_hooks,
}


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadArgument(expected(f"{name} to be a whole number of at least {least}", value))
    return value


def _optional(name: str, value: Any, least: int) -> int | None:
    return None if value is None else _whole(name, value, least)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _device(device: Any) -> torch.device:
    try:
        return resolve_device(device)
    except BadArgument as error:
        do = "Pass device='cpu', or device='auto' for the best there is."
        raise BadArgument(expected("device to be one this machine has", str(device), do)) from error.__cause__


@contextmanager
def _speaking_mini() -> Iterator[None]:
    """Errors about non-finite numbers in the words of this way in, and as the `RuntimeError` its users expect."""
    try:
        yield
    except NonFiniteError as error:
        what = str(error).partition(" Lower lr,")[0]
        advice = (
            "Lower the learning rate, pass grad_clip, look at the data of that step, use mixed_precision='bf16', or "
            "pass max_non_finite_grad_retries to try such steps again."
        )
        raise NonFiniteGradients(f"{what} {advice}") from error

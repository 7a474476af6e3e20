"""`BaseTrainer`: the subclass-style entry point. What its `build_*` methods return is passed to a `MiniRun`."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from trainformer.core.errors import BadArgument, NonFiniteError, expected
from trainformer.core.hooks import unknown_hooks
from trainformer.data.order import sample_key, seed_generators
from trainformer.engine import RunState
from trainformer.mini.adapter import checked_scheduler
from trainformer.mini.checkpointing import CheckpointingHook
from trainformer.mini.run import MiniRun, make_run
from trainformer.mini.state import collect_state, load_state
from trainformer.mini.utils import broadcast, check_integer
from trainformer.run.check_report import CheckReport
from trainformer.run.fit import fit
from trainformer.run.logging import console_messages
from trainformer.run.torch.preflight import check_run
from trainformer.utils.distributed import rank
from trainformer.utils.files import check_local
from trainformer.utils.locks import FolderInUse, FolderLock

#: Built in this order by `build_<name>()`, or earlier if another part uses it.
_PARTS = ("data_loader", "model", "optimizer", "lr_scheduler", "grad_scaler", "hooks")
#: Methods of the loop of trainloop.
_NOT_CALLED = (
    *("_run_step", "_before_train", "_before_step", "_before_optimizer_step", "_after_step", "_after_train"),
)
_DTYPES = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}
_TYPES: dict[str, type] = {"model": nn.Module, "optimizer": torch.optim.Optimizer}


class NonFiniteGradients(NonFiniteError, RuntimeError):
    """A loss or gradient was not finite after all retries. The weights are those of the last good step."""


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
        device: torch.device | str | int | None = None,
        no_sync_accumulate: bool = True,
        state_dict_options: StateDictOptions | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        for name in _NOT_CALLED:
            if hasattr(type(self), name):
                raise BadArgument(
                    f"{type(self).__name__} overrides {name}, which the training loop of this library does not call. "
                    "Move code around a step into hooks, and code inside a step into forward()."
                )
        for name in unknown_hooks(self, dir(BaseTrainer), prefix="build_"):
            close = difflib.get_close_matches(name, dir(BaseTrainer), n=1, cutoff=0.85)  # others are the user's own
            if close:
                message = "%s.%s is not called by the trainer. Did you mean %r?"
                logging.getLogger("trainformer").warning(message, type(self).__name__, name, close[0])
        self.max_steps = check_integer("max_steps", max_steps, minimum=1)
        self.grad_clip = grad_clip
        retries, accumulation = max_non_finite_grad_retries, gradient_accumulation_steps
        self.max_non_finite_grad_retries = _optional_integer("max_non_finite_grad_retries", retries, 0)
        if mixed_precision not in _DTYPES:
            raise BadArgument(expected("mixed_precision to be 'fp16', 'bf16' or None", mixed_precision))
        self.mixed_precision = _DTYPES[mixed_precision]
        self.gradient_accumulation_steps = _optional_integer("gradient_accumulation_steps", accumulation, 1) or 1
        check_local("workspace", workspace)
        self.workspace = None if workspace is None else Path(workspace).expanduser()
        self.device = _device(device)
        self.no_sync_accumulate = no_sync_accumulate
        self.state_dict_options = state_dict_options
        self.logger = logger or logging.getLogger(f"trainformer.mini.{type(self).__name__}")
        self.step_info: dict[str, Any] = {}
        self._run: MiniRun | None = None
        self._data_seed = -1
        self._in_step = False
        self._restored = False
        self._random_state: dict[str, Any] | None = None
        self._building: list[str] = []
        self.state_in_transfer: dict[str, Any] | None = None  # while hooks add to a state, or load theirs
        is_number = isinstance(grad_clip, (int, float)) and not isinstance(grad_clip, bool)
        if grad_clip is not None and not (is_number and grad_clip > 0):
            raise BadArgument(expected("grad_clip to be a positive number or None", grad_clip))

    # -- methods to implement or override ------------------------------------------------------------------------------

    def build_data_loader(self) -> Iterable[Any]:
        """Return an iterable of batches. It is iterated again if it ends before `max_steps`."""
        raise NotImplementedError(self._missing_method("build_data_loader(self)", "an iterable of batches"))

    def build_model(self) -> nn.Module:
        """Return the model, on its device and wrapped as needed."""
        raise NotImplementedError(self._missing_method("build_model(self)", "the model"))

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer for ``self.model.parameters()``."""
        raise NotImplementedError(self._missing_method("build_optimizer(self)", "the optimizer"))

    def forward(self, input: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the loss of a batch (None: skip it) and a nested dict of numbers to record."""
        raise NotImplementedError(self._missing_method("forward(self, input)", "(loss, records)"))

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Return a scheduler; it is stepped once per optimizer step."""
        return None

    def build_grad_scaler(self) -> torch.amp.GradScaler:
        """Return the gradient scaler; it is used if it is enabled."""
        return torch.amp.GradScaler(self.device.type, enabled=self.mixed_precision == torch.float16)

    def build_hooks(self) -> list[Any]:
        """Return hooks in the order in which they run; native and HuggingFace callbacks are allowed too."""
        return []

    def log(self, records: dict[str, Any], dry_run: bool = False) -> None:
        """Pass metrics to the hooks. With `dry_run`, as on all ranks but rank 0, nothing is written."""
        for hook in self.hooks:
            if isinstance(hook, BaseHook):
                hook.on_log(self, records, dry_run=dry_run or rank() > 0)

    def log_images(self, records: dict[str, Any], dry_run: bool = False) -> None:
        """Pass images (PIL images, arrays or tensors) to the hooks, by name."""
        for hook in self.hooks:
            if isinstance(hook, BaseHook):
                hook.on_log_images(self, records, dry_run=dry_run or rank() > 0)

    # -- training ---------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train from the current state to `max_steps`. Raise `max_steps` and call it again to continue."""
        with console_messages(Console(), enabled=rank() == 0), _mini_errors(), ExitStack() as stack:
            self._build()
            stack.enter_context(self._locked())
            run = self._built_run()
            run.settings.max_steps = check_integer("max_steps", self.max_steps, minimum=1)
            if not self._restored:
                self._restored = True
                done = False  # load the newest file, whichever hook wrote it
                for hook in sorted(self._checkpointing(), key=lambda hook: -hook.newest_step(self)):
                    done |= hook.restore(self, wanted=not done)
            if self._random_state is not None:  # of the loaded state; generators may have been used since
                restore_random(self._random_state)
                self._random_state = None
            try:
                fit(run)
            finally:
                self._in_step = False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """No other process writes to the folders of the checkpoints; if one does, the error is raised on all ranks."""
        problem = None
        with ExitStack() as stack:
            try:
                for folder in {hook.folder(self) for hook in self._checkpointing()} if rank() == 0 else ():
                    stack.enter_context(FolderLock(folder, "saving checkpoints").held())
            except FolderInUse as error:
                problem = str(error)
            problem = broadcast(problem)
            if problem is not None:
                raise FolderInUse(problem)
            yield

    def check(self, raise_on_failure: bool = True) -> CheckReport:
        """Validate the run in seconds. Model, optimizer, RNG state and position do not change."""
        if isinstance(self.data_loader, Iterator):
            do = "Return a DataLoader or a list."
            raise BadArgument(expected("data that can be iterated more than once", "a generator", do))
        with _mini_errors():
            self._build()
            return check_run(self._built_run(), raise_on_failure)

    def _build(self) -> None:
        if self._run is not None:
            return
        for name in _PARTS:
            getattr(self, name)
        self._run = make_run(self)
        self._run.connect()

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes: a part is built on first use and then set as a plain attribute.
        if name not in _PARTS or "_building" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        building = self._building
        if name in building:
            cycle = " -> ".join(f"build_{part}()" for part in [*building[building.index(name) :], name])
            raise BadArgument(f"Expected self.{name} to be used after it was built, received {cycle}.")
        building.append(name)
        if self._data_seed < 0:  # the data order uses the seed of the program before anything is built
            self._data_seed = torch.initial_seed() % 2**32
        try:
            built = getattr(self, f"build_{name}")()
        finally:
            building.remove(name)
        if name == "hooks":
            if not isinstance(built, (list, tuple)):
                do = "Return [] for none."
                raise BadArgument(expected("build_hooks() to return a list of hooks", type(built).__name__, do))
            built = list(built)
        elif name == "lr_scheduler":
            built = checked_scheduler(built)
        elif not isinstance(built, kind := _TYPES.get(name, object)):
            raise BadArgument(expected(f"build_{name}() to return a {kind.__name__}", type(built).__name__))
        setattr(self, name, built)
        return built

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole state of the run: model, optimizer, scheduler, scaler, position, RNG state, hooks.

        Only tensors and plain values, so that `torch.load(weights_only=True)` reads it. As usual in torch, the tensors
        are not copied. What hooks add is at the top level as well as in their own component.
        """
        self._build()
        return collect_state(self, self._built_run())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict()` or from a checkpoint file, also one of trainloop."""
        self._build()
        run = self._built_run()
        states = load_state(self, run, state_dict)
        run.state.stopped = []  # loaded on purpose, to continue
        self._random_state = states.get("rng")
        if rank() > 0:
            # The file contains the RNG state of rank 0. The other ranks seed their own.
            seed_generators(sample_key(self._data_seed, self.step, rank()))
            self._random_state = None

    def _restore_data_seed(self, seed: int) -> None:
        self._data_seed = seed
        source: Any = self._built_run().train_source
        source.seed = seed

    # -- attributes -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The current step: 0 before training, 1 during the first `forward()`; after a step, its number."""
        return 0 if self._run is None else self._run.state.step + self._in_step

    @staticmethod
    def unwrap(module: nn.Module) -> nn.Module:
        """The model inside `torch.compile`, DDP, FSDP and `AveragedModel`."""
        return unwrap(module)

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model being trained, without wrappers."""
        return unwrap(self.model)

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal is ending this process; the run is to be resumed in another one."""
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

    def _missing_method(self, method: str, what: str) -> str:
        return f"Expected {type(self).__name__} to implement {method}, received none. It returns {what}."


def _optional_integer(name: str, value: Any, minimum: int) -> int | None:
    return None if value is None else check_integer(name, value, minimum)


def _device(device: Any) -> torch.device:
    if device is None:
        return torch.device("cuda") if torch.cuda.is_available() else torch.get_default_device()
    try:
        return resolve_device(device)
    except BadArgument as error:
        do = "Pass device='cpu', or device='auto' to choose the best one."
        raise BadArgument(expected("device to be available on this machine", str(device), do)) from error.__cause__


@contextmanager
def _mini_errors() -> Iterator[None]:
    """Raise non-finite errors as a `RuntimeError`, with advice in terms of the arguments of `BaseTrainer`."""
    try:
        yield
    except NonFiniteError as error:
        what = str(error).partition(" Lower lr,")[0]
        advice = (
            "Lower the learning rate, pass grad_clip, inspect the data of that step, use mixed_precision='bf16', or "
            "pass max_non_finite_grad_retries to retry such steps."
        )
        raise NonFiniteGradients(f"{what} {advice}") from error

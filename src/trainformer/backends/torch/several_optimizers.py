"""Several named optimizers: the step of a task that has `configure_optimizers` (GANs, actor-critic).

A step consists of one update per optimizer that is due, in order, each over the same window of micro-batches: losses,
backward passes into the parameters of that optimizer only, scaling, clipping, the non-finite check and the update are
those of `TorchBackend`. A loss comes from a function per optimizer, or from a generator `train_step` that yields
``(name, loss)`` and continues after that update. `manual.py` owns steps that tasks take by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainformer.backends.torch.active_optimizer import ActiveOptimizer
from trainformer.backends.torch.backend import TorchBackend
from trainformer.backends.torch.idle_optimizers import IdleOptimizers
from trainformer.backends.torch.optimizers import make_optimizer, params_of
from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.types import DeviceBatch, Entry, OptimizerConfig, StepResult

if TYPE_CHECKING:
    from trainformer.distributed import Strategy
    from trainformer.run.torch.settings import RunSettings


class NamedOptimizer(ActiveOptimizer):
    """One of several optimizers; `updates` counts how often it was stepped."""

    def __init__(
        self,
        name: str,
        config: OptimizerConfig,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        settings: RunSettings,
    ) -> None:
        super().__init__(
            optimizer,
            parameters,
            settings,
            scheduler=settings.scheduler if config.scheduler is None else config.scheduler,
            gradient_clip=settings.gradient_clip if config.gradient_clip is None else config.gradient_clip,
        )
        self.name = name
        self.config = config
        self.updates = 0
        self.used_lr: float | None = None  # in the last update; a scheduler may have changed it since

    def is_due(self, step: int | None) -> bool:
        """Whether it is updated in the step after `step` steps; always in a trial step (None)."""
        return step is None or (step + 1) % self.config.every == 0

    def schedule_for(self, total_steps: int | None) -> None:
        """Build the schedule for the updates of this optimizer in this many steps."""
        per_due_step = self.config.repeat * self.config.updates_per_step
        super().schedule_for(None if total_steps is None else total_steps // self.config.every * per_due_step)


class SeveralOptimizers(TorchBackend):
    """The torch backend for a task with several named optimizers."""

    optimizers: dict[str, NamedOptimizer]  # type: ignore[assignment]
    active: NamedOptimizer
    who_updates = "train_step does not yield ({name!r}, loss)"

    def __init__(self, task: Any, settings: RunSettings, strategy: Strategy, reduces_rows: bool = True) -> None:
        strategy.use_several_optimizers()
        super().__init__(task, settings, strategy, reduces_rows)
        self.guard.counts_updates = False
        self.primary = next(o for o in self.optimizers.values() if o.config.every == 1)
        self._yields = inspect.isgeneratorfunction(getattr(task, "train_step", None))
        self._functions = self._find_functions()
        self._sections: list[Generator[Any, None, None]] = []
        self._outputs: Iterator[Any] = iter(())
        self._result: StepResult | None = None
        self.idle = IdleOptimizers(self)
        if self._yields:
            self.splitter.policy = "raise"  # a generator cannot be run again in smaller pieces
            if self.guard.retries:
                do = f"Write one method per optimizer ({', '.join(f'{n}_step' for n in self.optimizers)}) instead."
                raise BadArgument(expected("nonfinite='raise' or 'skip' with a train_step that yields", "retry", do))

    # -- set-up --------------------------------------------------------------------------------------------

    def _make_optimizers(self) -> dict[str, NamedOptimizer]:  # type: ignore[override]
        settings = self.settings
        if isinstance(settings.optimizer, torch.optim.Optimizer) or settings.layer_decay is not None:
            what = "one optimizer" if settings.layer_decay is None else "layer_decay"
            who = f"{type(self.task).__name__}.configure_optimizers, which names several"
            raise BadArgument(f"Expected no {what} from the trainer with {who}. Configure each there.")
        made = {}
        for name, config in checked_configs(self.task).items():
            groups = _groups_of(name, config)
            self._check_known(name, groups)
            optimizer = config.optimizer
            if isinstance(optimizer, torch.optim.Optimizer):
                _check_instance(name, config, groups)
            else:
                lr = settings.lr if config.lr is None else config.lr
                decay = settings.weight_decay if config.weight_decay is None else config.weight_decay
                spec = settings.optimizer if optimizer is None else optimizer
                optimizer = make_optimizer(spec, self.task, lr, decay, params=groups, names=self.names)
            optimizer = self.strategy.prepare_optimizer(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            made[name] = NamedOptimizer(name, config, optimizer, parameters, settings)
        self._check_complete(made)
        return made

    def _check_known(self, name: str, groups: Sequence[Mapping[str, Any]]) -> None:
        unknown = [tuple(p.shape) for group in groups for p in group["params"] if id(p) not in self.names]
        if unknown:
            what = f"the optimizer {name!r} to train parameters of modules that the task holds as attributes"
            do = "Assign the module to the task (self.critic = ...), and leave out frozen parameters."
            raise BadArgument(expected(what, f"{len(unknown)} others, of shapes {unknown[:4]}", do))

    def _check_complete(self, made: Mapping[str, NamedOptimizer]) -> None:
        optimized = {id(p) for optimizer in made.values() for p in optimizer.parameters}
        missing = [self.names[id(p)] for p in self.parameters if id(p) not in optimized]
        if missing:
            some = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
            raise BadArgument(
                f"Expected every trainable parameter in one of the optimizers {', '.join(made)}, received none for "
                f"{some}: they would never be trained. Add them, or set requires_grad=False."
            )

    def _find_functions(self) -> dict[str, Callable[[Any], Any]]:
        """The loss function of each optimizer; none if `train_step` yields losses."""
        functions: dict[str, Callable[[Any], Any]] = {}
        for name, optimizer in self.optimizers.items():
            given, method = optimizer.config.step, getattr(self.task, f"{name}_step", None)
            if method is None and len(self.optimizers) == 1:
                method = getattr(self.task, "train_step", None)
            if self._yields:
                if given is not None or optimizer.config.repeat != 1:
                    what = f"no `step` and no `repeat` for {name!r} with a train_step that yields losses"
                    raise BadArgument(expected(what, optimizer.config, "Yield its loss as often as it should step."))
                continue
            if optimizer.config.updates_per_step != 1:
                what = f"updates_per_step=1 for {name!r}, whose losses train_step does not yield"
                raise BadArgument(expected(what, optimizer.config.updates_per_step, "Pass repeat instead."))
            function = given or method
            if not callable(function):
                do = f"Define {name}_step(self, batch), or make train_step yield ({name!r}, loss)."
                what = f"{type(self.task).__name__} to have a loss function for the optimizer {name!r}"
                raise BadArgument(expected(what, "none", do))
            functions[name] = self.strategy.wrapped(function)
        return functions

    def check_due(self, total_steps: int | None) -> None:
        for problem in self.idle.never_due(total_steps):
            raise BadArgument(problem)

    def warn_of_idle(self, steps: int, is_end: bool) -> None:
        self.idle.warn(steps, is_end)

    # -- the step ------------------------------------------------------------------------------------------

    @property
    def may_repeat(self) -> bool:
        """The micro-batches of a step are kept: every optimizer uses them."""
        return True

    def updates(self, step: int | None, window: Iterable[DeviceBatch]) -> Iterator[NamedOptimizer]:
        """The optimizers that are due in this step, in order. None: a trial step, in which all are."""
        self._result = None
        if self._yields:
            due = False
            for optimizer in self._yielded(step, list(window)):
                due = True
                yield optimizer
            if not due:
                what = f"train_step to yield a loss of an optimizer that is due in every step ({self.primary.name})"
                raise BadArgument(expected(what, "none"))
        else:
            for optimizer in self.optimizers.values():
                for _ in range(optimizer.config.repeat if optimizer.is_due(step) else 0):
                    self.active = optimizer
                    self._shared_step = self._functions[optimizer.name]
                    yield optimizer
        self.guard.count_step()

    def _yielded(self, step: int | None, window: list[DeviceBatch]) -> Iterator[NamedOptimizer]:
        """Drive one generator per micro-batch, from yield to yield; each loss is used before the next is computed."""
        self._sections = [self.task.train_step(batch.data) for batch in window]
        self._shared_step = lambda data: next(self._outputs)
        while True:
            if self._statistics is not None:
                self._statistics.keep()
            first = self._advance(0, window)
            if first is None:
                break
            self.active, output = first
            rest = (self._advance_to(self.active, i, window) for i in range(1, len(window)))
            if not self.active.is_due(step):
                for _ in rest:
                    pass
                continue
            self._outputs = (self._computed(found) for found in chain((output,), rest))
            yield self.active
        for i in range(1, len(window)):
            late = self._advance(i, window)
            if late is not None:
                raise _uneven("no further loss", late[0].name)

    def _advance(self, i: int, window: Sequence[DeviceBatch]) -> tuple[NamedOptimizer, Any] | None:
        """Run `train_step` for a micro-batch up to its next yield: the optimizer and its loss; None at the end."""
        with self._forward(window[i].size):
            found = self.strategy.wrapped(lambda _: next(self._sections[i], None))(None)
        if found is None:
            return None
        if not isinstance(found, tuple) or len(found) != 2 or found[0] not in self.optimizers:
            received = found[0] if isinstance(found, tuple) and found else type(found).__name__
            what = f"train_step to yield (name, loss), with a name out of {', '.join(self.optimizers)}"
            raise BadArgument(expected(what, received, did_you_mean(str(received), self.optimizers)))
        return self.optimizers[found[0]], found[1]

    def _advance_to(self, optimizer: NamedOptimizer, i: int, window: Sequence[DeviceBatch]) -> Any:
        found = self._advance(i, window)
        if found is None or found[0] is not optimizer:
            raise _uneven(f"a loss for {optimizer.name!r}", "none" if found is None else found[0].name)
        return found[1]

    def _computed(self, output: Any) -> Any:
        """A yielded loss; a function is called now, so that it costs nothing when its optimizer is not due."""
        is_function = callable(output) and not isinstance(output, Tensor)
        return self.strategy.wrapped(lambda _: output())(None) if is_function else output

    def _backward(self, loss: Tensor) -> None:
        """Compute gradients of the active optimizer's parameters only."""
        self.strategy.backward_into(loss, self.precision.scaler, self.active.parameters)

    def finish(self) -> bool:
        self.strategy.reduce_gradients(self.active.parameters, self.names)
        return super().finish()

    def update(self, step: int) -> StepResult:
        """Update the active optimizer. The result holds the values of all updates of this step so far."""
        active, earlier = self.active, self._result
        result = super().update(active.updates)
        active.updates += 1
        active.used_lr = result.lr
        is_loss = active is self.primary
        entries = [] if earlier is None else earlier.entries
        entries += named_entries(result.entries, active.name, is_loss)
        self._result = (earlier or result)._replace(
            entries=entries,
            lr=self.learning_rates(),
            loss=result.loss if is_loss else None if earlier is None else earlier.loss,
        )
        return self._result

    def learning_rates(self) -> dict[str, float]:
        """Learning rates by their names in the log."""
        rates = {n: o.lr if o.used_lr is None else o.used_lr for n, o in self.optimizers.items()}
        return {"lr": rates[self.primary.name]} | {f"{name}/lr": lr for name, lr in rates.items()}

    @property
    def _is_first_update(self) -> bool:
        return self._result is None

    # -- state ---------------------------------------------------------------------------------------------

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if a state is of other optimizers."""
        saved = state.get("updates", {})
        if saved.keys() != self.optimizers.keys():
            raise DataError(
                f"The checkpoint's optimizers do not fit: it has {', '.join(saved) or 'a single one'}, the task "
                f"configures {', '.join(self.optimizers)}. Nothing was loaded."
            )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": {name: o.updates for name, o in self.optimizers.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.idle.forget_steps()
        for name, updates in state["updates"].items():
            self.optimizers[name].updates = updates


def checked_configs(task: Any) -> dict[str, OptimizerConfig]:
    """What `configure_optimizers` returned, with mistakes refused."""
    found = task.configure_optimizers()
    if isinstance(found, (OptimizerConfig, torch.optim.Optimizer)):
        found = {"main": found}
    elif isinstance(found, Mapping) and isinstance(found.get("optimizer"), torch.optim.Optimizer):  # as in Lightning
        optimizer, extra = found["optimizer"], sorted(map(str, set(found) - {"optimizer", "lr_scheduler"}))
        if extra:
            raise BadArgument(expected("'optimizer' and 'lr_scheduler' beside each other", ", ".join(extra)))
        groups = optimizer.param_groups
        found = {"main": OptimizerConfig(params=groups, optimizer=optimizer, scheduler=found.get("lr_scheduler"))}
    who = f"{type(task).__name__}.configure_optimizers"
    if not isinstance(found, Mapping) or not found:
        do = "For instance {'critic': OptimizerConfig(params=self.critic), 'generator': ...}."
        raise BadArgument(
            expected(f"{who} to return a mapping from names to OptimizerConfig", type(found).__name__, do)
        )
    configs = {}
    for name, config in found.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("loss", "lr", "grad_norm"):
            raise BadArgument(expected(f"names in {who} to be identifiers other than loss, lr and grad_norm", name))
        if isinstance(config, torch.optim.Optimizer):
            config = OptimizerConfig(params=config.param_groups, optimizer=config)
        if not isinstance(config, OptimizerConfig):
            what = f"{who} to return an OptimizerConfig or a torch optimizer for {name!r}"
            raise BadArgument(expected(what, type(config).__name__))
        for field in ("every", "repeat", "updates_per_step"):
            value = getattr(config, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadArgument(expected(f"{field} of the optimizer {name!r} to be an integer of at least 1", value))
        for field in ("lr", "weight_decay", "gradient_clip"):
            value = getattr(config, field)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
                raise BadArgument(expected(f"{field} of the optimizer {name!r} to be a number of at least 0", value))
        configs[name] = config
    if all(config.every > 1 for config in configs.values()):
        do = "A step in which nothing is updated would only skip data."
        raise BadArgument(expected(f"one optimizer of {who} with every=1", "none", do))
    return configs


def named_entries(entries: Iterable[Entry], name: str, is_loss: bool) -> list[Entry]:
    """Entries under the name of their optimizer; `is_loss`: its loss is also the loss of the step."""
    # Shares of the sources of a mixture belong to the step: they are the same for all optimizers.
    made = [e if e.name.startswith("share/") else e._replace(name=f"{name}/{e.name}") for e in entries]
    return made + [entry for entry in entries if is_loss and entry.name == "loss"]


def _check_instance(name: str, config: OptimizerConfig, groups: Sequence[Mapping[str, Any]]) -> None:
    """An optimizer that exists already has a learning rate and parameters of its own."""
    for field in ("lr", "weight_decay"):
        if getattr(config, field) is not None:
            do = "Set it in the optimizer."
            raise BadArgument(expected(f"no {field} beside an instance for the optimizer {name!r}", "one", do))
    own = {id(p) for group in config.optimizer.param_groups for p in group["params"] if p.requires_grad}
    if own != {id(p) for group in groups for p in group["params"]}:
        do = "Pass the optimizer itself instead of an OptimizerConfig, or the same parameters to both."
        raise BadArgument(expected(f"params of {name!r} to be those of its optimizer", "others", do))


def _groups_of(name: str, config: OptimizerConfig) -> list[dict[str, Any]]:
    groups = params_of(config.params)
    if groups is None:
        what = f"params of the optimizer {name!r} to be a module, parameters or param groups"
        raise BadArgument(expected(what, type(config.params).__name__))
    if not any(group["params"] for group in groups):
        what = f"params of the optimizer {name!r} to hold trainable parameters"
        raise BadArgument(expected(what, "none", "Is the module frozen, or was the iterator used before?"))
    return groups


def _uneven(what: str, received: str) -> BadArgument:
    do = "With gradient accumulation every micro-batch has to yield the same optimizers in the same order."
    return BadArgument(expected(f"train_step to yield {what} for every micro-batch of a step", received, do))

"""The torch backend: the training step, evaluation and state. Strategies handle several ranks.

One optimizer step is `accumulate` per micro-batch, `finish`, `update`, `end_step`; the loop calls them. With gradient
accumulation, gradients are sums divided once by the total weight of all micro-batches (the window), so that the size of
a micro-batch does not matter:

    each micro-batch:   backward(sum_i / reference)       reference: weight of the window's first micro-batch
    at the end:         gradients * (reference / total weight)

For a window of one micro-batch the factor is 1 and is left out; the step is then bitwise that of a hand-written loop
over the mean. With several ranks, the reference is a constant that all of them know, and the weight is summed over
ranks. Nothing in a step syncs with the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainformer.backends.torch import gradients, memory, quantize
from trainformer.backends.torch.accumulation import AccumulationWindow, MemorySplitter
from trainformer.backends.torch.active_optimizer import ActiveOptimizer
from trainformer.backends.torch.coverage import check_optimizer
from trainformer.backends.torch.eval_outputs import eval_result, metrics_by_name
from trainformer.backends.torch.logged_values import StepScope
from trainformer.backends.torch.modes import frozen_in_eval
from trainformer.backends.torch.nonfinite import NonFiniteGuard, RunningStatistics
from trainformer.backends.torch.optimizers import make_optimizer, modules_of, named_parameters
from trainformer.backends.torch.placement import Feeder, RequestFlag
from trainformer.backends.torch.scalars import DeviceScalars
from trainformer.backends.torch.schedules import Schedule
from trainformer.backends.torch.step_checks import StepChecks
from trainformer.backends.torch.step_window import announce_step
from trainformer.core.errors import BadArgument
from trainformer.core.types import DeviceBatch, Entry, EvalResult, HostBatch, Mean, StepResult
from trainformer.engine.metrics import weighted_means
from trainformer.utils.distributed import padding

logger = logging.getLogger("trainformer")

_ONE_UPDATE = (None,)
_OUT_OF_MEMORY = (
    "One rank ran out of memory; with several ranks a step cannot be repeated in smaller pieces. Raise "
    "accumulation_steps and lower batch_size, or use gradient_checkpointing=True or strategy='fsdp'."
)


if TYPE_CHECKING:
    from trainformer.distributed import Strategy
    from trainformer.run.torch.settings import RunSettings


class TorchBackend(DeviceScalars):
    """The torch side of a run. `reduces_rows`: whether the task reduces per-sample rows itself."""

    def __init__(self, task: Any, settings: RunSettings, strategy: Strategy, reduces_rows: bool = True) -> None:
        self.task = task
        self.settings = settings
        self.strategy = strategy
        self.device = self.strategy.setup_environment(settings.device, settings.rank_timeout)
        self.process_group = self.strategy.process_group
        self._is_single = self.process_group.is_single_process
        self.fp8 = quantize.fp8_recipe_of(settings.precision, settings.fp8_recipe)
        self.precision = memory.make_precision(settings.precision, self.device, fp8=self.fp8 is not None)
        if self.fp8 is not None:
            quantize.check_fp8_device(self.device)
        self.guard = NonFiniteGuard(settings.nonfinite, self.device)
        # A rank that runs out of memory cannot repeat its step alone: the others are waiting in the all-reduce.
        self.splitter = MemorySplitter(settings.oom if self._is_single else "raise")
        self.replaced = quantize.replace_layers(task.model, settings, self.fp8)
        self._place_model()
        self._frozen_in_eval = frozen_in_eval(task)
        named = named_parameters(task)
        self.names = {id(p): name for name, p in named.items()}
        self.parameters = list(named.values())
        self.optimizers = self._make_optimizers()
        self.active = next(iter(self.optimizers.values()))
        if self.precision.scaler is not None and any(p.dtype == torch.float16 for p in named.values()):
            raise BadArgument(
                "Expected parameters in fp32 for precision='fp16', whose scaled gradients need the range, received "
                "some in fp16. Load the model in fp32 or bf16, or pass precision='no'."
            )
        self.feeder = Feeder(self.device, settings.channels_last)
        self.checks = StepChecks(task, self.feeder)
        self._transforms: dict[bool, nn.Module | None] = {}
        self._forget = getattr(task, "on_step_skipped", None)
        no_sync = getattr(task, "no_sync", None)
        self._no_sync: Callable[[], AbstractContextManager[Any]] | None = (
            no_sync if self._is_single else self.strategy.no_sync
        )
        # The same on all ranks, and for a full batch the weight of each: no scaling is left to do then.
        self._reference = None if self._is_single else settings.batch_size / self.process_group.dp_world_size
        self.strategy.reference = self._reference or 1.0
        self._shared_step = self.strategy.train_step()
        self._request_flag = RequestFlag(self.device)
        self.before_clipping: Callable[[], None] | None = None  # sees complete gradients that are not clipped yet
        self.has_request: Callable[[], bool] = lambda: False  # whether this rank has a request for all ranks
        self._reduces_rows = reduces_rows
        # With "raise" the run ends anyway; saving a hundred small tensors in every step would cost time.
        keeps_running = self.guard.policy != "raise"
        self._statistics = RunningStatistics(modules_of(task).values()) if keeps_running else None
        self._window = AccumulationWindow(self._reference)
        self._logged: list[Entry] = []
        self._shared_loss: list[Entry] | None = None
        self.grad_norm: Tensor | None = None

    # -- set-up --------------------------------------------------------------------------------------------

    def _place_model(self) -> None:
        memory.prepare_model(self.task.model, self.settings)
        self.strategy.precision = self.precision.name
        self.strategy.prepare(self.task, self.device)

    def _make_optimizers(self) -> dict[str, ActiveOptimizer]:
        settings = self.settings
        given = settings.optimizer
        made = make_optimizer(given, self.task, settings.lr, settings.weight_decay, settings.layer_decay)
        if not isinstance(given, (str, Mapping)):
            check_optimizer(made, self.task)
        optimizer = self.strategy.prepare_optimizer(made)
        # Trainable parameters outside a user's optimizer would accumulate gradients: those are dropped too.
        optimized = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self.parameters = list(({id(p): p for p in self.parameters} | optimized).values())
        scheduler, clip = settings.scheduler, settings.gradient_clip
        active = ActiveOptimizer(optimizer, self.parameters, settings, scheduler=scheduler, gradient_clip=clip)
        return {"": active}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; with several, the one that is being stepped."""
        return self.active.optimizer

    @property
    def schedule(self) -> Schedule:
        """The learning rate schedule of `optimizer`."""
        return self.active.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self.active.schedule = schedule

    def schedule_for(self, total_steps: int | None) -> None:
        """Build the schedules, or fit them to another number of steps. Torch's schedulers are created once and kept."""
        for optimizer in self.optimizers.values():
            optimizer.schedule_for(total_steps)

    def check_due(self, total_steps: int | None) -> None:
        """Raise if one of several optimizers is not due once in this many steps."""

    def warn_of_idle(self, steps: int, is_end: bool) -> None:
        """Warn if one of several optimizers was never updated in the `steps` since `fit` began."""

    def end_epoch(self, epochs: int) -> None:
        """Step schedulers that count epochs. Called again for the same epoch, it does nothing."""
        for optimizer in self.optimizers.values():
            optimizer.schedule.end_epoch(epochs)

    def observe(self, metrics: Mapping[str, float], monitor: str) -> None:
        """Step schedulers that are stepped with a metric; by default with `monitor`."""
        for optimizer in self.optimizers.values():
            optimizer.schedule.observe(metrics, monitor)

    def monitors(self, monitor: str) -> list[tuple[str, Any]]:
        """Metrics that schedulers are stepped with, each with the scheduler."""
        return [pair for optimizer in self.optimizers.values() for pair in optimizer.schedule.monitors(monitor)]

    def run_context(self) -> ExitStack:
        """Process-wide settings of a run, restored on exit."""
        if self.replaced:
            logger.info(self.replaced)
        stack = ExitStack()
        stack.enter_context(memory.process_settings(self.settings.sdpa_backend, self.settings.matmul_precision))
        return stack

    # -- the step ------------------------------------------------------------------------------------------

    @property
    def may_repeat(self) -> bool:
        """Whether a window may be repeated, to retry it or to compute it in smaller pieces."""
        return self.guard.retries > 0 or (self.device.type != "cpu" and self.splitter.policy == "split")

    @property
    def wants_lookahead(self) -> bool:
        """Whether it matters which micro-batch is the last of a step: only that one all-reduces gradients."""
        return self._no_sync is not None

    @property
    def wants_window(self) -> bool:
        """Whether the task wants to know all micro-batches of a step before the first."""
        return bool(getattr(self.task, "wants_window", False))

    def begin_window(self, batches: Sequence[DeviceBatch]) -> None:
        """Pass the micro-batches of the next step to the task, and their totals if it has `step_totals`."""
        announce_step(self.task, batches, self.precision, self.strategy)

    def feed(self, batches: Iterable[HostBatch], train: bool) -> Iterator[DeviceBatch]:
        """Batches on the device, with the task's transforms applied."""
        if train not in self._transforms:  # not before the first batch: the task may need to see its data first
            get = getattr(self.task, "get_train_transforms" if train else "get_eval_transforms", None)
            transform = get() if callable(get) else None
            self._transforms[train] = transform.to(self.device) if isinstance(transform, nn.Module) else transform
        return self.feeder.feed(batches, self._transforms[train])

    def begin_training(self) -> None:
        """Set training mode on all modules of the task."""
        self._logged.clear()  # of trial steps
        self._set_mode(True)

    def _set_mode(self, train: bool) -> None:
        set_train_mode = getattr(self.task, "set_train_mode", None)
        if set_train_mode is not None:
            set_train_mode(train)
        else:
            for module in modules_of(self.task).values():
                module.train(train)
            for module in self._frozen_in_eval:
                module.training = False

    def updates(self, step: int | None, window: Iterable[DeviceBatch]) -> Iterable[Any]:
        """One update of the optimizer. `step` is None in trial steps."""
        return _ONE_UPDATE

    def accumulate(self, batch: DeviceBatch) -> bool:
        """Forward and backward pass of one micro-batch. False: out of memory, repeat it in smaller pieces."""
        if self._statistics is not None and not self._window.entries:
            self._statistics.keep()
        if self.checks.unoptimized is None:
            self.checks.check_batch(batch)
        try:
            for piece in self.splitter.split(batch):
                # Skip the gradient all-reduce for every micro-batch but the last of a step.
                with self._no_sync() if piece.more and self._no_sync is not None else nullcontext():
                    with self._forward(piece.size):
                        output = (self._shared_step or self.task.train_step)(piece.data)
                    loss = self._window.add(output, piece)
                    if self.checks.unoptimized is None:
                        # Sharded models have other tensors in the graph than in the optimizer.
                        self.checks.check_loss(loss, self.parameters if self._is_single else None)
                    if not self._is_single and not piece.more:
                        loss = self._send_stats(loss, output)
                    if loss is not None:
                        self._backward(loss)
        except torch.OutOfMemoryError as error:
            self.drop_step()
            if not self.splitter.shrink(batch, self.task.model):
                if not self._is_single:
                    error.add_note(_OUT_OF_MEMORY)
                raise
            return False
        except Exception as error:
            self.checks.explain(error, "train_step", batch)
            raise
        return True

    def _backward(self, loss: Tensor) -> None:
        self.strategy.backward(loss, self.precision.scaler)

    def _send_stats(self, loss: Tensor | None, output: Any) -> Tensor | None:
        """With the last micro-batch of a step, all-reduce its weight, loss and pending requests."""
        if isinstance(output, Mean) and output.value is None:
            raise BadArgument(
                "Expected a loss from every step with several processes, received none: the other ranks would wait for "
                "its gradients. Return a loss of weight 0 instead."
            )
        sums = self._window.weight_and_sum(self.device)
        requests = torch.full((1,), float(self.has_request()), dtype=sums.dtype, device=self.device)
        return self.strategy.piggyback_stats(loss, torch.cat([sums, requests]))

    def _forward(self, size: int) -> AbstractContextManager[object]:
        """Context of a forward pass, which collects logged values; a batch of size 0 is padding."""
        scope = StepScope(self.precision.forward(), self._logged, size, True, self.strategy.log_metric_advice)
        if not self.settings.activation_offload and size:
            return scope
        stack = ExitStack()
        stack.enter_context(scope)
        if self.settings.activation_offload:
            pin = self.device.type == "cuda"
            stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=pin))
        if not size:
            stack.enter_context(padding(participates=True))
        return stack

    def take_logged(self) -> list[Entry]:
        """What `log_metric` received in this step."""
        if not self._logged:
            return []
        taken = self._logged[:]
        self._logged.clear()
        return taken

    def finish(self) -> bool:
        """Scale gradients to those of the mean loss, clip them, and check that they are finite."""
        scaler, active = self.precision.scaler, self.active
        if self._window.is_idle:
            self.grad_norm = None
            return True
        if scaler is not None:
            scaler.unscale_(active.optimizer)
            for found in self._found_inf():
                self.strategy.sync_found_inf(found)
        grads = [p.grad for p in active.parameters if p.grad is not None]
        if not grads:
            raise BadArgument(
                "Expected the loss to give gradients, received none: it depends on no optimized parameter."
            )
        norm = self.strategy.total_norm(grads, active.uniform)
        losses = self._window.losses()
        if self._is_single:
            factor = self._window.gradient_scale()
        else:
            factor, losses = self._receive_stats()
        if factor is not None:
            norm = norm * factor
        if self.before_clipping is not None and not self.guard.retries:
            grads, norm, factor = self._call_before_clipping(grads, norm, factor)
        self.guard.inspect(norm if scaler is None else norm.new_zeros(()), losses)
        if self.guard.retries and self.guard.must_repeat():
            self.drop_step()
            return False
        if self.before_clipping is not None and self.guard.retries:
            grads, norm, factor = self._call_before_clipping(grads, norm, factor)
            self.guard.inspect(norm if scaler is None else norm.new_zeros(()), [])
            self.guard.require_finite("on_before_optimizer_step")
        if active.gradient_clip:
            coefficient = torch.clamp(active.gradient_clip / (norm + 1e-6), max=1.0)  # torch's formula
            factor = coefficient if factor is None else coefficient * factor
        if factor is not None:
            gradients.scale(grads, factor, active.uniform)
        self.grad_norm = norm
        return True

    def _call_before_clipping(self, grads: list[Tensor], norm: Tensor, factor: Any) -> tuple[list[Tensor], Tensor, Any]:
        """Call the hook with complete gradients, which it may change. A scaler skips what it makes infinite."""
        assert self.before_clipping is not None
        if factor is not None:
            gradients.scale(grads, factor, self.active.uniform)
        self.before_clipping()
        grads = [p.grad for p in self.active.parameters if p.grad is not None]
        changed = self.strategy.total_norm(grads, self.active.uniform)
        for flag in self._found_inf():
            flag.masked_fill_((norm.isfinite() & ~changed.isfinite()).to(flag.device), 1.0)
        return grads, changed, None

    def _found_inf(self) -> list[Tensor]:
        """The scaler's flags of infinite gradients, one per device; without a scaler there are none."""
        scaler = self.precision.scaler
        found = (
            {} if scaler is None else scaler._per_optimizer_states[id(self.active.optimizer)]["found_inf_per_device"]
        )
        return list(found.values())

    def _receive_stats(self) -> tuple[Tensor | float | None, list[Tensor]]:
        """The factor to scale gradients by, and the loss over all ranks."""
        sums = self.strategy.reduced_stats(self.precision.scaler)
        assert sums is not None, "every strategy for several ranks reduces the stats"
        weight, total, requests = sums.unbind()
        if self._is_first_update:
            self._request_flag.record(requests)
        self._shared_loss = self._window.replace_loss(weight, total, record=self.process_group.is_main)
        return self._window.reduced_gradient_scale(self.strategy.gradient_divide_factor, weight), [total]

    @property
    def _is_first_update(self) -> bool:
        """Whether this is the first update of a step; the only one, unless there are several optimizers."""
        return True

    def any_rank_has_request(self) -> bool:
        """Whether any rank has a request, as far as known by now: the same answer on every rank."""
        return self._request_flag.pop()

    def update(self, step: int) -> StepResult:
        """Take the optimizer step, unless gradients are not finite or no micro-batch had a loss."""
        active, window, norm = self.active, self._window, self.grad_norm
        lr = active.apply_schedules(step)
        if window.is_idle:
            pass
        elif self.precision.scaler is not None:
            self._scaled_update(self.precision.scaler)
        elif active.reads_found_inf and not self.guard.on_host:
            active.optimizer.found_inf = self.guard.flag  # type: ignore[attr-defined]
            active.optimizer.step()
        elif not self.guard.forbids():  # only fused optimizers skip an update by themselves
            active.optimizer.step()
        active.schedule.advance()
        if self._statistics is not None:
            self._statistics.settle(self.guard)
        if norm is not None and self.process_group.is_main:
            entry = Entry("grad_norm", norm, 1, True)
            if self.precision.scaler is not None:
                # The scaler handles overflows of scaled gradients: they do not enter the mean in the log.
                finite = norm.isfinite()
                entry = Entry("grad_norm", torch.where(finite, norm, 0.0), finite.to(norm.dtype), False)
            window.entries.append(entry)
        samples = window.samples if self._is_single else window.consumed
        return StepResult(window.entries, lr, samples, window.tokens, window.bad, window.consumed, self._shared_loss)

    def _scaled_update(self, scaler: torch.amp.GradScaler) -> None:
        # Overflows of scaled gradients are normal in fp16: the scaler skips the step and lowers the scale. A
        # non-finite loss is an error; the scaler is made to skip that step as well.
        for flag in self._found_inf():
            if not self.guard.on_host:
                torch.maximum(flag, self.guard.flag.to(flag.device), out=flag)
            elif self.guard.forbids():
                flag.fill_(1.0)
        scaler.step(self.active.optimizer)
        scaler.update()

    def end_step(self) -> None:
        """Reset gradients and the accumulation window."""
        for parameter in self.parameters:
            parameter.grad = None
        self._window = AccumulationWindow(self._reference)
        self._shared_loss = None

    def drop_step(self) -> None:
        """Discard a window: reset it, restore BatchNorm statistics and notify the task."""
        self.end_step()
        self._logged.clear()
        if self._statistics is not None:
            self._statistics.restore()
        if self._forget is not None:
            self._forget()

    def reduce_window_loss(self) -> None:
        """Replace the loss by that of all ranks, for a step that will not be finished (dry runs)."""
        if not self._is_single:
            self._receive_stats()

    def _loss_entries(self) -> list[Entry]:
        return self._shared_loss or [e for e in self._window.entries if e.name == "loss"]

    def window_loss(self) -> float:
        """The loss of the current window. Syncs with the device."""
        return weighted_means({"loss": self._loss_entries()}, self).get("loss", float("nan"))

    def window_weight(self) -> float:
        """The weight of the current window: samples, or what the task counts. Syncs with the device."""
        return sum(self.read([e.weight for e in self._loss_entries()]))

    def verify(self, step: int) -> dict[str, float]:
        """Raise if a step was not finite; returns counters to log."""
        counts = self.guard.verify(step)
        scaler = self.precision.scaler
        if scaler is not None and scaler.is_enabled():
            counts["loss_scale"] = scaler.get_scale()
        return counts

    # -- evaluation ----------------------------------------------------------------------------------------

    def evaluating(self) -> None:
        """Evaluation mode."""
        self._set_mode(False)

    def eval_step(self, batch: DeviceBatch) -> EvalResult:
        """Metrics of one batch from the task's `eval_step`."""
        return self.infer(self.task.eval_step, batch)

    def infer(self, function: Callable[[Any], Any], batch: DeviceBatch) -> EvalResult:
        """Call a function of a batch that returns a mapping, without gradients and in the run's precision."""
        entries: list[Entry] = []
        scope = StepScope(self.precision.forward(), entries, batch.size, False, self.strategy.log_metric_advice)
        with torch.no_grad(), scope, nullcontext() if batch.size else padding(participates=True):
            try:
                found = self.strategy.infer(function, batch.data)
                # None: everything was logged.
                outputs = {} if found is None and entries else metrics_by_name(found, function)
            except Exception as error:
                self.checks.explain(error, getattr(function, "__name__", "eval_step"), batch)
                raise
        return eval_result(outputs, entries, batch.size, sums_rows=not self._reduces_rows)

    def join_rows(self, pieces: list[Any]) -> Any:
        """Rows of all batches, in order. A task may override how rows of unequal length are joined."""
        if isinstance(pieces[0], list):
            return [row for piece in pieces for row in piece]
        return getattr(self.task, "join_rows", torch.cat)(pieces)

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State besides that of the model, the optimizer and the schedule."""
        scaler = self.precision.scaler
        return {
            "scaler": scaler.state_dict() if scaler is not None else {},
            "skipped_steps": self.guard.skipped,
            "pieces": self.splitter.pieces,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `load_state_dict` would fail. Called before anything is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`."""
        if self.precision.scaler is not None and state["scaler"]:
            self.precision.scaler.load_state_dict(state["scaler"])
        self.guard.skipped = state["skipped_steps"]
        if self._is_single:  # with several ranks splitting is off
            self.splitter.pieces = state["pieces"]

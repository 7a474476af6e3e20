"""The training loop. There is no other one.

It decides when things happen: steps, gradient accumulation, logging, evaluation, saving, stopping. How they are done
is up to the backend (the step) and the services (logging, evaluation, checkpoints). `engine.events.Event` lists the
order of events.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from trainformer.core.errors import DataError
from trainformer.core.types import DataSource, DeviceBatch, Entry
from trainformer.engine.cadence import Cadence
from trainformer.engine.control import Control
from trainformer.engine.events import STEP_EVENTS, Event, EventBus
from trainformer.engine.metrics import LazyScalar, RunningMetrics, weighted_means
from trainformer.engine.process_group import ProcessGroup, SingleProcess
from trainformer.engine.protocols import Backend, Services
from trainformer.engine.request_sync import RequestSync
from trainformer.engine.state import RunState


@dataclass(frozen=True, slots=True)
class Plan:
    """How far to train, and how often to log, evaluate and save. `None` means no limit, or never."""

    max_steps: int | None
    epochs: int | None
    accumulation: int = 1
    log_every: Cadence | None = None
    eval_every: Cadence | None = None
    save_every: Cadence | None = None
    eval_on_save: bool = False
    eval_at_end: bool = True
    eval_when_stopped: bool = False  # the final evaluation also runs after a requested stop
    save_at_end: bool = True
    log_first: bool = True  # log the first step, though no record is due yet
    log_remaining: bool = True  # at the end, log the steps since the last record
    monitor: str = "val/loss"
    monitor_mode: str = "min"


class Loop:
    """Trains from the position in `state` to the end of the plan."""

    def __init__(
        self,
        plan: Plan,
        state: RunState,
        *,
        backend: Backend,
        source: DataSource,
        bus: EventBus,
        control: Control,
        services: Services,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.plan = plan
        self.state = state
        self.backend = backend
        self.source = source
        self.bus = bus
        self.control = control
        self.services = services
        self.process_group = process_group or SingleProcess()
        self.requests = RequestSync(control, self.process_group, backend, services)
        self._metrics = RunningMetrics(backend, self.process_group)
        self._epoch_metrics: dict[str, float] = {}
        self._now = time.perf_counter()
        self._logged = self._now, 0, 0, 0
        self._evaluated = self._saved = self._now
        self._paused = 0.0
        # A cadence in minutes needs the clock after every step; one in steps or epochs does not.
        cadences = plan.log_every, plan.eval_every, plan.save_every
        self._uses_clock = any(c is not None and c.unit == "seconds" for c in cadences)
        self._lr: Any = None
        self._local_tokens = self._local_bad = 0  # of this rank, since the last all-reduce of counters

    # -- the run -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end of the plan, or until a stop is requested."""
        self.bus.emit(Event.TRAIN_BEGIN)
        self._restore_position()
        if self.state.step == self.state.evaluation_failed_at:  # it belongs to the step that was resumed from
            self.control.should_evaluate = True
            self._at_boundary(self.state.epoch if self.state.batch == 0 else None)
        while not self._finished():
            self._run_epoch()
        self._finish_run()
        self.bus.emit(Event.TRAIN_END)

    def _restore_position(self) -> None:
        """Start from the current state: a callback may have loaded another one in `on_train_begin`."""
        state = self.state
        logged = state.loss_steps if state.pending else state.step  # pending values are not logged yet
        if self.process_group.is_main:  # pending values are sums over all ranks
            self._metrics.extend(Entry(*values) for values in state.pending)
        state.pending = []
        self.requests.begin(lambda: self.bus.may_request(STEP_EVENTS))
        self.requests.sync_requests()
        self._logged = self._now, logged, state.samples, state.tokens

    def _run_epoch(self) -> None:
        state = self.state
        self._epoch_metrics = {}
        self.control.should_end_epoch = False
        self.bus.emit(Event.EPOCH_BEGIN, state.epoch)
        self.requests.sync_requests()
        self.backend.begin_training()
        for window in self._windows():
            self._run_step(window)
            self.services.poll()
            self.requests.poll_requests()  # before any decision, including whether the epoch ends here
            if state.batch == self.source.batches_per_epoch or self.control.should_end_epoch:
                # What is due after this step waits for the end of the epoch, so that no checkpoint falls between
                # the last step of an epoch and its evaluation.
                break
            self._at_boundary()
            if self._finished():
                return
        if state.batch == 0:
            raise DataError(f"Epoch {state.epoch} has no batches: expected at least one sample, received none.")
        state.epoch += 1
        state.batch = state.position = 0
        self._at_boundary(state.epoch)
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self._at_boundary()  # requested by a callback in on_epoch_end

    def _run_step(self, window: Iterable[DeviceBatch]) -> None:
        bus, state, backend = self.bus, self.state, self.backend
        step = state.step
        if bus.listeners(Event.STEP_BEGIN):
            bus.emit(Event.STEP_BEGIN, step)

        for _ in backend.updates(step, window):  # usually one; with several optimizers, one for each that is due
            complete = False
            while not complete:  # the backend may ask to repeat it: non-finite gradients, or out of memory
                batches = 0
                for batch in window:
                    if not backend.accumulate(batch):
                        break
                    batches += 1
                    if bus.listeners(Event.SUBSTEP_END):
                        bus.emit(Event.SUBSTEP_END, step)
                else:
                    complete = backend.finish()

            if bus.listeners(Event.BEFORE_OPTIMIZER_STEP):
                bus.emit(Event.BEFORE_OPTIMIZER_STEP, step)
            result = backend.update(step)
            if bus.listeners(Event.AFTER_OPTIMIZER_STEP):
                bus.emit(Event.AFTER_OPTIMIZER_STEP, step)
            backend.end_step()

        state.step = step = step + 1
        state.batch += batches
        state.position += result.samples + result.bad if result.consumed is None else result.consumed
        state.samples += result.samples
        if self.process_group.is_single_process:
            state.bad_samples += result.bad
            state.tokens += result.tokens
        else:
            self._local_bad += result.bad
            self._local_tokens += result.tokens
        self._lr = result.lr
        self._metrics.extend(result.entries)
        self._request_due()
        if bus.listeners(Event.STEP_END):
            entries = result.loss or [e for e in result.entries if e.name == "loss"]
            loss = LazyScalar(lambda: weighted_means({"loss": entries}, self.backend).get("loss", float("nan")))
            bus.emit(Event.STEP_END, step, loss)

    def _at_boundary(self, epoch: int | None = None) -> None:
        """Log, evaluate and save what was requested. `epoch` is the number of epochs done, at the end of one."""
        plan, control = self.plan, self.control
        if control.signal is not None:  # save and stop; the signal handler itself only sets a flag
            control.should_save = True
            control.stop(f"received {signal.Signals(control.signal).name}", by="a signal")
        if control.aborted:
            return
        if epoch is not None:
            self._request_due(epoch)
        # The final log and evaluation belong to the last step and come before its checkpoint: a run that is killed
        # after that checkpoint has nothing left to do.
        last = self._finished() and control.signal is None
        if control.should_log or (last and plan.log_remaining):
            self._log_remaining()
            self.requests.sync_requests()
        control.should_save |= last and plan.save_at_end
        evaluate = control.should_evaluate or (last and self._evaluates_at_end())
        if evaluate or (control.should_save and plan.eval_on_save):
            keep = self._evaluate()  # before the save, which a callback may request in on_eval_end
            control.should_save |= keep
            self.requests.sync_requests()
        if epoch is not None:
            self.bus.emit(Event.EPOCH_END, epoch - 1, self._epoch_metrics)
            self.requests.sync_requests()
        if control.should_save and not control.aborted:
            self._save()

    def _reduce_counters(self) -> None:
        """All-reduce the counters that each rank keeps for itself."""
        state = self.state
        if self.process_group.is_single_process:
            return
        tokens, bad = map(int, self.process_group.all_reduce_sum([self._local_tokens, self._local_bad]))
        state.tokens += tokens
        state.bad_samples += bad
        state.samples -= bad  # samples are counted over all ranks, bad samples per rank
        self._local_tokens = self._local_bad = 0

    def _finish_run(self) -> None:
        """Final log, evaluation and checkpoint, unless the last step has done them already."""
        self.requests.drain()
        if self.control.aborted:
            return
        self.backend.verify(self.state.step)
        if self.control.signal is None:
            # A signal ends the process, not the run: pending values are saved, and logged after the resume.
            if self.plan.log_remaining:
                self._log_remaining()
            elif self.state.step > self.state.loss_steps:
                self._drain()
        if self.control.signal is None and self._evaluates_at_end() and self.state.step > 0:
            self.control.should_save |= self._evaluate()
        self.requests.sync_requests()
        if self.control.should_save or (self.plan.save_at_end and self.state.step > 0):
            self._save()

    # -- one step ------------------------------------------------------------------------------------------

    def _windows(self) -> Iterator[Iterable[DeviceBatch]]:
        """Gradient accumulation windows of `accumulation` micro-batches; the last of an epoch may be smaller.

        A window never crosses an epoch boundary, and its gradients are divided by its actual weight. Micro-batches are
        drawn while the step runs, so a long window need not fit into memory, unless the step may have to be repeated.
        """
        state = self.state
        batches = self.backend.feed(self.source.batches(state.epoch, state.batch, state.position), train=True)
        accumulation = self.plan.accumulation
        for first in batches:
            window: Iterable[DeviceBatch] = (
                (first,) if accumulation == 1 else chain((first,), islice(batches, accumulation - 1))
            )
            if accumulation > 1 and self.backend.wants_lookahead:
                window = _with_lookahead(window)
            if self.backend.may_repeat or self.backend.wants_window:
                window = list(window)
                if self.backend.wants_window:
                    self.backend.begin_window(window)
            yield window

    # -- log, evaluate, save ------------------------------------------------------------------------

    def _log_remaining(self) -> None:
        """Log the steps since the last record, if any."""
        self.control.should_log = False
        if self.state.step > self._logged[1]:
            self._log()

    def _log(self) -> None:
        state = self.state
        counts = self.backend.verify(state.step)
        self._reduce_counters()
        metrics = {f"train/{name}": value for name, value in (self._drain() | counts).items()}
        rates = self._lr if isinstance(self._lr, Mapping) else {"lr": self._lr}
        metrics |= {f"train/{name}": float(lr) for name, lr in rates.items() if lr is not None}
        metrics["train/epoch"] = self._progress()
        if state.bad_samples:
            metrics["train/bad_samples"] = state.bad_samples
        metrics |= self._speed()
        self.bus.emit(Event.LOG, metrics)
        state.add_record({"step": state.step, **metrics})
        self.services.log(metrics, state.step)

    def _drain(self) -> dict[str, float]:
        """Means of the steps since the last record."""
        metrics = self._metrics.drain()
        state = self.state
        state.loss_sum += metrics.get("loss", 0.0) * (state.step - state.loss_steps)
        state.loss_steps = state.step
        return metrics

    def _evaluate(self) -> bool:
        """Evaluate, unless this step was evaluated already. Returns whether the result is worth a checkpoint."""
        state = self.state
        self.control.should_evaluate = False
        if state.evaluated_at == state.step:
            return False
        self.backend.verify(state.step)
        began = time.perf_counter()
        self.bus.emit(Event.EVAL_BEGIN)
        metrics = self.services.evaluate()
        self.backend.begin_training()
        state.evaluated_at = state.step
        self._evaluated = time.perf_counter()
        self._paused += self._evaluated - began
        if not metrics:
            return False
        self._epoch_metrics = metrics
        state.update_best(metrics, self.plan.monitor, self.plan.monitor_mode)
        state.add_record({"step": state.step, "epoch": self._progress(), **metrics})
        self.services.log(metrics, state.step)
        self.bus.emit(Event.EVAL_END, metrics)
        return self.services.is_worth_keeping(metrics)

    def pending_values(self) -> list[list[Any]]:
        """Values of the steps since the last log record, to be saved with the state."""
        return self._metrics.values()

    def _save(self) -> None:
        state = self.state
        self.control.should_save = False
        if state.saved_at == state.step:
            return
        self.backend.verify(state.step)
        self._reduce_counters()
        began = time.perf_counter()
        path = self.services.save()
        self._saved = time.perf_counter()
        self._paused += self._saved - began
        if path is not None:
            state.saved_at = state.step
            self.bus.emit(Event.SAVE, path)
            self.requests.sync_requests()

    # -- conditions -----------------------------------------------------------------------------------

    def _finished(self) -> bool:
        plan, state = self.plan, self.state
        if self.control.should_stop:
            return True
        if plan.max_steps is not None:
            return state.step >= plan.max_steps
        return plan.epochs is not None and state.epoch >= plan.epochs

    def _evaluates_at_end(self) -> bool:
        return self.plan.eval_at_end and (self.plan.eval_when_stopped or not self.control.should_stop)

    def _request_due(self, epoch: int | None = None) -> None:
        """Set the control flags that the plan makes due after this step, or after this epoch."""
        plan, control = self.plan, self.control
        if self._uses_clock:
            self._now = time.perf_counter()
        first = self.state.step == 1 and plan.log_first and plan.log_every is not None
        if first or self._due(plan.log_every, self._logged[0], epoch, "should_log"):
            control.should_log = True
        if self._due(plan.eval_every, self._evaluated, epoch, "should_evaluate"):
            control.should_evaluate = True
        if self._due(plan.save_every, self._saved, epoch, "should_save"):
            control.should_save = True

    def _due(self, cadence: Cadence | None, last: float, epoch: int | None, flag: str) -> bool:
        if cadence is None:
            return False
        if cadence.unit == "epochs":
            return epoch is not None and cadence.due_at_epoch(epoch)
        if epoch is not None:
            return False  # cadences in steps and seconds were checked after the step
        if cadence.unit == "seconds":
            due = self._now - last >= cadence.every
            if due and not self.process_group.is_single_process:
                self.requests.note_overdue(flag)
                return False  # set on all ranks at the next request sync
            return due
        return cadence.due_at_step(self.state.step)

    def _progress(self) -> float:
        """Epochs done, fractional where the length of an epoch is known."""
        length = self.source.batches_per_epoch
        return self.state.epoch + (self.state.batch / length if length else 0.0)

    def _speed(self) -> dict[str, float]:
        """Samples and tokens per second since the last log point, excluding evaluations and saves."""
        state = self.state
        now = time.perf_counter()
        then, _, samples, tokens = self._logged
        elapsed = now - then - self._paused
        self._logged = now, state.step, state.samples, state.tokens
        self._paused = 0.0
        state.seconds += now - then
        if elapsed <= 0 or state.samples == samples:
            return {}
        speed = {"train/samples_per_second": (state.samples - samples) / elapsed}
        if state.tokens > tokens:
            speed["train/tokens_per_second"] = (state.tokens - tokens) / elapsed
        return speed


def _with_lookahead(window: Iterable[DeviceBatch]) -> Iterator[DeviceBatch]:
    """Micro-batches that know whether another micro-batch of the same step follows."""
    ahead: DeviceBatch | None = None
    for batch in window:
        if ahead is not None:
            yield ahead._replace(more=True)
        ahead = batch
    if ahead is not None:
        yield ahead

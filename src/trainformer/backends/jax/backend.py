"""`JaxBackend`: the train state on the mesh and the two step functions, behind the protocol of the engine's loop.

A batch holds a whole optimizer step, and the step function splits it into micro-batches itself. So the loop accumulates
nothing, and a step is one asynchronous call. Values are read at log points only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from trainformer.backends.jax.compilation import DynamicBatchStep, JittedStep
from trainformer.backends.jax.flops import count_flops
from trainformer.backends.jax.gradient_norms import GradientNorms, parameter_names
from trainformer.backends.jax.placement import Placer
from trainformer.backends.jax.processes import RequestPoll, gather_to_host
from trainformer.backends.jax.state import partition
from trainformer.backends.jax.step_metrics import (
    PackedScalar,
    read_scalars,
    start_reading,
    sum_scalars,
    unpack_metrics,
)
from trainformer.backends.jax.step_queue import StepQueue
from trainformer.core.errors import BadArgument, NonFiniteError, expected
from trainformer.core.types import DeviceBatch, Entry, EvalResult, HostBatch, StepResult
from trainformer.engine.metrics import LazyScalar, weighted_means

logger = logging.getLogger("trainformer")

_MAX_FLAGS = 512  # steps without a log point after which their finite flags are read anyway
_ADVICE = (
    "Lower learning_rate, set max_grad_norm, or inspect the data of that step; nonfinite='skip' skips such steps "
    "and continues."
)


class JaxBackend:
    """The JAX side of a run. `state` is what is trained; `learning_rate` is a schedule (step -> lr), if known.

    `on_start(state, step)` and `on_end(state, metrics, step)` are hooks of the user around a step. With
    `steps_per_execution`, steps wait until there are so many, or until somebody reads the state or a metric.
    """

    may_repeat = False
    wants_lookahead = wants_window = False

    def __init__(
        self,
        state: Any,
        train_step: Callable[[Any, Any], Any],
        eval_step: Callable[[Any, Any], Any] | None,
        mesh: Mesh,
        *,
        accumulation: int = 1,
        learning_rate: Callable[[Any], Any] | None = None,
        nonfinite: str = "raise",
        on_start: Callable[[Any, int], Any] | None = None,
        on_end: Callable[[Any, dict[str, Any], int], Any] | None = None,
        steps_per_execution: int = 1,
    ) -> None:
        self._state = state
        self.mesh = mesh
        self.learning_rate = learning_rate
        self.nonfinite = nonfinite
        self._grad_norm: Any = None
        self.skipped_steps = 0  # as of the last check of the finite flags
        self.has_request: Callable[[], bool] = lambda: False
        self._train_step = train_step
        self._eval_step = eval_step
        self._on_start, self._on_end = on_start, on_end
        self._guards = isinstance(train_step, JittedStep)  # our own step skips non-finite updates
        self._queue: StepQueue | None = None
        self._lock = threading.RLock()  # of the queue: a callback's thread may read the loss
        if steps_per_execution > 1:
            self._queue = StepQueue(train_step, steps_per_execution, self._execute_steps)  # type: ignore[arg-type]
        # A step that masks padding rows (`_valid`) has one batch size; any other receives batches as they are.
        fixed = self._guards and not isinstance(train_step, DynamicBatchStep)
        self._placer = Placer(mesh, accumulation if fixed else 1, require_even=fixed, keep_on_host=self._guards)
        self.batch: DeviceBatch | None = None  # of the current step, or of the latest one between steps
        self._gradient_norms: list[GradientNorms] = []
        self._parameter_names: list[str] = []
        self._finite_flags: list[tuple[int, Any]] = []
        self._requests = RequestPoll(mesh) if jax.process_count() > 1 else None

    @property
    def state(self) -> Any:
        """The state after all steps so far. Executes those that wait."""
        self._execute_steps()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._execute_steps()
        self._state = state

    def _execute_steps(self) -> None:
        if self._queue is not None:
            with self._lock:
                self._state = self._queue.run(self._state)

    @property
    def grad_norm(self) -> Any:
        """Gradient norm of the last step before clipping, on the device; None before the first."""
        return self._grad_norm.scalar() if isinstance(self._grad_norm, PackedScalar) else self._grad_norm

    @grad_norm.setter
    def grad_norm(self, value: Any) -> None:
        self._grad_norm = value

    def feed(self, batches: Iterable[HostBatch], train: bool) -> Iterator[DeviceBatch]:
        return self._placer.feed(batches, train)

    def numeric_columns(self, data: Any) -> dict[str, Any]:
        """The columns of a batch that a device can hold."""
        return self._placer.numeric_columns(data)

    @contextmanager
    def preserved_feed(self) -> Iterator[None]:
        """Batches fed inside do not count as taken from the training data."""
        pending = self._placer.pending
        try:
            yield
        finally:
            self._placer.pending = pending

    @property
    def batches_ahead(self) -> int:
        """Training batches that were taken from their source but not trained on yet."""
        return self._placer.pending

    # -- the step ------------------------------------------------------------------------------------------

    def begin_window(self, batches: Sequence[Any]) -> None:
        """Not called: a batch holds a whole step."""

    def updates(self, step: int, window: Iterable[DeviceBatch]) -> Iterable[Any]:
        """One update: optax combines several optimizers into one (`optax.partition`)."""
        return (None,)

    def begin_training(self) -> None:
        """Nothing to do: a pure function has no training mode."""

    def accumulate(self, batch: DeviceBatch) -> bool:
        self.batch = batch
        return True

    def finish(self) -> bool:
        """Nothing to do: the step function runs forward, backward and update in one call."""
        return True

    def update(self, step: int) -> StepResult:
        """Dispatch the step. Returns before the devices have finished."""
        batch = self.batch
        assert batch is not None
        if self._queue is not None:
            with self._lock:
                output: Mapping[str, Any] = self._queue.add(batch.data)
        else:
            self._state, output = self._run_step(self._state, batch.data, step)
        entries = self._entries(output, batch.size, step)
        for norms in self._gradient_norms:
            norms.record(output, self._parameter_names)
        if batch.sources is not None and batch.size:
            names, numbers = batch.sources[:2]
            counts = np.bincount(numbers, minlength=len(names)).tolist()
            entries += [Entry(f"share/{n}", count, batch.size, False) for n, count in zip(names, counts, strict=True)]
        if self._on_end is not None:
            self._state, entries = self._call_end_hook(self._on_end, self._state, output, step, entries)
        schedule = self.learning_rate
        return StepResult(
            entries,
            None if schedule is None else LazyScalar(lambda: float(schedule(step))),
            batch.size if batch.global_size is None else batch.global_size,
            batch.tokens,
            batch.bad,
            batch.consumed,
        )

    def _run_step(self, state: Any, data: Any, step: int) -> tuple[Any, Mapping[str, Any]]:
        if self._on_start is not None:
            changed = self._on_start(state, step)
            state = state if changed is None else changed
        returned = self._train_step(state, data)
        if not isinstance(returned, tuple) or len(returned) != 2:
            what = "train_step_fn to return (state, metrics)"
            raise BadArgument(expected(what, type(returned).__name__, "Return the new state and a dict of scalars."))
        return returned[0], _as_mapping(returned[1])

    def gradient_norms(self) -> GradientNorms:
        """Records gradient norms from now on, which the step then returns as well."""
        step = self._train_step
        if not isinstance(step, JittedStep):
            do = "Return the norms as metrics of your train_step_fn, and leave the callback out."
            raise BadArgument(expected("a step made from compute_loss to compute gradient norms in", "your own", do))
        step.compute_gradient_norms()
        self._parameter_names = parameter_names(partition(self.state.params, self.state.trainable)[0])
        self._gradient_norms.append(GradientNorms())
        return self._gradient_norms[-1]

    def learning_rates(self, step: int) -> list[float]:
        """The learning rates after `step` steps: that of the schedule, or those in the optimizer's state."""
        if self.learning_rate is not None:
            return [float(self.learning_rate(max(0, step - 1)))]
        found = optax.tree_utils.tree_get_all_with_path(getattr(self.state, "opt_state", ()), "learning_rate")
        return self.read([value for _, value in found if isinstance(value, jax.Array)])

    def step_loss(self, output: Any, size: int) -> float | None:
        """The loss that a user's step function returned, if any."""
        entries = [entry for entry in _user_entries(output, size) if entry.name == "loss"]
        return next(iter(weighted_means({"loss": entries}, self).values()), None) if entries else None

    def count_flops(self, batch: Any) -> float:
        """The FLOPs of a train step on a batch, over all devices."""
        step = self._train_step
        if isinstance(step, JittedStep):
            return count_flops(step.pure(batch), self.state, batch, *step.constants)
        return count_flops(step, self.state, batch)

    def _entries(self, output: Mapping[str, Any], size: int, step: int) -> list[Entry]:
        """The metrics of a step as entries to average. Also records whether the step was finite."""
        self._grad_norm = output.get("grad_norm")
        if not self._guards:
            entries = _user_entries(output, size)
            losses = [e.value for e in entries if e.name == "loss"]
            if losses:
                self._record_finite(step, jnp.isfinite(losses[0]))
            return entries
        finite, norm, pairs = unpack_metrics(output)
        self._record_finite(step, finite)
        # As a sum of weight 1: a mean would be multiplied by its weight on the device when it is folded.
        return [*_pair_entries(pairs), Entry("grad_norm", norm, 1, False)]

    def _call_end_hook(
        self, hook: Callable[..., Any], state: Any, output: Mapping[str, Any], step: int, entries: list[Entry]
    ) -> tuple[Any, list[Entry]]:
        """Call the user's `on_step_end`, which may replace the state and the metrics."""
        metrics = dict(output)
        if self._guards:  # our own step: plain means, on the device
            pairs = {"loss": output["loss"], **output["metrics"]}
            metrics = {name: total / jnp.where(weight == 0, 1, weight) for name, (total, weight) in pairs.items()}
            metrics |= {name: output[name] for name in ("grad_norm",) if name in output}
        returned = hook(state, metrics, step + 1)
        if returned is None:
            return state, entries
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            changed = {name: value for name, value in returned[1].items() if metrics.get(name) is not value}
            kept = [entry for entry in entries if entry.name not in changed]
            return returned[0], kept + _user_entries(changed, 1)
        return returned, entries

    def take_logged(self) -> Sequence[Entry]:
        """None: a traced step returns its metrics."""
        return ()

    def end_step(self) -> None:
        """Nothing to do: the batch is kept for callbacks that compute features of it."""

    def drop_step(self) -> None:
        self.batch = None

    def any_rank_has_request(self) -> bool:
        """Whether any process has a request. All processes get the same answer, one step late."""
        return self._requests is not None and self._requests(self.has_request())

    # -- non-finite steps ------------------------------------------------------------------------------------

    def _record_finite(self, step: int, flag: Any) -> None:
        self._finite_flags.append((step + 1, flag))
        if len(self._finite_flags) >= _MAX_FLAGS:
            self._check_finite()

    def verify(self, step: int) -> dict[str, float]:
        """Raise for a non-finite step, or count the skipped ones. Returns the counters to log."""
        self._check_finite()
        counts: dict[str, float] = {"skipped_steps": self.skipped_steps} if self.skipped_steps else {}
        name = "compilations" if self._queue is None else "loop_compilations"
        compilations = getattr(self._train_step, name, None)
        if compilations is not None:
            counts["recompilations"] = max(0, compilations.count - 1)
        return counts

    def _check_finite(self) -> None:
        flags, self._finite_flags = self._finite_flags, []
        values = self.read([flag for _, flag in flags])
        bad = [step for (step, _), finite in zip(flags, values, strict=True) if not finite]
        if not bad:
            return
        if self.nonfinite == "raise":
            fate = "That update was skipped; later ones were made." if self._guards else "It reached the weights."
            raise NonFiniteError(f"Loss or gradients became non-finite at step {bad[0]}. {fate} {_ADVICE}")
        self.skipped_steps += len(bad)
        what = "were skipped" if self._guards else "were not skipped, since the step function is the user's"
        total = self.skipped_steps
        logger.warning("%d steps with a non-finite loss or gradient %s (%d in total)", len(bad), what, total)

    # -- evaluation ----------------------------------------------------------------------------------------

    def eval_step(self, batch: DeviceBatch) -> EvalResult:
        if self._eval_step is None:
            raise BadArgument("There is no eval_step_fn to evaluate with. Let configure_functions return one.")
        output = self._eval_step(self.state, batch.data)
        if isinstance(self._eval_step, JittedStep):
            loss = {"loss": output["loss"]} if "loss" in output else {}  # an evaluation by rewards has none
            rows = output.get("rows", {})
            rows = gather_to_host(rows) if jax.process_count() > 1 else rows
            return EvalResult(_pair_entries({**loss, **output["metrics"]}), rows)
        return EvalResult(_user_entries(output, batch.size, prefix="eval_"), {})

    def read(self, scalars: Sequence[Any]) -> list[float]:
        return read_scalars(scalars)

    def start_read(self, scalars: Sequence[Any]) -> Callable[[], list[float] | None]:
        return start_reading(scalars)

    def fold(self, scalars: Sequence[Any]) -> Any:
        return sum_scalars(scalars)

    def join_rows(self, pieces: list[Any]) -> Any:
        return np.concatenate([np.asarray(piece) for piece in pieces])

    # -- the run -------------------------------------------------------------------------------------------

    def schedule_for(self, total_steps: int | None) -> None:
        """Nothing to do: the schedule was built with the optimizer."""

    def run_context(self) -> AbstractContextManager[Any]:
        """Sets the mesh, also for the user's functions, and keeps absl from reconfiguring the root logger."""
        stack = ExitStack()
        stack.enter_context(jax.set_mesh(self.mesh))
        stack.enter_context(root_logger_untouched())
        return stack


@contextmanager
def root_logger_untouched() -> Iterator[None]:
    """Keep orbax and grain from configuring the root logger.

    They log through absl, which adds a stderr handler to a root logger without handlers. From then on the messages of
    all libraries would appear there, also those that are already shown elsewhere.
    """
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


# -- outputs of step functions ---------------------------------------------------------------------------------------


def _pair_entries(pairs: Mapping[str, tuple[Any, Any]]) -> list[Entry]:
    return [Entry(name, total, weight, False) for name, (total, weight) in pairs.items()]


def _user_entries(metrics: Any, size: int, prefix: str = "") -> list[Entry]:
    """Metrics of a user's step function: scalars (means over the rows of the batch) or (sum, weight) pairs."""
    entries = []
    for name, value in _as_mapping(metrics).items():
        name = str(name).removeprefix(prefix)
        if isinstance(value, (tuple, list)) and len(value) == 2:
            entries.append(Entry(name, value[0], value[1], False))
        elif np.ndim(value) == 0 and not isinstance(value, str) and value is not None:
            entries.append(Entry(name, value, size, True))
        elif value is not None:
            shape = getattr(value, "shape", type(value).__name__)
            raise BadArgument(expected(f"the metric {name!r} to be a scalar or a (sum, weight) pair", shape))
    return entries


def _as_mapping(metrics: Any) -> Mapping[str, Any]:
    if isinstance(metrics, Mapping):
        return metrics
    if callable(as_dict := getattr(metrics, "_asdict", None)):
        return as_dict()
    if hasattr(metrics, "__dataclass_fields__"):
        return {name: getattr(metrics, name) for name in metrics.__dataclass_fields__}
    raise BadArgument(expected("metrics as a dict of scalars by name", type(metrics).__name__))

"""Training with JAX, as the engine's loop sees it: the state on the mesh, and two functions that read and change it.

A batch of the loop holds a whole optimizer step; the step function divides it into micro-batches itself. So the loop
accumulates nothing, and a step is one call that returns before the devices are done. Values are read at log points.
What the functions compute is the business of `step`, or of whoever wrote them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from trainformer.backends.jax.dynamic_batch import AnyRowsStep
from trainformer.backends.jax.orbax_import import quiet
from trainformer.backends.jax.placement import Placer
from trainformer.backends.jax.processes import Asking
from trainformer.backends.jax.step import JittedStep
from trainformer.backends.jax.step_metrics import added_up, read_parts, told_by
from trainformer.core.errors import BadArgument, NonFiniteError, expected
from trainformer.core.types import DeviceBatch, Entry, EvalResult, HostBatch, StepResult
from trainformer.engine.metrics import LazyScalar

logger = logging.getLogger("trainformer")

_MOST_FLAGS = 512  # steps without a log point after which their flags are looked at all the same
_ADVICE = (
    "Lower learning_rate, set max_grad_norm, or look at the data of that step; nonfinite='skip' leaves such steps out "
    "and goes on."
)


@dataclass(frozen=True)
class StepHooks:
    """What a user wants done around a step; None where nothing is."""

    on_start: Callable[[Any, int], Any] | None = None
    on_end: Callable[[Any, dict[str, Any], int], Any] | None = None


@dataclass
class _Watched:
    """Whether the steps since the last look were finite, still on the device."""

    flags: list[tuple[int, Any]] = field(default_factory=list)
    skipped: int = 0


class JaxBackend:
    """The JAX side of a run. `state` is what is trained; `learning_rate` is a function of the step, if it is known."""

    may_repeat = False
    wants_lookahead = False

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
        hooks: StepHooks | None = None,
    ) -> None:
        self.state = state
        self.mesh = mesh
        self.learning_rate = learning_rate
        self.nonfinite = nonfinite
        self.grad_norm: Any = None
        self.has_request: Callable[[], bool] = lambda: False
        self._train_step = train_step
        self._eval_step = eval_step
        self._hooks = hooks or StepHooks()
        self._guards = isinstance(train_step, JittedStep)
        # A step that is told which rows count (`_valid`) has one size of batch; others get every batch as it is.
        fixed = self._guards and not isinstance(train_step, AnyRowsStep)
        self._placer = Placer(mesh, accumulation if fixed else 1, whole_shards=fixed, on_host=self._guards)
        self._batch: DeviceBatch | None = None
        self._watched = _Watched()
        self._asking = Asking(mesh) if jax.process_count() > 1 else None

    # -- batches -------------------------------------------------------------------------------------------

    def feed(self, batches: Iterable[HostBatch], train: bool) -> Iterator[DeviceBatch]:
        """Batches on the mesh, one ahead of the step."""
        return self._placer.feed(batches, train)

    @property
    def batches_ahead(self) -> int:
        """Training batches that were taken from their source and have not been trained on."""
        return self._placer.waiting

    # -- the step ------------------------------------------------------------------------------------------

    def begin_training(self) -> None:
        """A function has no mode."""

    def accumulate(self, batch: DeviceBatch) -> bool:
        """Take the batch of the step."""
        self._batch = batch
        return True

    def finish(self) -> bool:
        """The step function does everything at once."""
        return True

    def update(self, step: int) -> StepResult:
        """Take the step. Returns before the devices are done."""
        batch, hooks = self._batch, self._hooks
        assert batch is not None
        state = self.state
        if hooks.on_start is not None:
            state = _unless_none(hooks.on_start(state, step), state)
        state, output = _pair(self._train_step(state, batch.data))
        entries = self._entries(output, batch.size, step)
        if hooks.on_end is not None:
            state, entries = self._after(state, output, step, entries)
        self.state = state
        rate = self.learning_rate
        return StepResult(
            entries,
            None if rate is None else LazyScalar(lambda: float(rate(step))),
            batch.size if batch.global_size is None else batch.global_size,
            batch.tokens,
            batch.bad,
            batch.consumed,
        )

    def _entries(self, output: Mapping[str, Any], size: int, step: int) -> list[Entry]:
        """What a step says of itself, as values to average; and a note of whether it was finite."""
        if not self._guards:
            entries = _plain_entries(output, size)
            losses = [e.value for e in entries if e.name == "loss"]
            if losses:
                self._note(step, jnp.isfinite(losses[0]))
            self.grad_norm = output.get("grad_norm")
            return entries
        finite, norm, pairs = told_by(output)
        self._note(step, finite)
        self.grad_norm = output["grad_norm"]
        entries = [Entry(name, total, weight, False) for name, (total, weight) in pairs.items()]
        return [*entries, Entry("grad_norm", norm, 1, True)]

    def _after(self, state: Any, output: Mapping[str, Any], step: int, entries: list[Entry]) -> tuple[Any, list[Entry]]:
        """Let the user's hook see, and change, what the step gave."""
        assert self._hooks.on_end is not None
        metrics = means_of(output) if self._guards else dict(output)
        returned = self._hooks.on_end(state, metrics, step + 1)
        if returned is None:
            return state, entries
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            changed = {name: value for name, value in returned[1].items() if metrics.get(name) is not value}
            kept = [entry for entry in entries if entry.name not in changed]
            return returned[0], kept + _plain_entries(changed, 1)
        return returned, entries

    def end_step(self) -> None:
        """Let go of the batch."""
        self._batch = None

    def drop_step(self) -> None:
        """After a failure."""
        self._batch = None

    def any_rank_has_request(self) -> bool:
        """Whether a process has a request: what was asked with the step before, the same answer on all of them."""
        return self._asking is not None and self._asking(self.has_request())

    # -- whether it was finite -------------------------------------------------------------------------------

    def _note(self, step: int, flag: Any) -> None:
        self._watched.flags.append((step + 1, flag))
        if len(self._watched.flags) >= _MOST_FLAGS:
            self._look()

    @property
    def skipped_steps(self) -> int:
        """Steps left out so far, as far as was looked."""
        return self._watched.skipped

    def verify(self, step: int) -> dict[str, float]:
        """Raise if a step was not finite, or count those that were left out; how often steps were compiled again."""
        self._look()
        counts: dict[str, float] = {"skipped_steps": self._watched.skipped} if self._watched.skipped else {}
        compilations = getattr(self._train_step, "compilations", None)
        if compilations is not None:
            counts["recompilations"] = max(0, compilations.count - 1)
        return counts

    def _look(self) -> None:
        flags, self._watched.flags = self._watched.flags, []
        values = self.read([flag for _, flag in flags])
        bad = [step for (step, _), finite in zip(flags, values, strict=True) if not finite]
        if not bad:
            return
        if self.nonfinite == "raise":
            fate = "It was left out; the steps after it were taken." if self._guards else "It reached the weights."
            raise NonFiniteError(f"Loss or gradients became non-finite at step {bad[0]}. {fate} {_ADVICE}")
        self._watched.skipped += len(bad)
        what = "were skipped" if self._guards else "were taken, since the step function is not ours"
        logger.warning(
            "%d steps with a non-finite loss or gradient %s (%d in all)", len(bad), what, self._watched.skipped
        )

    # -- evaluation ----------------------------------------------------------------------------------------

    def eval_step(self, batch: DeviceBatch) -> EvalResult:
        """Metrics of one batch."""
        if self._eval_step is None:
            raise BadArgument("There is no eval_step_fn to evaluate with. Let configure_functions return one.")
        output = self._eval_step(self.state, batch.data)
        if isinstance(self._eval_step, JittedStep):
            return EvalResult(_own_entries(output), {})
        return EvalResult(_plain_entries(output, batch.size, prefix="eval_"), {})

    # -- values --------------------------------------------------------------------------------------------

    def read(self, scalars: Sequence[Any]) -> list[float]:
        """Values of device scalars and plain numbers, in one transfer."""
        return read_parts(scalars)

    def fold(self, scalars: Sequence[Any]) -> Any:
        """Their sum, on the device."""
        return added_up(scalars)

    def join_rows(self, pieces: list[Any]) -> Any:
        """Rows of several batches as one array of the host."""
        return np.concatenate([np.asarray(piece) for piece in pieces])

    # -- the run -------------------------------------------------------------------------------------------

    def schedule_for(self, total_steps: int | None) -> None:
        """The learning rate was planned with the optimizer."""

    def run_context(self) -> AbstractContextManager[Any]:
        """The mesh is in use meanwhile, also for functions of the user's; orbax and grain leave the logging alone."""
        stack = ExitStack()
        stack.enter_context(jax.set_mesh(self.mesh))
        stack.enter_context(quiet())
        return stack


# -- what functions return -------------------------------------------------------------------------------------------


def means_of(output: Mapping[str, Any]) -> dict[str, Any]:
    """What a step of ours gives, as plain means on the device."""
    pairs = {"loss": output["loss"], **output["metrics"]}
    means = {name: total / jnp.where(weight == 0, 1, weight) for name, (total, weight) in pairs.items()}
    return means | {name: output[name] for name in ("grad_norm",) if name in output}


def _own_entries(output: Mapping[str, Any]) -> list[Entry]:
    pairs = {"loss": output["loss"], **output["metrics"]}
    return [Entry(name, total, weight, False) for name, (total, weight) in pairs.items()]


def _plain_entries(metrics: Any, size: int, prefix: str = "") -> list[Entry]:
    """Metrics of a function that is not ours: scalars, which are means over the batch's rows, or pairs."""
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
    fields = getattr(metrics, "_asdict", None)
    if callable(fields):
        return fields()
    if hasattr(metrics, "__dataclass_fields__"):
        return {name: getattr(metrics, name) for name in metrics.__dataclass_fields__}
    raise BadArgument(expected("metrics as a dict of scalars by name", type(metrics).__name__))


def _pair(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        what = "train_step_fn to return (state, metrics)"
        raise BadArgument(expected(what, type(returned).__name__, "Return the new state and a dict of scalars."))
    state, metrics = returned
    return state, _as_mapping(metrics)


def _unless_none(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value

"""A run on JAX: its settings, backend and data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console

from trainformer.backends.jax.averaging import StateAverage
from trainformer.backends.jax.backend import JaxBackend
from trainformer.backends.jax.step import VALID
from trainformer.callbacks.base import CallbackList, handlers_of, name_of
from trainformer.callbacks.compat import unwrap_callback
from trainformer.checkpointing import Checkpoint, CheckpointStore, StateComponent, StatefulAdapter
from trainformer.checkpointing.checkpointer import Assets, Checkpointer
from trainformer.checkpointing.components import callback_states
from trainformer.checkpointing.jax_files import JaxFiles, arrays_component, jax_components
from trainformer.checkpointing.store import is_named
from trainformer.core.errors import BadArgument, DataError
from trainformer.core.types import DataSource
from trainformer.engine import Event
from trainformer.engine.evaluation import evaluate
from trainformer.engine.process_group import ProcessGroup, SingleProcess
from trainformer.run.components import common_components
from trainformer.run.jax.dry_run import DryRun, HostCopy
from trainformer.run.jax.inference import Inference
from trainformer.run.logging import eval_progress
from trainformer.run.provenance import record_length, record_settings, size_of
from trainformer.run.run import Run
from trainformer.run.settings import CommonSettings, FrontOptions
from trainformer.run.setup import RunParts, validate_settings
from trainformer.run.validation_sets import metric_name

logger = logging.getLogger("trainformer")

#: Events inside a compiled step, which cannot be emitted.
_INSIDE_A_STEP = {Event.SUBSTEP_END: "each micro-batch", Event.BEFORE_OPTIMIZER_STEP: "the gradients before the update"}


@dataclass(kw_only=True)
class JaxSettings(CommonSettings):
    """The settings that a trainer's arguments amount to. The arguments are validated; here they are recorded.

    `batch_size` is that of a whole optimizer step on all devices, split into `micro_batches`.
    """

    lr: float = 5e-5
    weight_decay: float = 0.01
    warmup_ratio: float = 0.0
    gradient_clip: float | None = 1.0
    optimizer: Any = "adamw"
    scheduler: Any = "linear"
    nonfinite: str = "raise"
    micro_batches: int = 1
    drop_last: bool = False
    precision: str = "auto"
    gradient_checkpointing: Any = None
    sharding_array: tuple[int, ...] = (1, -1, 1, 1)
    num_workers: int = 0


class JaxRun(Run):
    """One run on JAX. `owner` is the trainer; `derive` computes further metrics from those of an evaluation.

    `summarize` computes metrics from the rows of a whole evaluation, by name.
    """

    settings: JaxSettings
    backend: JaxBackend

    def __init__(
        self,
        owner: Any,
        settings: JaxSettings,
        backend: JaxBackend,
        *,
        train_source: DataSource,
        val_sources: Mapping[str, DataSource],
        callbacks: CallbackList,
        data: Any = None,
        passed: frozenset[str] = frozenset(),
        console: Console | None = None,
        derive: Callable[[dict[str, float]], dict[str, float]] | None = None,
        summarize: Callable[[dict[str, Any]], dict[str, float]] | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        validate_settings(settings)
        process_group = process_group or SingleProcess()
        self._derive, self._summarize = derive, summarize
        parts = RunParts(
            settings=settings,
            options=FrontOptions(fresh_start_hint="pass resume=None in the arguments"),
            process_group=process_group,
            backend=backend,
            files=JaxFiles(),
            callbacks=callbacks,
            train_source=train_source,
            val_sources=val_sources,
            train_size=size_of(getattr(train_source, "dataset", None)),
            data=data,
            passed=passed,
            console=console or Console(),
        )
        self._configured_lr = settings.lr
        super().__init__(owner, parts)
        self.inference = Inference(self)

    def connect(self) -> None:
        """Attach and subscribe callbacks; those that handle events inside a compiled step are rejected."""
        for callback in self.callbacks:
            self._check(callback)
        super().connect()

    def add_callback(self, callback: Any) -> None:
        super().add_callback(callback)
        try:
            self._check(self.callbacks.callbacks[-1])
        except BadArgument:
            self.remove_callback(callback)
            raise

    def _check(self, callback: Any) -> None:
        if getattr(unwrap_callback(callback), "needs_torch", False):
            raise BadArgument(f"The callback {name_of(callback)} needs a torch model; this is a JAX run. Remove it.")
        found = _INSIDE_A_STEP.keys() & handlers_of(callback, self.owner).keys()
        if found:
            what = " and ".join(_INSIDE_A_STEP[event] for event in sorted(found, key=lambda e: e.name))
            raise BadArgument(
                f"The callback {name_of(callback)} handles {what}, which happens inside a compiled step and cannot be "
                "observed. Use on_step_end, or compute it in the loss function and return it as a metric."
            )

    # -- description ------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return type(self.owner).__name__

    def describe(self) -> str:
        mesh, params = self.backend.mesh, getattr(self.backend.state, "params", {})
        axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        kind = mesh.devices.flat[0].device_kind
        where = f"{mesh.size} x {kind}" + (f" ({axes})" if axes else "")
        return f"{self.title} on {where} in {self.settings.precision}: {count:,} parameters"

    def model_shapes(self) -> list[tuple[str, list[int]]]:
        leaves = jax.tree_util.tree_leaves_with_path(getattr(self.backend.state, "params", {}))
        return [(jax.tree_util.keystr(path, simple=True, separator="/"), list(leaf.shape)) for path, leaf in leaves]

    def components(self) -> list[StateComponent]:
        schedule = StatefulAdapter(
            lambda: {"configured": self._configured_lr, "lr": self.owner.lr}, self._load_schedule
        )
        common = [*common_components(self), StateComponent("schedule", schedule, required=False, format="json")]
        if self.owner._overrides("check_learned"):
            learned = StatefulAdapter(self.owner.learned, lambda state: None, self.owner.check_learned)
            common.append(StateComponent("learned", learned, required=False, format="json"))
        callbacks = self.callbacks.named()
        found = jax_components(self.backend, self.train_source, self.state, common, callback_states(callbacks))
        averages = {name: getattr(callback, "average", None) for name, callback in callbacks.items()}
        return found + [
            arrays_component("average." + name.replace("#", "-"), average, "arrays", required=False)
            for name, average in averages.items()
            if isinstance(average, StateAverage)
        ]

    def _load_schedule(self, state: dict[str, Any]) -> None:
        """Learning rates that were found rather than configured survive a restart, unless the user has changed them."""
        if state["configured"] == self._configured_lr and state["lr"] != self.owner.lr:
            self.owner.active_scheduler.rescale(state["lr"])

    def assets(self) -> Assets | None:
        save_assets: Assets = self.owner.save_assets
        return save_assets

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        records: dict[str, dict[str, Any]] = self.owner.evaluation_records()
        return records

    def task_handlers(self) -> dict[Event, Any]:
        handlers: dict[Event, Any] = self.owner.listeners()
        return handlers

    def device_info(self) -> dict[str, Any]:
        mesh = self.backend.mesh
        return {"device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}", "precision": self.settings.precision}

    def fault_counters(self) -> dict[str, int]:
        return {"skipped": self.backend.skipped_steps}

    @property
    def peak_memory_gb(self) -> float | None:
        device = jax.local_devices()[0]
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use") if device.platform != "cpu" else None
        return None if peak is None else peak / 1e9

    @property
    def accelerator(self) -> str | None:
        device = self.backend.mesh.devices.flat[0]
        return None if device.platform == "cpu" else str(device.device_kind)

    @property
    def num_devices(self) -> int:
        return int(self.backend.mesh.size)

    def flops_per_sample(self) -> float | None:
        with self._preserved_data(), self.backend.run_context():
            batch = next(iter(self.backend.feed(self.train_source.batches(0), train=True)))
            try:
                flops = self.backend.count_flops(batch.data)
            except (TypeError, AttributeError, jax.errors.JAXTypeError) as error:
                why = str(error).split("\n")[0]
                logger.warning("Throughput: the FLOPs of this step cannot be counted; logging without them (%s)", why)
                return None
        return flops / _rows(batch.data) or None

    @contextmanager
    def _preserved_data(self) -> Iterator[None]:
        """Batches read inside do not change the position in the training data."""
        with getattr(self.train_source, "preserved_position", nullcontext)(), self.backend.preserved_feed():
            yield

    @contextmanager
    def sandbox(self) -> Iterator[DryRun]:
        """For trial steps: afterwards the state and the position are as before, bit for bit."""
        owner, before = self.owner, HostCopy(self.backend.state)
        owner.check_varies_lr("LRFinder")
        try:
            with self._preserved_data(), self.backend.run_context():
                yield DryRun(self)
        finally:
            self.backend.state = before.restore()

    def newest_checkpoint(self, checkpointer: Checkpointer) -> Checkpoint | None:
        """The newest valid checkpoint. If all of them are damaged, the run does not silently start from scratch."""
        found, store = super().newest_checkpoint(checkpointer), checkpointer.store
        if found is None and self.settings.resume == "auto" and _has_any(store):
            raise DataError(
                f"There are checkpoints in {store.root}, but all of them are damaged (see the warnings). Nothing was "
                "changed. Pass resume=None to start from scratch, or another output_dir."
            )
        return found

    def record_derived(self) -> None:
        record_length(self.context.config, self, self.settings.warmup_ratio)

    def record_config(self) -> None:
        config = self.context.config
        record_settings(self, {})
        config.set_env("jax_version", jax.__version__)
        config.set_env("device", self.backend.mesh.devices.flat[0].device_kind)
        config.set_env("num_devices", self.backend.mesh.size)
        config.set_from_data("num_samples", self.train_size)
        if getattr(self.owner, "num_classes", None) is not None:
            config.set_from_data("num_classes", self.owner.num_classes)
        config.set_user("task_type", self.title, filterable=True)
        if self.val_sets:
            config.set_from_data("val_sets", list(self.val_sets))
        self.record_derived()

    # -- evaluation ------------------------------------------------------------------------------------------

    def validate(self, name: str, state: Any = None) -> dict[str, float]:
        """Metrics on a validation set, of a state: by default that of a callback (EMA), else the trained one."""
        source, eval_mode = self.val_sources[name], self.inference.eval_mode(state)
        with eval_mode, eval_progress(self.callbacks, self.owner, source.batches_per_epoch) as advance:
            keep_rows = self._summarize is not None
            metrics, rows = evaluate(
                self.backend, source.batches(0), self.backend.eval_step, keep_rows, advance, self.process_group
            )
        if self._summarize is not None and rows:
            valid = rows.pop(VALID)
            metrics |= self._summarize({name: values[valid] for name, values in rows.items()})
        if self._derive is not None:
            metrics |= self._derive(metrics)
        if name and not metrics:
            raise DataError(f"Expected the validation set {name!r} to have metrics, received none: it has no batches.")
        return {metric_name(metric, name): value for metric, value in metrics.items()}


def _rows(batch: Mapping[str, Any]) -> int:
    return max(int(next(leaf.shape[0] for leaf in batch.values() if leaf.ndim)), 1)


def _has_any(store: CheckpointStore) -> bool:
    """Whether anything is named like a checkpoint, valid or not."""
    return store.root.is_dir() and any(is_named(path) and path.is_dir() for path in store.root.iterdir())

"""A session on JAX: the backend and the data of one run. The course of the run is `session.run`'s."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from trainformer.backends.jax.backend import JaxBackend
from trainformer.callbacks.base import CallbackList, handlers_of, name_of
from trainformer.callbacks.compat import original
from trainformer.checkpointing import Checkpoint, CheckpointStore, StateComponent
from trainformer.checkpointing.checkpointer import Assets
from trainformer.checkpointing.jax_files import JaxFiles
from trainformer.checkpointing.store import is_named
from trainformer.core.errors import BadArgument, DataError
from trainformer.core.types import DataSource
from trainformer.engine import Event
from trainformer.engine.evaluation import evaluate
from trainformer.engine.process_group import ProcessGroup, SingleProcess
from trainformer.loggers.registry import make_loggers
from trainformer.run.folder import RunFolder
from trainformer.run.habits import FrontOptions
from trainformer.run.jax.components import state_components
from trainformer.run.jax.settings import JaxSettings
from trainformer.run.progress import showing_progress
from trainformer.run.provenance import record_length, record_settings, size_of
from trainformer.run.run import Run

logger = logging.getLogger("trainformer")

#: What happens inside a compiled step: nobody can be told of it.
_INSIDE_A_STEP = {Event.SUBSTEP_END: "each micro-batch", Event.BEFORE_UPDATE: "the gradients before the update"}


class JaxRun(Run):
    """One run on JAX. `owner` is the trainer; `derive` makes further metrics of those of an evaluation."""

    settings: JaxSettings
    backend: JaxBackend

    def __init__(
        self,
        owner: Any,
        settings: JaxSettings,
        backend: JaxBackend,
        *,
        train_source: DataSource,
        val_source: DataSource | None,
        callbacks: CallbackList,
        data: Any = None,
        passed: frozenset[str] = frozenset(),
        console: Console | None = None,
        derive: Callable[[dict[str, float]], dict[str, float]] | None = None,
        processes: ProcessGroup | None = None,
    ) -> None:
        settings.validate()
        make_loggers(settings.log, project=settings.project, name=settings.name, run_dir=Path("runs"))  # known names?
        super().__init__(
            owner,
            settings,
            data=data,
            process_group=processes or SingleProcess(),
            callbacks=callbacks,
            passed=passed,
            console=console,
            habits=FrontOptions(begin_anew="pass resume=None in the arguments"),
        )
        if settings.save_async and not self.process_group.is_single_process:
            # orbax lets processes wait for each other, which must not happen behind the back of a step that does, too.
            settings.save_async = False
            if self.process_group.is_main:
                logger.warning(
                    "save_async is for one process; with %d of them saves are waited for", self.process_group.world_size
                )
        self.backend = backend
        self.files = JaxFiles()
        self.train_source = train_source
        self.val_source = val_source
        self.train_size = size_of(getattr(train_source, "dataset", None))
        self._derive = derive
        self._record_config()

    def connect(self) -> None:
        """Subscribe everybody; a callback that listens to what a compiled step cannot tell is refused."""
        for callback in self.callbacks:
            self._check(callback)
        super().connect()

    def add_callback(self, callback: Any) -> None:
        """One more callback, after the others; also while the run goes on."""
        super().add_callback(callback)
        try:
            self._check(self.callbacks.callbacks[-1])
        except BadArgument:
            self.remove_callback(callback)
            raise

    def _check(self, callback: Any) -> None:
        if getattr(original(callback), "needs_torch", False):
            raise BadArgument(f"The callback {name_of(callback)} works on models of torch; this run has one of JAX.")
        found = _INSIDE_A_STEP.keys() & handlers_of(callback, self.owner).keys()
        if found:
            what = " and ".join(_INSIDE_A_STEP[event] for event in sorted(found, key=lambda e: e.name))
            raise BadArgument(
                f"The callback {name_of(callback)} wants to hear of {what}, which is inside a compiled step and cannot "
                "be told from outside. Listen to on_step_end, or compute it in the loss function and return it as a "
                "metric."
            )

    # -- what it says of itself ------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The trainer's name."""
        return type(self.owner).__name__

    def describe(self) -> str:
        """The trainer, its devices and its size."""
        mesh, params = self.backend.mesh, getattr(self.backend.state, "params", {})
        axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        kind = mesh.devices.flat[0].device_kind
        where = f"{mesh.size} x {kind}" + (f" ({axes})" if axes else "")
        return f"{self.title} on {where} in {self.settings.precision}: {count:,} parameters"

    def model_shapes(self) -> list[tuple[str, list[int]]]:
        """Of every parameter."""
        leaves = jax.tree_util.tree_leaves_with_path(getattr(self.backend.state, "params", {}))
        return [(jax.tree_util.keystr(path, simple=True, separator="/"), list(leaf.shape)) for path, leaf in leaves]

    def components(self) -> list[StateComponent]:
        """State, place in the run, data, callbacks."""
        return state_components(self)

    def assets(self) -> Assets | None:
        """What the trainer wants to have beside the state."""
        return self.owner.save_assets

    def own_listeners(self) -> dict[Event, Any]:
        """The trainer's own hooks."""
        return self.owner.listeners()

    def place(self) -> dict[str, Any]:
        """The kind of the devices, and how many."""
        mesh = self.backend.mesh
        return {**super().place(), "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}"}

    def fault_counters(self) -> dict[str, int]:
        """As the backend counts them."""
        return {"skipped": self.backend.skipped_steps}

    def memory_gb(self) -> float | None:
        """Peak of the first device, where it tells."""
        device = jax.local_devices()[0]
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use") if device.platform != "cpu" else None
        return super().memory_gb() if peak is None else peak / 1e9

    def _newest_of(self, store: CheckpointStore, folder: RunFolder) -> Checkpoint | None:
        """The newest checkpoint that is whole. If none of those that are there is, the run does not begin anew."""
        found = super()._newest_of(store, folder)
        if found is None and self.settings.resume == "auto" and _has_any(store):
            raise DataError(
                f"There are checkpoints in {store.root}, and none of them can be read: they are damaged, as the "
                "warnings say. Nothing was changed. Pass resume=None to begin anew, or another output_dir."
            )
        return found

    def record_derived(self) -> None:
        """Lengths."""
        record_length(self.context.config, self, self.settings.warmup_ratio)

    def _record_config(self) -> None:
        config = self.context.config
        record_settings(self, {})
        config.set_env("jax_version", jax.__version__)
        config.set_env("device", self.backend.mesh.devices.flat[0].device_kind)
        config.set_env("num_devices", self.backend.mesh.size)
        config.set_from_data("num_samples", self.train_size)
        config.set_user("task_type", self.title, filterable=True)
        self.record_derived()

    # -- evaluation ------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Metrics of the validation data."""
        assert self.val_source is not None
        return self.evaluate_on(self.val_source)

    def evaluate_on(self, source: DataSource) -> dict[str, float]:
        """Metrics named ``val/...`` of a source's batches."""
        with showing_progress(self.callbacks, self.owner, source.batches_per_epoch) as tell, self.backend.run_context():
            metrics, _ = evaluate(
                self.backend, source.batches(0), self.backend.eval_step, False, tell, self.process_group
            )
        if self._derive is not None:
            metrics |= self._derive(metrics)
        return {f"val/{name}": value for name, value in metrics.items()}


def _has_any(store: CheckpointStore) -> bool:
    """Whether there is anything that is named like a checkpoint, be it whole or not."""
    return store.root.is_dir() and any(is_named(path) and path.is_dir() for path in store.root.iterdir())

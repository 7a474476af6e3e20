"""A session on torch: task, data and backend of one run, and what can be asked of them.

Every way into the library that trains with torch makes one of these. The course of the run is `session.run`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from trainformer.backends.torch import TorchBackend
from trainformer.backends.torch.state_trees import cloned, gathered
from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.ema import EMA
from trainformer.checkpointing import SharingPattern, StateComponent
from trainformer.checkpointing.checkpointer import Assets, load_components
from trainformer.checkpointing.snapshot import write_snapshot
from trainformer.checkpointing.torch_files import TorchFiles
from trainformer.core.types import DataSource
from trainformer.distributed import make_strategy
from trainformer.engine import Event
from trainformer.loggers.registry import make_loggers
from trainformer.run.habits import FrontOptions
from trainformer.run.provenance import size_of
from trainformer.run.run import Run
from trainformer.run.torch.components import TRAINED, state_components
from trainformer.run.torch.data import load_training_data, make_source
from trainformer.run.torch.dry_run import Probe
from trainformer.run.torch.evaluation import Evaluation
from trainformer.run.torch.inference import Inference, Inputs
from trainformer.run.torch.launched import refuse_to_part
from trainformer.run.torch.parts import load_options, torch_settings
from trainformer.run.torch.provenance import declared_arguments, record_config, record_derived
from trainformer.run.torch.settings import RunSettings
from trainformer.run.torch.suiting import (
    can_be_indexed,
    check_task,
    suit_to_loader,
    suit_to_task,
    without_vain_sampler,
)
from trainformer.run.torch.task_events import task_handlers
from trainformer.tasks.base import provides
from trainformer.utils.helpers import seed_everything


class TorchRun(Run):
    """One run on torch. `owner` is what callbacks get as `trainer`; `passed` are the settings the user named."""

    settings: RunSettings
    train_source: DataSource
    val_source: DataSource | None

    def __init__(
        self,
        owner: Any,
        task: Any,
        settings: RunSettings,
        *,
        data: Any,
        val_data: Any = None,
        val_split: float | int | None = None,
        callbacks: CallbackList,
        passed: frozenset[str] = frozenset(),
        console: Console | None = None,
        habits: FrontOptions | None = None,
    ) -> None:
        settings.validate()
        make_loggers(settings.log, project=settings.project, name=settings.name, run_dir=Path("runs"))  # known names?
        strategy = make_strategy(settings.strategy)
        strategy.join(settings.device, settings.rank_timeout)
        super().__init__(
            owner,
            settings,
            data=data,
            process_group=strategy.process_group,
            callbacks=callbacks,
            passed=passed,
            console=console,
            habits=habits,
        )
        seed_everything(settings.seed, deterministic=False)
        self.task = task

        check_task(task)
        suited = suit_to_loader(settings, data, passed) | suit_to_task(settings, task, passed)
        if settings.ema is not None and not any(isinstance(callback, EMA) for callback in callbacks):
            callbacks.add(EMA(decay=settings.ema))
        with self.process_group.main_first():  # what it reads and caches is there for the others
            loaded = load_training_data(task, data, val_data, val_split, settings.seed)
        self.info = loaded.info
        # Settings that follow from task or data, where the user chose none.
        self.suited = without_vain_sampler(settings, suited, loaded.train)
        self.declared = declared_arguments(task)
        if provides(task, "look_at") and can_be_indexed(loaded.train):
            task.look_at(loaded.train)
        if provides(task, "configure"):
            task.configure(loaded.info)
        self.backend = TorchBackend(task, torch_settings(settings), strategy, provides(task, "on_eval_end"))
        self.files = TorchFiles(on_device=self.backend.device.type != "cpu")
        options = load_options(settings, self.backend.device, self.process_group)
        with self.process_group.main_first():
            self.train_source = make_source(task, loaded.train, options, train=True)
            inference = Inference(owner, task, self.backend, callbacks, settings.seed)
            self._evaluation = Evaluation(inference, settings, loaded)
        if (
            not self.process_group.is_single_process
        ):  # until here all ranks have drawn the same numbers: they have the same weights
            seed_everything(settings.seed + 1 + strategy.random_stream, deterministic=False)
        self.val_source = self._evaluation.val_source
        self.labels_comparable = loaded.comparable
        self.train_size = size_of(getattr(self.train_source, "dataset", loaded.train))
        self.backend.schedule_for(self.total_steps())
        record_config(self)

    # -- what it says of itself ------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The task's name."""
        return type(self.task).__name__

    def describe(self) -> str:
        """The task, its device and its size."""
        backend = self.backend
        parameters = backend.strategy.count_parameters(backend.parameters)
        together = "" if self.process_group.is_single_process else f" ({backend.strategy.describe()})"
        name = getattr(self.task, "title", self.title)
        return (
            f"{name} on {backend.device}{together} in {backend.precision.name}: {parameters:,} trainable parameters"
            f"{_in_short(backend.parameters)}"
        )

    def model_shapes(self) -> list[tuple[str, list[int]]]:
        """Of every parameter of the task's model."""
        return [(name, list(p.shape)) for name, p in self.task.model.named_parameters()]

    def assets(self) -> Assets | None:
        """What the task wants to have beside its weights."""
        return self.task.save_assets if provides(self.task, "save_assets") else None

    def own_listeners(self) -> dict[Event, Any]:
        """The task's own methods."""
        return task_handlers(self.task, self.total_steps)

    def place(self) -> dict[str, Any]:
        """The device and precision of the backend."""
        return {"device": str(self.backend.device), "precision": self.backend.precision.name}

    def fault_counters(self) -> dict[str, int]:
        """As the backend counts them."""
        return {"skipped": self.backend.guard.skipped, "pieces": self.backend.splitter.pieces}

    def memory_gb(self) -> float | None:
        """What tensors have occupied of a GPU at most, which the allocator counts on the host; else the process."""
        device = self.backend.device
        return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else super().memory_gb()

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        """What the task tells of it."""
        return self.task.evaluation_records() if provides(self.task, "evaluation_records") else {}

    def record_derived(self) -> None:
        """Lengths and precision."""
        record_derived(self)

    def fit(self) -> None:
        """Train from where the state is to the end of the plan."""
        refuse_to_part(self.backend.strategy)
        super().fit()

    # -- evaluation and prediction -------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Metrics of the validation data."""
        return self._evaluation.validate()

    def evaluate_on(self, data: Any = None, batch_size: int | None = None, most: int | None = None) -> dict[str, float]:
        """Evaluate on the validation data, or on other data; on the first `most` batches, if that is given."""
        return self._evaluation.evaluate(data, batch_size, most)

    def evaluate_trained(self) -> dict[str, float]:
        """Evaluate the weights that are trained, also where a callback offers others (an average) for evaluation."""
        return self._evaluation.validate(model=self.task.model)

    def evaluate_first_batches(self, most: int) -> dict[str, float]:
        """The metrics of a few validation batches, to see which there are."""
        return self._evaluation.validate(most)

    def embed(self, data: Any = "val", most: int | None = None) -> dict[str, torch.Tensor]:
        """Embeddings (and labels) of data: "train", "val", or anything that can be predicted for."""
        return self._evaluation.embed(data, most)

    def look(self, most: int, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Inputs and predictions of some samples of the validation data."""
        return self._evaluation.look(most, inputs)

    def eval_mode(self) -> AbstractContextManager[None]:
        """Evaluation mode, the model to be judged, and random numbers of its own."""
        return self._evaluation.inference.apart()

    def predict(self, data: Any, batch_size: int | None = None) -> list[dict[str, torch.Tensor]]:
        """One dict per sample, in input order."""
        return self._evaluation.predict(data, batch_size)

    def inference_model(self) -> nn.Module:
        """The model to evaluate, predict and export with."""
        return self._evaluation.inference.model()

    # -- state ---------------------------------------------------------------------------------------------

    def components(self) -> list[StateComponent]:
        """Everything needed to go on exactly from here, in parts."""
        return state_components(self)

    def save_file(self, path: Path) -> Path:
        """Write everything to one file of the user's choice. Every rank takes part, rank 0 writes."""
        states = {c: gathered(c.stateful.state_dict()) for c in self.components()}
        own = {c.key: state for c, state in states.items() if c.sharing_pattern is SharingPattern.PER_RANK}
        of_ranks = self.process_group.gather(own)
        content = {c.key: state for c, state in states.items()}
        self.process_group.run_on_main(lambda: write_snapshot(path, content, of_ranks))
        return path

    def whole_model(self) -> nn.Module:
        """The model to evaluate, predict and export with, all of it on this rank. Every rank takes part."""
        judged, model = self.inference_model(), self.backend.strategy.whole_model()
        if model is self.task.model:  # nothing is divided
            return judged
        if judged is not self.task.model:
            model.load_state_dict(gathered(judged.state_dict()))
        return model

    @contextmanager
    def sandbox(self) -> Iterator[Probe]:
        """A place for trial steps: on leaving, model, optimizer, random numbers and position are as before."""
        before = self.trained_state()
        try:
            yield Probe(self)
        finally:
            self.backend.drop_step()
            self.backend.guard.reset()
            self.restore_trained(before)

    def trained_state(self) -> dict[str, Any]:
        """A copy of what steps change."""
        to_host = self.backend.device.type != "cpu"
        return {c.key: cloned(c.stateful.state_dict(), to_host) for c in self.components() if c.key in TRAINED}

    def restore_trained(self, state: dict[str, Any]) -> None:
        """Put it back."""
        load_components([c for c in self.components() if c.key in state], state)


def _in_short(parameters: Iterable[Tensor]) -> str:
    """Which of the parameters are kept in fewer bits than usual."""
    short = sorted({str(p.dtype).removeprefix("torch.") for p in parameters} - {"float32", "float64"})
    return f" ({', '.join(short)})" if short else ""

"""`BaseTrainer`: what every HF-style trainer has, also one with its own training loop.

It dispatches events to callbacks, applies process-wide settings during a run, and saves and loads checkpoints.
Subclasses implement `_prepare`, `_train_loop` and `_eval_loop`.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import GenericAlias
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import sdpa_kernel

from trainformer.adapters.base import is_adapted, unwrap_model
from trainformer.backends.torch.memory import sdpa_backends
from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.compat.handlers import call_handler
from trainformer.callbacks.compat.huggingface import Bridge, HuggingFaceCallback, changed_flags
from trainformer.callbacks.compat.huggingface_types import TrainerControl, TrainerState
from trainformer.checkpointing import CheckpointStore, Retention, SharingPattern, StateComponent
from trainformer.checkpointing.checkpointer import Checkpointer, load_components, read_states
from trainformer.checkpointing.torch_files import TorchFiles, write_component
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.distributed import TorchProcessGroup
from trainformer.engine.state import append_record
from trainformer.hf.arguments import MinimalTrainingArguments, arguments_from
from trainformer.hf.callback_view import CallbackView
from trainformer.hf.checkpoint_manager import RNGState, TrainerCheckpoints
from trainformer.hf.checkpoints import ARGUMENTS, OWN_WEIGHTS, link_or_copy, place_adapter
from trainformer.hf.compat import ScriptMixin
from trainformer.hf.distributed import join, this_process
from trainformer.hf.forgather import StatefulsMixin, skipped_components
from trainformer.hf.outputs import CallableBool, TrainOutput
from trainformer.hf.settings import CHECKPOINT_NAME, KEEP_ALL, monitored_metric, num_best_kept
from trainformer.hf.task import save_pretrained_assets
from trainformer.utils.files import check_local

logger = logging.getLogger("trainformer")

_FLAGS = tuple(TrainerControl.__dataclass_fields__)


class BaseTrainer(ScriptMixin, StatefulsMixin, ABC):
    """Base class of HF-style trainers. `callbacks` replace the default ones; `[]` means none."""

    def __class_getitem__(cls, arguments: Any) -> Any:
        """`BaseTrainer[MyArguments]`, for type checkers."""
        return GenericAlias(cls, arguments)

    checkpoint_manager: Any = None  # a subclass may create its own in `_prepare`

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """The callbacks that every trainer of this class has."""
        return []

    def __init__(
        self,
        args: MinimalTrainingArguments | None = None,
        model: nn.Module | None = None,
        *,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        callbacks: Iterable[Any] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        if isinstance(args, nn.Module) or isinstance(model, MinimalTrainingArguments):
            args, model = model, args  # type: ignore[assignment]  # HF's order
        if model is None and model_init is None:
            raise BadArgument("Expected a model or model_init, received neither. Pass one of them.")
        if model is not None and not isinstance(model, nn.Module):
            raise BadArgument(expected("model to be a torch Module", type(model).__name__))
        self.args: Any = arguments_from(args)
        self.model = model
        self.data_collator = data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.model_init = model_init
        self.loss_fn = compute_loss_func
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        process = this_process()
        self.is_local_process_zero = CallableBool(process.local_rank == 0)
        self.is_world_process_zero = CallableBool(process.rank == 0)
        self.num_processes = process.world_size
        self._callbacks = CallbackList()
        self._bridge = Bridge.of(self._callbacks.shared)
        self._stop_requested_by: tuple[str, str, str] | None = None
        self._skips_weights = False  # while saving a checkpoint, which writes the weights itself
        state = self._bridge.state
        state.is_world_process_zero, state.is_local_process_zero = process.rank == 0, process.local_rank == 0
        state.max_steps, state.num_train_epochs = self.args.max_steps, self.args.num_train_epochs
        state.train_batch_size = self.args.per_device_train_batch_size
        state.logging_steps, state.eval_steps = self.args.logging_steps, self.args.eval_steps or state.eval_steps
        for callback in self._initial_callbacks(callbacks):
            self.add_callback(callback)

    def __repr__(self) -> str:
        kind = type(self.model).__name__ if self.model is not None else "model_init"
        return f"{type(self).__name__}({kind}, step {self.state.global_step}, callbacks {self.callbacks})"

    # -- to be implemented ---------------------------------------------------------------------------------

    @abstractmethod
    def _prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Prepare for training or evaluation; either dataset may be None."""

    @abstractmethod
    def _train_loop(self) -> TrainOutput:
        """Train."""

    @abstractmethod
    def _eval_loop(self) -> dict[str, float]:
        """Evaluate."""

    # -- training and evaluation ---------------------------------------------------------------------------

    def train(self, **kwargs: Any) -> TrainOutput:
        """Prepare, then train. Can be called repeatedly."""
        for flag in _FLAGS:
            setattr(self.control, flag, False)
        self._stop_requested_by = None
        with self._process_settings():
            self._prepare(train_dataset=self.train_dataset, eval_dataset=self.eval_dataset)
            return self._train_loop()

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on the evaluation data, or on another dataset."""
        with self._process_settings():
            self._prepare(None, self.eval_dataset if eval_dataset is None else eval_dataset)
            return self._eval_loop()

    @contextmanager
    def _process_settings(self) -> Iterator[None]:
        """Apply process-wide settings, and restore them afterwards."""
        args = self.args
        with ExitStack() as stack:
            backends = sdpa_backends(args.sdpa_backend)
            if backends:
                stack.enter_context(sdpa_kernel(backends, set_priority=args.sdpa_set_priority))
            if args.detect_anomaly:
                logger.warning("detect_anomaly is on: every step is much slower")
                stack.enter_context(torch.autograd.detect_anomaly(check_nan=True))
            if args.dynamo_recompile_limit is not None:
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=args.dynamo_recompile_limit))
            budget = getattr(args, "activation_memory_budget", None)
            if budget is not None:
                stack.enter_context(torch._functorch.config.patch(activation_memory_budget=budget))
            if args.full_determinism:
                before = torch.are_deterministic_algorithms_enabled()
                stack.callback(torch.use_deterministic_algorithms, before)
                torch.use_deterministic_algorithms(True)
            if args.dataloader_num_workers:
                # Otherwise tokenizers warn in every forked worker, and then disable parallelism themselves.
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            yield

    def make_model(self, trial: Any = None) -> nn.Module:
        """The model. If none was passed, the first call creates it with `call_model_init` in `default_dtype`."""
        if self.model is None:
            assert self.model_init is not None
            before = torch.get_default_dtype()
            try:
                if self.args.default_dtype is not None:
                    torch.set_default_dtype(getattr(torch, self.args.default_dtype))
                self.model = self.call_model_init(trial)
            finally:
                torch.set_default_dtype(before)
            if not isinstance(self.model, nn.Module):
                raise BadArgument(expected("model_init to return a torch Module", type(self.model).__name__))
        return self.model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from `model_init`, which takes no argument, or the trial of a hyperparameter search."""
        assert self.model_init is not None
        try:
            parameters = inspect.signature(self.model_init).parameters.values()
            takes_trial = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        except ValueError:  # a builtin
            takes_trial = False
        return self.model_init(trial) if takes_trial else self.model_init()

    def unwrapped_model(self) -> nn.Module:
        """The model without the wrappers of torch."""
        return unwrap_model(self.make_model())

    # -- callbacks -----------------------------------------------------------------------------------------

    def _initial_callbacks(self, given: Iterable[Any] | None) -> list[Any]:
        return self.default_callbacks() if given is None else list(given)

    @property
    def callbacks(self) -> CallbackView:
        """The callbacks in order; a list that can be changed."""
        return CallbackView(self)

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[Any]) -> None:
        CallbackView(self).replace(callbacks)

    def add_callback(self, callback: Any) -> None:
        """Add a callback: an object, a class to instantiate, or a name."""
        self._callbacks.add(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first instance of a class, and return it; None if there is none."""
        return self._callbacks.remove(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first instance of a class."""
        self.pop_callback(callback)

    @property
    def state(self) -> TrainerState:
        """The progress of the run."""
        return self._bridge.state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self._bridge.state = state

    @property
    def control(self) -> TrainerControl:
        """The requests of callbacks. Assigning another control takes over its flags."""
        return self._bridge.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self._bridge.control = control

    @property
    def compute_loss_func(self) -> Callable[..., torch.Tensor] | None:
        """The loss function that was passed."""
        return self.loss_fn

    @compute_loss_func.setter
    def compute_loss_func(self, function: Callable[..., torch.Tensor] | None) -> None:
        self.loss_fn = function

    def log(self, logs: dict[str, float]) -> TrainerControl:
        """Add metrics to the log history, and dispatch `on_log`."""
        append_record(self.state.log_history, {**logs, "step": self.state.global_step})
        return self._dispatch_event("on_log", logs=logs)

    def _dispatch_event(self, event: str, **kwargs: Any) -> TrainerControl:
        """Call all HF callbacks in order. The returned control holds their requests."""
        for callback in list(self._callbacks):
            if isinstance(callback, HuggingFaceCallback) and callback.overrides(event):
                self._call_callback(callback.wrapped, event, kwargs)
        return self.control

    def _call_callback(self, callback: Any, event: str, extra: dict[str, Any]) -> None:
        control = self.control
        before = {name: bool(getattr(control, name)) for name in _FLAGS}
        keywords = {
            "model": self.unwrapped_model() if self.model is not None else None,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
            "trainer": self,
            **extra,
        }
        returned = call_handler(getattr(callback, event), self.args, self.state, control, keywords)
        changed = changed_flags(before, control, returned)
        for name in changed:
            setattr(control, name, not before[name])
        # Abort wins over stop: it is what the user has to know of.
        stops = {"should_abort_without_save": "abort", "should_training_stop": "stop"}
        asked = next((reason for name, reason in stops.items() if name in changed and not before[name]), None)
        if asked is not None and self._stop_requested_by is None:
            self._stop_requested_by = type(callback).__name__, event, asked
            logger.info("%s asked to %s in %s", type(callback).__name__, asked, event)

    # -- saving and loading --------------------------------------------------------------------------------

    def save_model(self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False) -> None:
        """Write the weights, the config and the tokenizer, for `from_pretrained`.

        Override it, or `_save`, to write more files; checkpoints call it, too. Call it on every rank: a sharded model
        is gathered. Rank 0 writes.
        """
        if self._own_manager is not None:
            return self._own_manager.save_model(output_dir, overwrite_output_dir=self.args.overwrite_output_dir)
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        check_local("output_dir", folder)
        weights = None if self._skips_weights else self._weights()
        if self.is_world_process_zero:
            folder.mkdir(parents=True, exist_ok=True)
            self._save(str(folder), weights)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if not self._skips_weights:
            write_component(folder, "model", "weights", self._weights() if state_dict is None else state_dict)
            if is_adapted(self.make_model()):
                place_adapter(folder, self.make_model())
        save_pretrained_assets(self.make_model(), self._saved_processor(), folder)
        torch.save(self.args, folder / ARGUMENTS)

    def _saved_processor(self) -> Any:
        """What is saved beside the model: the processing class, or else the tokenizer of the collator."""
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def save_checkpoint_assets(self, folder: Path) -> list[str]:
        """Write the files of a checkpoint besides its state, including those of an overridden `save_model`.

        Returns their names. An override writes to a temporary folder first, so that it cannot overwrite the state.
        """
        before = set(folder.iterdir())
        if type(self).save_model is BaseTrainer.save_model and type(self)._save is BaseTrainer._save:
            save_pretrained_assets(self.make_model(), self._saved_processor(), folder)
            return sorted(path.name for path in folder.iterdir() if path not in before and path.is_file())
        own = folder / "saved_by_user"
        own.mkdir()
        self._skips_weights = True
        try:
            self.save_model(str(own), _internal_call=True)
        finally:
            self._skips_weights = False
        for path in sorted(own.iterdir()):
            if (folder / path.name).exists():
                logger.warning(
                    "%s.save_model wrote %s, which is part of the checkpoint already; keeping that one. Use another "
                    "name.", type(self).__name__, path.name,
                )  # fmt: skip
            else:
                path.rename(folder / path.name)
        shutil.rmtree(own)
        weights = folder / OWN_WEIGHTS
        if weights.exists() and not any(folder.glob("*model*.safetensors")):
            link_or_copy(weights, folder / "model.safetensors")  # an override that leaves the weights to us
        return sorted(path.name for path in folder.iterdir() if path not in before and path.is_file())

    def _weights(self) -> dict[str, Any]:
        return next(c for c in self.get_state_components() if c.key == "model").stateful.state_dict()

    @property
    def _own_manager(self) -> Any:
        """The checkpoint manager that a subclass has created."""
        return None if isinstance(self.checkpoint_manager, TrainerCheckpoints) else self.checkpoint_manager

    def _join(self) -> TorchProcessGroup:
        """The process group of the run."""
        return join(self.args)

    def save_checkpoint(self, checkpoint_path: str | os.PathLike[str] | None = None) -> str:
        """Save a checkpoint to resume from, and return its path.

        The default path is ``output_dir/checkpoint-<step>``; older checkpoints there are deleted as the arguments say.
        """
        if self._own_manager is not None:
            return str(self._own_manager.save_checkpoint(checkpoint_path))
        metric, greater_is_better = monitored_metric(self.args)
        keep = Retention(
            last=self.args.save_total_limit or KEEP_ALL,
            best=num_best_kept(self.args),
            monitor=metric,
            mode="max" if greater_is_better else "min",
        )
        folder, naming = Path(self.args.output_dir), CHECKPOINT_NAME
        if checkpoint_path is not None:
            folder, naming = Path(checkpoint_path).parent, Path(checkpoint_path).name
            keep = Retention(last=KEEP_ALL)
        checkpointer = Checkpointer(
            self._components,
            TorchFiles(),
            CheckpointStore(folder, naming),
            keep,
            process_group=self._join(),
            timeout=self.args.ddp_timeout,
            assets=self.save_checkpoint_assets,
        )
        state = self.state
        path = checkpointer.save(state.global_step, state.raw_epoch)
        checkpointer.close()  # raises if the save failed
        return str(path)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str] | None = None) -> None:
        """Load a checkpoint, by default the newest in `output_dir`. Raises if it does not fit."""
        if self._own_manager is not None:
            return self._own_manager.load_checkpoint(checkpoint_path)
        path = self._checkpoint_at(checkpoint_path)
        states = read_states(path, TorchFiles(), self._join().rank, skips_deleted=True)
        load_components(self._restored_components(), states)

    def _restored_components(self) -> list[StateComponent]:
        skipped = skipped_components(self.args, "restore")
        parts = self.get_state_components()
        return [part for part in (*parts, *self.extra_components(p.key for p in parts)) if part.key not in skipped]

    def _checkpoint_at(self, path: str | os.PathLike[str] | None) -> Path:
        if path is not None:
            return Path(path)
        newest = CheckpointStore(Path(self.args.output_dir), skips_deleted=True).newest()
        if newest is None:
            do = "Pass the path of one."
            raise DataError(expected("a checkpoint in output_dir", f"none in {self.args.output_dir}", do))
        return newest.path

    def get_state_components(self) -> list[StateComponent]:
        """The components of a checkpoint, and how each is shared between ranks."""
        model = self.make_model()
        parts = [StateComponent("model", model, required=True, format="weights")]
        for key, part in (("optimizer", self.optimizer), ("scheduler", self.lr_scheduler)):
            if part is not None:
                parts.append(StateComponent(key, part, required=False))
        parts.append(StateComponent("trainer", self, required=False))
        if hasattr(self.train_dataloader, "state_dict"):
            parts.append(StateComponent("dataset", self.train_dataloader, required=False))
        return [*parts, StateComponent("rng", RNGState(), SharingPattern.PER_RANK, required=False)]

    def _components(self) -> list[StateComponent]:
        """The components under the names by which they are saved."""
        parts = self.get_state_components()
        parts += self.extra_components(part.key for part in parts)
        return [part for part in parts if part.key not in skipped_components(self.args, "save")]

    def get_process_groups(self) -> dict[str, Any]:
        """Process groups by name, for components that are shared within one; empty for a single process."""
        return {"world": dist.group.WORLD} if self.num_processes > 1 and dist.is_initialized() else {}

    def state_dict(self) -> dict[str, Any]:
        """The progress of the run."""
        state = self.state
        names = ("global_step", "epoch_start_step", "raw_epoch", "epoch", "num_input_tokens_seen", "total_flos")
        best = ("best_metric", "best_global_step", "best_model_checkpoint")
        return {name: getattr(state, name) for name in (*names, *best)} | {"log_history": list(state.log_history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, value in state_dict.items():
            setattr(self.state, name, list(value) if name == "log_history" else value)

"""Forgather's names for checkpoints: the manager of a trainer with its own loop, and what it is made from."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from trainformer.backends.torch import capture_random, restore_random
from trainformer.checkpointing import CheckpointStore, Retention, StateComponent
from trainformer.checkpointing.checkpointer import Checkpointer, load_components, read_states
from trainformer.checkpointing.manifest import MANIFEST, InvalidCheckpoint, Manifest
from trainformer.checkpointing.store import Checkpoint, protect, read_verified
from trainformer.checkpointing.torch_files import TorchFiles, write_component
from trainformer.core.errors import DataError, expected
from trainformer.hf.checkpoints import has_weights, model_weights
from trainformer.hf.forgather import skipped_components
from trainformer.hf.settings import CHECKPOINT_NAME, KEEP_ALL
from trainformer.hf.task import save_pretrained_assets
from trainformer.utils.files import check_local
from trainformer.utils.tensor_files import read_tensors

logger = logging.getLogger("trainformer")


class RNGState:
    """The random number generators of Python, NumPy and torch, as a part of a checkpoint.

    >>> import torch
    >>> state = RNGState().state_dict()
    >>> first = torch.rand(1)
    >>> RNGState().load_state_dict(state)
    >>> torch.equal(torch.rand(1), first)
    True
    """

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators."""
        return capture_random()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it; Forgather's own checkpoints have the generators of torch only."""
        if "torch_rng_state" not in state:
            restore_random(state)
            return
        torch.set_rng_state(state["torch_rng_state"])
        if "cuda_rng_state" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda_rng_state"])


@runtime_checkable
class StatefulProvider(Protocol):
    """Has a state that checkpoints are made of. Every trainer is one."""

    def get_state_components(self) -> list[StateComponent]:
        """The components of a checkpoint."""

    def get_process_groups(self) -> dict[str, Any]:
        """Process groups by name, for components that are shared within one."""


@runtime_checkable
class CheckpointInterface(Protocol):
    """What a trainer uses as its `checkpoint_manager`."""

    def save_checkpoint(self, checkpoint_path: str | None = None, checkpoint_id: str | None = None) -> str:
        """Save a checkpoint, and return its path."""

    def load_checkpoint(self, checkpoint_path: str | None = None) -> None:
        """Load one, by default the newest."""

    def save_model(self, output_dir: Any = None, overwrite_output_dir: bool = False) -> None:
        """Write the model for `from_pretrained`."""

    def set_best_checkpoint(self, best_checkpoint: str) -> None:
        """Keep a checkpoint, whatever the limit is."""

    def resolve_checkpoint_path(self, checkpoint_path: str | None) -> str | None:
        """The path if there is a checkpoint, by default that of the newest one; else None."""


@runtime_checkable
class ExtensibleTrainer(Protocol):
    """A trainer that has callbacks. Every trainer of `trainformer.hf` is one."""

    def train(self, **kwargs: Any) -> Any:
        """Train."""

    def evaluate(self, eval_dataset: Any = None, **kwargs: Any) -> dict[str, float]:
        """Evaluate."""

    def add_callback(self, callback: Any) -> None:
        """Add a callback."""

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, and return it."""

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where checkpoints are written, and how many are kept.

    >>> CheckpointConfig(output_dir="out", save_total_limit=2).save_total_limit
    2
    """

    output_dir: str
    save_total_limit: int | None = None


class CheckpointManager:
    """Saves and loads the components of a trainer with its own loop, which creates it in `_prepare`.

    Checkpoints are folders ``output_dir/checkpoint-<step>``; without a step their number goes on.

    Args:
        config: Where, and how many.
        dist: The rank of this process; only single-process trainers create their own manager.
        stateful_provider: Has the components: the trainer.
        model: Written by `save_model`.
        model_preprocessor: The tokenizer, written by `save_model`.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        dist: Any = None,
        stateful_provider: Any = None,
        model: nn.Module | None = None,
        model_preprocessor: Any = None,
    ) -> None:
        if stateful_provider is None or model is None:
            raise DataError(expected("stateful_provider and model for CheckpointManager", "None"))
        if getattr(dist, "world_size", 1) > 1:
            do = "Use Trainer, whose checkpoints have the parts of all ranks."
            raise DataError(expected("a single process for CheckpointManager", dist.world_size, do))
        self.config, self.dist, self.stateful_provider = config, dist, stateful_provider
        self.model, self.model_preprocessor = model, model_preprocessor
        self.best_checkpoint: str | None = None

    def save_checkpoint(self, checkpoint_path: str | None = None, checkpoint_id: str | None = None) -> str:
        """Save all components, and return the path. The oldest checkpoints beyond the limit are deleted."""
        folder, naming, keep = Path(self.config.output_dir), CHECKPOINT_NAME, self.config.save_total_limit
        if checkpoint_path is not None:
            folder, naming, keep = Path(checkpoint_path).parent, Path(checkpoint_path).name, None
        elif checkpoint_id is not None:
            naming = f"checkpoint-{checkpoint_id}"
        store = CheckpointStore(folder, naming)
        checkpointer = Checkpointer(self._saved_components, TorchFiles(), store, Retention(last=keep or KEEP_ALL))
        path = checkpointer.save(self._step(store))
        checkpointer.close()  # raises if the save failed
        return str(path)

    def _saved_components(self) -> list[StateComponent]:
        skipped = skipped_components(getattr(self.stateful_provider, "args", None), "save")
        return [part for part in self.stateful_provider.get_state_components() if part.key not in skipped]

    def _step(self, store: CheckpointStore) -> int:
        state = getattr(self.stateful_provider, "state", None)
        if state is not None:
            return int(state.global_step)
        return max((checkpoint.step for checkpoint in store.checkpoints()), default=-1) + 1

    def load_checkpoint(self, checkpoint_path: str | None = None) -> None:
        """Load all components, by default of the newest checkpoint."""
        path = self.resolve_checkpoint_path(checkpoint_path)
        if path is None:
            where = checkpoint_path or self.config.output_dir
            raise DataError(expected("a checkpoint to load", f"none in {where}", "Pass the path of one."))
        logger.info("resuming from %s", path)
        args = getattr(self.stateful_provider, "args", None)
        skipped = skipped_components(args, "restore")
        components = [part for part in self.stateful_provider.get_state_components() if part.key not in skipped]
        if (Path(path) / MANIFEST).is_file():
            states = read_states(Path(path), TorchFiles(), skips_deleted=True)
        else:
            states = read_forgather(Path(path), self.model, [part.key for part in components])
        load_components(components, states)

    def resolve_checkpoint_path(self, checkpoint_path: str | None) -> str | None:
        """The path if there is a checkpoint, by default that of the newest one; else None, with a warning."""
        return resolve_checkpoint(self.config.output_dir, checkpoint_path)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None, overwrite_output_dir: bool = False) -> None:
        """Write weights, config and tokenizer."""
        folder = Path(self.config.output_dir if output_dir is None else output_dir)
        check_local("output_dir", folder)
        if not overwrite_output_dir and any(folder.glob("model*.safetensors")):
            do = "Pass overwrite_output_dir=True, or another folder."
            raise DataError(expected(f"no model in {folder}", "one that would be overwritten", do))
        folder.mkdir(parents=True, exist_ok=True)
        write_component(folder, "model", "weights", self.model.state_dict())
        save_pretrained_assets(self.model, self.model_preprocessor, folder)

    def set_best_checkpoint(self, best_checkpoint: str) -> None:
        """Keep a checkpoint, whatever the limit is; the one that was kept before may be deleted."""
        if self.best_checkpoint is not None:
            set_protected(self.best_checkpoint, on=False)
        set_protected(best_checkpoint)
        self.best_checkpoint = best_checkpoint


class TrainerCheckpoints:
    """The `checkpoint_manager` of a `Trainer`: its own methods under the names of `CheckpointInterface`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def save_checkpoint(self, checkpoint_path: str | None = None, checkpoint_id: str | None = None) -> str:
        """Save a checkpoint, and return its path."""
        if checkpoint_path is None and checkpoint_id is not None:
            checkpoint_path = os.path.join(self._trainer.args.output_dir, f"checkpoint-{checkpoint_id}")
        return str(self._trainer.save_checkpoint(checkpoint_path))

    def load_checkpoint(self, checkpoint_path: str | None = None) -> None:
        """Load a checkpoint, by default the newest."""
        self._trainer.load_checkpoint(checkpoint_path)

    def save_model(self, output_dir: Any = None, overwrite_output_dir: bool = False) -> None:
        """Write the model for `from_pretrained`. A model that is there is always overwritten, as in HF."""
        self._trainer.save_model(output_dir)

    def set_best_checkpoint(self, best_checkpoint: str) -> None:
        """Keep a checkpoint, whatever `save_total_limit` is."""
        set_protected(best_checkpoint)

    def resolve_checkpoint_path(self, checkpoint_path: str | None) -> str | None:
        """The path if there is a checkpoint, by default that of the newest one; else None, with a warning."""
        return resolve_checkpoint(self._trainer.args.output_dir, checkpoint_path)


def resolve_checkpoint(folder: str | os.PathLike[str], path: str | None) -> str | None:
    """A checkpoint: the one at the path, or the newest in the folder; None with a warning if there is none."""
    found = find_latest_checkpoint(folder) if path is None else str(path) if validate_checkpoint(path) else None
    if found is None:
        logger.warning("there is no checkpoint in %s", folder if path is None else path)
    return found


def read_forgather(path: Path, model: nn.Module, keys: Sequence[str]) -> dict[str, Any]:
    """The states in a checkpoint that Forgather wrote: weights, and files such as `optimizer_state.pt`."""
    files = {key: path / f"{key}_state.pt" for key in keys}
    states = {key: read_tensors(file) for key, file in files.items() if file.exists()}
    return {"model": model_weights(path, model), **states}


def set_protected(path: str, on: bool = True) -> None:
    """Exempt a checkpoint from `save_total_limit`."""
    if (Path(path) / MANIFEST).is_file():
        protect(Checkpoint(Path(path), Manifest.read(Path(path))), on)


def validate_checkpoint(checkpoint_path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a checkpoint: of ours with all its files, of HF or Forgather with weights.

    >>> validate_checkpoint("no such folder")
    False
    """
    path = Path(checkpoint_path)
    if not (path / MANIFEST).exists():
        return path.is_dir() and has_weights(path)
    try:
        read_verified(path, skips_deleted=True)
    except InvalidCheckpoint as error:
        logger.warning("%s", error)
        return False
    return True


def find_latest_checkpoint(model_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint in a folder, or in `checkpoints` below it, where Forgather writes them.

    >>> find_latest_checkpoint("no such folder") is None
    True
    """
    newest = CheckpointStore(Path(model_dir), skips_deleted=True).newest()
    if newest is not None:
        return str(newest.path)
    others = [*Path(model_dir).glob("checkpoint-*"), *Path(model_dir, "checkpoints").glob("checkpoint-*")]
    return max(map(str, filter(validate_checkpoint, others)), key=os.path.getmtime, default=None)

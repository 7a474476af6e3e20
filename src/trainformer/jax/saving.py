"""What a trainer writes beside the state of a checkpoint, and a folder that holds everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors.numpy import save_file

from trainformer.backends.jax.processes import on_every_host
from trainformer.checkpointing import CheckpointStore, Manifest, Retention
from trainformer.checkpointing.checkpointer import Checkpointer, versions
from trainformer.core.errors import BadArgument, expected
from trainformer.jax.serialization import FILE_NAME
from trainformer.run.components import StatefulAdapter

if TYPE_CHECKING:
    from trainformer.jax.base_trainer import BaseTrainer


def save_assets(trainer: BaseTrainer, folder: Path) -> list[str]:
    """Write the arguments; the names of the files."""
    trainer.arguments.save(folder / FILE_NAME)
    return [FILE_NAME]


def save_trainer(
    trainer: BaseTrainer, path: Path, state: Any = None, write: Callable[[Path, Any], list[str]] | None = None
) -> Path:
    """Write a folder that is a checkpoint to go on from, and holds the weights as files of their own.

    `write` puts the weights of a state into a folder and tells the files' names; by default the trainer does.
    """
    run = trainer._run
    if "{" in path.name or "}" in path.name:
        raise BadArgument(expected("a folder whose name has no braces", path.name))
    path = path.absolute()
    components = run.components()
    if state is not None:
        given = StatefulAdapter(lambda: state, lambda saved: None)
        components = [dataclasses.replace(c, stateful=given) if c.key == "state" else c for c in components]
    chosen = on_every_host(run.backend.state if state is None else state)
    manifest = Manifest(step=int(chosen.step), epoch=run.state.epoch, components={}, versions=versions(run.files))
    checkpointer = Checkpointer(
        path.parent,
        Retention(last=10**9),
        asynchronous=False,
        naming=path.name,
        files=run.files,
        process_group=run.process_group,
    )
    checkpointer.store = _OneFolder(path.parent, path.name)
    # What stood there before is replaced in one move; a folder of other things is not ours to replace.
    if path.exists() and any(path.iterdir()) and not (path / "manifest.json").exists():
        raise BadArgument(expected("a new folder, or one that save_pretrained wrote", str(path), "Choose another one."))

    def assets(folder: Path) -> list[str]:
        return [*trainer.save_assets(folder), *(write or trainer.save_weights)(folder, chosen)]

    if not checkpointer.save(components, manifest, assets):
        checkpointer.conclude()  # raises, and says why
    return path


class _OneFolder(CheckpointStore):
    """A folder on its own, in a place that belongs to the user: nothing else is written there."""

    def _point_to(self, target: Path) -> None:
        """No hint to the latest."""


def save_weights(trainer: BaseTrainer, folder: Path, state: Any) -> list[str]:
    """Write the weights: as the model itself does, or by the paths of its parameters."""
    model: Any = getattr(state, "model", None)
    with new_files(folder) as written:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)
        else:
            leaves = jax.tree_util.tree_leaves_with_path(getattr(state, "params", state))
            arrays = {
                jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
                for path, leaf in leaves
                if hasattr(leaf, "dtype") and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            }
            save_file(arrays, folder / "model.safetensors")
    return written


@contextmanager
def new_files(folder: Path) -> Iterator[list[str]]:
    """A list that in the end holds the names of the files that were written to a folder meanwhile."""
    before = set(folder.iterdir())
    written: list[str] = []
    yield written
    written += sorted(path.name for path in folder.iterdir() if path not in before and path.is_file())

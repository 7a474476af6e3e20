"""Files that a trainer saves next to the state of a checkpoint, and `save_pretrained`."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors.numpy import save_file

from trainformer.backends.jax.processes import gather_to_host
from trainformer.checkpointing import CheckpointStore, Retention, StateComponent, StatefulAdapter
from trainformer.checkpointing.checkpointer import Checkpointer
from trainformer.core.errors import BadArgument, expected
from trainformer.utils.files import check_local

if TYPE_CHECKING:
    from trainformer.jax.base_trainer import BaseTrainer


def save_trainer(
    trainer: BaseTrainer, path: Path, state: Any = None, write: Callable[[Path, Any], list[str]] | None = None
) -> Path:
    """Write a folder that is both a checkpoint to resume from and a model with weight files.

    `write(folder, state)` writes the weights and returns the file names; default: the trainer's `save_weights`.
    """
    check_local("the folder", path)
    run = trainer._run
    if "{" in path.name or "}" in path.name:
        raise BadArgument(expected("a folder name without braces", path.name))
    path = path.absolute()
    chosen = gather_to_host(_in_own_dtypes(run) if state is None else state)
    # An existing folder is replaced by one rename; a folder with other content is not ours to replace.
    if path.exists() and any(path.iterdir()) and not (path / "manifest.json").exists():
        do = "Choose another folder."
        raise BadArgument(expected("a new folder, or one that save_pretrained wrote", str(path), do))

    def components() -> list[StateComponent]:
        found = run.components()
        if state is None:
            return found
        given = StatefulAdapter(lambda: state, lambda saved: None)
        return [dataclasses.replace(c, stateful=given) if c.key == "state" else c for c in found]

    def assets(folder: Path) -> list[str]:
        return [*trainer.save_assets(folder), *(write or trainer.save_weights)(folder, chosen)]

    checkpointer = Checkpointer(
        components,
        run.files,
        CheckpointStore(path.parent, path.name, marks_latest=False),
        Retention(last=10**9),
        process_group=run.process_group,
        assets=assets,
    )
    checkpointer.save(int(chosen.step), run.state.epoch)
    checkpointer.close()  # raises if the save failed
    return path


def _in_own_dtypes(run: Any) -> Any:
    """The state whose weights are written: that of evaluations (EMA), in the dtypes of the trained one."""
    chosen, trained = run.inference.state(), run.backend.state
    if chosen is trained:
        return chosen
    return jax.tree.map(lambda array, own: array.astype(own.dtype), chosen, trained)


@contextmanager
def new_files(folder: Path) -> Iterator[list[str]]:
    """A list that on exit contains the names of the files written to a folder inside the block."""
    before = set(folder.iterdir())
    written: list[str] = []
    yield written
    written += sorted(path.name for path in folder.iterdir() if path not in before and path.is_file())


def write_weights(folder: Path, state: Any) -> list[str]:
    """Write the weights with the model's own `save_pretrained`, or by parameter path. Returns the file names."""
    model: Any = getattr(state, "model", None)
    with new_files(folder) as written:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)
        else:
            save_file(arrays_by_path(state), folder / "model.safetensors")
    return written


def arrays_by_path(state: Any) -> dict[str, np.ndarray]:
    """The parameters of a state by path."""
    leaves = jax.tree_util.tree_leaves_with_path(getattr(state, "params", state))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in leaves
        if hasattr(leaf, "dtype") and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }


def export_trainer(trainer: BaseTrainer, path: Path) -> str:
    """Write the model of a trainer, without the state of its training; returns the path.

    A ``.safetensors`` file gets the weights by parameter path. Any other path is a folder: the weights in the format of
    HuggingFace (of LoRA, the adapter in that of peft), and the tokenizer.
    """
    path, state = path.absolute(), gather_to_host(trainer.model_state)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix == ".safetensors":
            save_file(arrays_by_path(state), draft)
        else:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise BadArgument(expected("a folder to make, which is empty or not there", str(path)))
            draft.mkdir()
            trainer.save_weights(draft, state)
            trainer.save_tokenizer(draft)
            if path.exists():
                path.rmdir()
        draft.replace(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True) if draft.is_dir() else draft.unlink(missing_ok=True)
    return str(path)

"""From the path a person has at hand to the checkpoint that is meant. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from trainformer.checkpointing import Checkpoint, CheckpointStore, InvalidCheckpoint, Manifest
from trainformer.checkpointing import protect as mark
from trainformer.checkpointing.manifest import MANIFEST
from trainformer.checkpointing.store import folder_of_checkpoints, is_named
from trainformer.core.errors import BadArgument, DataError, expected

AnyPath = str | Path


def list_checkpoints(run_or_folder: AnyPath) -> list[Checkpoint]:
    """The complete checkpoints of a run's folder, or of a folder of checkpoints; oldest first.

    Only manifests are read. A folder whose manifest is damaged is passed over with a warning.
    """
    path = existing(run_or_folder)
    if path.is_file():
        raise BadArgument(expected("the folder of a run or of its checkpoints", str(path), "This is a file."))
    if is_checkpoint(path):
        return [Checkpoint(path, Manifest.read(path))]
    return CheckpointStore(folder_of_checkpoints(path)).checkpoints()


def protect(path: AnyPath) -> Checkpoint:
    """Keep a checkpoint for good: no rule of a run deletes it. The checkpoint that was meant."""
    return _mark(path, on=True)


def unprotect(path: AnyPath) -> Checkpoint:
    """Let the rules of the run decide again."""
    return _mark(path, on=False)


def _mark(path: AnyPath, on: bool) -> Checkpoint:
    found = find(path)
    if not isinstance(found, Checkpoint):
        raise BadArgument(
            expected("the folder of a checkpoint", str(found), "Single files are never deleted by a run's rules.")
        )
    mark(found, on)
    return found


def find(path: AnyPath) -> Checkpoint | Path:
    """The checkpoint that a path means; the path itself if it is a file."""
    path = existing(path)
    if path.is_file():
        return path
    if is_checkpoint(path):
        return Checkpoint(path, Manifest.read(path))
    if is_draft(path):
        raise InvalidCheckpoint(f"{path} is not a complete checkpoint: it has no {MANIFEST}.")
    if not (found := list_checkpoints(path)):
        raise DataError(
            expected(
                "the folder of a run, of its checkpoints, or of one checkpoint",
                str(path),
                "There is no complete checkpoint in it.",
            )
        )
    return found[-1]


def existing(path: AnyPath) -> Path:
    """The path, if there is anything."""
    path = Path(path)
    if not path.exists():
        raise DataError(
            expected("a checkpoint, the folder of a run, or a file", str(path), "There is nothing at this path.")
        )
    return path


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has what makes it a checkpoint, be it damaged or not."""
    return (folder / MANIFEST).exists()


def is_draft(folder: Path) -> bool:
    """Whether a folder is named like a checkpoint, or holds files of one."""
    return is_named(folder) or (folder / "model.safetensors").exists()

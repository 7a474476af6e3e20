"""Find, list, protect and verify checkpoints by the path a user has. Needs no torch."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

from trainformer.checkpointing import Checkpoint, CheckpointStore, InvalidCheckpoint, Manifest
from trainformer.checkpointing import protect as mark
from trainformer.checkpointing.manifest import MANIFEST
from trainformer.checkpointing.store import checkpoints_folder, is_named
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.utils.files import check_archive

AnyPath = str | Path
JAX_STATE = "state"  # the component with the train state of a JAX run


def list_checkpoints(run_or_folder: AnyPath) -> list[Checkpoint]:
    """The complete checkpoints of a run folder or a checkpoints folder, oldest first.

    Only manifests are read. A checkpoint with a damaged manifest is skipped with a warning.
    """
    path = existing(run_or_folder)
    if path.is_file():
        raise BadArgument(expected("the folder of a run or of its checkpoints", str(path), "This is a file."))
    if is_checkpoint(path):
        return [Checkpoint(path, Manifest.read(path))]
    return CheckpointStore(checkpoints_folder(path)).checkpoints()


def protect(path: AnyPath) -> Checkpoint:
    """Exempt a checkpoint from retention: no run deletes it. Returns the checkpoint."""
    return _mark(path, on=True)


def unprotect(path: AnyPath) -> Checkpoint:
    """Put a checkpoint under retention again."""
    return _mark(path, on=False)


def _mark(path: AnyPath, on: bool) -> Checkpoint:
    found = find(path)
    if not isinstance(found, Checkpoint):
        do = "Single files are never deleted by a run's rules."
        raise BadArgument(expected("the folder of a checkpoint", str(found), do))
    mark(found, on)
    return found


def find(path: AnyPath) -> Checkpoint | Path:
    """The checkpoint that a path stands for; the path itself if it is a file."""
    path = existing(path)
    if path.is_file():
        return path
    if is_checkpoint(path):
        return Checkpoint(path, Manifest.read(path))
    if is_draft(path):
        raise InvalidCheckpoint(f"{path} is not a complete checkpoint: it has no {MANIFEST}.")
    if not (found := list_checkpoints(path)):
        what = "the folder of a run, of its checkpoints, or of one checkpoint"
        raise DataError(expected(what, str(path), "There is no complete checkpoint in it."))
    return found[-1]


def existing(path: AnyPath) -> Path:
    """The path, if it exists."""
    path = Path(path)
    if not path.exists():
        do = "There is nothing at this path."
        raise DataError(expected("a checkpoint, the folder of a run, or a file", str(path), do))
    return path


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest, damaged or not."""
    return (folder / MANIFEST).exists()


def is_of_jax(checkpoint: Checkpoint) -> bool:
    """Whether a run on JAX wrote a checkpoint."""
    return JAX_STATE in checkpoint.manifest.components


def is_draft(folder: Path) -> bool:
    """Whether a folder is named like a checkpoint, or holds files of one."""
    return is_named(folder) or (folder / "model.safetensors").exists()


def verify(path: AnyPath) -> list[str]:
    """The problems of a checkpoint, one sentence per file; an empty list means that it is intact.

    Every file is read and compared with its digest. For a run folder or checkpoints folder, all checkpoints are
    verified. A single file is read completely, with its own checksums.
    """
    path = existing(path)
    if path.is_file():
        return _problems_of_file(path)
    if is_checkpoint(path) or is_draft(path):
        return _problems_of_folder(path)
    folder = checkpoints_folder(path)
    found = sorted(p for p in folder.iterdir() if p.is_dir() and is_named(p))
    if not found:
        return [f"There is no complete checkpoint in {path}."]
    return [problem for checkpoint in found for problem in _problems_of_folder(checkpoint)]


def _problems_of_folder(folder: Path) -> list[str]:
    try:
        manifest = Manifest.read(folder)
    except InvalidCheckpoint as error:
        return [str(error)]
    problems = []
    for record in manifest.files():
        try:
            dataclasses.replace(manifest, components={"one": [record]}).verify(folder)
        except (InvalidCheckpoint, OSError) as error:
            problems.append(str(error))
    return problems


def _problems_of_file(path: Path) -> list[str]:
    from trainformer.checkpointing.tools.states import read_file

    try:
        check_archive(path)
        if zipfile.is_zipfile(path):  # torch files are; loading does not check their checksums
            try:
                with zipfile.ZipFile(path) as archive:
                    damaged = archive.testzip()
            except Exception as error:  # BadZipFile, UnicodeDecodeError, zlib.error, NotImplementedError, ...
                return [f"{path} is damaged: {error}."]
            if damaged is not None:
                return [f"{path} is damaged: its part {damaged} does not match its checksum."]
        read_file(path)
    except DataError as error:
        return [str(error)]
    return []

"""Is it as it was written? Every problem is named, not only the first."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

from trainformer.checkpointing import InvalidCheckpoint, Manifest
from trainformer.checkpointing.store import folder_of_checkpoints, is_named
from trainformer.checkpointing.tools.places import AnyPath, existing, is_checkpoint, is_draft
from trainformer.core.errors import DataError


def verify(path: AnyPath) -> list[str]:
    """What is wrong with a checkpoint, one sentence per file; an empty list means that all is well.

    Every file is read and compared with its digest. For the folder of a run or of checkpoints, all of them are looked
    at. A single file is read in full, by its own checksums.
    """
    path = existing(path)
    if path.is_file():
        return _problems_of_file(path)
    if is_checkpoint(path) or is_draft(path):
        return _problems_of_folder(path)
    folder = folder_of_checkpoints(path)
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
    from trainformer.checkpointing.tools.reading import read_file

    if zipfile.is_zipfile(path):  # torch files are; their checksums are not looked at when they are loaded
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
            return [f"{path} is damaged: {error}."]
        if damaged is not None:
            return [f"{path} is damaged: its part {damaged} does not match its checksum."]
    try:
        read_file(path)
    except DataError as error:
        return [str(error)]
    return []

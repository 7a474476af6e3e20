"""A folder of checkpoints, each a folder that appears whole or not at all.

Writing: files go to a folder with a temporary name, are synced to disk, get their manifest last, and are moved into
place by one rename. Whoever is killed in between leaves a temporary folder, which the next run clears away. So a
folder ``step_<n>`` (or ``checkpoint-<n>``) with a valid manifest is a checkpoint, and nothing else is.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainformer.checkpointing.manifest import MANIFEST, FileRecord, InvalidCheckpoint, Manifest
from trainformer.utils.files import sync
from trainformer.utils.processes import is_alive

logger = logging.getLogger("trainformer")

LATEST = "latest"
_PROTECTED = "protected"
_NAME = re.compile(r"(?:step_|checkpoint-)(\d+)")
_LEFTOVER = re.compile(rf"\.(?:(?:writing|deleting)-{_NAME.pattern}|latest)-(?P<process>\d+)")
_REPLACED = re.compile(rf"\.replaced-(?P<name>{_NAME.pattern})-(?P<process>\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, as its manifest tells. Its files have not been read."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    @property
    def is_protected(self) -> bool:
        """Whether it must never be deleted."""
        return (self.path / _PROTECTED).exists()

    def verify(self) -> None:
        """Read every file and compare it with its digest."""
        self.manifest.verify(self.path)


class CheckpointStore:
    """Checkpoints of one run, in one folder. `naming` is formatted with the step to name new ones."""

    def __init__(self, root: Path, naming: str = "step_{:08d}") -> None:
        self.root = root
        self._naming = naming

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self.root / self._naming.format(step)

    # -- writing -------------------------------------------------------------------------------------------

    def write(self, manifest: Manifest, fill: Callable[[Path], dict[str, list[str]]]) -> Checkpoint:
        """Write a checkpoint. `fill` writes files into a folder and says which belong to which component."""
        draft = self.begin(manifest.step)
        try:
            return self.complete(draft, manifest, records_of(draft, fill(draft)))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def begin(self, step: int) -> Path:
        """An empty folder for the files of a checkpoint, which is none yet."""
        draft = self.root / f".writing-{self.path_of(step).name}-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        return draft

    def complete(self, draft: Path, manifest: Manifest, records: dict[str, list[FileRecord]]) -> Checkpoint:
        """Make a checkpoint of a folder whose files are all there."""
        complete = Manifest(**{**vars(manifest), "components": records, "time": time.time()})
        (draft / MANIFEST).write_bytes(complete.to_bytes())
        sync(draft / MANIFEST)
        sync(draft)
        target = self.path_of(manifest.step)
        self._put_in_place(draft, target)
        return Checkpoint(target, complete)

    def _put_in_place(self, draft: Path, target: Path) -> None:
        # A folder cannot be renamed onto another that has content. The old one steps aside; if we are killed before
        # the new one is there, `clean` puts it back.
        aside = self.root / f".replaced-{target.name}-{os.getpid()}"
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        draft.rename(target)
        sync(self.root)
        shutil.rmtree(aside, ignore_errors=True)
        self._point_to(target)

    def _point_to(self, target: Path) -> None:
        """A hint for people and scripts; nothing here relies on it."""
        temporary = self.root / f".{LATEST}-{os.getpid()}"
        temporary.write_text(target.name)
        temporary.replace(self.root / LATEST)

    # -- reading -------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first. Damaged manifests are passed over with a warning."""
        found = []
        for path in self._folders():
            try:
                found.append(Checkpoint(path, Manifest.read(path)))
            except InvalidCheckpoint as error:
                logger.warning("%s It is passed over.", error)
        return found

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose files are all as they were written; damaged ones are named and passed over."""
        for path in reversed(self._folders()):
            try:
                checkpoint = Checkpoint(path, Manifest.read(path))
                checkpoint.verify()
            except InvalidCheckpoint as error:
                logger.warning("%s The checkpoint before it is used.", error)
            else:
                return checkpoint
        return None

    def _folders(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        return [path for _, path in sorted((step_of(path), path) for path in self.root.iterdir() if is_named(path))]

    # -- deleting ------------------------------------------------------------------------------------------

    def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint. It ceases to be one at once, by a rename, and is then removed file by file."""
        to_delete = self.root / f".deleting-{checkpoint.path.name}-{os.getpid()}"
        checkpoint.path.rename(to_delete)
        shutil.rmtree(to_delete, ignore_errors=True)

    def set_aside(self, after: int) -> None:
        """Move checkpoints of later steps out of the way: they belong to a run that was given up."""
        abandoned = [path for path in self._folders() if step_of(path) > after]
        if not abandoned:
            return
        number = 1
        while (place := self.root / f"given-up-{number}").exists():
            number += 1
        place.mkdir()
        for path in abandoned:
            path.rename(place / path.name)
        logger.warning("%d checkpoints of later steps than %d were moved to %s", len(abandoned), after, place)

    def clean(self) -> None:
        """Clear away what a killed process left: drafts and half-deleted folders, not those of a living process."""
        if not self.root.is_dir():
            return
        for path in self.root.iterdir():
            if (match := _REPLACED.fullmatch(path.name)) and not is_alive(int(match["process"])):
                if not (self.root / match["name"]).exists():
                    path.rename(self.root / match["name"])
                else:
                    shutil.rmtree(path, ignore_errors=True)
            elif (match := _LEFTOVER.fullmatch(path.name)) and not is_alive(int(match["process"])):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def is_named(path: Path) -> bool:
    """Whether a folder is named like a checkpoint."""
    return _NAME.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def protect(checkpoint: Checkpoint, on: bool = True) -> None:
    """Keep a checkpoint from ever being deleted by retention."""
    marker = checkpoint.path / _PROTECTED
    if on:
        marker.touch()
    else:
        marker.unlink(missing_ok=True)


def folder_of_checkpoints(path: Path) -> Path:
    """Where a run keeps its checkpoints, as its config says; a folder that is not that of a run is meant itself."""
    try:
        save_dir = json.loads((path / "config.json").read_bytes())["save_dir"]["value"]
    except (OSError, ValueError, KeyError, TypeError):
        save_dir = "checkpoints"
    return path / save_dir if (path / save_dir).is_dir() else path


def records_of(folder: Path, files: Mapping[str, Sequence[str]]) -> dict[str, list[FileRecord]]:
    """Put the files of each component safely on the disk, and take their sizes and digests."""
    names = {name for names in files.values() for name in names}
    for path in {folder / name for name in names}:
        sync(path)
    for parent in {(folder / name).parent for name in names} - {folder}:
        sync(parent)
    return {key: [FileRecord.of(folder, name) for name in names] for key, names in files.items()}

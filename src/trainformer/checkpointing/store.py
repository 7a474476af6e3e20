"""The checkpoints of a run on disk: each is a folder that appears completely or not at all.

Files are written to a folder with a temporary name and fsynced, the manifest is written last, and the folder is renamed
into place. A process that is killed in between leaves a temporary folder, which the next run removes. So a folder
``step_<n>`` (or ``checkpoint-<n>``) with a valid manifest is a checkpoint, and nothing else is.

After a power cut, names that were not fsynced may be lost in any order. So folders are fsynced after every rename, and
before anything is deleted that the rename replaces.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainformer.checkpointing.manifest import MANIFEST, FileRecord, InvalidCheckpoint, Manifest
from trainformer.utils.files import make_folder, sync, write_atomically
from trainformer.utils.processes import is_alive
from trainformer.utils.run_folders import NAME
from trainformer.utils.run_folders import checkpoints_folder as checkpoints_folder
from trainformer.utils.run_folders import is_named as is_named
from trainformer.utils.run_folders import step_of as step_of

logger = logging.getLogger("trainformer")

_NONE_LEFT = "There is no earlier one: the run starts from scratch."

LATEST = "latest"
_PROTECTED = "protected"
_LEFTOVER = re.compile(rf"\.(?:(?:writing|deleting)-{NAME.pattern}-(?P<process>\d+)|latest\.(?P<writer>\d+)\.tmp)")
_REPLACED = re.compile(rf"\.replaced-(?P<name>{NAME.pattern})-(?P<process>\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, according to its manifest. Its files have not been read."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    @property
    def is_protected(self) -> bool:
        """Whether retention must never delete it."""
        return (self.path / _PROTECTED).exists()

    def verify(self) -> None:
        """Read every file and compare it with its digest."""
        self.manifest.verify(self.path)


class CheckpointStore:
    """Checkpoints of one run, in one folder. `naming` is formatted with the step to name new ones.

    With `marks_latest`, a file `latest` names the newest one. With `skips_deleted`, a component whose file was deleted
    is left out, and does not count as damaged.
    """

    def __init__(
        self, root: Path, naming: str = "step_{:08d}", marks_latest: bool = True, *, skips_deleted: bool = False
    ) -> None:
        self.root = root
        self._naming = naming
        self._marks_latest = marks_latest
        self.skips_deleted = skips_deleted

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self.root / self._naming.format(step)

    # -- writing -------------------------------------------------------------------------------------------

    def write(self, manifest: Manifest, fill: Callable[[Path], dict[str, list[str]]]) -> Checkpoint:
        """Write a checkpoint. `fill` writes files into a folder and returns their names by component."""
        draft = self.begin(manifest.step)
        try:
            return self.complete(draft, manifest, records_of(draft, fill(draft)))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def begin(self, step: int) -> Path:
        """An empty temporary folder for the files of a checkpoint."""
        draft = self.root / f".writing-{self.path_of(step).name}-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        make_folder(self.root)
        draft.mkdir()
        return draft

    def complete(self, draft: Path, manifest: Manifest, records: dict[str, list[FileRecord]]) -> Checkpoint:
        """Turn a folder with all its files into a checkpoint: write the manifest, then rename."""
        complete = Manifest(**{**vars(manifest), "components": records, "time": time.time()})
        (draft / MANIFEST).write_bytes(complete.to_bytes())
        sync(draft / MANIFEST)
        sync(draft)
        target = self.path_of(manifest.step)
        self._rename(draft, target)
        return Checkpoint(target, complete)

    def _rename(self, draft: Path, target: Path) -> None:
        # A folder cannot be renamed onto one that has content. The old one is moved aside; if the process is killed
        # before the new one is in place, `clean` restores it.
        aside = self.root / f".replaced-{target.name}-{os.getpid()}"
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        draft.rename(target)
        sync(self.root)
        shutil.rmtree(aside, ignore_errors=True)
        self._update_latest(target)

    def _update_latest(self, target: Path) -> None:
        """The file `latest` is for people and scripts; nothing here relies on it."""
        if self._marks_latest:
            write_atomically(self.root / LATEST, target.name.encode())

    # -- reading -------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first. Damaged manifests are skipped with a warning."""
        found = []
        for path in self._folders():
            try:
                found.append(Checkpoint(path, Manifest.read(path)))
            except InvalidCheckpoint as error:
                logger.warning("%s Skipping it.", error)
        return found

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose files match their digests; damaged ones are skipped with a warning."""
        folders = self._folders()
        while folders:
            try:
                return read_verified(folders.pop(), self.skips_deleted)
            except InvalidCheckpoint as error:
                instead = f"Falling back to the previous checkpoint, {folders[-1].name}." if folders else _NONE_LEFT
                logger.warning("%s %s", error, instead)
        return None

    def _folders(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        return [path for _, path in sorted((step_of(path), path) for path in self.root.iterdir() if is_named(path))]

    # -- deleting ------------------------------------------------------------------------------------------

    def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint: renamed first, so that it stops being one at once, then removed file by file."""
        trash = self.root / f".deleting-{checkpoint.path.name}-{os.getpid()}"
        checkpoint.path.rename(trash)
        sync(self.root)
        shutil.rmtree(trash, ignore_errors=True)

    def set_aside(self, after: int) -> None:
        """Move checkpoints of later steps aside: they belong to an abandoned run and would pass for the newest."""
        abandoned = [path for path in self._folders() if step_of(path) > after]
        if not abandoned:
            return
        number = 1
        while (place := self.root / f"abandoned-{number}").exists():
            number += 1
        make_folder(place)
        for path in abandoned:
            path.rename(place / path.name)
        sync(place)
        sync(self.root)
        what = "the checkpoint" if len(abandoned) == 1 else f"{len(abandoned)} checkpoints"
        logger.warning("moved %s after step %d, where this run continues, to %s", what, after, place)

    def clean(self) -> None:
        """Remove what a killed process left: temporary and half-deleted folders. Those of live processes stay."""
        if not self.root.is_dir():
            return
        sync(self.root)  # the rename that makes a leftover useless may not be durable yet
        for path in self.root.iterdir():
            if (match := _REPLACED.fullmatch(path.name)) and not is_alive(int(match["process"])):
                if not (self.root / match["name"]).exists():
                    path.rename(self.root / match["name"])
                else:
                    shutil.rmtree(path, ignore_errors=True)
            elif (match := _LEFTOVER.fullmatch(path.name)) and not is_alive(int(match["process"] or match["writer"])):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def read_verified(path: Path, skips_deleted: bool = False) -> Checkpoint:
    """The checkpoint of a folder, after comparing its files with their digests."""
    manifest = Manifest.read(path)
    checkpoint = Checkpoint(path, manifest.without_deleted(path) if skips_deleted else manifest)
    checkpoint.verify()
    return checkpoint


def protect(checkpoint: Checkpoint, on: bool = True) -> None:
    """Exempt a checkpoint from retention."""
    marker = checkpoint.path / _PROTECTED
    if on:
        marker.touch()
    else:
        marker.unlink(missing_ok=True)
    sync(checkpoint.path)


def records_of(folder: Path, files: Mapping[str, Sequence[str]]) -> dict[str, list[FileRecord]]:
    """Fsync the files of each component, and record their sizes and digests."""
    names = {name for names in files.values() for name in names}
    for path in {folder / name for name in names}:
        sync(path)
    for parent in {(folder / name).parent for name in names} - {folder}:
        sync(parent)
    return {key: [FileRecord.of(folder, name) for name in names] for key, names in files.items()}

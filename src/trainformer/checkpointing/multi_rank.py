"""One checkpoint written by several ranks, each its own part, without any exchange but files.

Rank 0 makes the folder. Every rank writes its files there, puts them on the disk, and leaves a note of them. When all
notes are there, rank 0 writes the manifest and moves the folder into place; the others see it appear. So it can happen
behind the loop's back, where ranks must not exchange anything, and a rank that dies leaves a folder without a manifest.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from trainformer.checkpointing import CheckpointStore, FileRecord, Manifest
from trainformer.checkpointing.manifest import MANIFEST
from trainformer.checkpointing.store import records_of
from trainformer.engine.process_group import ProcessGroup

_NOTE = ".part-{}.json"
_FAILED = ".failed"
_PAUSE = 0.01  # seconds between two looks; a save takes longer than that

Fill = Callable[[Path], dict[str, list[str]]]


class SharedWriting:
    """The part of one rank in writing checkpoints. `timeout` is how long it waits for the others."""

    def __init__(self, store: CheckpointStore, process_group: ProcessGroup, timeout: float) -> None:
        self._store = store
        self._ranks = process_group
        self._timeout = timeout

    def begin(self, step: int) -> Path:
        """Make the folder; all ranks know it afterwards. If it cannot be made, every rank gets the error."""
        draft, problem = None, None
        if self._ranks.is_main:
            try:
                draft = str(self._store.begin(step))
            except OSError as error:
                problem = str(error)
        draft, problem = self._ranks.broadcast((draft, problem))
        if self._ranks.is_main:  # by now every rank has heard how the save before ended
            for verdict in self._store.root.glob(f".writing-*{_FAILED}"):
                verdict.unlink(missing_ok=True)
        if draft is None:
            raise OSError(problem)
        if not all(self._ranks.all_gather_object(Path(draft).is_dir())):
            raise OSError(
                f"{draft} is not there on every rank. Choose a run_dir on a file system that all machines share."
            )
        return Path(draft)

    def write(self, draft: Path, manifest: Manifest, fill: Fill) -> None:
        """Write this rank's files, and wait until the checkpoint is complete. Any rank's failure is everybody's."""
        note: dict[str, object]
        try:
            records = records_of(draft, fill(draft))
            note = {"files": {key: [asdict(record) for record in files] for key, files in records.items()}}
        except OSError as error:
            note = {"error": f"rank {self._ranks.rank}: {error}"}
        self._leave(draft / _NOTE.format(self._ranks.rank), note)
        if self._ranks.is_main:
            self._complete(draft, manifest)
        else:
            self._await_end(draft, manifest.step)

    def _complete(self, draft: Path, manifest: Manifest) -> None:
        notes = [draft / _NOTE.format(rank) for rank in range(self._ranks.world_size)]
        try:
            self._wait(lambda: all(note.exists() for note in notes), notes)
            told = [json.loads(note.read_text()) for note in notes]
            errors = [one["error"] for one in told if "error" in one]
            if errors:
                raise OSError("; ".join(errors))
            records: dict[str, list[FileRecord]] = {}
            for one in told:
                for key, files in one["files"].items():
                    records.setdefault(key, []).extend(FileRecord(**record) for record in files)
            for note in notes:
                note.unlink()
            self._store.complete(draft, manifest, records)
        except OSError as error:
            self._give_up(draft, error)
            raise
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _give_up(self, draft: Path, error: OSError) -> None:
        """Tell the others why, and take the folder away when they have heard it."""
        try:
            self._leave(self._verdict(draft), {"error": str(error)})
        except OSError:
            pass  # the disk is full, most likely; they see the folder vanish
        shutil.rmtree(draft, ignore_errors=True)

    def _await_end(self, draft: Path, step: int) -> None:
        """Wait until rank 0 has moved the folder into place, or has given it up."""
        self._wait(lambda: not draft.exists(), [])
        if (self._store.path_of(step) / MANIFEST).exists():
            return
        verdict = self._verdict(draft)
        reason = json.loads(verdict.read_text())["error"] if verdict.exists() else "rank 0 could not complete it"
        raise OSError(reason)

    def _verdict(self, draft: Path) -> Path:
        return draft.with_name(draft.name + _FAILED)

    def _wait(self, done: Callable[[], bool], notes: list[Path]) -> None:
        deadline = time.monotonic() + self._timeout
        while not done():
            lost = None if self._ranks.monitor is None else self._ranks.monitor.lost()
            if lost is not None:
                raise lost
            if time.monotonic() > deadline:
                late = [str(rank) for rank, note in enumerate(notes) if not note.exists()] or ["0"]
                raise TimeoutError(
                    f"rank {', '.join(late)} did not finish its part of a checkpoint within {self._timeout:g} s"
                )
            time.sleep(_PAUSE)

    @staticmethod
    def _leave(path: Path, note: dict[str, object]) -> None:
        """A note that is there whole or not at all."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(note))
        temporary.replace(path)

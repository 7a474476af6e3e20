"""One checkpoint written by several ranks, coordinated through files alone.

Rank 0 creates the folder. Every rank writes and fsyncs its files there and leaves a list of them. When all lists are
there, rank 0 writes the manifest and renames the folder into place; the other ranks see it appear. No collective is
used, so this works in a background thread, and a rank that dies leaves a folder without a manifest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainformer.checkpointing.components import StateComponent
from trainformer.checkpointing.manifest import MANIFEST, FileRecord, Manifest
from trainformer.checkpointing.store import CheckpointStore, records_of
from trainformer.core.secrets import mask_text
from trainformer.core.types import SharingPattern
from trainformer.engine.process_group import ProcessGroup

_FILE_LIST = ".part-{}.json"
_FAILED = ".failed"
_POLL_SECONDS = 0.01  # a save takes longer than that
_RANK_FILE = re.compile(r"\.rank(\d+)\.[^.]+$")

Fill = Callable[[Path], dict[str, list[str]]]


def is_written_here(component: StateComponent, process_group: Any) -> bool:
    """Whether this rank writes a component, or its shard of it."""
    pattern = component.sharing_pattern
    if component.format in ("sharded", "orbax") or pattern is SharingPattern.PER_RANK:
        return True
    if pattern is SharingPattern.PER_NODE:
        return bool(process_group.local_rank == 0)
    if pattern is SharingPattern.PER_GROUP:
        return bool(process_group.group(component.process_group_name).is_first)
    return bool(process_group.is_main)


def stem_of(component: StateComponent, process_group: Any) -> str:
    """The name of the file that this rank writes, without its suffix."""
    per_group = component.sharing_pattern is SharingPattern.PER_GROUP
    group = process_group.group(component.process_group_name).number if per_group else 0
    return component.stem(process_group.rank, group, int(os.environ.get("GROUP_RANK", "0")))


def files_for_rank(names: Sequence[str], rank: int) -> list[str]:
    """Which files of a component a rank reads: its own where each rank has one; none if it did not exist then.

    >>> files_for_rank(["rng.rank0.pt", "rng.rank1.pt"], rank=1), files_for_rank(["model.safetensors"], rank=1)
    (['rng.rank1.pt'], ['model.safetensors'])
    """
    ranks = {name: int(match[1]) for name in names if (match := _RANK_FILE.search(name))}
    if not ranks or len(ranks) < len(names):
        return list(names)
    return [name for name, number in ranks.items() if number == rank]


def is_from_another_rank(name: str) -> bool:
    """Whether a file that appears while rank 0 writes belongs to another rank: a shard, or its file list."""
    return re.search(r"^\.part-|\.shard-|\.rank\d+\.", name) is not None


class MultiRankWriter:
    """One rank's part in writing checkpoints. `timeout` limits how long it waits for the other ranks."""

    def __init__(self, store: CheckpointStore, process_group: ProcessGroup, timeout: float) -> None:
        self._store = store
        self._process_group = process_group
        self._timeout = timeout
        self._is_monitored = False

    def begin(self, step: int) -> Path:
        """Create the folder and broadcast its path. If that fails, every rank gets the error."""
        draft, problem = None, None
        self._is_monitored = self._process_group.monitor is not None
        if self._process_group.is_main:
            try:
                draft = str(self._store.begin(step))
            except OSError as error:
                problem = str(error)
        draft, problem = self._process_group.broadcast((draft, problem))
        if self._process_group.is_main:  # by now every rank knows how the previous save ended
            for marker in self._store.root.glob(f".writing-*{_FAILED}"):
                marker.unlink(missing_ok=True)
        if draft is None:
            raise OSError(problem)
        if not all(self._process_group.all_gather_object(Path(draft).is_dir())):
            raise OSError(f"{draft} is not visible on every rank. Choose a run_dir on a shared file system.")
        return Path(draft)

    def write(self, draft: Path, manifest: Manifest, fill: Fill) -> None:
        """Write this rank's files and wait until the checkpoint is complete. If one rank fails, all ranks fail."""
        content: dict[str, object]
        try:
            records = records_of(draft, fill(draft))
            content = {"files": {key: [asdict(record) for record in files] for key, files in records.items()}}
        except OSError as error:
            content = {"error": f"rank {self._process_group.rank}: {error}"}
        _write_json(draft / _FILE_LIST.format(self._process_group.rank), content)
        if self._process_group.is_main:
            self._complete(draft, manifest)
            return
        self._wait(lambda: not draft.exists(), [])  # until rank 0 has renamed the folder, or has given up
        if not (self._store.path_of(manifest.step) / MANIFEST).exists():
            marker = _failure_marker(draft)
            known = json.loads(marker.read_text())["error"] if marker.exists() else "rank 0 could not complete it"
            raise OSError(known)

    def _complete(self, draft: Path, manifest: Manifest) -> None:
        lists = [draft / _FILE_LIST.format(rank) for rank in range(self._process_group.world_size)]
        try:
            self._wait(lambda: all(path.exists() for path in lists), lists)
            contents = [json.loads(path.read_text()) for path in lists]
            errors = [content["error"] for content in contents if "error" in content]
            if errors:
                raise OSError("; ".join(errors))
            records: dict[str, list[FileRecord]] = {}
            for content in contents:
                for key, files in content["files"].items():
                    records.setdefault(key, []).extend(FileRecord(**record) for record in files)
            for path in lists:
                path.unlink()
            self._store.complete(draft, manifest, records)
        except OSError as error:
            try:
                _write_json(_failure_marker(draft), {"error": mask_text(str(error))})
            except OSError:
                pass  # most likely the disk is full; the other ranks see the folder disappear
            shutil.rmtree(draft, ignore_errors=True)
            raise
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _wait(self, is_done: Callable[[], bool], lists: list[Path]) -> None:
        deadline = time.monotonic() + self._timeout
        while not is_done():
            monitor = self._process_group.monitor
            lost = None if monitor is None else monitor.lost_ranks()
            if lost is not None:
                raise lost
            if monitor is None and self._is_monitored:  # a save in the background must not keep the process alive
                raise OSError("the run ended before all ranks had written their parts of the checkpoint")
            if time.monotonic() > deadline:
                late = [str(rank) for rank, path in enumerate(lists) if not path.exists()] or ["0"]
                raise TimeoutError(
                    f"rank {', '.join(late)} did not finish its part of a checkpoint within {self._timeout:g} s"
                )
            time.sleep(_POLL_SECONDS)


def _failure_marker(draft: Path) -> Path:
    return draft.with_name(draft.name + _FAILED)


def _write_json(path: Path, content: dict[str, object]) -> None:
    """Atomically, so that a rank that polls never reads half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)

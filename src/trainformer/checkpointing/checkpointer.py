"""Checkpoints of a run: which components go in, when writing fails, and what comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from trainformer.checkpointing import (
    BackgroundWriter,
    Checkpoint,
    CheckpointStore,
    Manifest,
    Retention,
    StateComponent,
)
from trainformer.checkpointing.manifest import MANIFEST
from trainformer.checkpointing.multi_rank import SharedWriting
from trainformer.checkpointing.sharing import files_for, is_of_another_rank, is_ours
from trainformer.checkpointing.state_files import StateFiles
from trainformer.checkpointing.store import folder_of_checkpoints
from trainformer.core.errors import BadArgument, DataError, TrainformerError, did_you_mean, expected
from trainformer.engine.process_group import ProcessGroup, SingleProcess

logger = logging.getLogger("trainformer")

_MOST_FAILURES = 3

#: Writes files that belong beside the weights (a model's config, a tokenizer) and says which.
Assets = Callable[[Path], list[str]]


class SaveFailed(TrainformerError, OSError):
    """Saving failed several times in a row; going on would risk losing everything since the last checkpoint."""


class Checkpointer:
    """Writes and prunes the checkpoints of one run, in the loop's time or behind its back."""

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        asynchronous: bool,
        naming: str = "step_{:08d}",
        *,
        files: StateFiles,
        process_group: ProcessGroup | None = None,
        timeout: float = 1800.0,
    ) -> None:
        self.store = CheckpointStore(folder, naming)
        self.retention = retention
        self.asynchronous = asynchronous
        self.files = files
        self.process_group: ProcessGroup = process_group or SingleProcess()
        self._sharing = SharedWriting(self.store, self.process_group, timeout)
        self.failures = 0
        self._last_error: OSError | None = None
        self.blocked = 0.0  # seconds for which saves have kept the loop waiting
        self._writer = BackgroundWriter()

    def is_worth_keeping(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is among the best so far."""
        return self.retention.is_worth_keeping(metrics, self.store.checkpoints())

    def save(
        self,
        components: Sequence[StateComponent],
        manifest: Manifest,
        assets: Assets | None = None,
        written: Callable[[], None] | None = None,
    ) -> bool:
        """Write a checkpoint, or hand it to the background. False: it could not be written, and that was reported.

        `written` is called when it is there, in the thread that wrote it.
        """
        began = time.perf_counter()
        self.finish()  # at most one save in flight; if the one before failed, this one is tried all the same
        states = {c: c.stateful.state_dict() for c in components}  # on every rank: some have to ask the others
        self.files.check_replicas(states, self.process_group)
        states = {c: state for c, state in states.items() if is_ours(c, self.process_group)}
        try:
            draft = None if self.process_group.is_single_process else self._sharing.begin(manifest.step)
            if self.asynchronous:
                # A snapshot first: the loop is about to change these very tensors.
                states = {c: self.files.snapshot(c, state) for c, state in states.items()}
                self._writer.submit(lambda: self._write(states, manifest, assets, draft, written))
            else:
                self._write(states, manifest, assets, draft, written)
        except OSError as error:
            self._note(error)
            return False
        finally:
            self.blocked += time.perf_counter() - began
        return True

    def poll(self) -> None:
        """Report what went wrong behind the loop's back."""
        if not self._writer.is_busy:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight."""
        try:
            self._writer.wait()
        except OSError as error:
            self._note(error)

    def _write(
        self,
        states: dict[StateComponent, Any],
        manifest: Manifest,
        assets: Assets | None,
        draft: Path | None,
        written: Callable[[], None] | None,
    ) -> None:
        process_group = self.process_group

        def fill(folder: Path) -> dict[str, list[str]]:
            files = {c.key: self.files.write(folder, c, state, process_group) for c, state in states.items()}
            if assets is not None and process_group.is_main:
                files["assets"] = [name for name in assets(folder) if not is_of_another_rank(name)]
            return files

        formats = {c.key: c.format for c in states}
        manifest = Manifest(**{**vars(manifest), "formats": formats})
        if draft is None:
            self.store.write(manifest, fill)
        else:
            self._sharing.write(draft, manifest, fill)
        logger.info("saved %s", self.store.path_of(manifest.step))
        if written is not None:
            written()
        if process_group.is_main:
            self.tidy()  # only after a complete save is anything deleted
        self.failures = 0

    def tidy(self) -> None:
        """Delete what no rule keeps."""
        for old in self.retention.to_delete(self.store.checkpoints()):
            self.store.delete(old)

    def _note(self, error: OSError) -> None:
        self.failures += 1
        kept = self.store.checkpoints()
        newest = f"the newest checkpoint is {kept[-1].path}" if kept else "there is no checkpoint yet"
        ends = self.failures >= _MOST_FAILURES
        outlook = f"this is number {self.failures} in a row" if ends else "training goes on"
        logger.error("a checkpoint could not be written (%s); %s, %s", error, outlook, newest)
        self._last_error = error
        if ends:
            self._give_up(f"{self.failures} saves in a row failed, the last with: {error}.")

    def conclude(self) -> None:
        """At the end of a run: wait for the last save. A run whose result is nowhere has not finished."""
        self.finish()
        if self.failures:
            self._give_up(f"The last save of the run failed with: {self._last_error}.")

    def _give_up(self, what: str) -> None:
        kept = self.store.checkpoints()
        newest = f"from {kept[-1].path}" if kept else "from the beginning, since there is no checkpoint yet"
        raise SaveFailed(
            f"{what} Free some space or choose another run_dir, then run the same command again: it goes on {newest}."
        ) from self._last_error


def read_checkpoint(checkpoint: Checkpoint, files: StateFiles, rank: int = 0) -> dict[str, Any]:
    """The states of a checkpoint's components, as a rank wants them."""
    manifest = checkpoint.manifest
    chosen = {
        key: files_for(key, [record.name for record in records], rank)
        for key, records in manifest.components.items()
        if key in manifest.formats
    }
    return {key: files.read(checkpoint.path, names, manifest.formats[key]) for key, names in chosen.items() if names}


def read_states(path: Path, files: StateFiles, rank: int = 0) -> dict[str, Any]:
    """States by component from a file, a checkpoint's folder, or a run's folder (its newest checkpoint)."""
    if not path.is_dir():
        return files.read_file(path, rank)
    if (path / MANIFEST).exists():
        checkpoint: Checkpoint | None = Checkpoint(path, Manifest.read(path))
        assert checkpoint is not None
        checkpoint.verify()
    else:
        checkpoint = CheckpointStore(folder_of_checkpoints(path)).newest()
    if checkpoint is None:
        raise DataError(f"There is no complete checkpoint in {path}.")
    return read_checkpoint(checkpoint, files, rank)


def load_components(
    components: Sequence[StateComponent], states: dict[str, Any], only: Collection[str] | None = None
) -> None:
    """Hand states back to their components. Everything is looked at before anything is changed."""
    known = {c.key for c in components} | states.keys()
    for name in only or ():
        if name not in known:
            raise BadArgument(
                expected(f"components to load to be among {', '.join(sorted(known))}", name, did_you_mean(name, known))
            )
    chosen = [c for c in components if only is None or c.key in only]
    missing = [c.key for c in chosen if c.required and c.key not in states]
    if missing:
        raise DataError(
            f"The checkpoint lacks required components: {', '.join(missing)}; it has {', '.join(sorted(states))}. "
            "Nothing was loaded. Name the components to load if that is what you want."
        )
    for component in chosen:
        if component.key in states and hasattr(component.stateful, "check_state"):
            component.stateful.check_state(states[component.key])
    for component in chosen:
        if component.key in states:
            component.stateful.load_state_dict(states[component.key])
        else:
            logger.warning("the checkpoint has no %r; it begins anew", component.key)


def versions(files: StateFiles) -> dict[str, str]:
    """Versions to record with a checkpoint."""
    from trainformer import __version__

    return {"trainformer": __version__, **files.versions()}

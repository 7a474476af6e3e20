"""`Checkpointer`: saves and resumes one run. Owns its components, its store, retention and the background writer.

One save: `save` collects the state dicts, `_write` writes one file set per component through `StateFiles` into a folder
of the `CheckpointStore`, which makes it a checkpoint by writing the manifest and renaming. With several ranks
`MultiRankWriter` coordinates that folder. Retention deletes old checkpoints only after a complete save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainformer.checkpointing.components import StateComponent, StateFiles
from trainformer.checkpointing.manifest import MANIFEST, Manifest
from trainformer.checkpointing.multi_rank import (
    MultiRankWriter,
    files_for_rank,
    is_from_another_rank,
    is_written_here,
)
from trainformer.checkpointing.retention import Retention
from trainformer.checkpointing.store import Checkpoint, CheckpointStore, checkpoints_folder, read_verified
from trainformer.core.errors import BadArgument, DataError, TrainformerError, did_you_mean, expected
from trainformer.engine.process_group import ProcessGroup, SingleProcess

logger = logging.getLogger("trainformer")

_MAX_FAILURES = 3

#: Writes files that belong beside the weights (a model config, a tokenizer) and returns their names.
Assets = Callable[[Path], list[str]]


class SaveFailed(TrainformerError, OSError):
    """Several saves in a row failed; continuing would risk losing everything since the last checkpoint."""


class Checkpointer:
    """Saves the components of a run to a folder, synchronously or in the background, and loads them back.

    `components` is called at every save and load. `assets` writes further files into each checkpoint.
    """

    def __init__(
        self,
        components: Callable[[], Sequence[StateComponent]],
        files: StateFiles,
        store: CheckpointStore,
        retention: Retention,
        *,
        asynchronous: bool = False,
        process_group: ProcessGroup | None = None,
        timeout: float = 1800.0,
        assets: Assets | None = None,
    ) -> None:
        self.store = store
        self.retention = retention
        self.files = files
        self.asynchronous = asynchronous
        self.failures = 0  # in a row
        self.blocked_seconds = 0.0  # how long saves have blocked the loop
        self._components = components
        self._assets = assets
        self._process_group: ProcessGroup = process_group or SingleProcess()
        self._multi_rank = MultiRankWriter(store, self._process_group, timeout)
        self._last_error: OSError | None = None
        self._writer = BackgroundWriter()

    # -- saving ------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        epoch: int = 0,
        metrics: dict[str, float] | None = None,
        on_written: Callable[[], None] | None = None,
    ) -> Path | None:
        """Write a checkpoint, or hand it to the background thread; its path. None: it failed, and was reported.

        `on_written` is called once the checkpoint is complete, in the thread that wrote it.
        """
        manifest = Manifest(
            step=step,
            epoch=epoch,
            components={},
            metrics=metrics or {},
            versions=versions(self.files),
            world_size=self._process_group.world_size,
        )
        began = time.perf_counter()
        self.wait()  # at most one save in flight; if it failed, this one is tried all the same
        states = self._collect()
        try:
            draft = None if self._process_group.is_single_process else self._multi_rank.begin(step)
            if self.asynchronous:
                # Copy first: the next step changes these very tensors.
                states = {c: self.files.snapshot(c, state, draft) for c, state in states.items()}
                self._writer.submit(lambda: self._write(states, manifest, draft, on_written))
            else:
                self._write(states, manifest, draft, on_written)
        except OSError as error:
            self._report_failure(error)
            return None
        finally:
            self.blocked_seconds += time.perf_counter() - began
        return self.store.path_of(step)

    def _collect(self) -> dict[StateComponent, Any]:
        """The state dicts that this rank writes. All ranks compute all of them: some need collectives."""
        states = {c: c.stateful.state_dict() for c in self._components()}
        self.files.check_replicas(states, self._process_group)
        return {c: state for c, state in states.items() if is_written_here(c, self._process_group)}

    def _write(
        self,
        states: dict[StateComponent, Any],
        manifest: Manifest,
        draft: Path | None,
        on_written: Callable[[], None] | None,
    ) -> None:
        process_group = self._process_group

        def fill(folder: Path) -> dict[str, list[str]]:
            files = {c.key: self.files.write(folder, c, state, process_group) for c, state in states.items()}
            if self._assets is not None and process_group.is_main:
                files["assets"] = [name for name in self._assets(folder) if not is_from_another_rank(name)]
            return files

        manifest = replace(manifest, formats={c.key: c.format for c in states})
        if draft is None:
            self.store.write(manifest, fill)
        else:
            self._multi_rank.write(draft, manifest, fill)
        logger.info("saved %s", self.store.path_of(manifest.step))
        if on_written is not None:
            on_written()
        if process_group.is_main:
            self.prune()
        self.failures = 0

    def prune(self) -> None:
        """Delete the checkpoints that no retention rule keeps."""
        for old in self.retention.to_delete(self.store.checkpoints()):
            self.store.delete(old)

    def poll(self) -> None:
        """Report a failure of the background thread, without waiting for it."""
        if not self._writer.is_busy:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight."""
        try:
            self._writer.wait()
        except OSError as error:
            self._report_failure(error)

    def close(self) -> None:
        """At the end of a run: wait for the last save, and raise if it failed."""
        self.wait()
        if self.failures:
            self._give_up(f"The last save of the run failed with: {self._last_error}.")

    def _report_failure(self, error: OSError) -> None:
        self.failures += 1
        kept = self.store.checkpoints()
        newest = f"the newest checkpoint is {kept[-1].path}" if kept else "there is no checkpoint yet"
        gives_up = self.failures >= _MAX_FAILURES
        outlook = f"this is failure {self.failures} in a row" if gives_up else "training continues"
        logger.error("a checkpoint could not be written (%s); %s, %s", error, outlook, newest)
        self._last_error = error
        if gives_up:
            self._give_up(f"{self.failures} saves in a row failed, the last with: {error}.")

    def _give_up(self, what: str) -> None:
        kept = self.store.checkpoints()
        newest = f"from {kept[-1].path}" if kept else "from the start, since there is no checkpoint yet"
        raise SaveFailed(
            f"{what} Free some space or choose another run_dir, then run the same command again: it resumes {newest}."
        ) from self._last_error

    # -- loading -----------------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The newest valid checkpoint. Rank 0 looks and broadcasts, so that all ranks take the same one."""
        found = self.store.newest() if self._process_group.is_main else None
        path = self._process_group.broadcast(None if found is None else str(found.path))
        if path is None or found is not None:
            return found
        manifest = Manifest.read(Path(path))
        return Checkpoint(Path(path), manifest.without_deleted(Path(path)) if self.store.skips_deleted else manifest)

    def load(self, checkpoint: Checkpoint, only: Collection[str] | None = None) -> None:
        """Load the components of a checkpoint, or some of them. If anything does not fit, nothing is changed."""
        states = read_checkpoint(checkpoint, self.files, self._process_group.rank)
        load_components(self._components(), states, only)


class BackgroundWriter:
    """Runs one job at a time in a thread. Errors are raised by the next `submit` or `wait`.

    >>> writer, done = BackgroundWriter(), []
    >>> writer.submit(lambda: done.append(1))
    >>> writer.wait()
    >>> done
    [1]
    """

    def __init__(self) -> None:
        # Its thread is not a daemon: the interpreter waits at exit, so the last save of a program is not torn.
        self._executor = ThreadPoolExecutor(1, "checkpoint-writer")
        self._job: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Wait for the previous job, raise its error if it had one, then start this one."""
        self.wait()
        self._job = self._executor.submit(job)

    def wait(self) -> None:
        """Wait for the job in flight; raise its error."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._job is not None and not self._job.done()


def read_checkpoint(checkpoint: Checkpoint, files: StateFiles, rank: int = 0) -> dict[str, Any]:
    """The states of a checkpoint's components, as a rank needs them."""
    manifest = checkpoint.manifest
    chosen = {
        key: files_for_rank([record.name for record in records], rank)
        for key, records in manifest.components.items()
        if key in manifest.formats
    }
    return {key: files.read(checkpoint.path, names, manifest.formats[key]) for key, names in chosen.items() if names}


def read_states(path: Path, files: StateFiles, rank: int = 0, skips_deleted: bool = False) -> dict[str, Any]:
    """States by component from a file, a checkpoint folder, or a run folder (its newest checkpoint).

    With `skips_deleted`, a component whose file was deleted is left out with a warning.
    """
    if not path.is_dir():
        return files.read_file(path, rank)
    if (path / MANIFEST).exists():
        checkpoint = read_verified(path, skips_deleted)
    elif (newest := CheckpointStore(checkpoints_folder(path), skips_deleted=skips_deleted).newest()) is not None:
        checkpoint = newest
    else:
        raise DataError(f"There is no complete checkpoint in {path}.")
    return read_checkpoint(checkpoint, files, rank)


def load_components(
    components: Sequence[StateComponent], states: dict[str, Any], only: Collection[str] | None = None
) -> None:
    """Load states into their components. Everything is checked before anything is changed."""
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
            "Nothing was loaded. Name the components to load if that is intended."
        )
    for component in chosen:
        if component.key in states and hasattr(component.stateful, "check_state"):
            with _explained(component.key):
                component.stateful.check_state(states[component.key])
    for component in chosen:
        if component.key in states:
            with _explained(component.key):
                component.stateful.load_state_dict(states[component.key])
        else:
            logger.warning("the checkpoint has no %r; it keeps its initial state", component.key)


@contextmanager
def _explained(key: str) -> Iterator[None]:
    """Errors of a component that meets a state of another shape, such as a forged one, name the component."""
    try:
        yield
    except TrainformerError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(
            f"The state of {key!r} in the checkpoint cannot be loaded ({type(error).__name__}: {error}). It is "
            "damaged, or was written by something else."
        ) from error


def versions(files: StateFiles) -> dict[str, str]:
    """Package versions to record with a checkpoint."""
    from trainformer import __version__

    return {"trainformer": __version__, **files.versions()}

"""The run folder: config, status, metrics, checkpoints, log; and how all ranks come to use the same one."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.context import PipelineConfig
from trainformer.core.errors import BadArgument, TrainformerError
from trainformer.engine.process_group import ProcessGroup
from trainformer.live.runs import read_status
from trainformer.run.context import current_context
from trainformer.run.logging import log_handler
from trainformer.run.provenance import fingerprint
from trainformer.run.settings import CommonSettings, check_run_name, folder_name
from trainformer.utils.console import INTERRUPTIONS
from trainformer.utils.files import make_folder, sync, write_atomically
from trainformer.utils.locks import FolderLock
from trainformer.utils.processes import is_alive, process_identity

if TYPE_CHECKING:
    from trainformer.run.run import Run

logger = logging.getLogger("trainformer")

_TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")  # as `write_atomically` names them
_VISIBLE_SECONDS = 5.0  # other machines may see a new file of a network file system late
_CONTENTS = (
    "config.json", "status.json", "metrics.jsonl", "records.jsonl", "log.txt", "checkpoints", "tensorboard",
    "report.html", "recipe.yaml",
)  # fmt: skip


class RunFolder:
    """Where a run keeps everything. Created when the run starts, not before."""

    def __init__(self, path: Path, save_dir: str) -> None:
        self.path = path
        self.checkpoints = path / save_dir  # an absolute save_dir replaces the path
        self.fingerprint = ""
        outside = [] if self.checkpoints.is_relative_to(path) else [self.checkpoints]
        self._locks = [FolderLock(folder, "training") for folder in (*outside, path)]

    @classmethod
    def choose(
        cls, run_dir: str | Path | None, name: str | None, task: str, save_dir: str, unfinished: str | None = None
    ) -> RunFolder:
        """The folder the user named, else ``runs/<name>``, else one named after the task and the time.

        `unfinished` is the fingerprint of the command. If a run of the same command was interrupted, its folder is
        used again: that is why running the same command again resumes.
        """
        if run_dir is not None:
            return cls(Path(run_dir), save_dir)
        if name is not None:
            check_run_name(name)
            return cls(Path("runs") / folder_name(name), save_dir)
        if unfinished is not None and (found := _unfinished_run(task, unfinished)) is not None:
            return cls(found, save_dir)
        stem = Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in itertools.count(1):
            path = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
            make_folder(path.parent)
            try:
                path.mkdir()
            except FileExistsError:  # perhaps created by another process, just now
                continue
            sync(path.parent)
            return cls(path, save_dir)
        raise AssertionError("count() has no end")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process can train in the folder meanwhile; raises `FolderInUse` if one does."""
        with ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock.held())
            yield

    def open(self, from_scratch: bool) -> None:
        """Create the folder. With `from_scratch`, files of an earlier run are moved to ``previous/``."""
        make_folder(self.path)
        for draft in self.path.glob(".*.tmp"):  # left by a process that was killed while writing
            match = _TEMPORARY.fullmatch(draft.name)
            if match and not is_alive(int(match[1])):
                draft.unlink(missing_ok=True)
        found = [self.path / name for name in _CONTENTS if (self.path / name).exists()]
        if from_scratch and found:
            number = 1
            while (archive := self.path / "previous" / f"{number:03d}").exists():
                number += 1
            make_folder(archive)
            for item in found:
                item.rename(archive / item.name)
            sync(archive)
            sync(self.path)
            logger.info("moved files of an earlier run in %s to %s", self.path, archive)

    def was_interrupted(self) -> bool:
        """Whether this folder holds an unfinished run of the same command."""
        return _was_interrupted(read_status(self.path), self.fingerprint)

    @contextmanager
    def recording(self, config: PipelineConfig) -> Iterator[None]:
        """Write ``config.json``: every setting and where it came from, including those derived during the run."""
        path = self.path / "config.json"
        write_atomically(path, json.dumps(config.to_json(), indent=2).encode())
        with _writing_after(path, lambda: json.dumps(config.to_json(), indent=2).encode()):
            yield

    @contextmanager
    def status(self, outcome: Callable[[], str]) -> Iterator[None]:
        """Write ``status.json``: running (and by which process), then finished, stopped, interrupted or failed.

        A process that is killed leaves "running" with the ID of a process that no longer exists.
        """
        path, ended = self.path / "status.json", "failed"
        write_atomically(path, self._status("running"))
        with _writing_after(path, lambda: self._status(ended)):
            try:
                yield
            except INTERRUPTIONS:
                ended = "interrupted"
                raise
            ended = outcome()

    def _status(self, status: str) -> bytes:
        process = os.getpid()
        content = {
            "status": status,
            "process": process,
            "identity": process_identity(process),
            "fingerprint": self.fingerprint,
            "time": time.time(),
        }
        return json.dumps(content).encode()

    @contextmanager
    def log_file(self) -> Iterator[None]:
        """Write everything that trainformer logs to ``log.txt``."""
        handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        with log_handler(handler):
            yield


class NonMainFolder(RunFolder):
    """The run folder on ranks other than 0, which write their parts of checkpoints and nothing else."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield

    @contextmanager
    def recording(self, config: PipelineConfig) -> Iterator[None]:
        yield

    @contextmanager
    def status(self, outcome: Callable[[], str]) -> Iterator[None]:
        yield

    @contextmanager
    def log_file(self) -> Iterator[None]:
        yield


class CheckpointFolder(NonMainFolder):
    """A folder with checkpoints and nothing else: no records, no log, no live control."""

    path: Any = None

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints
        self.fingerprint = ""
        self._locks = [FolderLock(checkpoints, "training")]

    locked = RunFolder.locked

    def open(self, from_scratch: bool) -> None:
        """Create the folder."""
        make_folder(self.checkpoints)

    def was_interrupted(self) -> bool:
        """False: nothing records how a run ended."""
        return False


class NoFolder:
    """A run that writes nothing to disk."""

    path = None

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def recording(self, config: PipelineConfig) -> AbstractContextManager[None]:
        return nullcontext()

    def status(self, outcome: Callable[[], str]) -> AbstractContextManager[None]:
        return nullcontext()

    def log_file(self) -> AbstractContextManager[None]:
        return nullcontext()


def _unfinished_run(task: str, fingerprint: str) -> Path | None:
    """The newest folder of an unfinished run of the same command that no process is working on."""
    for path in sorted(Path("runs").glob(f"{task}-*"), reverse=True):
        if _was_interrupted(read_status(path), fingerprint):
            return path
    return None


def _was_interrupted(status: dict[str, Any], fingerprint: str) -> bool:
    """Whether a run of this command did not finish, and no process is working on it."""
    if status.get("fingerprint") != fingerprint or status["status"] in ("finished", "stopped"):
        return False
    return not (status["status"] == "running" and process_identity(status["process"]) == status["identity"])


@contextmanager
def _writing_after(path: Path, content: Callable[[], bytes]) -> Iterator[None]:
    """Write a file at the end. If that fails because the disk is full, an error from inside is not hidden by it."""
    try:
        yield
    except BaseException:
        try:
            write_atomically(path, content())
        except OSError as error:
            logger.error("%s could not be written: %s", path, error)
        raise
    write_atomically(path, content())


def choose_folder(run: Run, stack: ExitStack) -> RunFolder | NoFolder:
    """The run folder. Rank 0 chooses, locks (until the end of the stack) and creates it; all ranks must see it."""
    settings, process_group = run.settings, run.process_group
    if not run.options.keeps_folder:
        return NoFolder()
    created: list[RunFolder] = []
    records = run.options.keeps_records or settings.run_dir is not None or current_context() is not None

    def create() -> str:
        folder = _folder_from_context(run) or _own_folder(run, records)
        stack.enter_context(folder.locked())
        folder.open(from_scratch=settings.resume is None and run.state.step == 0)
        created.append(folder)
        return str((folder.path if records else folder.checkpoints).absolute())

    path = Path(process_group.run_on_main(lambda: _writable(create, settings)))
    if not process_group.is_single_process:
        _check_visible(path, process_group)
    if created:
        return created[0]
    return NonMainFolder(path, settings.save_dir) if records else _NonMainCheckpoints(path)


def _writable(create: Callable[[], str], settings: CommonSettings) -> str:
    """Create the folder; an error of the file system names the setting."""
    try:
        return create()
    except OSError as error:
        if isinstance(error, TrainformerError):
            raise
        where = {"run_dir": settings.run_dir, "name": settings.name, "save_dir": settings.save_dir}
        setting = next(name for name, value in where.items() if value is not None)
        path = error.filename or where[setting]
        do = f"Choose another {setting}."
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            received = f"{path}, which is a file or lies in one"
        else:
            received = f"{path}: {error.strerror or error}"
        raise BadArgument(
            f"Expected {setting} to be a folder that can be written, received {received}. {do}"
        ) from error


class _NonMainCheckpoints(CheckpointFolder):
    """The folder of checkpoints on ranks other than 0, which do not lock it."""

    locked = NonMainFolder.locked


def _own_folder(run: Run, records: bool) -> RunFolder:
    settings = run.settings
    if not records:
        return CheckpointFolder(Path(settings.save_dir))
    return RunFolder.choose(
        settings.run_dir,
        settings.name,
        run.title,
        settings.save_dir,
        unfinished=fingerprint(run) if settings.resume == "auto" else None,
    )


def _folder_from_context(run: Run) -> RunFolder | None:
    """The folder that the surrounding sweep chooses, if there is one."""
    context, settings = current_context(), run.settings
    if context is None:
        return None
    wanted = None
    if settings.run_dir is not None or settings.name is not None:
        wanted = RunFolder.choose(settings.run_dir, settings.name, run.title, settings.save_dir).path
    save_dir = Path(settings.save_dir)  # if absolute, runs of several trials would share one checkpoints folder
    return RunFolder(context.folder_for(wanted, run.title), save_dir.name if save_dir.is_absolute() else str(save_dir))


def _check_visible(folder: Path, process_group: ProcessGroup) -> None:
    """Raise, on all ranks, if one of them does not see the files that rank 0 writes."""
    marker = folder / f".seen-by-all.{process_group.broadcast(os.getpid())}.tmp"  # removed like other temporary files
    if process_group.is_main:
        marker.touch()
    process_group.all_gather_object(None)  # a barrier
    blind = [rank for rank, seen in enumerate(process_group.all_gather_object(_appears(marker))) if not seen]
    if process_group.is_main:
        marker.unlink(missing_ok=True)
    if blind:
        raise BadArgument(
            f"Expected the run folder to be the same for all ranks, received {folder}: rank "
            f"{', '.join(map(str, blind))} does not see what rank 0 writes there. Choose a run_dir on a file system "
            "that all machines share."
        )


def _appears(marker: Path) -> bool:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not marker.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True

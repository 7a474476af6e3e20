"""`CheckpointingHook`: single-file checkpoints of a mini trainer, a `latest` link, and retention.

The loop decides when to save, and the run's components decide what; this module only manages the files. They are
written atomically, and older ones are deleted only after a newer one exists.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from trainformer.callbacks.compat.mini import TrainerView
from trainformer.checkpointing.checkpointer import SaveFailed
from trainformer.checkpointing.torch_files import read_single_file, write_single_file
from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.mini.hooks import IntervalHook, in_workspace
from trainformer.mini.state import read_trainloop_folder
from trainformer.mini.utils import barrier, broadcast, check_integer
from trainformer.run.provenance import check_unchanged
from trainformer.utils.distributed import rank
from trainformer.utils.files import check_local, make_folder, sync
from trainformer.utils.processes import is_alive

_NAME = re.compile(r"checkpoint_step_(\d+)\.pt")
_LATEST = "checkpoint_latest.pt"
_LEFTOVER = re.compile(r"\.checkpoint_\w+\.pt\.(\d+)\.tmp")
_MAX_FAILURES = 3


class CheckpointingHook(IntervalHook):
    """Saves every `interval` steps, at the end, and on `exit_signals`; resumes when the program is started again.

    `keep_previous` is the number of files to keep (None: all). Multiples of `keep_interval` and `keep_steps` are saved
    as well, and always kept. A relative `path` is inside the workspace. `load` is ``"latest"``, a file to start from
    (also the folder of a checkpoint of trainloop), or None to start from scratch. After a signal the process exits with
    `exit_code`, `exit_wait` seconds later.
    """

    def __init__(
        self,
        interval: int = 1000,
        keep_previous: int | None = None,
        keep_interval: int | None = None,
        path: str | os.PathLike[str] | None = "checkpoints",  # None: the same
        load: str | os.PathLike[str] | None = "latest",
        *,
        keep_steps: Iterable[int] | None = None,
        exit_signals: int | str | Sequence[int | str] | None = (signal.SIGTERM, signal.SIGINT),
        exit_code: int | str = "128+signal",
        exit_wait: float | timedelta = 0.0,
    ) -> None:
        super().__init__(interval)
        if keep_previous is not None:
            check_integer("keep_previous", keep_previous, minimum=0)
        self.keep_previous = keep_previous
        self.keep_interval = check_integer("keep_interval", keep_interval or 0, minimum=0)  # 0: none
        self.keep_steps = {check_integer("keep_steps", step, minimum=1) for step in keep_steps or ()}
        check_local("path", path)
        check_local("load", load)
        self.path = Path("checkpoints" if path is None else path)
        self.load = None if load is None else os.fspath(load)
        numbers = [exit_signals] if isinstance(exit_signals, (int, str)) else exit_signals or ()
        self.exit_signals = tuple(_signal(number) for number in numbers)
        self.exit_code = exit_code
        self.exit_wait = exit_wait.total_seconds() if isinstance(exit_wait, timedelta) else exit_wait
        self.is_pending = False
        self._origin = ""
        self._failures = 0
        if exit_code != "128+signal" and (isinstance(exit_code, bool) or not isinstance(exit_code, int)):
            raise BadArgument(expected("exit_code to be a number or '128+signal'", exit_code))
        if not isinstance(self.exit_wait, (int, float)) or self.exit_wait < 0:
            raise BadArgument(expected("exit_wait to be a number of seconds or a timedelta", exit_wait))

    def on_before_train(self, trainer: Any) -> None:
        if isinstance(trainer, TrainerView):
            raise BadArgument(
                "Expected CheckpointingHook in a mini.BaseTrainer, received a run that has its own checkpoints. "
                "Remove the hook; use the trainer's save_every, save_last and keep_every."
            )

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint of a step is saved and kept, whatever the other rules."""
        return step in self.keep_steps or bool(self.keep_interval and step % self.keep_interval == 0)

    def on_after_step(self, trainer: Any) -> None:
        # Saved after all hooks have handled the step, so that the checkpoint contains what they did.
        if self.is_due(trainer) or self.is_kept(trainer.step):
            self.is_pending = True
            trainer._built_run().control.should_save = True

    def save(self, trainer: Any) -> Path | None:
        """Write a checkpoint of the current step. Returns its path, or None if it could not be written."""
        self.is_pending = False
        path = self.folder(trainer) / f"checkpoint_step_{trainer.step}.pt"
        state = trainer.state_dict()  # on every rank: sharded models are gathered
        written = self._write(trainer, path, state) if rank() == 0 else path
        if not trainer.is_interrupted:  # ranks may receive a signal at different steps
            barrier()
        return written

    def _write(self, trainer: Any, path: Path, state: dict[str, Any]) -> Path | None:
        _check_plain(state)
        try:
            write_single_file(path, state)
            self._link_latest(path)
        except OSError as error:
            self._failures += 1
            kept = _numbered(self.folder(trainer))
            newest = f"the newest checkpoint is {kept[-1][1]}" if kept else "there is no checkpoint yet"
            if trainer.step >= trainer.max_steps or trainer.is_interrupted or self._failures >= _MAX_FAILURES:
                raise SaveFailed(
                    f"Could not save step {trainer.step} ({error}); {newest}. Free some space or choose another path, "
                    "then run the same command again."
                ) from error
            trainer.logger.error("could not write a checkpoint (%s); training continues, %s", error, newest)
            return None
        self._failures = 0
        trainer.logger.info("saved %s", path)
        self._prune(path.parent, trainer.step)
        return path

    def _link_latest(self, path: Path) -> None:
        """Replace the link atomically. Nothing here relies on it, so file systems without links do without."""
        temporary = path.with_name(f".{_LATEST}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        try:
            temporary.symlink_to(path.name)
        except (OSError, NotImplementedError):
            return
        os.replace(temporary, path.with_name(_LATEST))

    def _prune(self, folder: Path, newest: int) -> None:
        if self.keep_previous is None:
            return
        numbered = [(step, path) for step, path in _numbered(folder) if step <= newest]
        for step, path in numbered[: len(numbered) - max(self.keep_previous, 1)]:
            if not self.is_kept(step):
                path.unlink(missing_ok=True)

    def restore(self, trainer: Any, wanted: bool = True) -> bool:
        """Before training: load what `load` says, if `wanted`, and clean up. Returns whether a file was loaded."""
        folder = self.folder(trainer)
        self._origin = origin = "" if self.load in (None, "latest") else str(self.load)
        wanted = wanted and self.load is not None
        found = self._newest(trainer, folder) if wanted and rank() == 0 else None
        # All ranks use what rank 0 found: on shared storage a file may appear later to some of them.
        path = broadcast(None if found is None else found[0])
        if wanted and path is None:
            path = self._named(folder)
        if path is not None:
            if trainer.step:
                trainer.logger.info("replacing the state loaded before (step %d)", trainer.step)
            if not origin and trainer.workspace is not None and path.is_file():
                check_unchanged(
                    trainer._built_run(), trainer.workspace, path, ignore=("seed",)
                )  # drawn by each process
            read = read_trainloop_folder if path.is_dir() else read_single_file
            trainer.load_state_dict(read(path) if found is None else found[1])
            self._origin = origin
            trainer.logger.info("resuming from %s (step %d); pass load=None to start from scratch", path, trainer.step)
        self._clean_up(trainer, folder)
        return path is not None

    def _named(self, folder: Path) -> Path | None:
        """The file or folder of `load`, or a name in the checkpoint folder; "latest" is that of trainloop."""
        named = folder / "latest" if self.load == "latest" else Path(str(self.load))
        if not named.exists() and len(named.parts) == 1:
            named = folder / named
        if named.is_file() or (named.is_dir() and (named / "training_state.pt").is_file()):
            return named
        if self.load == "latest":
            return None
        raise BadArgument(expected("load to be 'latest', a checkpoint's file, or None", str(self.load)))

    def _newest(self, trainer: Any, folder: Path) -> tuple[Path, dict[str, Any]] | None:
        """The newest readable file. If `load` names a file, only one of a run that started from it."""
        for _, path in reversed(_numbered(folder)):
            try:
                states = read_single_file(path)
            except DataError as error:
                trainer.logger.warning("%s Falling back to the previous checkpoint.", error)
                continue
            hooks = [s for key, s in states.items() if key.startswith("callback.CheckpointingHook")]
            origins = [s.get("checkpointing_hook", {}).get("origin", "") for s in hooks]
            return (path, states) if not self._origin or self._origin in origins else None
        return None

    def newest_step(self, trainer: Any) -> int:
        """The step of the newest file; -1 if there is none, or `load` is None."""
        numbered = _numbered(self.folder(trainer)) if self.load is not None else []
        return numbered[-1][0] if numbered else -1

    def _clean_up(self, trainer: Any, folder: Path) -> None:
        """Finish what a killed process may have left undone."""
        barrier()
        if rank() > 0 or not folder.is_dir():
            return
        for path in folder.iterdir():  # temporary files of dead processes
            match = _LEFTOVER.fullmatch(path.name)
            if match and not is_alive(int(match[1])):
                path.unlink(missing_ok=True)
        self._move_abandoned(trainer, folder)
        if kept := _numbered(folder):
            self._link_latest(kept[-1][1])
            self._prune(folder, trainer.step)

    def _move_abandoned(self, trainer: Any, folder: Path) -> None:
        """Move files of later steps away: they are damaged, or belong to an abandoned run."""
        later = [path for step, path in _numbered(folder) if step > trainer.step]
        if not later:
            return
        number = 1
        while (place := folder / f"abandoned-{number}").exists():
            number += 1
        make_folder(place)
        for path in later:
            path.rename(place / path.name)
        sync(place)
        sync(folder)
        trainer.logger.warning("moved %d files of steps after %d to %s", len(later), trainer.step, place)

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        # A run that started from a named file resumes from its own newest file when it is started again.
        state_dict["checkpointing_hook"] = {"origin": self._origin}

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self._origin = state_dict.get("checkpointing_hook", {}).get("origin", "")  # trainloop saves none

    def folder(self, trainer: Any) -> Path:
        """The folder of the checkpoints."""
        return in_workspace(trainer, self.path)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints by step, oldest first."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def _check_plain(state: Any, where: str = "") -> None:
    """Refuse values that could not be read back: loading executes no code, so it creates no objects."""
    if isinstance(state, dict):
        for key, value in state.items():
            if not where and not key.startswith("callback."):
                continue  # states of torch and of the library itself are known to be plain
            _check_plain(value, f"{where}.{key}" if where else key)
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            _check_plain(value, f"{where}[{number}]")
    elif not (state is None or isinstance(state, Tensor) or type(state) in (bool, int, float, str, bytes, complex)):
        do = "Keep tensors and plain values (numbers, strings, lists, dicts), and rebuild objects when loading."
        raise BadArgument(expected(f"{where} in a checkpoint to be a plain value", type(state).__name__, do))


def _signal(number: Any) -> int:
    try:
        return int(signal.Signals[number] if isinstance(number, str) else signal.Signals(number))
    except (KeyError, ValueError):
        hint = did_you_mean(str(number), [s.name for s in signal.Signals])
        raise BadArgument(expected("exit_signals to be signals", number, hint)) from None

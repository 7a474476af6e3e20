"""Checkpoints of a mini trainer: single files, a link to the latest, and what is kept of them.

When to save is asked of the loop, and what is saved is what the session's components say; here is only where the files
are. A file appears whole or not at all; older ones are deleted only when a newer one is there.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainformer.callbacks.compat.mini import TrainerView
from trainformer.checkpointing.checkpointer import SaveFailed
from trainformer.checkpointing.torch_files import read_single_file, write_single_file
from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.mini.hooks.intervals import IntervalHook, whole_number
from trainformer.mini.utils import from_first_rank, wait_for_all
from trainformer.utils.distributed import rank
from trainformer.utils.processes import is_alive

_NAME = re.compile(r"checkpoint_step_(\d+)\.pt")
_LATEST = "checkpoint_latest.pt"
_LEFTOVER = re.compile(r"\.checkpoint_\w+\.pt\.(\d+)\.tmp")
_MOST_FAILURES = 3


class CheckpointingHook(IntervalHook):
    """Saves every `interval` steps, at the end, and on `exit_signals`; takes the run up again when it is started anew.

    `keep_previous` keeps the last so many files, `keep_interval` also one per so many steps; None for `keep_previous`
    keeps all. `path` is ``checkpoints`` in the workspace unless given. `load` is ``"latest"``, a file to begin from, or
    None to begin anew. After a signal the process leaves with `exit_code`; with several ranks it waits `exit_wait`
    seconds before, so that the others can save, too.
    """

    def __init__(
        self,
        interval: int = 1000,
        keep_previous: int | None = None,
        keep_interval: int | None = None,
        path: str | os.PathLike[str] | None = None,
        load: str | os.PathLike[str] | None = "latest",
        *,
        exit_signals: Sequence[int] | None = (signal.SIGTERM, signal.SIGINT),
        exit_code: int | str = "128+signal",
        exit_wait: float = 0.0,
    ) -> None:
        super().__init__(interval)
        if keep_previous is not None:
            whole_number("keep_previous", keep_previous, least=0)
        if keep_interval is not None:
            whole_number("keep_interval", keep_interval, least=1)
        self.keep_previous = keep_previous
        self.keep_interval = keep_interval
        self.path = None if path is None else Path(path)
        self.load = load
        self.exit_signals = tuple(_signal(number) for number in exit_signals or ())
        self.exit_code = exit_code
        self.exit_wait = exit_wait
        self.is_due = False
        self._origin = ""
        self._failures = 0
        if exit_code != "128+signal" and (isinstance(exit_code, bool) or not isinstance(exit_code, int)):
            raise BadArgument(expected("exit_code to be a number or '128+signal'", exit_code))
        if not isinstance(exit_wait, (int, float)) or exit_wait < 0:
            raise BadArgument(expected("exit_wait to be a number of seconds", exit_wait))

    # -- saving --------------------------------------------------------------------------------------------

    def on_before_train(self, trainer: Any) -> None:
        """Refuse a run that has checkpoints of its own."""
        if isinstance(trainer, TrainerView):
            raise BadArgument(
                "Expected CheckpointingHook in a mini.BaseTrainer, received a run that keeps checkpoints itself. Leave "
                "the hook out; see the trainer's save_every, save_last and keep_every."
            )

    def on_after_step(self, trainer: Any) -> None:
        """Ask for a save. It is done when all hooks have heard of the step, so that it holds what they did."""
        if self.is_time(trainer):
            self.is_due = True
            trainer._built_run().control.should_save = True

    def save(self, trainer: Any) -> Path | None:
        """Write the checkpoint of the step that was just made; where it is, or None where it could not be written."""
        self.is_due = False
        path = self.folder(trainer) / f"checkpoint_step_{trainer.step}.pt"
        state = trainer.state_dict()  # on every rank: models that are spread over ranks are put together for it
        written = self._write(trainer, path, state) if rank() == 0 else path
        if not trainer.is_interrupted:  # ranks may hear of a signal at different steps
            wait_for_all()
        return written

    def _write(self, trainer: Any, path: Path, state: dict[str, Any]) -> Path | None:
        _check_plain(state)
        try:
            write_single_file(path, state)
            self._point_to(path)
        except OSError as error:
            self._note(trainer, error)
            return None
        self._failures = 0
        trainer.logger.info("saved %s", path)
        self._prune(path.parent, trainer.step)
        return path

    def _note(self, trainer: Any, error: OSError) -> None:
        self._failures += 1
        last = trainer.step >= trainer.max_steps or trainer.is_interrupted
        kept = _numbered(self.folder(trainer))
        newest = f"the newest checkpoint is {kept[-1][1]}" if kept else "there is no checkpoint yet"
        if last or self._failures >= _MOST_FAILURES:
            raise SaveFailed(
                f"Step {trainer.step} could not be saved ({error}); {newest}. Free some space or choose another path, "
                "then run the same command again."
            ) from error
        trainer.logger.error("a checkpoint could not be written (%s); training goes on, %s", error, newest)

    def _point_to(self, path: Path) -> None:
        """Replace the link at one stroke. Nothing here relies on it: systems without links go without."""
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
            if self.keep_interval is None or step % self.keep_interval:
                path.unlink(missing_ok=True)

    # -- loading -------------------------------------------------------------------------------------------

    def restore(self, trainer: Any, wanted: bool = True) -> bool:
        """Before the run begins: take up what `load` says, if that is `wanted`, and tidy up. Whether anything was."""
        folder = self.folder(trainer)
        self._origin = origin = "" if self.load in (None, "latest") else str(self.load)
        wanted = wanted and self.load is not None
        found = self._newest(trainer, folder) if wanted and rank() == 0 else None
        # All ranks take what the first one has found: files may appear to some of them later than to others.
        path = from_first_rank(None if found is None else found[0])
        if wanted and path is None and origin:
            path = Path(origin)
            if not path.is_file():
                raise BadArgument(expected("load to be 'latest', a checkpoint's file, or None", origin))
        if path is not None:
            if trainer.step:
                trainer.logger.info("what was loaded before (step %d) is replaced", trainer.step)
            trainer.load_state_dict(read_single_file(path) if found is None else found[1])
            self._origin = origin
            trainer.logger.info("going on from %s (step %d); pass load=None to begin anew", path, trainer.step)
        self._tidy(trainer, folder)
        return path is not None

    def _newest(self, trainer: Any, folder: Path) -> tuple[Path, dict[str, Any]] | None:
        """The newest file that can be read. Where a file to begin from was named, only that of a run that did."""
        for _, path in reversed(_numbered(folder)):
            try:
                states = read_single_file(path)
            except DataError as error:
                trainer.logger.warning("%s The checkpoint before it is used.", error)
                continue
            began = [s.get("origin", "") for key, s in states.items() if key.startswith("callback.CheckpointingHook")]
            return (path, states) if not self._origin or self._origin in began else None
        return None

    def newest_step(self, trainer: Any) -> int:
        """The step of the newest file to begin from; -1 if there is none, or none is wanted."""
        numbered = _numbered(self.folder(trainer)) if self.load is not None else []
        return numbered[-1][0] if numbered else -1

    def _tidy(self, trainer: Any, folder: Path) -> None:
        """Do what the process before may have been killed in the middle of."""
        wait_for_all()
        if rank() > 0 or not folder.is_dir():
            return
        _clean(folder)
        self._set_aside(trainer, folder)
        if kept := _numbered(folder):
            self._point_to(kept[-1][1])
            self._prune(folder, trainer.step)

    def _set_aside(self, trainer: Any, folder: Path) -> None:
        """Move files of later steps out of the way: they belong to a run that was given up, or are damaged."""
        later = [path for step, path in _numbered(folder) if step > trainer.step]
        if not later:
            return
        number = 1
        while (place := folder / f"given-up-{number}").exists():
            number += 1
        place.mkdir()
        for path in later:
            path.rename(place / path.name)
        trainer.logger.warning("%d files of later steps than %d were moved to %s", len(later), trainer.step, place)

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """Which file the run began from, if one was named: started again, it goes on instead of beginning there."""
        state_dict["origin"] = self._origin

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self._origin = state_dict["origin"]

    def folder(self, trainer: Any) -> Path:
        """Where the files are."""
        return self.path if self.path is not None else (trainer.workspace or Path()) / "checkpoints"


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints by step, oldest first."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def _clean(folder: Path) -> None:
    """Clear away what a killed process left half-written."""
    for path in folder.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match and not is_alive(int(match[1])):
            path.unlink(missing_ok=True)


def _check_plain(state: Any, where: str = "") -> None:
    """Refuse what could be written but never read again: reading executes nothing, so it makes no objects."""
    if isinstance(state, dict):
        for key, value in state.items():
            if not where and not key.startswith("callback."):
                continue  # what torch and the library say of themselves is read back in their tests
            _check_plain(value, f"{where}.{key}" if where else key)
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            _check_plain(value, f"{where}[{number}]")
    elif not _is_plain(state):
        do = "Keep tensors and plain values (numbers, strings, lists, dicts), and make objects of them on loading."
        raise BadArgument(expected(f"{where} in a checkpoint to be a plain value", type(state).__name__, do))


def _is_plain(value: Any) -> bool:
    import torch

    return value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, str, bytes, complex)


def _signal(number: Any) -> int:
    """A signal by number, enum or name."""
    try:
        return int(signal.Signals[number] if isinstance(number, str) else signal.Signals(number))
    except (KeyError, ValueError):
        hint = did_you_mean(str(number), [s.name for s in signal.Signals])
        raise BadArgument(expected("exit_signals to be signals", number, hint)) from None

"""What ranks settle before a run begins: that they see one folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainformer.core.errors import BadArgument
from trainformer.engine.process_group import ProcessGroup
from trainformer.run.context import folder_from_around
from trainformer.run.folder import GuestFolder, NoFolder, RunFolder
from trainformer.run.provenance import fingerprint

if TYPE_CHECKING:
    from trainformer.run.run import Run

_PATIENCE = 5.0  # seconds; other machines may see a new file of a network file system only after a while


def choose_folder(run: Run) -> RunFolder | NoFolder:
    """The folder of the run, which rank 0 chooses and makes, and all ranks must see."""
    settings, process_group = run.settings, run.process_group
    if not run.habits.keeps_folder:
        return NoFolder()
    made: list[RunFolder] = []

    def make() -> str:
        folder = folder_from_around(run) or RunFolder.choose(
            settings.run_dir,
            settings.name,
            run.title,
            settings.save_dir,
            unfinished=fingerprint(run) if settings.resume == "auto" else None,
        )
        folder.open(anew=settings.resume is None and run.state.step == 0)
        made.append(folder)
        return str(folder.path.absolute())

    path = Path(process_group.run_on_main(make))
    if not process_group.is_single_process:
        _see(path, process_group)
    return made[0] if made else GuestFolder(path, settings.save_dir)


def _see(folder: Path, process_group: ProcessGroup) -> None:
    """Raise, on all ranks, if one of them does not find in the folder what rank 0 puts there."""
    mark = (
        folder / f".seen-by-all.{process_group.broadcast(os.getpid())}.tmp"
    )  # cleared away with drafts, if left behind
    if process_group.is_main:
        mark.touch()
    process_group.all_gather_object(None)
    blind = [rank for rank, seen in enumerate(process_group.all_gather_object(_is_there(mark))) if not seen]
    if process_group.is_main:
        mark.unlink(missing_ok=True)
    if blind:
        raise BadArgument(
            f"Expected the folder of the run to be one and the same for all ranks, received {folder}: rank "
            f"{', '.join(map(str, blind))} does not find there what rank 0 writes. Choose a run_dir on a file system "
            "that all machines share."
        )


def _is_there(mark: Path) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True

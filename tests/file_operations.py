"""Stops a process at a chosen moment of a save: at a file operation, or inside the write of a checkpoint."""

import os
import signal
import sys
import time
from pathlib import Path

BLOCKED = "blocked.txt"


def count_operations(folder, die_at):
    """Count file operations below a folder (open, rename, mkdir, remove), and die just before the `die_at`-th.

    Unlike a kill after some milliseconds, this reaches every moment at which the files look different, however short.
    """
    count, prefix = [0], str(folder)
    watched = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}

    def hook(event, args):
        if event in watched and isinstance(args[0], (str, os.PathLike)) and os.path.abspath(args[0]).startswith(prefix):
            count[0] += 1
            if count[0] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return count


def block_in_save(modules, where):
    """Block for ever at the n-th fsync of the k-th checkpoint that this process writes; `where` is (k, n).

    ``blocked.txt`` appears just before, so that another process can kill this one there. `modules` are those that
    import `sync`.
    """
    saves, syncs = [], [0]
    marker = Path(BLOCKED).absolute()
    marker.unlink(missing_ok=True)
    original = modules[0].sync

    def sync(path):
        draft = next((part for part in Path(path).parts if part.startswith(".writing-")), None)
        if draft is not None:
            if draft not in saves:
                saves.append(draft)
                syncs[0] = 0
            syncs[0] += 1
            if (len(saves), syncs[0]) == tuple(where):
                block(marker)
        original(path)

    for module in modules:
        module.sync = sync


def block(marker, until=None):
    """Create a file, then wait for another; without one, until this process is killed. Appends a byte every 10 ms."""
    while True:
        with open(marker, "ab", buffering=0) as file:
            file.write(b".")
        if until is not None and Path(until).exists():
            return
        time.sleep(0.01)

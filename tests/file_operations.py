"""Dying at a chosen moment of a save."""

import os
import signal
import sys


def count_operations(folder, die_at):
    """Count what happens to files below a folder (open, rename, mkdir, remove), and die just before one of them.

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

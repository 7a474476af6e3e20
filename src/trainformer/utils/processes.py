"""Which process is which, also after its number was given to another."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def process_identity(number: int) -> str | None:
    """What tells a process from a later one with the same number (in a container it is often the same every time).

    None: there is no such process. One that has ended but that nobody has waited for is no longer there either.

    >>> process_identity(os.getpid()) == process_identity(os.getpid())
    True
    """
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        here = number == os.getpid() or is_alive(number)
        return str(number) if here and not Path("/proc/self").exists() else None
    if fields[0] in "ZX":  # a zombie, or just about to disappear
        return None
    return f"{number}-{fields[19]}-{boot}"  # field 22 of the whole line: when it was started


def is_alive(process: int) -> bool:
    """Whether a process of this machine is running, other than this one (which has no leftovers of its own)."""
    if process == os.getpid():
        return False
    with contextlib.suppress(PermissionError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return True

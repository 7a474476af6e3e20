"""Processes: identities that survive the reuse of process ids, and the memory of this one."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def process_identity(number: int) -> str | None:
    """Distinguishes a process from a later one with the same id (in a container, the id is often the same every time).

    None if there is no such process, or only a zombie.

    >>> process_identity(os.getpid()) == process_identity(os.getpid())
    True
    """
    try:
        fields = _stat(number)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        here = number == os.getpid() or is_alive(number)
        return str(number) if here and not Path("/proc/self").exists() else None
    if fields[0] in "ZX":  # a zombie, or dead
        return None
    return f"{number}-{fields[19]}-{boot}"  # field 22 of the line: the start time


def is_alive(process: int) -> bool:
    """Whether another process of this machine is running; False for this process itself, and for a zombie.

    A killed process stays a zombie until its parent waits for it: for ever, if that is a container's first process.
    """
    if process == os.getpid():
        return False
    with contextlib.suppress(PermissionError):
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):  # a number that no process can have
            return False
    try:
        return _stat(process)[0] not in "ZX"
    except OSError:  # no /proc, or it shows only one's own processes
        return True


def _stat(number: int) -> list[str]:
    """The fields of /proc/<number>/stat from the state on."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()


def resident_bytes() -> int:
    """Resident memory of this process; its peak where the system reports no more."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak resident memory of this process; 0 on Windows."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""Follows what a process does, and stops it at a chosen moment: at an event, or inside the write of a checkpoint."""

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

BLOCKED = "blocked.txt"
PHASE = "phase.txt"
PHASES = ("start-up", "resume", "step", "evaluation", "save", "rename", "delete")

_RENAMES = {"os.rename", "os.link", "os.symlink"}
_DELETIONS = {"os.remove", "os.rmdir", "shutil.rmtree"}
_WATCHED = {"open", "os.mkdir", *_RENAMES, *_DELETIONS}


class Watch:
    """Counts the events of a process: file operations below a folder, and what `mark` is told. Dies at one of them.

    `die_at` is the number of an event, or a phase and the number of an event in it. Unlike a kill after some
    milliseconds, this reaches every moment at which the files look different, however short. The file ``phase.txt``
    says what the process does, and still does after a kill.
    """

    current = None

    def __init__(self, folder, die_at=None, name=PHASE):
        self.process, self.prefix, self.began = os.getpid(), str(folder), time.monotonic()
        self.die_at = ("operation", die_at) if isinstance(die_at, int) else die_at
        self.phase, self.step, self.counts = "start-up", 0, Counter()
        self._file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.mark("start-up")
        sys.addaudithook(self._on_audit)
        Watch.current = self

    def mark(self, phase, step=None):
        """Say what the process does from now on."""
        if os.getpid() == self.process:
            self.phase, self.step = phase, self.step if step is None else step
            self._write(phase)
            self._count(phase)

    def _on_audit(self, event, args):
        if event not in _WATCHED or os.getpid() != self.process or not isinstance(args[0], (str, os.PathLike)):
            return
        paths = [os.path.abspath(path) for path in args[:2] if isinstance(path, (str, os.PathLike))]
        if paths[0].startswith(self.prefix) or (event in _RENAMES and paths[-1].startswith(self.prefix)):
            self.counts["operation"] += 1
            self._count(self._phase_of(event, paths), operation=True)

    def _phase_of(self, event, paths):
        if self.phase == "start-up":
            return self.phase
        if event in _DELETIONS or any("/.deleting-" in path for path in paths):
            return "delete"
        if event in _RENAMES:
            return "rename"
        return "save" if any(map(is_draft, Path(paths[0]).parts)) else self.phase

    def _count(self, phase, operation=False):
        self.counts[phase] += 1
        if self.die_at == (phase, self.counts[phase]) or (
            operation and self.die_at == ("operation", self.counts["operation"])
        ):
            self._write(phase)
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, phase):
        os.pwrite(self._file, f"{phase:<12}{self.step:>12}\n".encode(), 0)


def mark(phase, step=None):
    """Say what this process does, if somebody watches."""
    if Watch.current is not None:
        Watch.current.mark(phase, step)


def phase_file(rank):
    """The name of the file that says what a rank does."""
    return f"{PHASE}-{rank}" if rank else PHASE


def last_phase(folder, name=PHASE):
    """What a process did last, and in which step; a process that did not get so far was starting."""
    text = Path(folder, name).read_text() if Path(folder, name).exists() else ""
    return (text[:12].strip(), int(text[12:])) if len(text) > 12 else ("start-up", 0)


def block_in_save(where):
    """Block for ever at the n-th fsync of the k-th checkpoint that this process writes; `where` is (k, n).

    ``blocked.txt`` appears just before, so that another process can kill this one there.
    """
    saves, syncs = [], [0]
    marker = Path(BLOCKED).absolute()
    marker.unlink(missing_ok=True)
    original = os.fsync

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        draft = next((part for part in Path(path).parts if is_draft(part)), None)
        if draft is not None:
            if draft not in saves:
                saves.append(draft)
                syncs[0] = 0
            syncs[0] += 1
            if (len(saves), syncs[0]) == tuple(where):
                block(marker)
        original(descriptor)

    os.fsync = fsync


def is_draft(name, kind="writing"):
    """Whether a file or folder is a checkpoint that is being written, or deleted."""
    single_file = kind == "writing" and name.startswith(".checkpoint_step_") and name.endswith(".tmp")
    return name.startswith(f".{kind}-") or single_file


def block(marker, until=None):
    """Create a file, then wait for another; without one, until this process is killed. Appends a byte every 10 ms."""
    parent = os.getppid()
    while os.getppid() == parent:
        with open(marker, "ab", buffering=0) as file:
            file.write(b".")
        if until is not None and Path(until).exists():
            return
        time.sleep(0.01)
    os._exit(1)  # nobody is left to kill this process

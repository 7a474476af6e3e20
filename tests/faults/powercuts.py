"""Simulated power cuts: what a disk may hold after one, given the file operations that a program made.

`record` runs a program under `powercut.c`, which logs its file operations below Python. `History` replays the log into
a model of a file system that promises as little as POSIX does:

- The data of a file is durable after an fsync of that file. Before, any 512-byte sector of it may be lost, in any
  order, and the file may have its new size with zeros or old garbage in place of the data.
- A name (create, rename, link, remove) is durable after an fsync of its folder. Before, it may be lost, and others
  that came later may not be. An fsync of a file says nothing about its name. A rename is atomic.
- Nothing else orders anything.

`History.cut` chooses one of the states that are possible if the power fails at a moment.
"""

from __future__ import annotations

import math
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SECTOR = 512
_HERE = Path(__file__).parent


# -- recording -------------------------------------------------------------------------------------------------------


def unavailable() -> str | None:
    """Why programs cannot be recorded here; None if they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "recording file operations needs seccomp and LD_PRELOAD: Linux on x86_64"
    return None if shutil.which("gcc") else "recording file operations needs gcc: install it"


def record(command: list[str], folder: Path, processes: int = 1) -> Path:
    """Run a command in a folder; the log of its file operations there.

    With several `processes` each gets the variables of torchrun.
    """
    scratch = Path(tempfile.mkdtemp(prefix="log-", dir=folder.parent))
    library, log = scratch / "powercut.so", scratch / "operations.log"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, _HERE / "powercut.c"], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "POWERCUT_ROOT": str(folder),
        "POWERCUT_LOG": str(log),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
    }
    port = str(_free_port())
    ranks = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(processes if processes > 1 else 0)
    ]
    with (scratch / "output.txt").open("wb") as output:
        running = [
            subprocess.Popen(command, cwd=folder, env=environment | rank, stdout=output, stderr=output)
            for rank in ranks or [{}]
        ]
        codes = [process.wait() for process in running]
    assert not any(codes), f"exit codes {codes}:\n{(scratch / 'output.txt').read_text()[-4000:]}"
    return log


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Operation(NamedTuple):
    """One line of the log. Paths are relative to the recorded folder."""

    kind: str
    inode: int
    offset: int
    data: bytes
    path: str
    other: str


def read_log(path: Path, root: Path) -> list[Operation]:
    """The operations below a folder, in order, and the marks of the program that worked in it.

    They are only returned if replaying them gives exactly the files that are there at the end.
    """
    operations = []
    prefix = f"{root.resolve()}/"
    with path.open("rb") as file:
        while line := file.readline():
            kind, inode, offset, size, name, other = line.decode().removesuffix("\n").split("\t")
            data = file.read(int(size))
            if kind == "mark":
                if f"{other}/" == prefix:
                    operations.append(Operation(kind, 0, 0, b"", name, ""))
            elif f"{name}/".startswith(prefix) and (kind != "mkdir" or name + "/" != prefix):
                relative = name.removeprefix(prefix.rstrip("/")).lstrip("/")
                operations.append(Operation(kind, int(inode), int(offset), data, relative, other.removeprefix(prefix)))
    differences = History(operations, root.stat().st_ino).differences(root)
    assert not differences, f"the log is not complete, it does not explain these files: {differences[:20]}"
    return operations


# -- replaying -------------------------------------------------------------------------------------------------------


class NameChange(NamedTuple):
    """Names that appear and disappear together, each as (folder, name, node)."""

    index: int
    added: tuple[tuple[int, str, int], ...]
    removed: tuple[tuple[int, str, int], ...]
    durable: float  # the index of the fsync that makes it durable


class Write(NamedTuple):
    """Data at an offset, or, if it is None, a new size."""

    index: int
    offset: int
    data: bytes | None


@dataclass
class State:
    """What is on the disk after a power cut."""

    cut: int
    files: dict[str, bytes]
    folders: list[str]
    links: dict[str, str]
    lost_names: int = 0  # names that had changed, and changed back
    torn_files: int = 0  # files that are neither as at their last fsync nor as they were when the power failed

    def write(self, folder: Path, blobs: Blobs) -> None:
        """Create the files of this state in an empty folder. They must not be written to, as they share content."""
        for name in self.folders:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            os.link(blobs.path_of(content), folder / name)
        for name, target in self.links.items():
            (folder / name).symlink_to(target)


class Blobs:
    """Contents of files, each on the disk once, to be linked into many states."""

    def __init__(self, folder: Path, at_most: int = 2000) -> None:
        self._folder = folder
        self._known: dict[bytes, Path] = {}
        self._at_most = at_most
        folder.mkdir(parents=True, exist_ok=True)

    def path_of(self, content: bytes) -> Path:
        """A file with this content."""
        if content not in self._known:
            if len(self._known) >= self._at_most:  # torn contents are not needed again
                for path in self._known.values():
                    path.unlink()
                self._known.clear()
            self._known[content] = path = self._folder / str(len(self._known))
            path.write_bytes(content)
        return self._known[content]


class History:
    """The operations of a program on a file system with weak guarantees.

    `without` names kinds of operations to ignore: without "sync folder" the program never made a name durable.
    """

    def __init__(self, operations: list[Operation], root: int, without: Collection[str] = ()) -> None:
        self.operations = operations
        self._changes: list[NameChange] = []
        self._writes: dict[int, list[Write]] = defaultdict(list)
        self._syncs: dict[int, list[int]] = defaultdict(list)
        self._kinds: dict[int, str] = {0: "folder"}  # by node; the target, if it is a symbolic link
        self._durable_contents: dict[tuple[int, int], bytes] = {}
        names: dict[int, dict[str, int]] = defaultdict(dict)
        nodes = {root: 0}
        changes: list[tuple[int, list[tuple[int, str, int]], list[tuple[int, str, int]]]] = []

        def place(path: str) -> tuple[int, str]:
            *parents, name = path.split("/")
            folder = 0
            for parent in parents:
                folder = names[folder][parent]
            return folder, name

        def change(added: list[tuple[int, str, int]], removed: list[tuple[int, str, int]]) -> None:
            for folder, name, _ in removed:
                del names[folder][name]
            for folder, name, node in added:
                names[folder][name] = node
            changes.append((index, added, removed))

        def create(kind: str) -> int:
            node = len(self._kinds)
            self._kinds[node] = kind
            nodes[operation.inode] = node
            return node

        for index, operation in enumerate(operations):
            kind = operation.kind
            if kind in ("open", "truncating"):
                folder, name = place(operation.path)
                if name not in names[folder]:
                    change([(folder, name, create("file"))], [])
                elif kind == "truncating":
                    self._writes[nodes[operation.inode]].append(Write(index, 0, None))
            elif kind == "unnamed":
                create("file")
            elif kind == "write":
                self._writes[nodes[operation.inode]].append(Write(index, operation.offset, operation.data))
            elif kind == "size":
                self._writes[nodes[operation.inode]].append(Write(index, operation.offset, None))
            elif kind in ("mkdir", "symlink"):
                change([(*place(operation.path), create("folder" if kind == "mkdir" else operation.other))], [])
            elif kind == "link":
                change([(*place(operation.path), nodes[operation.inode])], [])
            elif kind == "remove":
                folder, name = place(operation.path)
                change([], [(folder, name, names[folder][name])])
            elif kind == "rename":
                (folder, name), target = place(operation.path), place(operation.other)
                node = names[folder][name]
                change([(*target, node)], [(folder, name, node)])
            elif kind.startswith("sync"):
                if kind not in without:
                    self._syncs[nodes[operation.inode]].append(index)
            else:
                assert kind == "mark", f"{kind} of {operation.path} cannot be simulated"
        for index, added, removed in changes:
            folders = {folder for folder, _, _ in (*added, *removed)}
            durable = min(self._next_sync(folder, index) for folder in folders)
            self._changes.append(NameChange(index, tuple(added), tuple(removed), durable))

    def _next_sync(self, node: int, index: int) -> float:
        syncs = self._syncs[node]
        after = bisect_right(syncs, index)
        return syncs[after] if after < len(syncs) else math.inf

    def at(self, index: int) -> State:
        """What programs see after an operation: all of it."""
        return self._state(index, lambda change: True, lambda node, writes: _replay(bytearray(), writes))

    def differences(self, folder: Path) -> list[str]:
        """The names whose content on disk is not what replaying everything gives."""
        state = self.at(len(self.operations))
        there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
        names = {*state.files, *state.folders, *state.links} ^ there.keys()
        return sorted(names) + [
            name for name, content in state.files.items() if name in there and there[name].read_bytes() != content
        ]

    def cut(self, cut: int, rng: random.Random) -> State:
        """One of the states in which the disk may be if the power fails while operation number `cut` is in progress.

        In some of them all is lost that may be, in some nothing; in some the names are as they were at one moment, as
        on a file system with an ordered journal; in the others each change counts for itself.
        """
        style = rng.choice(["lost", "kept", "ordered", "mixed", "mixed", "mixed"])
        share = {"lost": 0.0, "kept": 1.0}.get(style, rng.choice([0.1, 0.5, 0.9]))
        moment = rng.randint(0, cut) if style == "ordered" else -1
        lost = torn = 0

        def keeps(change: NameChange) -> bool:
            nonlocal lost
            if change.durable < cut:
                return True
            kept = change.index <= moment if style == "ordered" else rng.random() < share
            lost += not kept
            return kept

        def content(node: int, writes: list[Write]) -> bytes:
            nonlocal torn
            syncs = self._syncs[node]
            past = bisect_right(syncs, cut - 1)
            last = syncs[past - 1] if past else -1
            done = sum(write.index < last for write in writes)
            if (node, done) not in self._durable_contents:
                self._durable_contents[node, done] = _replay(bytearray(), writes[:done])
            durable = self._durable_contents[node, done]
            if done == len(writes):
                return durable
            found = _tear(durable, writes[done:], share, rng)
            torn += found not in (durable, _replay(bytearray(durable), writes[done:]))
            return found

        state = self._state(cut, keeps, content)
        state.lost_names, state.torn_files = lost, torn
        return state

    def _state(
        self, last: int, keeps: Callable[[NameChange], bool], content: Callable[[int, list[Write]], bytes]
    ) -> State:
        names: dict[int, dict[str, int]] = defaultdict(dict)
        for change in self._changes:
            if change.index > last:
                break
            if keeps(change):
                for folder, name, node in change.removed:
                    if names[folder].get(name) == node:
                        del names[folder][name]
                for folder, name, node in change.added:
                    names[folder][name] = node
        state = State(last, {}, [], {})
        contents: dict[int, bytes] = {}
        for path, node in _walk(names, 0, ""):
            kind = self._kinds[node]
            if kind == "folder":
                state.folders.append(path)
            elif kind == "file":
                if node not in contents:
                    contents[node] = content(node, [w for w in self._writes[node] if w.index <= last])
                state.files[path] = contents[node]
            else:
                state.links[path] = kind
        return state


def _walk(names: dict[int, dict[str, int]], folder: int, prefix: str) -> Iterator[tuple[str, int]]:
    for name, node in names[folder].items():
        yield prefix + name, node
        yield from _walk(names, node, f"{prefix}{name}/")


def _replay(content: bytearray, writes: list[Write]) -> bytes:
    for write in writes:
        _resize(content, write.offset if write.data is None else max(len(content), write.offset + len(write.data)))
        if write.data is not None:
            content[write.offset : write.offset + len(write.data)] = write.data
    return bytes(content)


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _tear(durable: bytes, writes: list[Write], share: float, rng: random.Random) -> bytes:
    """Writes of which some sectors reached the disk."""
    content = bytearray(durable)
    if share == 1.0:
        return _replay(content, writes)
    if share == 0.0:
        return durable
    for write in writes:
        if write.data is None:
            if rng.random() < share:
                _resize(content, write.offset)
            continue
        end = write.offset + len(write.data)
        if end > len(content) and rng.random() < share:  # the new size, but not yet the data
            hole = end - len(content)
            content += rng.randbytes(hole) if rng.random() < 0.3 else bytes(hole)
        # Sectors in any order, or all up to a point.
        up_to = rng.randint(write.offset, end) if rng.random() < 0.3 else None
        for start in range(write.offset - write.offset % SECTOR, end, SECTOR):
            first, last = max(start, write.offset), min(start + SECTOR, end)
            if first < up_to if up_to is not None else rng.random() < share:
                _resize(content, max(len(content), last))
                content[first:last] = write.data[first - write.offset : last - write.offset]
    return bytes(content)


# -- judging ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was found in many states."""

    cuts: int = 0
    before_first: int = 0  # before the first checkpoint was complete
    torn: int = 0  # states with a file that is torn
    lost: int = 0  # states in which names had not reached the disk
    ahead: int = 0  # the newest checkpoint was complete although its save had not returned
    fell_back: int = 0  # a damaged checkpoint was skipped
    resumed: int = 0  # continued to the end, and compared with a run without a power cut
    places: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __iadd__(self, other: Tally) -> Tally:
        for name, value in vars(other).items():
            if name == "places":
                for place, count in value.items():
                    self.places[place] = self.places.get(place, 0) + count
            else:
                setattr(self, name, getattr(self, name) + value)
        return self


def place_of(operation: Operation) -> str:
    """What the program was doing, by the operation at which the power failed."""
    path = operation.path
    name = path.rpartition("/")[2]
    if operation.kind == "rename" and ".writing-" in path:
        return "checkpoint: rename"
    if ".deleting-" in path + operation.other or ".replaced-" in path + operation.other:
        return "checkpoint: delete"
    if operation.kind == "remove" and name.startswith("checkpoint_step_"):
        return "checkpoint: delete"
    if ".writing-" in path or name.startswith(".checkpoint_"):
        if name == "manifest.json":
            return "checkpoint: manifest"
        return "checkpoint: fsync" if operation.kind.startswith("sync") else "checkpoint: data"
    for file in ("metrics.jsonl", "records.jsonl", "log.txt", "status.json", "config.json", "latest"):
        if file in name or file in operation.other:
            return {"log.txt": "log", "latest": "link to the newest"}.get(file, file)
    return "folders" if operation.kind in ("mkdir", "sync folder") else "other"

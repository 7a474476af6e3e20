"""What ranks tell each other to show that they live: a word each, every few seconds, through the group's store.

Owns the thread that speaks and listens, and what is known of the other ranks. What follows from silence, or from a
word that is not a good one, is judged in `watch`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from trainformer.utils.processes import is_alive

LEFT = "left"  # finished, and said so
FAILED = "failed"  # raised an error; there is a `Note` of it
ENDED = "ended"  # said by a neighbour, who saw that the process is gone

#: Seconds between two words of a rank, per rank: everybody reads everybody, so the store's work per second grows with
#: the number of ranks and no faster.
_SECONDS_PER_RANK = 0.01


@dataclass(frozen=True)
class Who:
    """A process and where it runs. `place` is where process numbers mean the same."""

    host: str
    process: int
    place: str

    @classmethod
    def here(cls) -> Who:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), _place())


@dataclass(frozen=True)
class Note:
    """What a rank left that failed. `symptom`: it failed because another one did not answer."""

    text: str
    symptom: bool = False


class Peer:
    """What is known of another rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.word = ""  # the last one: a number as long as it works, or LEFT, FAILED, ENDED
        self.heard = 0.0  # when that was, on the clock of the wall
        self.silence = 0.0  # for how long we have listened since then
        self.who: Who | None = None
        self.note = Note("")
        self.process: LocalProcess | None = None
        self.has_ended = False  # seen from here, not told

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" on {self.who.host} (process {self.who.process})" if self.who else "")

    @property
    def works(self) -> bool:
        """Whether its last word was that it is at work."""
        return self.word.isdigit()


class LocalProcess:
    """Another process in the same place, of which the kernel can tell whether it has ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._handle: int | None = None
        # A handle stays with this process when its number goes to another, and knows the end of one that nobody has
        # waited for. Old kernels and other systems have none.
        with contextlib.suppress(AttributeError, OSError):
            self._handle = os.pidfd_open(number)

    def has_ended(self) -> bool:
        """Whether it is gone."""
        if self._handle is None:
            return self.number != os.getpid() and not is_alive(self.number)
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Give the handle back."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


class Heartbeats:
    """Says that this rank lives, and hears the others, in a thread of its own.

    The thread alone changes what is known through the store; `Peer.process` and `Peer.has_ended` belong to whoever
    looks at processes. So nothing needs a lock, and a fork at any moment is harmless.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, every: float) -> None:
        self.rank = rank
        self.interval = max(every, world_size * _SECONDS_PER_RANK)
        self.peers = [Peer(other) for other in range(world_size) if other != rank]
        self.answers = 0  # how often the store has answered
        self.broken: Exception | None = None  # what the store's connection ended with
        self.address, self.keeper = _keeper(store)
        self._shared = store
        self._store = store
        self._farewell: tuple[str, Note] | None = None
        self._listened = time.monotonic()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainformer-heartbeats", daemon=True)

    def begin(self) -> None:
        """Speak and listen from now on."""
        self._thread.start()

    def hurry(self) -> None:
        """Ask the store now, not when it is due."""
        self._wake.set()

    def end(self, word: str, note: Note) -> None:
        """Say a last word. Does not wait for a store that does not answer."""
        self._farewell = word, note
        self._wake.set()
        self._thread.join(self._most_lingering + max(1.0, self.interval))

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._introduce()
            while self._exchange():
                self.answers += 1
                self._wake.wait(self.interval)
                self._wake.clear()
            self._linger()
        except Exception as error:  # a store raises whatever its connection does
            self.broken = error

    def _introduce(self) -> None:
        # A connection of our own: on a shared one, a call that waits for another rank would hold up ours.
        clone = getattr(self._shared, "clone", None)
        own = dist.PrefixStore("trainformer/heartbeats", clone() if clone else self._shared)
        # The words of an earlier run in the same processes do not count. Its number is that of every rank.
        number = own.add(f"runs/{self.rank}", 1)
        self._store = dist.PrefixStore(str(number), own)
        self._store.set(f"who/{self.rank}", json.dumps(asdict(Who.here())))

    def _exchange(self) -> bool:
        """Say our word, hear those of the others; whether there is more to come."""
        word, note = self._farewell or (str(self.answers), Note(""))
        if word == FAILED:
            self._store.set(f"note/{self.rank}", json.dumps(asdict(note)))
        self._store.set(f"word/{self.rank}", word)
        self._listen()
        return word.isdigit()

    def _listen(self) -> None:
        now = time.monotonic()
        # Time in which this process did not run, or the store did not answer, says nothing about the others.
        passed, self._listened = min(now - self._listened, 2 * self.interval), now
        ended = [peer for peer in self.peers if peer.has_ended and peer.works]
        self._meet_newcomers()
        known = [peer for peer in self.peers if peer.who]
        words = self._store.multi_get([f"word/{peer.rank}" for peer in known]) if known else []
        for peer in self.peers:
            peer.silence += passed
        for peer, word in zip(known, words, strict=True):
            self._hear(peer, word.decode())
        for peer in ended:
            if peer.works:  # it did not say goodbye before: only its neighbours can know
                self._store.set(f"word/{peer.rank}", ENDED)
                peer.word = ENDED

    def _meet_newcomers(self) -> None:
        # To ask for a value is to wait until it is there, so it must be known to be there.
        missing = [peer for peer in self.peers if peer.who is None]
        if missing and not self._store.check([f"word/{peer.rank}" for peer in missing]):
            missing = [peer for peer in missing if self._store.check([f"word/{peer.rank}"])]
        for peer in missing:
            peer.who = Who(**json.loads(self._store.get(f"who/{peer.rank}")))

    def _hear(self, peer: Peer, word: str) -> None:
        if word == peer.word:
            return
        if word == FAILED:
            peer.note = Note(**json.loads(self._store.get(f"note/{peer.rank}")))
        peer.word, peer.silence = word, 0.0
        if word != ENDED:  # not its own
            peer.heard = time.time()

    def _linger(self) -> None:
        """The store ends with the process that keeps it: the others must have heard our last word before."""
        until = time.monotonic() + self._most_lingering
        while any(peer.works and not peer.has_ended for peer in self.peers) and time.monotonic() < until:
            time.sleep(min(0.1, self.interval))
            self._listen()

    @property
    def _most_lingering(self) -> float:
        return 3 * self.interval if self.keeper == self.rank else 0.0


def _place() -> str:
    """Two processes of one place can look for each other by their numbers: same machine, same container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _keeper(store: dist.Store) -> tuple[str, int | None]:
    """Where a store is, and which rank's process keeps it; None: another process, or a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return "", None
    # What torchrun tells its workers when the store is in its own process.
    kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{store.host}:{store.port}", None if kept_by_launcher else 0

"""A rank that dies is named, and nothing hangs.

The others of a rank that was killed sit in a collective: over gloo until they get an error that names nobody, over
NCCL for as long as its timeout. `RankMonitor` finds out who is gone, puts a name to such errors, and ends a process
that would not end by itself. It owns the judgement; what ranks tell each other is in `heartbeats`. The training
thread does nothing for it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType

import torch.distributed as dist

from trainformer.core.errors import BadArgument, TrainformerError, expected
from trainformer.distributed.heartbeats import (
    ENDED,
    FAILED,
    LEFT,
    Heartbeats,
    LocalProcess,
    Note,
    Peer,
    Who,
)

logger = logging.getLogger("trainformer")

#: The exit code of a process that hung because of another one: EX_TEMPFAIL of sysexits.h, "try again". It is not 0, so
#: every launcher restarts the run, and not 1, so that it is not taken for an error of the rank's own.
HUNG = 75

_LONGEST_NOTE = 2000
_LONGEST_LOGGING = 2.0


class RankLost(TrainformerError, RuntimeError):
    """A rank is gone, or does not answer, and the others cannot go on without it. `ranks` says which."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Weight(IntEnum):
    """How well something explains that a collective failed; only the best explanations are told."""

    CERTAIN = 0
    SILENT = 1
    LEFT = 2
    SYMPTOM = 3


@dataclass(frozen=True)
class Cause:
    """Something that keeps the other ranks from going on. No rank: the store's keeper was not one."""

    weight: Weight
    rank: int | None
    text: str


class RankMonitor:
    """Watches over the ranks of a run while it is `guarding`.

    Each rank gives a sign of life `every` so many seconds. One that gave none for `patience` seconds counts as lost,
    until it is heard again; one whose process has ended, or that failed, counts at once. A run whose thread then stays
    inside one call for `grace` seconds is ended with the exit code `HUNG`: no exception can reach a thread that waits
    inside a library, and a process that hangs holds its devices and all other ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        every: float = 2.0,
        patience: float = 60.0,
        grace: float = 30.0,
    ) -> None:
        if every <= 0 or patience < 4 * every:
            advice = "A busy rank may be late: leave it the time of four signs at least."
            raise BadArgument(expected("patience to be at least 4 * every, and every > 0", (patience, every), advice))
        self.rank = rank
        self.world_size = world_size
        self.every = every
        self.grace = grace
        self._store = store
        self._place = Who.here().place
        self._beats = Heartbeats(store, rank, world_size, every)
        self.patience = max(patience, 4 * self._beats.interval)  # with thousands of ranks signs are rarer
        self._guarded = 0  # the thread that trains
        self._answers = 0
        self._unanswered = 0.0  # for how long the store has been silent
        self._overdue: float | None = None  # somebody is lost, and for so long the run has not moved
        self._spot: tuple[FrameType | None, int] = None, 0  # where it was then
        self._explaining = False
        self._over = threading.Event()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Around a run: the others hear that this rank works, that it finished, or which error it failed with.

        An error of a collective comes out as a `RankLost` that says who is to blame, if somebody is.
        """
        if self.world_size == 1:
            yield
            return
        judge = self._begin()
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            lost = self.explain(raised)
            error = raised if lost is None else lost
            if lost is not None:
                raise lost from raised
            raise
        finally:
            self._over.set()
            judge.join()
            self._spot = None, 0
            self._beats.end(*_last_word(error))
            for peer in self._beats.peers:
                if peer.process is not None:
                    peer.process.close()

    def lost(self) -> RankLost | None:
        """Who is certainly gone, as far as it is known by now; for those who wait for ranks without a collective."""
        causes = [cause for cause in self._causes(self.patience) if cause.weight is Weight.CERTAIN]
        return _lost(causes, self.rank) if causes else None

    def explain(self, error: BaseException) -> RankLost | None:
        """Who is gone, now that a collective raised an error here; None: nobody, the error itself is the story.

        Takes as long as a few signs of life. It must be called while `guarding`.
        """
        told = isinstance(error, RankLost) or not isinstance(
            error, Exception
        )  # by us, or by somebody who wants to stop
        if self.world_size == 1 or told or not is_of_a_collective(error):
            return None
        self._explaining = True
        self._overdue = None if self._overdue is None else 0.0  # the run came back: time to end well
        beats = self._beats
        until = time.monotonic() + 4 * beats.interval + 1
        while time.monotonic() < until and not self._over.is_set():
            if any(cause.weight is Weight.CERTAIN for cause in self._causes(self.patience)):
                time.sleep(min(1.0, self.every))  # ranks are often lost together
                break
            time.sleep(0.05)
        # The failed collective is a second witness: with it, less silence is enough.
        causes = self._causes(2.5 * beats.interval, unheard=self.patience, has_failed=True)
        return _lost(causes, self.rank) if causes else None

    # -- judgement -----------------------------------------------------------------------------------------

    def _begin(self) -> threading.Thread:
        self._beats = Heartbeats(self._store, self.rank, self.world_size, self.every)
        self._guarded = threading.get_ident()
        self._answers = 0
        self._unanswered = 0.0
        self._overdue = None
        self._explaining = False
        self._over.clear()
        self._beats.begin()
        judge = threading.Thread(target=self._judge, name="trainformer-watch", daemon=True)
        judge.start()
        return judge

    def _judge(self) -> None:
        pause = min(1.0, self.every)
        before = time.monotonic()
        while not self._over.wait(pause):
            now = time.monotonic()
            # Time in which this process did not run does not count.
            passed, before = min(now - before, 2 * pause), now
            self._look_at_processes()
            self._look_at_store(passed)
            self._act_on(self._causes(self.patience), passed)

    def _look_at_processes(self) -> None:
        for peer in self._beats.peers:
            if peer.process is None and peer.who is not None and peer.who.place == self._place:
                peer.process = LocalProcess(peer.who.process)
            if peer.process is not None and not peer.has_ended and peer.process.has_ended():
                peer.has_ended = True
                self._beats.hurry()  # the store knows whether it said goodbye

    def _look_at_store(self, passed: float) -> None:
        if self._answers != self._beats.answers:
            self._answers, self._unanswered = self._beats.answers, 0.0
        else:
            self._unanswered += passed

    def _act_on(self, causes: list[Cause], passed: float) -> None:
        """Warn of lost ranks once, and end a run that does not come back."""
        if not causes:
            if self._overdue is not None:
                self._say(logging.WARNING, "all ranks are heard again")
            self._overdue, self._spot = None, (None, 0)
        elif self._overdue is None:
            self._overdue = 0.0
            if not self._explaining:
                advice = f"This process ends when it has hung for {self.grace:g} s."
                self._say(logging.WARNING, f"{_in_words(causes)} {advice}")
        else:
            self._overdue = 0.0 if self._has_moved() else self._overdue + passed
            if self._overdue >= self.grace:
                self._end_process(causes)

    def _has_moved(self) -> bool:
        """Whether the run is elsewhere in its code than a moment ago. Its frame is kept, so that no other equals it."""
        before = self._spot
        frame = sys._current_frames().get(self._guarded)
        self._spot = frame, frame.f_lasti if frame is not None else 0
        return self._spot[0] is not before[0] or self._spot[1] != before[1]

    def _causes(self, patience: float, unheard: float | None = None, has_failed: bool = False) -> list[Cause]:
        """What keeps this rank from going on, the best explanations alone.

        `unheard`: accuse ranks of which nothing was heard in that time. `has_failed`: a collective has.
        """
        beats = self._beats
        found = self._accuse_the_store()
        store_is_blamed = bool(found)
        for peer in beats.peers:
            # An end that is seen from here counts when the store cannot be asked whether a goodbye came before it. Once
            # it is gone nobody can say goodbye: then an end means something only beside a failed collective.
            is_unheard = has_failed if beats.broken is not None else self._unanswered > 2 * beats.interval
            seen = peer.has_ended and is_unheard and not store_is_blamed
            if (cause := _accuse(peer, patience, seen)) is not None:
                found.append(cause)
        if unheard is not None:
            text = "{} has not been heard of since this rank began, {:.0f} s ago."
            unseen = [peer for peer in beats.peers if peer.who is None and peer.silence > unheard]
            found += [Cause(Weight.SILENT, peer.rank, text.format(peer, peer.silence)) for peer in unseen]
        if has_failed:
            text = "{} finished at {} and left, while this rank still waits for it."
            gone = [peer for peer in beats.peers if peer.word == LEFT]
            found += [Cause(Weight.LEFT, peer.rank, text.format(peer, _clock(peer))) for peer in gone]
        best = min((cause.weight for cause in found), default=None)
        return [cause for cause in found if cause.weight == best]

    def _accuse_the_store(self) -> list[Cause]:
        """The store is gone with the process that kept it; after a last word of that one it is no wonder."""
        beats = self._beats
        if beats.broken is None and self._unanswered <= self.patience:
            return []
        keeper = next((peer for peer in beats.peers if peer.rank == beats.keeper), None)
        if keeper is not None and keeper.word in (LEFT, FAILED, ENDED):
            return []
        state = "is gone" if beats.broken is not None else f"has not answered for {self._unanswered:.0f} s"
        store = f"the store where the ranks meet{f' ({beats.address})' if beats.address else ''}"
        if keeper is not None:
            does = "has ended" if keeper.has_ended else "does not answer"
            return [Cause(Weight.CERTAIN, keeper.rank, f"{keeper} {does}: {store}, which it kept, {state}.")]
        who = ", which the launcher kept," if beats.address and beats.keeper is None else ""
        return [Cause(Weight.CERTAIN, None, f"{store}{who} {state}.")]

    # -- the end -------------------------------------------------------------------------------------------

    def _end_process(self, causes: list[Cause]) -> None:
        frame = self._spot[0]
        place = traceback.extract_stack(frame)[-1] if frame is not None else None
        where = f" It hangs in {place.name} ({place.filename}:{place.lineno})." if place is not None else ""
        message = f"{_lost(causes, self.rank)} This process has hung for {self.grace:g} s and ends now."
        text = f"{message}{where}\n"
        if logger.hasHandlers():
            self._say(logging.ERROR, text.rstrip())
        os.write(2, f"trainformer: rank {self.rank} of {self.world_size}: {text}".encode())
        self._beats.end(FAILED, Note(message[:_LONGEST_NOTE], symptom=True))  # so that nobody blames this rank
        os._exit(HUNG)

    def _say(self, level: int, text: str) -> None:
        """Log, but do not wait for a log that hangs: its lock, or its disk, may be what the run hangs in."""
        thread = threading.Thread(target=logger.log, args=(level, "%s", text), daemon=True)
        thread.start()
        thread.join(_LONGEST_LOGGING)


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an error, or what caused it, comes from the exchange between ranks.

    >>> is_of_a_collective(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"))
    True
    >>> is_of_a_collective(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    current: BaseException | None = error
    while current is not None:
        text = str(current).lower()
        if isinstance(current, dist.DistError | RankLost) or any(name in text for name in ("gloo", "nccl", "c10d")):
            return True
        current = current.__cause__ or current.__context__
    return False


def _last_word(error: BaseException | None) -> tuple[str, Note]:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return LEFT, Note("")
    text = f"{type(error).__name__}: {error}"[:_LONGEST_NOTE]
    return FAILED, Note(text, symptom=is_of_a_collective(error))


def _accuse(peer: Peer, patience: float, seen_to_end: bool) -> Cause | None:
    """What is wrong with a rank, if anything is."""
    if peer.word == FAILED:
        weight = Weight.SYMPTOM if peer.note.symptom else Weight.CERTAIN
        end = "" if peer.note.text.endswith((".", "!", "?")) else "."
        return Cause(weight, peer.rank, f"{peer} failed at {_clock(peer)} with: {peer.note.text}{end}")
    if peer.word == ENDED or (peer.works and seen_to_end):
        advice = "Was it killed, by the out-of-memory killer for instance?"
        text = f"{peer} has ended without a word; it was last heard of at {_clock(peer)}. {advice}"
        return Cause(Weight.CERTAIN, peer.rank, text)
    if peer.works and peer.silence > patience:
        state = "its process is still there, but stopped or stuck" if peer.process else "its machine may be lost"
        text = f"nothing was heard of {peer} since {_clock(peer)}, for {peer.silence:.0f} s: {state}."
        return Cause(Weight.SILENT, peer.rank, text)
    return None


def _clock(peer: Peer) -> str:
    return time.strftime("%H:%M:%S", time.localtime(peer.heard))


def _in_words(causes: list[Cause]) -> str:
    text = " ".join(cause.text for cause in causes)
    return text[0].upper() + text[1:]


def _lost(causes: list[Cause], rank: int) -> RankLost:
    them = "it" if len(causes) == 1 else "them"
    advice = f"Rank {rank} cannot go on without {them}. Started again, the run goes on from its last checkpoint."
    return RankLost(f"{_in_words(causes)} {advice}", tuple(cause.rank for cause in causes if cause.rank is not None))

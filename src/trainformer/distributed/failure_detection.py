"""Failure detection: errors name the rank that died, and no process hangs.

When a rank is killed, the others sit in a collective: with gloo until they get an error that names nobody, with NCCL
until its timeout. `RankMonitor` finds out which rank is gone, names it in such errors, and ends a process that would
otherwise hang. `heartbeats` owns the communication. The training thread does nothing for it.
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
from trainformer.core.secrets import mask_text
from trainformer.distributed.heartbeats import (
    DIED,
    FAILED,
    FINISHED,
    Failure,
    Heartbeats,
    LocalProcess,
    Peer,
    ProcessInfo,
)

logger = logging.getLogger("trainformer")

#: Exit code of a process that hung because of another rank: EX_TEMPFAIL of sysexits.h, "try again". It is not 0, so
#: every launcher restarts the run, and not 1, so it is not taken for an error of this rank.
HUNG_EXIT_CODE = 75

_MAX_FAILURE_TEXT = 2000
_MAX_LOG_SECONDS = 2.0


class RankLost(TrainformerError, RuntimeError):
    """A rank died or does not respond, and the others cannot continue without it. `ranks` says which."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Evidence(IntEnum):
    """How well a cause explains a failed collective, best first; only the best causes are reported."""

    CERTAIN = 0
    SILENT = 1
    FINISHED = 2
    SYMPTOM = 3


@dataclass(frozen=True)
class Cause:
    """Something that keeps the other ranks from continuing. `rank` is None if no rank hosts the lost store."""

    evidence: Evidence
    rank: int | None
    text: str


class RankMonitor:
    """Monitors the ranks of a run while `guarding`.

    Each rank sends a heartbeat `every` seconds. A rank without one for `patience` seconds counts as lost until it is
    back; one whose process exited, or that failed, counts at once. If the run's thread then stays inside one call for
    `grace` seconds, the process exits with `HUNG_EXIT_CODE`: no exception can reach a thread that waits inside a
    library, and a hanging process blocks its devices and all other ranks.
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
            advice = "A busy rank may be late: allow for at least four heartbeats."
            raise BadArgument(expected("patience to be at least 4 * every, and every > 0", (patience, every), advice))
        self.rank = rank
        self.world_size = world_size
        self.every = every
        self.grace = grace
        self._store = store
        self._namespace = ProcessInfo.current().namespace
        self._over = threading.Event()
        self._reset()
        self.patience = max(patience, 4 * self._beats.interval)  # with thousands of ranks heartbeats are rarer

    def _reset(self) -> None:
        self._beats = Heartbeats(self._store, self.rank, self.world_size, self.every)
        self._guarded_thread = threading.get_ident()
        self._responses = 0
        self._store_silence = 0.0  # seconds without a response of the store
        self._overdue: float | None = None  # seconds the run has not moved since a rank was lost
        self._position: tuple[FrameType | None, int] = None, 0  # where the run was then
        self._explaining = False
        self._over.clear()

    @property
    def peers(self) -> list[Peer]:
        """What is known about the other ranks."""
        return self._beats.peers

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Around a run: tell the other ranks that this one is running, that it finished, or its error.

        An error of a collective is raised as a `RankLost` that names the rank to blame, if there is one.
        """
        if self.world_size == 1:
            yield
            return
        self._reset()
        self._beats.start()
        thread = threading.Thread(target=self._watch, name="trainformer-watch", daemon=True)
        thread.start()
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
            thread.join()
            self._position = None, 0
            if error is None or (isinstance(error, SystemExit) and not error.code):
                self._beats.stop(FINISHED, Failure(""))
            else:
                text = f"{type(error).__name__}: {error}"[:_MAX_FAILURE_TEXT]
                self._beats.stop(FAILED, Failure(text, is_symptom=is_collective_error(error)))
            for peer in self.peers:
                if peer.process is not None:
                    peer.process.close()

    def lost_ranks(self) -> RankLost | None:
        """The ranks known to be gone by now, for code that waits for ranks without a collective."""
        causes = [cause for cause in self._causes(self.patience) if cause.evidence is Evidence.CERTAIN]
        return _rank_lost(causes, self.rank) if causes else None

    def explain(self, error: BaseException) -> RankLost | None:
        """Which rank caused an error of a collective; None if no rank is lost and the error explains itself.

        Takes as long as a few heartbeats. Call it while `guarding`.
        """
        # Either we raised it ourselves, or somebody wants to stop (KeyboardInterrupt, SystemExit).
        is_final = isinstance(error, RankLost) or not isinstance(error, Exception)
        if self.world_size == 1 or is_final or not is_collective_error(error):
            return None
        self._explaining = True
        self._overdue = None if self._overdue is None else 0.0  # the run came back: give it time to end
        beats = self._beats
        until = time.monotonic() + 4 * beats.interval + 1
        while time.monotonic() < until and not self._over.is_set():
            if any(cause.evidence is Evidence.CERTAIN for cause in self._causes(self.patience)):
                time.sleep(min(1.0, self.every))  # ranks are often lost together
                break
            time.sleep(0.05)
        # The failed collective is additional evidence: with it, a shorter silence is enough.
        causes = self._causes(2.5 * beats.interval, startup_limit=self.patience, collective_failed=True)
        return _rank_lost(causes, self.rank) if causes else None

    # -- the monitor thread --------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause = min(1.0, self.every)
        before = time.monotonic()
        while not self._over.wait(pause):
            now = time.monotonic()
            # Time in which this process was suspended does not count.
            passed, before = min(now - before, 2 * pause), now
            for peer in self.peers:
                if peer.process is None and peer.info is not None and peer.info.namespace == self._namespace:
                    peer.process = LocalProcess(peer.info.pid)
                if peer.process is not None and not peer.has_exited and peer.process.has_exited():
                    peer.has_exited = True
                    self._beats.poll_now()  # the store knows whether it wrote a final status
            if self._responses != self._beats.responses:
                self._responses, self._store_silence = self._beats.responses, 0.0
            else:
                self._store_silence += passed
            self._react(self._causes(self.patience), passed)

    def _react(self, causes: list[Cause], passed: float) -> None:
        """Warn once about lost ranks, and end the process if the run hangs."""
        if not causes:
            if self._overdue is not None:
                self._log(logging.WARNING, "heartbeats of all ranks are back")
            self._overdue, self._position = None, (None, 0)
        elif self._overdue is None:
            self._overdue = 0.0
            if not self._explaining:
                self._log(logging.WARNING, f"{_text(causes)} This process exits if it hangs for {self.grace:g} s.")
        else:
            # Whether the run's thread is at another instruction. Keeping its frame ensures no other one reuses its id.
            before, frame = self._position, sys._current_frames().get(self._guarded_thread)
            self._position = frame, frame.f_lasti if frame is not None else 0
            has_moved = frame is not before[0] or self._position[1] != before[1]
            self._overdue = 0.0 if has_moved else self._overdue + passed
            if self._overdue >= self.grace:
                self._exit(causes)

    def _causes(
        self, patience: float, startup_limit: float | None = None, collective_failed: bool = False
    ) -> list[Cause]:
        """What keeps this rank from continuing, only the best explanations.

        `startup_limit`: also blame ranks that have sent nothing at all for that many seconds.
        """
        beats = self._beats
        found = self._blame_store()
        store_is_blamed = bool(found)
        for peer in self.peers:
            # An exit seen from here counts if the store cannot be asked for a final status. Once the store is gone no
            # rank can write one: then an exit means something only together with a failed collective.
            unknown = collective_failed if beats.error is not None else self._store_silence > 2 * beats.interval
            if (cause := _blame(peer, patience, peer.has_exited and unknown and not store_is_blamed)) is not None:
                found.append(cause)
        if startup_limit is not None:
            text = "{} has sent no heartbeat since this rank started {:.0f} s ago."
            absent = [peer for peer in self.peers if peer.info is None and peer.silence > startup_limit]
            found += [Cause(Evidence.SILENT, peer.rank, text.format(peer, peer.silence)) for peer in absent]
        if collective_failed:
            text = "{} finished at {} while this rank still waits for it."
            finished = [peer for peer in self.peers if peer.status == FINISHED]
            found += [Cause(Evidence.FINISHED, peer.rank, text.format(peer, _clock(peer))) for peer in finished]
        best = min((cause.evidence for cause in found), default=None)
        return [cause for cause in found if cause.evidence == best]

    def _blame_store(self) -> list[Cause]:
        """The store is gone with the process that hosts it; after a final status of that one this is expected."""
        beats = self._beats
        if beats.error is None and self._store_silence <= self.patience:
            return []
        host = next((peer for peer in self.peers if peer.rank == beats.store_rank), None)
        if host is not None and host.status in (FINISHED, FAILED, DIED):
            return []
        state = "is gone" if beats.error is not None else f"has not responded for {self._store_silence:.0f} s"
        store = f"the rendezvous store{f' ({beats.address})' if beats.address else ''}"
        if host is not None:
            does = "has exited" if host.has_exited else "does not respond"
            return [Cause(Evidence.CERTAIN, host.rank, f"{host} {does}: {store}, which it hosts, {state}.")]
        where = ", hosted by the launcher," if beats.address and beats.store_rank is None else ""
        return [Cause(Evidence.CERTAIN, None, f"{store}{where} {state}.")]

    def _exit(self, causes: list[Cause]) -> None:
        frame = self._position[0]
        place = traceback.extract_stack(frame)[-1] if frame is not None else None
        where = f" It hangs in {place.name} ({place.filename}:{place.lineno})." if place is not None else ""
        message = f"{_rank_lost(causes, self.rank)} This process has hung for {self.grace:g} s and exits now."
        text = f"{message}{where}\n"
        if logger.hasHandlers():
            self._log(logging.ERROR, text.rstrip())
        os.write(2, f"trainformer: rank {self.rank} of {self.world_size}: {mask_text(text)}".encode())
        self._beats.stop(FAILED, Failure(message[:_MAX_FAILURE_TEXT], is_symptom=True))  # so nobody blames this rank
        os._exit(HUNG_EXIT_CODE)

    def _log(self, level: int, text: str) -> None:
        """Log without waiting for a log that hangs: its lock or its disk may be what the run hangs in."""
        thread = threading.Thread(target=logger.log, args=(level, "%s", text), daemon=True)
        thread.start()
        thread.join(_MAX_LOG_SECONDS)


def is_collective_error(error: BaseException) -> bool:
    """Whether an error, or its cause, comes from the communication between ranks.

    >>> is_collective_error(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"))
    True
    >>> is_collective_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    current: BaseException | None = error
    while current is not None:
        text = str(current).lower()
        if isinstance(current, dist.DistError | RankLost) or any(name in text for name in ("gloo", "nccl", "c10d")):
            return True
        current = current.__cause__ or current.__context__
    return False


def _blame(peer: Peer, patience: float, seen_to_exit: bool) -> Cause | None:
    """What is wrong with a rank, if anything."""
    if peer.status == FAILED:
        evidence = Evidence.SYMPTOM if peer.failure.is_symptom else Evidence.CERTAIN
        end = "" if peer.failure.text.endswith((".", "!", "?")) else "."
        return Cause(evidence, peer.rank, f"{peer} failed at {_clock(peer)} with: {peer.failure.text}{end}")
    if peer.status == DIED or (peer.is_running and seen_to_exit):
        advice = "Was it killed, for instance by the out-of-memory killer?"
        text = f"{peer} exited without reporting an error (last heartbeat at {_clock(peer)}). {advice}"
        return Cause(Evidence.CERTAIN, peer.rank, text)
    if peer.is_running and peer.silence > patience:
        state = "its process exists, but is stopped or stuck" if peer.process else "its machine may be down"
        text = f"no heartbeat from {peer} since {_clock(peer)} ({peer.silence:.0f} s): {state}."
        return Cause(Evidence.SILENT, peer.rank, text)
    return None


def _clock(peer: Peer) -> str:
    return time.strftime("%H:%M:%S", time.localtime(peer.last_seen))


def _text(causes: list[Cause]) -> str:
    text = " ".join(cause.text for cause in causes)
    return text[0].upper() + text[1:]


def _rank_lost(causes: list[Cause], rank: int) -> RankLost:
    them = "it" if len(causes) == 1 else "them"
    advice = f"Rank {rank} cannot continue without {them}. Restart the run to resume from its last checkpoint."
    return RankLost(f"{_text(causes)} {advice}", tuple(cause.rank for cause in causes if cause.rank is not None))

"""A rank that dies, fails, hangs or leaves is named by the others, which end; ranks that live are left in peace."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from watched_ranks import Case, Fleet

from trainformer.core.errors import BadArgument
from trainformer.distributed.failure_detection import HUNG, RankLost, RankMonitor, is_of_a_collective
from trainformer.distributed.heartbeats import LocalProcess, Note, Who

pytestmark = pytest.mark.timeout(240)

COLLECTIVE_FAILED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3")


# -- processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "found"),
    [
        pytest.param((), "has ended without a word", id="one host"),
        # Only rank 1 can see that the process is gone, and tells rank 0.
        pytest.param(("a", "b", "b"), "has ended without a word", id="a neighbour tells"),
        # Nobody can see it: silence and the failed collective have to do.
        pytest.param(("a", "b", "c"), "nothing was heard of r", id="three hosts", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named(tmp_path, places, found):
    with Fleet(Case(places=places), tmp_path) as fleet:
        name = fleet.hit(2, signal.SIGKILL)
        assert fleet.end(0, 1, 2) == [1, 1, -signal.SIGKILL]
        for rank in (0, 1):
            last_line = fleet.said(rank).strip().splitlines()[-1]
            assert "RankLost" in last_line
            assert found in last_line.lower()
            assert name in last_line
            assert last_line.count("(process") == 1  # nobody else is accused
            assert "gloo" in fleet.said(rank)  # the error is still to be seen


@pytest.mark.parametrize(("places", "does"), [((), "has ended"), (("a", "b", "b"), "does not answer")])
def test_the_rank_that_keeps_the_store_is_killed(tmp_path, places, does):
    with Fleet(Case(places=places), tmp_path) as fleet:
        name = fleet.hit(0, signal.SIGKILL)
        assert fleet.end(1, 2) == [1, 1]
        for rank in (1, 2):
            last_line = fleet.said(rank).strip().splitlines()[-1]
            assert f"{name} {does}" in last_line
            assert "the store where the ranks meet (127.0.0.1:" in last_line
            assert last_line.count("(process") == 1


@pytest.mark.parametrize("failing", [0, 2])
def test_the_error_of_a_failing_rank_is_quoted_by_the_others(tmp_path, failing):
    with Fleet(Case(failing=failing), tmp_path) as fleet:
        assert fleet.end(0, 1, 2) == [1, 1, 1]
        for rank in {0, 1, 2} - {failing}:
            last_line = fleet.said(rank).strip().splitlines()[-1]
            assert f"{fleet.name(failing)} failed at " in last_line
            assert "ValueError: there is no such token" in last_line
            assert last_line.count("(process") == 1
        assert fleet.said(failing).rstrip().endswith("ValueError: there is no such token")
        assert "RankLost" not in fleet.said(failing)


@pytest.mark.slow
def test_a_stopped_rank_is_named_after_patience_and_the_hanging_ones_end(tmp_path):
    with Fleet(Case(patience=6, grace=2), tmp_path) as fleet:
        name = fleet.hit(2, signal.SIGSTOP)
        codes = fleet.end(0, 1)
        assert HUNG in codes  # the end of the first gives the other one an error, perhaps
        assert set(codes) <= {1, HUNG}
        for rank in (0, 1):
            said = fleet.said(rank)
            assert f"Nothing was heard of r{name} since" in said
            assert "still there, but stopped or stuck" in said
            assert ("It hangs in" in said) == (codes[rank] == HUNG)
            assert f"ank {1 - rank} on" not in said


@pytest.mark.slow
def test_a_stopped_keeper_of_the_store_is_named_too(tmp_path):
    with Fleet(Case(patience=6, grace=2), tmp_path) as fleet:
        name = fleet.hit(0, signal.SIGSTOP)
        codes = fleet.end(1, 2)
        assert HUNG in codes
        assert set(codes) <= {1, HUNG}
        for rank in (1, 2):
            assert f"R{name} does not answer: the store where the ranks meet" in fleet.said(rank)


@pytest.mark.slow
def test_a_thread_that_never_comes_back_does_not_keep_its_process(tmp_path):
    with Fleet(Case(stuck=1, grace=3), tmp_path) as fleet:
        name = fleet.hit(2, signal.SIGKILL)
        codes = fleet.end(0, 1)
        assert codes[1] == HUNG
        assert codes[0] in (1, HUNG)  # it waits for one of the two, that is up to gloo
        said = fleet.said(1)
        assert f"R{name} has ended without a word" in said
        assert "ends when it has hung for 3 s" in said
        assert "It hangs in wait (" in said


def test_a_rank_that_left_too_early_is_named(tmp_path):
    with Fleet(Case(leaving=2), tmp_path) as fleet:
        assert fleet.end(0, 1, 2) == [1, 1, 0]
        for rank in (0, 1):
            assert f"R{fleet.name(2)} finished at " in fleet.said(rank)


@pytest.mark.slow
def test_a_run_that_ends_well_is_left_in_peace(tmp_path):
    # Twice, and with a rank that is late: nobody may be accused of what comes before or after.
    with Fleet(Case(late=1, runs=2, patience=5, grace=0.5), tmp_path) as fleet:
        fleet.wait_until_busy()
        (tmp_path / "enough").touch()
        assert fleet.end(0, 1, 2) == [0, 0, 0]
        assert [fleet.said(rank) for rank in range(3)] == ["", "", ""]


@pytest.mark.slow
def test_ranks_that_are_all_paused_do_not_accuse_each_other(tmp_path):
    # The last to stop is the first to go on: rank 0 has heard nothing of rank 2, nor rank 1 of the store, for a moment
    # before and after. What is between does not count.
    with Fleet(Case(patience=5, grace=0.5), tmp_path) as fleet:
        for rank in (2, 0, 1):
            fleet.hit(rank, signal.SIGSTOP)
            time.sleep(0.6)
        time.sleep(6)
        for rank in (1, 0, 2):
            fleet.hit(rank, signal.SIGCONT)
            time.sleep(0.6)
        (tmp_path / "enough").touch()
        assert fleet.end(0, 1, 2) == [0, 0, 0]
        assert [fleet.said(rank) for rank in range(3)] == ["", "", ""]


# -- one rank, the others played by the test ---------------------------------------------------------------


class Stage:
    """A store with rank 0 at it, who is real; the test speaks for the others."""

    def __init__(self, world: int, **options: float) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        self.asks = self.store.clone()
        self.watch = RankMonitor(self.store, 0, world, **{"every": 0.1, "patience": 600.0, "grace": 600.0, **options})

    def say(self, rank: int, word: str, note: Note | None = None, who: Who | None = None) -> None:
        """Speak for a rank that is on another machine, if nothing else is said."""
        place = dist.PrefixStore("trainformer/heartbeats/1", self.store)
        place.set(f"who/{rank}", json.dumps(asdict(who or Who("afar", 70 + rank, f"machine {rank}"))))
        if note is not None:
            place.set(f"note/{rank}", json.dumps(asdict(note)))
        place.set(f"word/{rank}", word)

        self.asks = self.store.clone()

    def last_word(self) -> str:
        """What rank 0 has said, if anything."""
        word = "trainformer/heartbeats/1/word/0"
        return self.asks.get(word).decode() if self.asks.check([word]) else ""


def wait_for(condition: Callable[[], object]) -> bool:
    """Wait until something is so; False if it takes too long."""
    until = time.monotonic() + 60
    while not (found := bool(condition())) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def test_a_rank_that_is_heard_again_is_no_longer_lost(caplog):
    stage = Stage(2, patience=0.5)
    with stage.watch.guarding():
        stage.say(1, "0")
        assert wait_for(lambda: "Nothing was heard of rank 1 on afar (process 71)" in caplog.text)
        assert "its machine may be lost" in caplog.text
        assert stage.watch.explain(COLLECTIVE_FAILED).ranks == (1,)
        stage.say(1, "1")
        assert wait_for(lambda: "all ranks are heard again" in caplog.text)


def test_signs_of_life_go_on_while_the_run_waits_for_the_store():
    stage = Stage(2)
    waiting = threading.Thread(target=stage.store.wait, args=(["a rank that is late"], timedelta(seconds=60)))
    waiting.start()
    with stage.watch.guarding():
        assert wait_for(stage.last_word)
        first = stage.last_word()
        assert wait_for(lambda: stage.last_word() != first)
    assert waiting.is_alive()
    stage.asks.set("a rank that is late", "here")
    waiting.join()


def test_a_rank_that_has_not_come_yet_is_not_lost(caplog):
    stage = Stage(3, patience=0.4, grace=0.1)
    with stage.watch.guarding():
        stage.say(1, "left")
        time.sleep(1)
        assert stage.watch.explain(ValueError("shapes differ")) is None
        # Beside a failed collective its absence is the best explanation there is.
        lost = stage.watch.explain(COLLECTIVE_FAILED)
    assert lost.process_group == (2,)
    assert "rank 2 has not been heard of" in str(lost).lower()
    assert caplog.text == ""  # and this process was not ended


def test_an_error_among_the_living_is_the_story_itself():
    stage = Stage(2)
    other = RankMonitor(stage.store, 1, 2, every=0.1)
    with other.guarding():
        with pytest.raises(RuntimeError, match="closed by peer") as caught, stage.watch.guarding():
            raise COLLECTIVE_FAILED
        assert not isinstance(caught.value, RankLost)


def test_causes_are_told_and_symptoms_are_not():
    stage = Stage(4)
    with stage.watch.guarding():
        stage.say(1, "failed", Note("RuntimeError: gloo timed out", symptom=True))
        symptom = stage.watch.explain(COLLECTIVE_FAILED)
        stage.say(3, "left")
        better = stage.watch.explain(COLLECTIVE_FAILED)
        stage.say(2, "failed", Note("MemoryError: 3 GB"))
        cause = stage.watch.explain(COLLECTIVE_FAILED)
    assert [symptom.process_group, better.process_group, cause.process_group] == [(1,), (3,), (2,)]
    assert "gloo timed out" in str(symptom)
    assert "MemoryError: 3 GB" in str(cause)


def test_a_run_that_moves_is_not_ended_though_a_rank_is_lost(monkeypatch, caplog):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    stage = Stage(2, grace=0.5)
    with stage.watch.guarding():
        stage.say(1, "failed", Note("ValueError: once"))
        assert wait_for(lambda: "ValueError: once" in caplog.text)
        assert [ended.wait(0.05) for _ in range(40)] == [False] * 40
        assert ended.wait(60)  # now the thread stays in one call


def test_what_happened_in_an_earlier_run_does_not_count():
    stage = Stage(2)
    with stage.watch.guarding():
        stage.say(1, "failed", Note("ValueError: once"))
        assert stage.watch.explain(COLLECTIVE_FAILED).ranks == (1,)
    with stage.watch.guarding():
        assert stage.watch.explain(COLLECTIVE_FAILED) is None


@pytest.mark.parametrize(
    ("error", "word"), [(None, "left"), (SystemExit(0), "left"), (SystemExit(3), "failed"), (OSError("x"), "failed")]
)
def test_the_last_word_says_how_a_run_ended(error, word):
    stage, threads = Stage(2), threading.active_count()
    with ExitStack() as stack:
        if error is not None:
            stack.enter_context(pytest.raises(type(error)))
        with stage.watch.guarding():
            assert threading.active_count() > threads
            if error is not None:
                raise error
    assert stage.last_word() == word
    assert threading.active_count() == threads


def test_a_goodbye_counts_though_the_end_is_seen_first(caplog):
    child, stage = waiting_process(), Stage(2, every=3.0)
    who = replace(Who.here(), process=child.pid)
    stage.say(1, "0", who=who)
    with stage.watch.guarding():
        (other,) = stage.watch._beats.peers
        assert wait_for(lambda: other.works and other.process)
        stage.say(1, "left", who=who)
        child.kill()
        assert wait_for(lambda: other.has_ended and not other.works)
    child.communicate()
    assert other.word == "left"
    assert caplog.text == ""


def waiting_process() -> subprocess.Popen:
    """A process that does nothing."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_a_process_that_nobody_has_waited_for_has_ended(monkeypatch):
    child = waiting_process()
    process = LocalProcess(child.pid)
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    without_handle = LocalProcess(child.pid)
    assert [process.has_ended(), without_handle.has_ended()] == [False, False]
    child.kill()
    assert wait_for(process.has_ended)
    child.communicate()
    assert without_handle.has_ended()
    process.close()


def test_errors_of_collectives_are_told_from_others():
    wrapped = ValueError("the metrics could not be reduced")
    wrapped.__cause__ = COLLECTIVE_FAILED
    assert is_of_a_collective(wrapped)
    assert is_of_a_collective(dist.DistBackendError("remote process exited"))
    assert not is_of_a_collective(RuntimeError("CUDA error: out of memory"))


def test_bad_and_idle_watches():
    with pytest.raises(BadArgument, match="patience to be at least"):
        Stage(2, patience=0.1)
    alone, threads = RankMonitor(dist.HashStore(), 0, 1), threading.active_count()
    with alone.guarding():
        assert threading.active_count() == threads
    assert alone.explain(COLLECTIVE_FAILED) is None

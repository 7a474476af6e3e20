"""Errors name a rank that dies, fails, hangs or finishes early, and the others end; healthy ranks are not blamed."""

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
from monitored_ranks import Case, Fleet

from trainformer.core.errors import BadArgument
from trainformer.distributed.failure_detection import HUNG_EXIT_CODE, RankLost, RankMonitor, is_collective_error
from trainformer.distributed.heartbeats import Failure, LocalProcess, ProcessInfo

pytestmark = pytest.mark.timeout(1500)

COLLECTIVE_FAILED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3")


# -- processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "found"),
    [
        pytest.param((), "exited without reporting an error", id="one host"),
        # Only rank 1 can see that the process is gone, and reports it to rank 0.
        pytest.param(("a", "b", "b"), "exited without reporting an error", id="seen by another rank"),
        # Nobody can see it: a missing heartbeat and the failed collective must suffice.
        pytest.param(("a", "b", "c"), "no heartbeat from r", id="three hosts", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named(tmp_path, places, found):
    with Fleet(Case(places=places), tmp_path) as fleet:
        name = fleet.hit(2, signal.SIGKILL)
        assert fleet.end(0, 1, 2) == [1, 1, -signal.SIGKILL]
        for rank in (0, 1):
            last_line = fleet.output(rank).strip().splitlines()[-1]
            assert "RankLost" in last_line
            assert found in last_line.lower()
            assert name in last_line
            assert last_line.count("(process") == 1  # nobody else is blamed
            assert "gloo" in fleet.output(rank)  # the original error is still shown


@pytest.mark.parametrize(("places", "does"), [((), "has exited"), (("a", "b", "b"), "does not respond")])
def test_the_rank_that_hosts_the_store_is_killed(tmp_path, places, does):
    with Fleet(Case(places=places), tmp_path) as fleet:
        name = fleet.hit(0, signal.SIGKILL)
        assert fleet.end(1, 2) == [1, 1]
        for rank in (1, 2):
            last_line = fleet.output(rank).strip().splitlines()[-1]
            assert f"{name} {does}" in last_line
            assert "the rendezvous store (127.0.0.1:" in last_line
            assert last_line.count("(process") == 1


@pytest.mark.parametrize("failing", [0, 2])
def test_the_error_of_a_failing_rank_is_quoted_by_the_others(tmp_path, failing):
    with Fleet(Case(failing=failing), tmp_path) as fleet:
        assert fleet.end(0, 1, 2) == [1, 1, 1]
        for rank in {0, 1, 2} - {failing}:
            last_line = fleet.output(rank).strip().splitlines()[-1]
            assert f"{fleet.name(failing)} failed at " in last_line
            assert "ValueError: there is no such token" in last_line
            assert last_line.count("(process") == 1
        assert fleet.output(failing).rstrip().endswith("ValueError: there is no such token")
        assert "RankLost" not in fleet.output(failing)


@pytest.mark.slow
def test_a_stopped_rank_is_named_after_patience_and_the_hanging_ones_end(tmp_path):
    with Fleet(Case(patience=12, grace=2), tmp_path) as fleet:
        name = fleet.hit(2, signal.SIGSTOP)
        codes = fleet.end(0, 1)
        assert HUNG_EXIT_CODE in codes  # the end of the first gives the other one an error, perhaps
        assert set(codes) <= {1, HUNG_EXIT_CODE}
        for rank in (0, 1):
            output = fleet.output(rank)
            assert f"No heartbeat from r{name} since" in output
            assert "its process exists, but is stopped or stuck" in output
            assert ("It hangs in" in output) == (codes[rank] == HUNG_EXIT_CODE)
            assert f"ank {1 - rank} on" not in output


@pytest.mark.slow
def test_a_stopped_host_of_the_store_is_named_too(tmp_path):
    with Fleet(Case(patience=12, grace=2), tmp_path) as fleet:
        name = fleet.hit(0, signal.SIGSTOP)
        codes = fleet.end(1, 2)
        assert HUNG_EXIT_CODE in codes
        assert set(codes) <= {1, HUNG_EXIT_CODE}
        for rank in (1, 2):
            assert f"R{name} does not respond: the rendezvous store" in fleet.output(rank)


@pytest.mark.slow
def test_a_process_whose_thread_hangs_exits(tmp_path):
    with Fleet(Case(stuck=1, grace=3), tmp_path) as fleet:
        name = fleet.hit(2, signal.SIGKILL)
        codes = fleet.end(0, 1)
        assert codes[1] == HUNG_EXIT_CODE
        assert codes[0] in (1, HUNG_EXIT_CODE)  # which of the two it waits for is up to gloo
        output = fleet.output(1)
        assert f"R{name} exited without reporting an error" in output
        assert "exits if it hangs for 3 s" in output
        assert "It hangs in wait (" in output


def test_a_rank_that_finished_too_early_is_named(tmp_path):
    with Fleet(Case(leaving=2), tmp_path) as fleet:
        assert fleet.end(0, 1, 2) == [1, 1, 0]
        for rank in (0, 1):
            assert f"R{fleet.name(2)} finished at " in fleet.output(rank)


@pytest.mark.slow
def test_a_run_that_succeeds_blames_nobody(tmp_path):
    # Twice, and with a rank that is late: nobody may be blamed for what happens before or after.
    with Fleet(Case(late=1, runs=2, patience=60, grace=0.5), tmp_path) as fleet:
        fleet.wait_until_busy()
        (tmp_path / "enough").touch()
        assert fleet.end(0, 1, 2) == [0, 0, 0]
        assert [fleet.output(rank) for rank in range(3)] == ["", "", ""]


@pytest.mark.slow
def test_ranks_that_are_all_paused_do_not_blame_each_other(tmp_path):
    # The last to stop is the first to continue: rank 0 misses heartbeats of rank 2, and rank 1 the store, for a moment
    # before and after. The pause itself does not count.
    with Fleet(Case(patience=10, grace=0.5), tmp_path) as fleet:
        for rank in (2, 0, 1):
            fleet.hit(rank, signal.SIGSTOP)
            time.sleep(0.6)
        time.sleep(12)
        for rank in (1, 0, 2):
            fleet.hit(rank, signal.SIGCONT)
            time.sleep(0.6)
        (tmp_path / "enough").touch()
        assert fleet.end(0, 1, 2) == [0, 0, 0]
        assert [fleet.output(rank) for rank in range(3)] == ["", "", ""]


# -- one real rank, the others simulated -------------------------------------------------------------------


class Stage:
    """A store with a real rank 0; the test writes the heartbeats of the others."""

    def __init__(self, world: int, **options: float) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        self.reader = self.store.clone()
        self.monitor = RankMonitor(self.store, 0, world, **{"every": 0.1, "patience": 600.0, "grace": 600.0, **options})

    def beat(self, rank: int, status: str, failure: Failure | None = None, info: ProcessInfo | None = None) -> None:
        """Write the heartbeat of a rank, on another machine by default."""
        store = dist.PrefixStore("trainformer/heartbeats/1", self.store)
        store.set(f"info/{rank}", json.dumps(asdict(info or ProcessInfo("afar", 70 + rank, f"machine {rank}"))))
        if failure is not None:
            store.set(f"failure/{rank}", json.dumps(asdict(failure)))
        store.set(f"status/{rank}", status)

        self.reader = self.store.clone()

    def last_status(self) -> str:
        """The last heartbeat of rank 0, if any."""
        key = "trainformer/heartbeats/1/status/0"
        return self.reader.get(key).decode() if self.reader.check([key]) else ""


def wait_for(condition: Callable[[], object]) -> bool:
    """Wait until a condition holds; False if it takes too long."""
    until = time.monotonic() + 120
    while not (found := bool(condition())) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def test_a_rank_whose_heartbeats_return_is_no_longer_lost(caplog):
    stage = Stage(2, patience=0.5)
    with stage.monitor.guarding():
        stage.beat(1, "0")
        assert wait_for(lambda: "No heartbeat from rank 1 on afar (process 71)" in caplog.text)
        assert "its machine may be down" in caplog.text
        assert stage.monitor.explain(COLLECTIVE_FAILED).ranks == (1,)
        stage.beat(1, "1")
        assert wait_for(lambda: "heartbeats of all ranks are back" in caplog.text)


def test_heartbeats_continue_while_the_run_waits_for_the_store():
    stage = Stage(2)
    waiting = threading.Thread(target=stage.store.wait, args=(["a rank that is late"], timedelta(seconds=60)))
    waiting.start()
    with stage.monitor.guarding():
        assert wait_for(stage.last_status)
        first = stage.last_status()
        assert wait_for(lambda: stage.last_status() != first)
    assert waiting.is_alive()
    stage.reader.set("a rank that is late", "here")
    waiting.join()


def test_a_rank_that_has_not_started_yet_is_not_lost(caplog):
    stage = Stage(3, patience=0.4, grace=0.1)
    with stage.monitor.guarding():
        stage.beat(1, "finished")
        time.sleep(1)
        assert stage.monitor.explain(ValueError("shapes differ")) is None
        # Together with a failed collective its absence is the best explanation.
        lost = stage.monitor.explain(COLLECTIVE_FAILED)
    assert lost.ranks == (2,)
    assert "rank 2 has sent no heartbeat" in str(lost).lower()
    assert caplog.text == ""  # and this process was not ended


def test_an_error_while_all_ranks_are_alive_explains_itself():
    stage = Stage(2)
    other = RankMonitor(stage.store, 1, 2, every=0.1)
    with other.guarding():
        with pytest.raises(RuntimeError, match="closed by peer") as caught, stage.monitor.guarding():
            raise COLLECTIVE_FAILED
        assert not isinstance(caught.value, RankLost)


def test_causes_are_reported_rather_than_symptoms():
    stage = Stage(4)
    with stage.monitor.guarding():
        stage.beat(1, "failed", Failure("RuntimeError: gloo timed out", is_symptom=True))
        symptom = stage.monitor.explain(COLLECTIVE_FAILED)
        stage.beat(3, "finished")
        better = stage.monitor.explain(COLLECTIVE_FAILED)
        stage.beat(2, "failed", Failure("MemoryError: 3 GB"))
        cause = stage.monitor.explain(COLLECTIVE_FAILED)
    assert [symptom.ranks, better.ranks, cause.ranks] == [(1,), (3,), (2,)]
    assert "gloo timed out" in str(symptom)
    assert "MemoryError: 3 GB" in str(cause)


def test_a_run_that_makes_progress_is_not_ended_though_a_rank_is_lost(monkeypatch, caplog):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    stage = Stage(2, grace=0.5)
    with stage.monitor.guarding():
        stage.beat(1, "failed", Failure("ValueError: once"))
        assert wait_for(lambda: "ValueError: once" in caplog.text)
        assert [ended.wait(0.05) for _ in range(40)] == [False] * 40
        assert ended.wait(60)  # now the thread stays in one call


def test_what_happened_in_an_earlier_run_does_not_count():
    stage = Stage(2)
    with stage.monitor.guarding():
        stage.beat(1, "failed", Failure("ValueError: once"))
        assert stage.monitor.explain(COLLECTIVE_FAILED).ranks == (1,)
    with stage.monitor.guarding():
        assert stage.monitor.explain(COLLECTIVE_FAILED) is None


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "finished"), (SystemExit(0), "finished"), (SystemExit(3), "failed"), (OSError("x"), "failed")],
)
def test_the_final_status_says_how_a_run_ended(error, status):
    stage, threads = Stage(2), threading.active_count()
    with ExitStack() as stack:
        if error is not None:
            stack.enter_context(pytest.raises(type(error)))
        with stage.monitor.guarding():
            assert threading.active_count() > threads
            if error is not None:
                raise error
    assert stage.last_status() == status
    assert threading.active_count() == threads


def test_a_final_status_counts_though_the_exit_is_seen_first(caplog):
    child, stage = waiting_process(), Stage(2, every=3.0)
    info = replace(ProcessInfo.current(), pid=child.pid)
    stage.beat(1, "0", info=info)
    with stage.monitor.guarding():
        (other,) = stage.monitor.peers
        assert wait_for(lambda: other.is_running and other.process)
        stage.beat(1, "finished", info=info)
        child.kill()
        assert wait_for(lambda: other.has_exited and not other.is_running)
    child.communicate()
    assert other.status == "finished"
    assert caplog.text == ""


def waiting_process() -> subprocess.Popen:
    """A process that does nothing."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_the_exit_of_a_process_that_nobody_has_waited_for_is_seen(monkeypatch):
    child = waiting_process()
    process = LocalProcess(child.pid)
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    without_handle = LocalProcess(child.pid)
    assert [process.has_exited(), without_handle.has_exited()] == [False, False]
    child.kill()
    assert wait_for(process.has_exited)
    child.communicate()
    assert without_handle.has_exited()
    process.close()


def test_errors_of_collectives_are_recognised():
    wrapped = ValueError("the metrics could not be reduced")
    wrapped.__cause__ = COLLECTIVE_FAILED
    assert is_collective_error(wrapped)
    assert is_collective_error(dist.DistBackendError("remote process exited"))
    assert not is_collective_error(RuntimeError("CUDA error: out of memory"))


def test_bad_options_and_a_single_process():
    with pytest.raises(BadArgument, match="patience to be at least"):
        Stage(2, patience=0.1)
    alone, threads = RankMonitor(dist.HashStore(), 0, 1), threading.active_count()
    with alone.guarding():
        assert threading.active_count() == threads
    assert alone.explain(COLLECTIVE_FAILED) is None

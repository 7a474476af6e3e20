"""Requests of one rank, made those of all; ranks are objects here, and exchange what they have in turn."""

import threading

from fakes import FakeServices

from trainformer.engine import Control
from trainformer.engine.request_sync import RequestSync


class Table:
    """Where the threads of one test exchange values, round by round."""

    def __init__(self, count):
        self.count = count
        self.barrier = threading.Barrier(count, timeout=20)
        self.values = [None] * count

    def exchange(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class Seat:
    """One rank at the table, as `ProcessGroup`; also the backend that hears whether somebody asks."""

    def __init__(self, table, rank):
        self.table, self.rank = table, rank
        self.is_main, self.is_single_process = rank == 0, table.count == 1
        self.has_request = lambda: False
        self.exchanges = 0

    def all_gather_object(self, value):
        self.exchanges += 1
        return self.table.exchange(self.rank, value)

    def any_rank(self, flags):
        self.exchanges += 1
        return [any(column) for column in zip(*self.table.exchange(self.rank, flags), strict=True)]

    def any_rank_has_request(self):
        return any(self.table.exchange(self.rank, self.has_request()))  # what travels with gradients


def together(count, story):
    """Run ``story(rank, control, sync)`` on so many ranks at once; what each control was left with."""
    table = Table(count)
    seats, controls, errors = [Seat(table, rank) for rank in range(count)], [Control() for _ in range(count)], []

    def play(rank):
        sync = RequestSync(controls[rank], seats[rank], seats[rank], FakeServices())
        seats[rank].has_request = sync.has_requests
        try:
            story(rank, controls[rank], sync)
        except Exception as error:
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return controls, seats


def test_what_a_callback_asks_on_one_rank_all_ranks_do():
    def story(rank, control, sync):
        sync.begin(lambda: rank == 2)
        if rank == 2:
            control.should_save = True
            control.should_end_epoch = True
            control.stop("enough", by="Judge")
        sync.poll_requests()

    controls, _ = together(3, story)
    for rank, control in enumerate(controls):
        assert control.should_save
        assert control.should_end_epoch
        assert not control.should_evaluate
        assert control.stop_reason == "enough"
        assert control.stopped_by == ("Judge" if rank == 2 else "Judge (on rank 2)")


def test_nobody_exchanges_anything_where_nobody_can_ask():
    def story(rank, control, sync):
        sync.begin(lambda: False)
        for _ in range(5):
            sync.poll_requests()

    _, seats = together(2, story)
    assert [seat.exchanges for seat in seats] == [1, 1]  # before the first step


def test_a_callback_that_comes_later_on_one_rank_is_heard():
    def story(rank, control, sync):
        came = [False]
        sync.begin(lambda: came[0])
        sync.poll_requests()
        came[0] = rank == 1
        if rank == 1:
            control.stop("late", by="Latecomer")
        sync.poll_requests()

    controls, _ = together(2, story)
    assert [control.stop_reason for control in controls] == ["late", "late"]


def test_a_signal_and_the_clock_of_rank_0_reach_all_ranks_once():
    def story(rank, control, sync):
        sync.begin(lambda: False)
        sync.note_overdue("should_log")  # clocks of other ranks do not count
        control.pending_signal = 15 if rank == 1 else None
        control.pending_save = rank == 2
        sync.poll_requests()
        assert not sync.has_requests()

    controls, _ = together(3, story)
    for control in controls:
        assert (control.signal, control.should_save, control.should_log) == (15, True, True)


def test_the_clock_of_another_rank_asks_for_nothing():
    def story(rank, control, sync):
        sync.begin(lambda: False)
        if rank == 1:
            sync.note_overdue("should_evaluate")
        sync.poll_requests()

    controls, seats = together(2, story)
    assert not any(control.should_evaluate for control in controls)
    assert [seat.exchanges for seat in seats] == [1, 1]


def test_the_clock_of_rank_0_asks_all_ranks_for_one_validation_set():
    def story(rank, control, sync):
        sync.begin(lambda: False)
        if rank == 0:
            sync.note_overdue("should_evaluate/shifted")
        sync.poll_requests()

    controls, _ = together(2, story)
    assert [(control.should_evaluate, control.due_sets) for control in controls] == [(True, ("shifted",))] * 2


def test_what_came_after_the_last_step_is_heard_at_the_end():
    def story(rank, control, sync):
        sync.begin(lambda: False)
        sync.poll_requests()
        control.pending_save = rank == 1
        sync.drain()

    controls, _ = together(2, story)
    assert [control.should_save for control in controls] == [True, True]


def test_one_process_obeys_without_asking_anybody():
    control = Control()
    sync = RequestSync(control, Seat(Table(1), 0), Seat(Table(1), 0), FakeServices())
    sync.begin(lambda: True)
    control.pending_signal = 10
    sync.poll_requests()
    assert control.signal == 10
    assert control.pending_signal is None

"""The background sender: order, batches, retries, limits."""

from __future__ import annotations

import threading
import time

import pytest

from trainformer.loggers.sender import Sender


def test_items_arrive_in_order_and_in_batches() -> None:
    batches: list[list[int]] = []
    sender: Sender[int] = Sender(batches.append, batch_size=7)
    for start in range(0, 100, 10):
        sender.put(range(start, start + 10))
    sender.close(timeout=10)
    assert [item for batch in batches for item in batch] == list(range(100))
    assert max(len(batch) for batch in batches) <= 7
    assert sender.dropped == 0


def test_putting_never_waits_for_a_slow_receiver() -> None:
    go_on = threading.Event()
    received: list[int] = []

    def slow(batch: list[int]) -> None:
        go_on.wait(10)
        received.extend(batch)

    sender: Sender[int] = Sender(slow, batch_size=1000)
    start = time.monotonic()
    for item in range(100):
        sender.put([item])
    assert time.monotonic() - start < 1
    assert received == []
    go_on.set()
    sender.close(timeout=10)
    assert received == list(range(100))


def test_a_failed_batch_is_sent_again() -> None:
    received: list[int] = []
    down = True

    def send(batch: list[int]) -> None:
        if down:
            raise ConnectionError("server is down")
        received.extend(batch)

    sender: Sender[int] = Sender(send, batch_size=2, pause=0)
    sender.put([1, 2, 3])
    with pytest.raises(ConnectionError, match="server is down"):
        sender.flush(timeout=10)
    down = False
    sender.close(timeout=10)
    assert received == [1, 2, 3]
    assert sender.dropped == 0


def test_a_pause_follows_a_failure() -> None:
    calls: list[list[int]] = []

    def send(batch: list[int]) -> None:
        calls.append(batch)
        raise ConnectionError

    sender: Sender[int] = Sender(send, batch_size=10, pause=60)
    sender.put([1])
    with pytest.raises(ConnectionError):
        sender.flush(timeout=10)
    for item in range(5):
        sender.put([item])
    assert calls == [[1]]
    with pytest.raises(ConnectionError):
        sender.close(timeout=10)


def test_a_batch_that_is_always_refused_does_not_hold_up_the_others() -> None:
    received: list[int] = []

    def send(batch: list[int]) -> None:
        if 13 in batch:
            raise ValueError("13 is refused")
        received.extend(batch)

    sender: Sender[int] = Sender(send, batch_size=1, pause=0, tries=3)
    sender.put([12, 13, 14])
    for _ in range(3):
        with pytest.raises(ValueError, match="refused"):
            sender.flush(timeout=10)
    sender.close(timeout=10)
    assert received == [12, 14]
    assert sender.dropped == 1


def test_memory_is_bounded_while_the_receiver_hangs() -> None:
    go_on = threading.Event()
    received: list[int] = []

    def hang(batch: list[int]) -> None:
        go_on.wait(10)
        received.extend(batch)

    sender: Sender[int] = Sender(hang, batch_size=1000, keep=10)
    for item in range(50):
        sender.put([item])
    with pytest.raises(TimeoutError, match=r"11 items were not sent within 0\.05 s"):
        sender.flush(timeout=0.05)
    go_on.set()
    sender.close(timeout=10)
    assert received == [0, *range(40, 50)]
    assert sender.dropped == 39

"""The background sender of MLflowLogger: order, batches, retries, limits."""

from __future__ import annotations

import threading

import pytest

from trainformer.loggers.mlflow import Sender


def test_items_arrive_in_order_and_in_batches() -> None:
    batches: list[list[int]] = []
    sender: Sender[int] = Sender(batches.append, batch_size=7)
    for start in range(0, 100, 10):
        sender.put(range(start, start + 10))
    sender.close(timeout=300)
    assert [item for batch in batches for item in batch] == list(range(100))
    assert max(len(batch) for batch in batches) <= 7
    assert sender.dropped == 0


def test_put_never_waits_for_a_slow_receiver() -> None:
    release = threading.Event()
    received: list[int] = []

    def slow(batch: list[int]) -> None:
        release.wait(300)
        received.extend(batch)

    sender: Sender[int] = Sender(slow, batch_size=1000)
    for item in range(100):
        sender.put([item])
    assert received == []  # the receiver is still blocked
    release.set()
    sender.close(timeout=300)
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
        sender.flush(timeout=300)
    down = False
    sender.close(timeout=300)
    assert received == [1, 2, 3]
    assert sender.dropped == 0


def test_retries_are_delayed_after_a_failure() -> None:
    calls: list[list[int]] = []

    def send(batch: list[int]) -> None:
        calls.append(batch)
        raise ConnectionError

    sender: Sender[int] = Sender(send, batch_size=10, pause=60)
    sender.put([1])
    with pytest.raises(ConnectionError):
        sender.flush(timeout=300)
    for item in range(5):
        sender.put([item])
    assert calls == [[1]]
    with pytest.raises(ConnectionError):
        sender.close(timeout=300)


def test_a_batch_that_is_always_rejected_does_not_block_the_others() -> None:
    received: list[int] = []

    def send(batch: list[int]) -> None:
        if 13 in batch:
            raise ValueError("13 is refused")
        received.extend(batch)

    sender: Sender[int] = Sender(send, batch_size=1, pause=0, tries=3)
    sender.put([12, 13, 14])
    for _ in range(3):
        with pytest.raises(ValueError, match="refused"):
            sender.flush(timeout=300)
    sender.close(timeout=300)
    assert received == [12, 14]
    assert sender.dropped == 1


def test_memory_is_bounded_while_the_receiver_hangs() -> None:
    release = threading.Event()
    received: list[int] = []

    def hang(batch: list[int]) -> None:
        release.wait(300)
        received.extend(batch)

    sender: Sender[int] = Sender(hang, batch_size=1000, keep=10)
    for item in range(50):
        sender.put([item])
    with pytest.raises(TimeoutError, match=r"11 items were not sent within 0\.05 s"):
        sender.flush(timeout=0.05)
    release.set()
    sender.close(timeout=300)
    assert received == [0, *range(40, 50)]
    assert sender.dropped == 39

"""Evaluation and prediction: one pass over a source, without gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from trainformer.core.types import EvalResult, Placed, Sized
from trainformer.engine.metrics import RunningMetrics
from trainformer.engine.peers import Alone, Peers
from trainformer.engine.protocols import Backend

Rows = dict[str, Any]


def evaluate(
    backend: Backend,
    batches: Iterator[Sized],
    step: Callable[[Placed], EvalResult],
    keep_rows: bool,
    on_batch: Callable[[int], None] | None = None,
    peers: Peers | None = None,
) -> tuple[dict[str, float], Rows]:
    """Means of the whole set, and the collected rows in input order, the same on every rank.

    Means are sums over sums of weights, so they do not depend on the batch size. Rows are kept on the host, and
    only if somebody wants them (`keep_rows`): logits of a large set would not fit. Ranks have contiguous parts of every
    batch, so their rows follow each other batch by batch.
    """
    peers = peers or Alone()
    metrics = RunningMetrics(backend, peers)
    pieces: dict[str, list[Any]] = defaultdict(list)
    for batch in backend.feed(batches, train=False):
        result = step(batch)
        metrics.extend(result.entries)
        if keep_rows:
            for name, rows in result.rows.items():
                pieces[name].append(rows)
        if on_batch is not None:
            on_batch(batch.size)
    if keep_rows and not peers.is_alone:
        pieces = _in_turn(peers.gather_parts(dict(pieces)))
    return metrics.drain(), {name: backend.join_rows(parts) for name, parts in pieces.items()}


def _in_turn(ranks: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The pieces of all ranks: of each batch those of rank 0, rank 1, and so on."""
    return {
        name: [piece for batch in zip(*(one[name] for one in ranks), strict=True) for piece in batch]
        for name in ranks[0]
    }

"""Evaluation and prediction: one pass over a source, without gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from trainformer.core.types import EvalResult, Placed, Sized
from trainformer.engine.metrics import RunningMetrics
from trainformer.engine.protocols import Backend

Rows = dict[str, Any]


def evaluate(
    backend: Backend,
    batches: Iterator[Sized],
    step: Callable[[Placed], EvalResult],
    keep_rows: bool,
    on_batch: Callable[[int], None] | None = None,
) -> tuple[dict[str, float], Rows]:
    """Means of the whole set, and the collected rows in input order.

    Means are sums over sums of weights, so they do not depend on the batch size. Rows are kept on the host, and
    only if somebody wants them (`keep_rows`): logits of a large set would not fit.
    """
    metrics = RunningMetrics(backend)
    pieces: dict[str, list[Any]] = defaultdict(list)
    for batch in backend.feed(batches, train=False):
        result = step(batch)
        metrics.extend(result.entries)
        if keep_rows:
            for name, rows in result.rows.items():
                pieces[name].append(rows)
        if on_batch is not None:
            on_batch(batch.size)
    return metrics.drain(), {name: backend.join_rows(parts) for name, parts in pieces.items()}

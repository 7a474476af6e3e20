"""Evaluation and prediction: one pass over a source, without gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from trainformer.core.types import DeviceBatch, EvalResult, HostBatch
from trainformer.engine.metrics import RunningMetrics
from trainformer.engine.process_group import ProcessGroup, SingleProcess
from trainformer.engine.protocols import Backend

Rows = dict[str, Any]


def evaluate(
    backend: Backend,
    batches: Iterator[HostBatch],
    step: Callable[[DeviceBatch], EvalResult],
    keep_rows: bool,
    on_batch: Callable[[int], None] | None = None,
    process_group: ProcessGroup | None = None,
) -> tuple[dict[str, float], Rows]:
    """Means over the whole dataset, and the collected rows in input order, the same on every rank.

    Means are sums over sums of weights, so they do not depend on the batch size. Rows are kept on the host, and only
    with `keep_rows`: the logits of a large dataset would not fit. Each rank has a contiguous part of every batch, so
    rows are interleaved batch by batch.
    """
    process_group = process_group or SingleProcess()
    metrics = RunningMetrics(backend, process_group)
    pieces: dict[str, list[Any]] = defaultdict(list)
    for batch in backend.feed(batches, train=False):
        result = step(batch)
        metrics.extend(result.entries)
        if keep_rows:
            for name, rows in result.rows.items():
                pieces[name].append(rows)
        if on_batch is not None:
            on_batch(batch.size)
    if keep_rows and not process_group.is_single_process:
        ranks = process_group.all_gather_dp(dict(pieces))
        for name in ranks[0]:  # in input order: for each batch the rows of rank 0, rank 1, and so on
            pieces[name] = [piece for batch in zip(*(one[name] for one in ranks), strict=True) for piece in batch]
    return metrics.drain(), {name: backend.join_rows(parts) for name, parts in pieces.items()}

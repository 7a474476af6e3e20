"""Reports of a classifier over a whole evaluation: calibration error, and the confusion matrix as table and record.

They need three numbers per sample (prediction, confidence, label), whatever the number of classes. Metrics that need
all scores are in `trainformer.eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

_MOST_CLASSES = 100  # larger matrices can neither be read nor plotted
_MOST_CONFUSED = 50  # classes kept of a larger matrix


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """Compute `eval.expected_calibration_error` from top-1 confidences and whether each prediction is correct.

    >>> round(calibration_error(torch.tensor([0.9, 0.7]), torch.tensor([True, False])), 4)
    0.4
    """
    confidence = confidence.double()
    bin_index = torch.bucketize(confidence, torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1])
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_index, confidence - correct.double())
    return gaps.abs().sum().item() / len(confidence)


def confusion_record(counts: Tensor | None, names: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Return the `evaluation_records` entry for a confusion matrix (classes, classes) with true classes as rows.

    With more than 100 classes, only the 50 most confused ones are kept, in class order. `classes` is then the number
    of all classes, and `totals`, `predicted` and `accuracy` cover all of them.

    >>> confusion_record(torch.tensor([[3, 1], [0, 2]]), ["cat", "dog"])["confusion_matrix"]
    {'key': 'val', 'labels': ['cat', 'dog'], 'matrix': [[3, 1], [0, 2]]}
    """
    if counts is None:
        return {}
    labels = None if names is None else [names[i] if i < len(names) else str(i) for i in range(len(counts))]
    record: dict[str, Any] = {"key": "val"}
    if len(counts) > _MOST_CLASSES:
        errors = counts.clone().fill_diagonal_(0)
        most_confused = (errors.sum(0) + errors.sum(1)).argsort(descending=True, stable=True)
        kept = most_confused[:_MOST_CONFUSED].sort().values
        record["classes"] = len(counts)
        record["totals"], record["predicted"] = counts.sum(1)[kept].tolist(), counts.sum(0)[kept].tolist()
        record["accuracy"] = float(counts.diagonal().sum() / counts.sum().clamp(min=1))
        labels = [str(i) if labels is None else labels[i] for i in kept.tolist()]
        counts = counts[kept][:, kept]
    return {"confusion_matrix": {**record, "labels": labels, "matrix": counts.tolist()}}


def confusion_table(counts: Tensor, names: Sequence[str] | None, most: int) -> Table:
    """Render a confusion matrix with true classes as rows; beyond `most` classes, list the most frequent errors."""
    names = [escape(names[i]) if names and i < len(names) else str(i) for i in range(len(counts))]
    if len(names) > most:
        return _error_table(counts, names, most)
    table = Table(title="true class (rows), predicted class (columns)", title_justify="left", show_edge=False)
    table.add_column("", no_wrap=True)
    for name in [*names, "recall"]:
        table.add_column(name, justify="right")
    for index, (name, row) in enumerate(zip(names, counts.tolist(), strict=True)):
        cells = [f"[bold]{n}[/]" if column == index else str(n or "·") for column, n in enumerate(row)]
        recall = f"{row[index] / sum(row):.1%}" if sum(row) else "-"
        table.add_row(name, *cells, recall)
    return table


def _error_table(counts: Tensor, names: Sequence[str], most: int) -> Table:
    table = Table(title=f"most frequent errors among {len(names)} classes", title_justify="left", show_edge=False)
    for heading, justify in (("true class", "left"), ("predicted", "left"), ("count", "right"), ("share", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    errors = counts.clone().fill_diagonal_(0)
    values, cells = errors.flatten().sort(descending=True, stable=True)
    for count, cell in zip(values[:most].tolist(), cells[:most].tolist(), strict=True):
        if count:
            true, predicted = divmod(cell, len(names))
            table.add_row(names[true], names[predicted], str(count), f"{count / int(counts[true].sum()):.1%}")
    return table

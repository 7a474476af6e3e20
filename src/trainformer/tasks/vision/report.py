"""What is told of a classifier after a whole evaluation: whether its confidence is right, and what it mixes up.

Works on what is kept of each sample (a prediction, its confidence, the label): three numbers, whatever the number of
classes. Metrics that need all scores are in `trainformer.eval`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor


def calibration_error(confidence: Tensor, right: Tensor, bins: int = 15) -> float:
    """`eval.expected_calibration_error` from the confidence in each prediction and whether it was right.

    >>> round(calibration_error(torch.tensor([0.9, 0.7]), torch.tensor([True, False])), 4)
    0.4
    """
    confidence = confidence.double()
    place = torch.bucketize(confidence, torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1])
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, confidence - right.double())
    return gaps.abs().sum().item() / len(confidence)


def confusion_table(counts: Tensor, names: Sequence[str] | None, most: int) -> Table:
    """Counts (classes, classes), rows being the true classes; with more than `most` classes, the commonest mistakes."""
    names = [escape(names[i]) if names and i < len(names) else str(i) for i in range(len(counts))]
    if len(names) > most:
        return _mistakes(counts, names, most)
    table = Table(title="true class (rows), predicted class (columns)", title_justify="left", show_edge=False)
    table.add_column("", no_wrap=True)
    for name in [*names, "recall"]:
        table.add_column(name, justify="right")
    for place, (name, row) in enumerate(zip(names, counts.tolist(), strict=True)):
        cells = [f"[bold]{n}[/]" if column == place else str(n or "·") for column, n in enumerate(row)]
        recall = f"{row[place] / sum(row):.1%}" if sum(row) else "-"
        table.add_row(name, *cells, recall)
    return table


def _mistakes(counts: Tensor, names: Sequence[str], most: int) -> Table:
    table = Table(title=f"commonest mistakes among {len(names)} classes", title_justify="left", show_edge=False)
    for heading, justify in (("true class", "left"), ("predicted", "left"), ("count", "right"), ("share", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    wrong = counts.clone().fill_diagonal_(0)
    values, places = wrong.flatten().sort(descending=True, stable=True)
    for count, place in zip(values[:most].tolist(), places[:most].tolist(), strict=True):
        if count:
            true, predicted = divmod(place, len(names))
            table.add_row(names[true], names[predicted], str(count), f"{count / int(counts[true].sum()):.1%}")
    return table

"""Splitting one dataset into training and validation data: a pure function of the labels, the share and the seed."""

from __future__ import annotations

import logging
import sys
from numbers import Integral, Real
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import Subset
from trainformer.data.labels import is_stream, labels_of, length

logger = logging.getLogger(__name__)

# A stream of random numbers independent of the epochs' orders, which use the same seed.
_STREAM = 0x5B117


def split_dataset(dataset: Any, val_split: float | int, seed: int) -> tuple[Any, Any]:
    """Split into (train, val), both in the order of `dataset`. The same seed gives the same split.

    A float is the share of the validation data, an integer its number of samples. If labels are known without loading
    samples, the split is stratified, and every class keeps at least one training sample. Both results are torch's
    `Subset`, or ours in a program without torch. A dataset with `split_validation` (time series) splits itself.

    >>> train, val = split_dataset([(x, x % 2) for x in range(10)], 0.2, seed=0)
    >>> len(train), sorted(label for _, label in val)
    (8, [0, 1])
    """
    if hasattr(dataset, "split_validation"):
        return dataset.split_validation(val_split, seed)
    size = length(dataset)
    if size is None or is_stream(dataset):
        what = "a dataset with a length and samples that can be read by index"
        raise DataError(expected(what, type(dataset).__name__, "Pass the validation data as val_data."))
    val_size = _val_size(size, val_split)
    rng = np.random.default_rng([seed, _STREAM])
    labels = labels_of(dataset)
    in_val = np.zeros(size, dtype=bool)
    in_val[_stratified(labels, val_size, rng) if labels is not None else rng.permutation(size)[:val_size]] = True
    kind = getattr(sys.modules.get("torch.utils.data"), "Subset", Subset)
    return kind(dataset, np.flatnonzero(~in_val).tolist()), kind(dataset, np.flatnonzero(in_val).tolist())


def _val_size(size: int, val_split: float | int) -> int:
    if isinstance(val_split, bool) or not isinstance(val_split, Real):
        raise BadArgument(expected("val_split to be a share such as 0.1 or a number of samples", val_split))
    if isinstance(val_split, Integral):
        wanted, do = int(val_split), f"Pass a number from 1 to {size - 1}, or a share such as 0.1."
    elif 0 < val_split < 1:
        wanted, do = round(size * float(val_split)), "Pass a number of samples, such as val_split=1."
    else:
        raise BadArgument(expected("val_split to be between 0 and 1", val_split, "Pass 0.1 for a tenth."))
    if size < 2:
        raise DataError(expected("at least 2 samples to split", size, "Pass more data, or no val_split."))
    if not 0 < wanted < size:
        raise BadArgument(
            f"Expected val_split to leave samples for both training and validation, received {val_split!r}, which is "
            f"{wanted} of {size} samples for validation. {do}"
        )
    return wanted


def _stratified(labels: np.ndarray, val_size: int, rng: np.random.Generator) -> np.ndarray:
    """Indices of `val_size` samples, stratified; at least one sample of each class stays for training."""
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    room = counts - 1
    order = rng.permutation(len(labels))
    if val_size > room.sum():
        what = f"{val_size} validation samples out of {len(labels)}"
        missing = f"one training sample for each of {len(counts)} classes"
        logger.warning("%s cannot leave %s: the split is not stratified.", what, missing)
        return order[:val_size]
    taken = _apportion(counts, room, val_size, rng)
    # Shuffled samples, sorted by class: take the first of each class, as many as it is due.
    order = order[np.argsort(classes[order], kind="stable")]
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[rank < np.repeat(taken, counts)]


def _apportion(counts: np.ndarray, room: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Distribute `total` over the classes by largest remainder, in integer arithmetic.

    Classes with one sample get none. Ties are broken at random: otherwise, with many small classes, validation would
    always use the first ones.
    """
    shares = np.where(room > 0, counts, 0).astype(np.int64)
    taken = total * shares // shares.sum()
    due = total * shares - taken * shares.sum()
    while left := total - int(taken.sum()):
        able = rng.permutation(np.flatnonzero(taken < room))
        chosen = able[np.argsort(-due[able], kind="stable")][:left]
        taken[chosen] += 1
        due[chosen] -= shares.sum()
    return taken

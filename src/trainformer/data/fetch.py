"""Reading the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from trainformer.data.order import preserved_generators, sample_key, seed_generators

Collate = Callable[[list[Any]], Any]


class Fetched(NamedTuple):
    """A batch, how many samples are in it, which could not be read and why, and which draws the others are."""

    data: Any
    size: int
    bad: list[tuple[int, str]]
    draws: np.ndarray


class Fetcher:
    """Turns draws into a batch: numbers of samples, or of repetitions of samples (see `order.distinct_draws`).

    Data that can be read as a whole (tensors, HF `datasets`) are read with one call. Everything else is read sample
    by sample, each with generators seeded by (seed, epoch, sample): random augmentation depends neither on
    workers, nor on the batch size, nor on where a run was resumed. With `skip_bad`, a sample that cannot be read is
    left out of its batch and reported.
    """

    def __init__(self, dataset: Any, collate: Collate | None, seed: int, skip_bad: bool = False) -> None:
        self.dataset, self._map = unwrap_subsets(dataset)
        self.collate = collate
        self.seed = seed
        self.skip_bad = skip_bad
        self._tensors = tensors_of(self.dataset) if collate is None else None
        self._reads_whole_batches = self._tensors is None and not skip_bad and reads_batches(self.dataset)
        self._size = len(self.dataset)

    def __call__(self, epoch: int, draws: np.ndarray, in_worker: bool = False) -> Fetched:
        """The batch of these draws, as it looks in this epoch."""
        draws = self._below_subsets(draws)
        if self._tensors is not None:
            index = torch.from_numpy(np.ascontiguousarray(draws % self._size))
            return Fetched(tuple(t.index_select(0, index) for t in self._tensors), len(draws), [], draws)
        collate = self.collate or default_collate
        if self._reads_whole_batches:
            data = collate(self.dataset.__getitems__((draws % self._size).tolist()))
            return Fetched(data, len(draws), [], draws)
        # A worker process has its generators to itself; the main process shares them with the model's dropout.
        with nullcontext() if in_worker else preserved_generators():
            samples, bad, read = self._read_all(epoch, draws)
            return Fetched(collate(samples) if samples else None, len(samples), bad, draws[read] if bad else draws)

    def _below_subsets(self, draws: np.ndarray) -> np.ndarray:
        """The same draws, numbered as the data set below any subsets numbers them."""
        if self._map is None:
            return draws
        repetition, index = np.divmod(draws, len(self._map))
        return self._map[index] + repetition * self._size

    def _read_all(self, epoch: int, draws: np.ndarray) -> tuple[list[Any], list[tuple[int, str]], list[int]]:
        samples: list[Any] = []
        bad: list[tuple[int, str]] = []
        read: list[int] = []
        for place, draw in enumerate(map(int, draws)):
            index = draw % self._size
            seed_generators(sample_key(self.seed, epoch, draw))
            try:
                samples.append(self.dataset[index])
                read.append(place)
            except Exception as error:
                if not self.skip_bad:
                    error.add_note(f"(while reading sample {index} of {type(self.dataset).__name__})")
                    raise
                bad.append((index, f"{type(error).__name__}: {error}"))
        return samples, bad, read


def unwrap_subsets(dataset: Any) -> tuple[Any, np.ndarray | None]:
    """The data set below any `Subset`s, and which of its samples they chose (None: all)."""
    chosen: np.ndarray | None = None
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices, dtype=np.int64)
        chosen = indices if chosen is None else indices[chosen]
        dataset = dataset.dataset
    return dataset, chosen


def tensors_of(dataset: Any) -> Sequence[torch.Tensor] | None:
    """The tensors of a data set that is nothing but tensors."""
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        return dataset.tensors
    return None


def reads_batches(dataset: Any) -> bool:
    """Whether whole batches can be read at once without losing the seeds of the single samples."""
    if not hasattr(dataset, "__getitems__"):
        return False
    # A transform set on an HF data set may be random; it would see one seed for the whole batch.
    return type(dataset).__module__.startswith("datasets.") and getattr(dataset, "_format_type", None) != "custom"


def is_in_memory(dataset: Any) -> bool:
    """Whether reading is too cheap for worker processes to pay."""
    base, _ = unwrap_subsets(dataset)
    return tensors_of(base) is not None or isinstance(base, (list, tuple)) or bool(getattr(base, "in_memory", False))

"""Reading the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from trainformer.data.dataset import Subset
from trainformer.data.labels import SUBSET, TENSORS, full_name, is_a
from trainformer.data.order import begin_sample, preserved_generators, sample_key, seed_generators

Collate = Callable[[list[Any]], Any]
#: The samples of these numbers as a batch, read at once.
Rows = Callable[[np.ndarray], Any]


class Fetched(NamedTuple):
    """A batch, how many samples are in it, which could not be read and why, and which draws the others are."""

    data: Any
    size: int
    bad: list[tuple[int, str]]
    draws: np.ndarray


class Fetcher:
    """Turns draws into a batch: numbers of samples, or of repetitions of samples (see `order.distinct_draws`).

    Data that can be read as a whole are read with one call: by `rows` (of the data set below any subsets), where it is
    given, or as HF `datasets` do it. Everything else is read sample by sample, each with generators seeded by (seed,
    epoch, sample): random augmentation depends neither on workers, nor on the batch size, nor on where a run was
    resumed. With `skip_bad`, a sample that cannot be read is left out of its batch and reported.
    """

    def __init__(
        self, dataset: Any, collate: Collate, seed: int, skip_bad: bool = False, rows: Rows | None = None
    ) -> None:
        self.dataset, self._map = unwrap_subsets(dataset)
        self.collate = collate
        self.seed = seed
        self.skip_bad = skip_bad
        self._rows = rows
        self._reads_whole_batches = rows is None and not skip_bad and reads_batches(self.dataset)
        self._size = len(self.dataset)

    @property
    def draws_per_sample(self) -> bool:
        """Whether samples are read one by one, so that each may draw random numbers."""
        return self._rows is None and not self._reads_whole_batches

    def __call__(self, epoch: int, draws: np.ndarray, in_worker: bool = False, in_thread: bool = False) -> Fetched:
        """The batch of these draws, as it looks in this epoch.

        A thread among others leaves the process's generators alone: only `sample_rng` is seeded there.
        """
        draws = self._below_subsets(draws)
        if self._rows is not None:
            return Fetched(self._rows(draws % self._size), len(draws), [], draws)
        if self._reads_whole_batches:
            data = self.collate(self.dataset.__getitems__((draws % self._size).tolist()))
            return Fetched(data, len(draws), [], draws)
        # A worker process has its generators to itself; the main process shares them with the model's dropout.
        with nullcontext() if in_worker or in_thread else preserved_generators():
            seed = begin_sample if in_thread else seed_generators
            samples, bad, read = self._read_all(epoch, draws, seed)
            data = self.collate(samples) if samples else None
            begin_sample(None)
            return Fetched(data, len(samples), bad, draws[read] if bad else draws)

    def _below_subsets(self, draws: np.ndarray) -> np.ndarray:
        """The same draws, numbered as the data set below any subsets numbers them."""
        if self._map is None:
            return draws
        repetition, index = np.divmod(draws, len(self._map))
        return self._map[index] + repetition * self._size

    def _read_all(
        self, epoch: int, draws: np.ndarray, seed: Callable[[int], None]
    ) -> tuple[list[Any], list[tuple[int, str]], list[int]]:
        samples: list[Any] = []
        bad: list[tuple[int, str]] = []
        read: list[int] = []
        for place, draw in enumerate(map(int, draws)):
            index = draw % self._size
            seed(sample_key(self.seed, epoch, draw))
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
    while is_subset_itself(dataset):
        indices = np.asarray(dataset.indices, dtype=np.int64)
        chosen = indices if chosen is None else indices[chosen]
        dataset = dataset.dataset
    return dataset, chosen


def is_subset_itself(dataset: Any) -> bool:
    """Whether a data set is a `Subset`, ours or torch's, and not of a class made from it, which may do anything."""
    return type(dataset) is Subset or full_name(type(dataset)) == SUBSET


def tensors_of(dataset: Any) -> Sequence[Any] | None:
    """The tensors of a data set that is nothing but tensors."""
    if not is_a(dataset, TENSORS):
        return None
    from torch.utils.data import TensorDataset

    return dataset.tensors if type(dataset).__getitem__ is TensorDataset.__getitem__ else None


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

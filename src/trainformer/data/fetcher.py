"""Reading and collating the samples of a batch, with random numbers that depend on (seed, epoch, sample) alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from trainformer.core.errors import DataError
from trainformer.data.dataset import Subset
from trainformer.data.labels import SUBSET, TENSORS, is_instance_of, qualified_name
from trainformer.data.order import preserved_generators, sample_key, seed_generators, set_sample_key
from trainformer.data.shapes_in_words import shape_of

Collate = Callable[[list[Any]], Any]
#: Reads a whole batch by indices.
Rows = Callable[[np.ndarray], Any]


class Fetched(NamedTuple):
    """A batch, its number of samples, the (index, reason) of unreadable ones, and the draws that were read."""

    data: Any
    size: int
    bad: list[tuple[int, str]]
    draws: np.ndarray


class Fetcher:
    """Turns draws (sample indices, see `order.distinct_draws`) into a batch.

    Whole batches are read with one call where possible: by `rows`, or by `__getitems__` of HF datasets. Other data are
    read sample by sample, with generators seeded by (seed, epoch, sample): random augmentation depends neither on
    workers, nor on the batch size, nor on where a run was resumed. `skip_bad` skips and reports unreadable samples.
    """

    def __init__(
        self, dataset: Any, collate: Collate, seed: int, skip_bad: bool = False, rows: Rows | None = None
    ) -> None:
        self.dataset, self._map = unwrap_subsets(dataset)
        self.collate = collate
        self.seed = seed
        self.skip_bad = skip_bad
        self._rows = rows
        # A transform set on an HF dataset may be random; it would see one seed for the whole batch.
        is_hf = hasattr(self.dataset, "__getitems__") and type(self.dataset).__module__.startswith("datasets.")
        is_plain = is_hf and getattr(self.dataset, "_format_type", None) != "custom"
        self._reads_whole_batches = rows is None and not skip_bad and is_plain
        self._size = len(self.dataset)

    @property
    def draws_per_sample(self) -> bool:
        """Whether samples are read one by one, and may draw random numbers."""
        return self._rows is None and not self._reads_whole_batches

    def __call__(self, epoch: int, draws: np.ndarray, in_worker: bool = False, in_thread: bool = False) -> Fetched:
        """The batch of these draws in this epoch. In a thread only `sample_rng` is seeded, no shared generator."""
        if self._map is not None:  # indices of the dataset below any subsets
            repetition, chosen = np.divmod(draws, len(self._map))
            draws = self._map[chosen] + repetition * self._size
        if self._rows is not None:
            return Fetched(self._rows(draws % self._size), len(draws), [], draws)
        if self._reads_whole_batches:
            data = self.collate(self.dataset.__getitems__((draws % self._size).tolist()))
            return Fetched(data, len(draws), [], draws)
        samples: list[Any] = []
        bad: list[tuple[int, str]] = []
        read: list[int] = []
        seed = set_sample_key if in_thread else seed_generators
        # A worker process owns its generators; the main process shares them with the model's dropout.
        with nullcontext() if in_worker or in_thread else preserved_generators():
            for place, draw in enumerate(map(int, draws)):
                index = draw % self._size
                seed(sample_key(self.seed, epoch, draw))
                try:
                    sample = self.dataset[index]
                    if sample is None and self.skip_bad:
                        raise self._no_sample()
                    samples.append(sample)
                    read.append(place)
                except Exception as error:
                    if not self.skip_bad:
                        error.add_note(f"(while reading sample {index} of {type(self.dataset).__name__})")
                        raise
                    bad.append((index, f"{type(error).__name__}: {error}"))
            data = self._collated(samples, draws[read] if bad else draws) if samples else None
            set_sample_key(None)
            return Fetched(data, len(samples), bad, draws[read] if bad else draws)

    def _no_sample(self) -> DataError:
        kind = type(self.dataset).__name__
        return DataError(f"Expected a sample, received None: does {kind}.__getitem__ lack a return?")

    def _collated(self, samples: list[Any], draws: np.ndarray) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            missing = next((place for place, sample in enumerate(samples) if sample is None), None)
            if missing is not None:  # some collate functions leave such samples out
                none = self._no_sample()
                none.add_note(f"(while reading sample {int(draws[missing]) % self._size})")
                raise none from error
            shapes = [shape_of(sample) for sample in samples]
            other = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), None)
            if other is not None:
                first, index = int(draws[0]) % self._size, int(draws[other]) % self._size
                error.add_note(
                    f"(samples of one batch differ: sample {index} of {type(self.dataset).__name__} is "
                    f"{shapes[other]}, sample {first} is {shapes[0]})"
                )
            raise

    def __getitem__(self, index: tuple[int, np.ndarray]) -> Fetched:
        """As a dataset for the workers of a `DataLoader`: one index, (epoch, draws), is a whole batch."""
        return self(*index, in_worker=True)


def unwrap_subsets(dataset: Any) -> tuple[Any, np.ndarray | None]:
    """The dataset below any `Subset`s, and the indices they select (None: all)."""
    chosen: np.ndarray | None = None
    while is_plain_subset(dataset):
        indices = np.asarray(dataset.indices, dtype=np.int64)
        chosen = indices if chosen is None else indices[chosen]
        dataset = dataset.dataset
    return dataset, chosen


def is_plain_subset(dataset: Any) -> bool:
    """Whether a dataset is exactly `Subset`, ours or torch's; a subclass may do anything."""
    return type(dataset) is Subset or qualified_name(type(dataset)) == SUBSET


def tensors_of(dataset: Any) -> Sequence[Any] | None:
    """The tensors of a plain `TensorDataset`."""
    if not is_instance_of(dataset, TENSORS):
        return None
    from torch.utils.data import TensorDataset

    return dataset.tensors if type(dataset).__getitem__ is TensorDataset.__getitem__ else None


def is_in_memory(dataset: Any) -> bool:
    """Whether reading is so cheap that worker processes would not pay off."""
    base, _ = unwrap_subsets(dataset)
    return tensors_of(base) is not None or isinstance(base, (list, tuple)) or bool(getattr(base, "in_memory", False))

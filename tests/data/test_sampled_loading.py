"""Sources with a sampler and repeated samples, and the keys of a sample's random numbers."""

import functools
import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from trainformer import Trainer
from trainformer.core.errors import BadArgument
from trainformer.data.loader import DatasetSource, LoaderSource
from trainformer.data.order import distinct_draws, sample_key, sample_keys


class Draws(Dataset):
    """Samples that show their number and a random number."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return i, torch.rand(())


class Fixed:
    """A sampler that says the same order in every epoch."""

    def __init__(self, *order):
        self._order = np.array(order)

    def order(self, epoch, seed):
        return self._order

    def __len__(self):
        return len(self._order)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 2**20), samples=st.lists(st.integers(0, 2**40), min_size=1))
def test_keys_of_many_samples_are_those_of_each(seed, epoch, samples):
    many = sample_keys(seed, epoch, np.array(samples))
    assert many.dtype == np.uint64
    assert many.tolist() == [sample_key(seed, epoch, sample) for sample in samples]


@settings(max_examples=50, deadline=None)
@given(order=st.lists(st.integers(0, 6), max_size=40))
def test_repetitions_are_numbered_in_order(order):
    draws = distinct_draws(np.array(order, dtype=np.int64), 7)
    expected, times = [], [0] * 7
    for sample in order:
        expected.append(sample + 7 * times[sample])
        times[sample] += 1
    assert draws.tolist() == expected


def test_each_repetition_of_a_sample_has_random_numbers_of_its_own():
    source = DatasetSource(Draws(), 3, sampler=Fixed(4, 4, 4, 1, 4, 2), num_workers=0, seed=5)
    batches = list(source.batches(0))
    shown = [int(i) for batch in batches for i in batch.data[0]]
    noise = [float(x) for batch in batches for x in batch.data[1]]
    assert shown == [4, 4, 4, 1, 4, 2]
    assert len(set(noise)) == 6
    keys = [int(k) for batch in batches for k in sample_keys(*batch.origin)]
    assert len(set(keys)) == 6
    # The first time a sample is drawn, it has the numbers it would have without a sampler.
    plain = {
        int(i): float(x)
        for b in DatasetSource(Draws(), 4, num_workers=0, seed=5).batches(0)
        for i, x in zip(*b.data, strict=True)
    }
    assert noise[0] == plain[4]
    assert noise[3] == plain[1]


def test_a_sampled_epoch_resumes_at_any_position_with_the_same_numbers():
    source = DatasetSource(Draws(), 2, sampler=Fixed(3, 3, 7, 3, 7, 0, 3), num_workers=0)
    whole = [float(x) for batch in source.batches(2) for x in batch.data[1]]
    rest = [float(x) for batch in source.batches(2, batch=1, position=3) for x in batch.data[1]]
    assert rest == whole[3:]


def test_repetitions_within_a_subset_keep_their_own_numbers():
    subset = Subset(Draws(), [8, 2, 5])
    source = DatasetSource(subset, 4, sampler=Fixed(1, 1, 0, 1), num_workers=0)
    (batch,) = source.batches(0)
    assert batch.data[0].tolist() == [2, 2, 8, 2]
    assert batch.origin.samples.tolist() == [2, 12, 8, 22]


@pytest.mark.parametrize("workers", [0, 2])
def test_origins_name_the_samples_that_could_be_read(workers):
    class Broken(Draws):
        def __getitem__(self, i):
            if i in (2, 3):
                raise OSError("gone")
            return super().__getitem__(i)

    source = DatasetSource(Broken(), 5, num_workers=workers, skip_bad=True)
    batches = list(source.batches(0))
    assert [batch.origin.samples.tolist() for batch in batches] == [[0, 1, 4], [5, 6, 7, 8, 9]]
    assert [batch.bad for batch in batches] == [2, 0]
    assert [len(sample_keys(*batch.origin)) for batch in batches] == [3, 5]


def test_tensors_and_loaders_have_origins_too():
    tensors = TensorDataset(torch.arange(6))
    (first, second) = DatasetSource(tensors, 4).batches(1)
    assert (first.origin.epoch, first.origin.samples.tolist(), second.origin.samples.tolist()) == (
        1,
        [0, 1, 2, 3],
        [4, 5],
    )
    loader = LoaderSource([torch.arange(3), torch.arange(2)], seed=4)
    assert [b.origin.samples.tolist() for b in loader.batches(0)] == [[0, 1, 2], [3, 4]]
    assert [b.origin.samples.tolist() for b in loader.batches(0, batch=1, position=3)] == [[3, 4]]


def test_the_last_batch_can_be_dropped():
    source = DatasetSource(TensorDataset(torch.arange(10)), 4, drop_last=True)
    assert source.batches_per_epoch == 2
    assert [batch.size for batch in source.batches(0)] == [4, 4]
    with pytest.raises(BadArgument, match="at least 11 samples for one batch with drop_last, received 10"):
        DatasetSource(TensorDataset(torch.arange(10)), 11, drop_last=True)


class Counting:
    """Counts how often it saw each sample."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1)
        self.batches = []

    def train_step(self, batch):
        x, y = batch
        self.batches.append(y.tolist())
        return self.model(x).mean()

    def eval_step(self, batch):
        return {"loss": self.train_step(batch)}


def imbalanced():
    labels = torch.tensor([0] * 30 + [1] * 6 + [2] * 4)
    return torch.randn(40, 1), labels


def test_a_trainer_takes_samplers_by_name():
    task = Counting()
    Trainer(task, imbalanced(), epochs=1, batch_size=10, sampler="balanced", log="none", save_best=0).fit()
    counts = np.bincount(functools.reduce(operator.iadd, task.batches, []))
    assert counts.sum() == 40
    assert counts.max() - counts.min() <= 1

    task = Counting()
    Trainer(task, imbalanced(), epochs=1, batch_size=12, sampler="pk:4", log="none", save_best=0).fit()
    assert all(sorted(np.bincount(batch).tolist()) == [4, 4, 4] for batch in task.batches)


def test_a_sampler_that_cannot_be_used_raises():
    loader = torch.utils.data.DataLoader(TensorDataset(*imbalanced()), batch_size=4)
    with pytest.raises(BadArgument, match="a loader has a sampler and batches of its own"):
        Trainer(Counting(), loader, sampler="balanced", log="none")
    with pytest.raises(BadArgument, match="Did you mean 'balanced'"):
        Trainer(Counting(), imbalanced(), sampler="balnced", log="none")

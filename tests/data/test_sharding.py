"""Sharded batches: together they are the batch, in order, for any world size."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from trainformer.core.errors import BadArgument, DataError
from trainformer.core.types import HostBatch, Origin
from trainformer.data.loader import DatasetSource, LoaderSource
from trainformer.data.sharding import Shard, check_sliceable, is_sharded, unsharded
from trainformer.data.source import DispatchedSource

Pair = namedtuple("Pair", "image name")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_parts_follow_each_other_and_differ_by_one_at_most(size, count):
    bounds = [Shard(index, count).bounds(size) for index in range(count)]
    assert [place for low, high in bounds for place in range(low, high)] == list(range(size))
    lengths = {high - low for low, high in bounds}
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_a_sliced_batch_is_counted_once(size, count):
    data = {
        "x": torch.arange(size * 2).view(size, 2),
        "words": [f"w{i}" for i in range(size)],
        "pair": Pair(torch.arange(size), 3),
    }
    batch = HostBatch(data, size, bad=2, origin=Origin(0, 1, np.arange(size) + 10))
    parts = [Shard(index, count).slice(batch) for index in range(count)]
    real = [part for part in parts if part.size]
    assert torch.equal(torch.cat([part.data["x"] for part in real]), data["x"])
    assert [word for part in real for word in part.data["words"]] == data["words"]
    assert torch.equal(torch.cat([part.data["pair"].image for part in real]), data["pair"].image)
    assert np.concatenate([part.origin.samples for part in real]).tolist() == (np.arange(size) + 10).tolist()
    assert sum(part.size for part in parts) == size
    assert sum(part.bad for part in parts) == 2
    assert {(part.global_size, part.consumed) for part in parts} == {(size, size + 2)}
    assert all(len(part.data["x"]) == max(part.size, 1) for part in parts)  # who has none is lent one


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_ranks_read_the_epoch_of_one_process(count, skip_bad):
    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 23

        def __getitem__(self, index):
            if skip_bad and index in (3, 4, 11):
                raise ValueError("broken")
            return torch.tensor(index)

    alone = DatasetSource(Numbers(), 5, shuffle=True, seed=3, num_workers=0, skip_bad=skip_bad)
    whole = [batch.data.tolist() for batch in alone.batches(2)]
    sources = [
        DatasetSource(Numbers(), 5, shuffle=True, seed=3, num_workers=0, skip_bad=skip_bad, shard=Shard(index, count))
        for index in range(count)
    ]
    together = list(zip(*(source.batches(2) for source in sources), strict=True))
    assert [[x for part in parts if part.size for x in part.data.tolist()] for parts in together] == whole
    assert sum(part.bad for parts in together for part in parts) == (3 if skip_bad else 0)
    if count > 1:
        assert {part.consumed for parts in together[:-1] for part in parts} == {5}


class Shuffling(IterableDataset):
    """Draws from the global generator while it is read."""

    def __iter__(self):
        left = list(range(19))
        while left:
            yield torch.tensor(left.pop(int(torch.randint(min(4, len(left)), ()))))


def test_a_stream_that_draws_random_numbers_is_the_same_on_every_rank():
    def read(index, batch=0):
        torch.manual_seed(index)  # ranks have random numbers of their own
        source = LoaderSource(DataLoader(Shuffling(), 4), seed=1, shard=Shard(index, 2))
        parts = []
        for part in source.batches(0, batch, 4 * batch):
            torch.rand(index + 1)  # and draw from them between two batches
            parts.append(part.data.tolist() if part.size else [])
        return parts

    first, second = read(0), read(1)
    assert sorted(x for part in [*first, *second] for x in part) == list(range(19))
    assert read(1, batch=3) == second[3:]  # and again from the middle


def test_sharded_loaders_are_recognised():
    data = list(range(8))
    assert not is_sharded(DataLoader(data))
    assert is_sharded(DataLoader(data, sampler=DistributedSampler(data, 2, 0)))
    batches = torch.utils.data.BatchSampler(DistributedSampler(data, 2, 0), 2, drop_last=False)
    assert is_sharded(DataLoader(data, batch_sampler=batches))

    class Split(IterableDataset):
        num_replicas, rank = 2, 1

        def __iter__(self):
            return iter(range(self.rank, 8, self.num_replicas))

    assert is_sharded(DataLoader(Split()))
    assert list(unsharded(Split())) == data
    plain = Shuffling()
    assert unsharded(plain) is plain


def test_a_batch_that_cannot_be_sliced_raises():
    with pytest.raises(BadArgument, match="DistributedSampler"):
        check_sliceable(HostBatch(object(), 3))
    check_sliceable(HostBatch(torch.zeros(3, 2), 3))
    assert check_sliceable(HostBatch(object(), 1)) is None  # of one sample there are no parts


class Hands:
    """Rank 0 of two, and what it would have handed to the other."""

    is_main, dp_world_size = True, 2

    def __init__(self):
        self.other = []

    def scatter(self, parts):
        self.other.append(parts[1])
        return parts[0]


def test_rank_0_scatters_batches_the_end_and_errors():
    hands = Hands()
    source = DispatchedSource(DatasetSource(torch.arange(7), 4, num_workers=0), hands)
    assert source.batches_per_epoch == 2
    own = [part.data.tolist() for part in source.batches(0)]
    assert own == [[0, 1], [4]]
    assert [part.data.tolist() for part in hands.other[:2]] == [[2, 3], [5, 6]]
    assert hands.other[2:] == [None]

    class Fails:
        batches_per_epoch = None

        def batches(self, *place):
            yield HostBatch(torch.zeros(2), 2)
            raise DataError("the disk is gone")

    failing = Hands()
    with pytest.raises(DataError, match="disk"):
        list(DispatchedSource(Fails(), failing).batches(0))
    assert failing.other[1] == "DataError: the disk is gone"

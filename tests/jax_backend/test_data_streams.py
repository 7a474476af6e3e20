"""Streams and foreign loaders as sources of NumPy batches, resumed exactly."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainformer.core.errors import BadArgument, DataError
from trainformer.data.numpy_loader import NumpyStreamSource, numpy_source
from trainformer.data.sharding import Shard
from trainformer.data.text.collate import token_batch
from trainformer.data.text.encode import Encoder
from trainformer.data.text.streams import TokenStream

grain = pytest.importorskip("grain")
datasets = pytest.importorskip("datasets")

N = 23


class Countdown:
    """An iterable without a state, that draws from the process's generators as it goes."""

    def __iter__(self):
        return ({"x": i, "noise": random.random() + np.random.rand()} for i in range(N))


class Placed(Countdown):
    """The same with a state; `read` counts what was taken."""

    def __init__(self):
        self.place = self.start = self.read = 0

    def __iter__(self):
        self.place, self.start = self.start, 0
        while self.place < N:
            self.place += 1
            self.read += 1
            yield {"x": self.place - 1, "noise": random.random() + np.random.rand()}

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.start = state["place"]


def records():
    return [{"x": i, "noise": i / 7} for i in range(N)]


def hf_stream():
    data = datasets.Dataset.from_list(records()).to_iterable_dataset(num_shards=3)
    return data.map(lambda row: {"x": row["x"], "noise": row["noise"] * 2})


def shuffled_hf_stream():
    return hf_stream().shuffle(seed=4, buffer_size=5).map(lambda row: row)


def grain_stream():
    return grain.MapDataset.source(records()).seed(3).shuffle().to_iter_dataset()


def grain_noise():
    data = grain.MapDataset.source(records()).seed(3)
    return data.random_map(lambda row, rng: {**row, "noise": rng.random()}).to_iter_dataset()


def grain_loader(batch=4, **options):
    sampler = grain.samplers.IndexSampler(
        N, shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=3
    )
    operations = [grain.transforms.Batch(batch)] if batch else []
    return grain.DataLoader(data_source=records(), sampler=sampler, operations=operations, worker_count=0, **options)


def batched():
    """A function that opens an iteration over batches."""
    for begin in range(0, N, 4):
        rows = np.arange(begin, min(N, begin + 4))
        yield {"x": rows, "noise": rows + random.random()}


SOURCES = {
    "plain": lambda: NumpyStreamSource(Countdown(), 4, seed=1),
    "function": lambda: NumpyStreamSource(lambda: iter(Countdown()), 4, seed=1),
    "placed": lambda: NumpyStreamSource(Placed(), 4, seed=1),
    "hf": lambda: NumpyStreamSource(hf_stream(), 4, seed=1),
    "hf shuffled": lambda: NumpyStreamSource(shuffled_hf_stream(), 4, seed=1),
    "grain": lambda: NumpyStreamSource(grain_stream(), 4, seed=1),
    "grain noise": lambda: NumpyStreamSource(grain_noise(), 4, seed=1),
    "grain loader": lambda: numpy_source(grain_loader(), 4, seed=1),
    "grain samples": lambda: numpy_source(grain_loader(batch=0), 4, seed=1, batched=False),
    "loader": lambda: numpy_source(batched, 4, batched=True, seed=1),
    "torch loader": lambda: numpy_source(DataLoader(records(), 4, shuffle=True), 4, seed=1),
}


def plain(batches):
    return [
        (b.size, b.data["x"].tolist(), b.data["noise"].tolist(), b.origin.samples.tolist(), b.origin.epoch)
        for b in batches
    ]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("kind", SOURCES)
def test_the_rest_follows_wherever_it_was_left(kind, epoch):
    run = SOURCES[kind]()
    epochs = [plain(run.batches(number)) for number in range(epoch + 2)]
    whole = epochs[epoch]
    assert sorted(x for batch in whole for x in batch[1]) == list(range(N))
    for cut in range(len(whole) + 1):
        source = SOURCES[kind]()
        for before in range(epoch):
            assert plain(source.batches(before)) == epochs[before]
        iterator = source.batches(epoch)
        head = plain(next(iterator) for _ in range(cut))
        assert head == whole[:cut]
        state = json.loads(json.dumps(source.state_dict()))
        random.seed(cut)  # the resumed process has generators in another state
        np.random.seed(cut)
        other = SOURCES[kind]()
        other.load_state_dict(state)
        assert json.loads(json.dumps(other.state_dict())) == state
        assert plain(other.batches(epoch, cut, 4 * cut if cut < len(whole) else N)) == whole[cut:]
        assert plain(other.batches(epoch + 1)) == epochs[epoch + 1]


@pytest.mark.parametrize("kind", SOURCES)
def test_a_state_at_the_end_of_an_epoch_begins_the_next(kind):
    run = SOURCES[kind]()
    list(run.batches(0))
    state = json.loads(json.dumps(run.state_dict()))
    following = plain(run.batches(1))
    other = SOURCES[kind]()
    other.load_state_dict(state)
    assert plain(other.batches(1)) == following
    assert len(following) == 6


def test_streams_that_know_their_place_are_not_read_again():
    source = NumpyStreamSource(Placed(), 4)
    iterator = source.batches(0)
    for _ in range(4):
        next(iterator)
    other = NumpyStreamSource(Placed(), 4)
    other.load_state_dict(source.state_dict())
    assert len(list(other.batches(0, 4, 16))) == 2
    assert other.stream.read == N - 16
    hf = SOURCES["hf"]()
    next(hf.batches(0))
    assert hf.state_dict()["known_by"] == "stream"
    again = NumpyStreamSource(Placed(), 4)  # without the state there is no other way
    assert len(list(again.batches(0, 4, 16))) == 2
    assert again.stream.read == N


def test_epochs_of_a_shuffled_stream_differ():
    source = NumpyStreamSource(shuffled_hf_stream(), N)
    (first,), (second,) = plain(source.batches(0)), plain(source.batches(1))
    assert first[1] != second[1]
    assert sorted(first[1]) == sorted(second[1])


def test_who_reads_ahead_says_how_far():
    source = NumpyStreamSource(Placed(), 4, lookahead=2)
    iterator = source.batches(0)
    taken = plain(next(iterator) for _ in range(4))
    other = NumpyStreamSource(Placed(), 4)
    other.load_state_dict(source.state_dict(unused=2))
    assert plain(other.batches(0, 2, 8))[:2] == taken[2:]
    with pytest.raises(BadArgument, match="lookahead"):
        source.state_dict(unused=3)
    with pytest.raises(BadArgument, match="lookahead"):
        NumpyStreamSource(Placed(), 4).state_dict(unused=1)


@pytest.mark.parametrize("kind", ["plain", "loader", "grain"])
@pytest.mark.parametrize("parts", [2, 3])
def test_processes_take_their_part_of_each_batch(kind, parts):
    makers = {
        "plain": lambda shard: NumpyStreamSource(Countdown(), 4, shard=shard),
        "loader": lambda shard: NumpyStreamSource(batched, batched=True, shard=shard),
        "grain": lambda shard: numpy_source(grain_stream(), 4, shard=shard),
    }
    whole = [batch.data["noise"].tolist() for batch in makers[kind](Shard()).batches(1)]
    shares = [list(makers[kind](Shard(index, parts)).batches(1)) for index in range(parts)]
    for number, batch in enumerate(whole):
        together = [share[number] for share in shares]
        assert [x for part in together for x in part.data["noise"][: part.size].tolist()] == batch
        assert {part.global_size for part in together} == {part.consumed for part in together} == {len(batch)}
    late = makers[kind](Shard(1, parts)).batches(1, 2, 8)
    assert [b.data["x"].tolist() for b in late] == [b.data["x"].tolist() for b in shares[1][2:]]


def test_the_last_batch_is_padded_or_dropped():
    for source in (
        NumpyStreamSource(Countdown(), 4, pad_last=True),
        NumpyStreamSource(batched, 4, batched=True, pad_last=True),
    ):
        batches = list(source.batches(0))
        assert [batch.size for batch in batches] == [4] * 5 + [3]
        assert {batch.data["x"].shape for batch in batches} == {(4,)}
        assert [batch.data["_valid"].sum() for batch in batches] == [4] * 5 + [3]
    assert len(list(NumpyStreamSource(Countdown(), 4, drop_last=True).batches(0))) == 5
    parts = [NumpyStreamSource(Countdown(), 4, pad_last=True, shard=Shard(index, 2)) for index in range(2)]
    last = [list(part.batches(0))[-1] for part in parts]
    assert [part.data["_valid"].tolist() for part in last] == [[True, False], [True, True]]
    assert [part.data["x"].tolist() for part in last] == [[20, 20], [21, 22]]


def test_batches_of_a_torch_loader_become_arrays():
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    source = numpy_source(DataLoader(data, 4), 4)
    assert isinstance(source, NumpyStreamSource)
    assert source.batched
    assert source.batches_per_epoch == 3
    first = next(source.batches(0)).data
    assert [type(part) for part in first] == [np.ndarray, np.ndarray]
    assert first[0].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("capacity", [None, 16])
def test_a_stream_of_tokens_resumes_with_what_waits_to_be_packed(capacity, shuffled):
    texts = [{"input_ids": list(range(1, 2 + i % 9))} for i in range(200)]

    def make():
        source = datasets.Dataset.from_list(texts).to_iterable_dataset(num_shards=4)
        source = source.shuffle(seed=1, buffer_size=8) if shuffled else source
        stream = TokenStream(source, Encoder(None, max_length=16), capacity=capacity)
        return NumpyStreamSource(stream, 3, collate=lambda samples: token_batch(samples, 16, 0), pad_last=True)

    def values(batches):
        return [{name: array.tolist() for name, array in batch.data.items()} for batch in batches]

    whole = values(make().batches(0))
    for cut in (1, 5, len(whole) - 1):
        source = make()
        iterator = source.batches(0)
        for _ in range(cut):
            next(iterator)
        other = make()
        other.load_state_dict(json.loads(json.dumps(source.state_dict())))
        assert values(other.batches(0, cut, 3 * cut)) == whole[cut:]


def test_what_cannot_be_a_stream_is_refused():
    with pytest.raises(BadArgument, match="can be read only once"):
        NumpyStreamSource(iter([1, 2]), 2)
    with pytest.raises(BadArgument, match="an iterable of samples or batches"):
        NumpyStreamSource(3, 2)
    with pytest.raises(BadArgument, match="batch_size with pad_last"):
        NumpyStreamSource(batched, batched=True, pad_last=True)
    with pytest.raises(BadArgument, match="no collate with a loader"):
        numpy_source(grain_loader(), 4, collate=list)
    source = NumpyStreamSource(Countdown(), 4)
    source.load_state_dict({"known_by": "iterator", "place": {"next_index": 4}})
    with pytest.raises(DataError, match="Pass the same data as before"):
        next(source.batches(0, 1, 4))
    with pytest.raises(DataError, match="state of a stream"):
        source.load_state_dict({"place": 4})

"""The NumPy loader gives the batches of the torch loader: order, resuming, seeds, shards, what cannot be read."""

from __future__ import annotations

import logging
import random
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset as TorchSubset
from torch.utils.data import TensorDataset

from trainformer.core.errors import BadArgument, DataError
from trainformer.data.builtin import builtin_arrays, load_builtin
from trainformer.data.dataset import ArrayDataset, Subset
from trainformer.data.loader import DatasetSource
from trainformer.data.metadata import extract_info
from trainformer.data.numpy_loader import NumpySource, as_data, numpy_source
from trainformer.data.order import sample_rng
from trainformer.data.samplers import ClassBalancedSampler
from trainformer.data.sharding import Shard
from trainformer.data.split import split_dataset


class Noisy:
    """Samples that draw from the generators that are shared by the process, or from their own."""

    def __init__(self, n=20, shared=True, bad=()):
        self.n = n
        self.shared = shared
        self.bad = bad
        self.read_in = set()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read_in.add(threading.current_thread().name.split("_")[0])
        if i in self.bad:
            raise ValueError(f"sample {i} is broken")
        own = sample_rng().random(2)
        shared = [random.random(), np.random.rand()] if self.shared else [0.0, 0.0]
        return {"i": i, "noise": np.array([*own, *shared])}


def columns(batch):
    return batch if isinstance(batch, dict) else dict(enumerate(batch))


def assert_same(mine, others):
    """Batches of the two loaders, value by value, and all that is said of them."""
    mine, others = list(mine), list(others)
    assert len(mine) == len(others)
    for one, other in zip(mine, others, strict=True):
        assert one[1:3] == other[1:3]
        assert one[4:] == other[4:]
        assert (one.origin.seed, one.origin.epoch) == (other.origin.seed, other.origin.epoch)
        assert one.origin.samples.tolist() == other.origin.samples.tolist()
        assert columns(one.data).keys() == columns(other.data).keys()
        for name, value in columns(one.data).items():
            assert isinstance(value, np.ndarray)
            theirs = columns(other.data)[name]
            assert np.array_equal(value, theirs.numpy())
            assert str(value.dtype) == str(theirs.dtype).removeprefix("torch.")


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40), batch=st.integers(1, 9), position=st.integers(0, 40), seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 4), shuffle=st.booleans(), parts=st.integers(1, 3), last=st.booleans(),
)  # fmt: skip
def test_batches_are_those_of_the_torch_loader(n, batch, position, seed, epoch, shuffle, parts, last):
    values = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    options = {"shuffle": shuffle, "seed": seed, "drop_last": last and n >= batch}
    tensors = TensorDataset(torch.from_numpy(values), torch.arange(n))
    arrays = ArrayDataset((values, np.arange(n)))
    where = {"batch": position // batch, "position": min(position, n)}
    for index in range(parts):
        shard = Shard(index, parts)
        mine = NumpySource(arrays, batch, shard=shard, **options).batches(epoch, **where)
        assert_same(mine, DatasetSource(tensors, batch, shard=shard, **options).batches(epoch, **where))


@pytest.mark.parametrize("position", [0, 8])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_samples_draw_what_they_draw_in_the_torch_loader(position, skip_bad):
    bad = (2, 3, 11) if skip_bad else ()
    options = {"shuffle": True, "seed": 5, "skip_bad": skip_bad}
    theirs = DatasetSource(Noisy(bad=bad), 4, num_workers=0, **options)
    for epoch in (0, 3):
        mine = NumpySource(Noisy(bad=bad), 4, **options)
        assert_same(mine.batches(epoch, position // 4, position), theirs.batches(epoch, position // 4, position))
    other_epoch = next(NumpySource(Noisy(), 20, seed=5).batches(1)).data["noise"]
    first_epoch = next(NumpySource(Noisy(), 20, seed=5).batches(0)).data["noise"]
    assert len(np.unique(first_epoch)) == 80  # every sample has numbers of its own
    assert not (first_epoch == other_epoch).any()


def test_reading_leaves_the_generators_alone():
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    list(NumpySource(Noisy(), 4, shuffle=True).batches(0))
    list(NumpySource(Noisy(shared=False), 4, threads=3).batches(0))
    list(NumpySource(Noisy(), 4, threads=3).batches(0))
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])


def test_threads_change_nothing():
    whole = list(NumpySource(Noisy(50, shared=False), 4, shuffle=True, seed=1).batches(2, 3, 12))
    data = Noisy(50, shared=False)
    threaded = NumpySource(data, 4, shuffle=True, seed=1, threads=4)
    for one, other in zip(whole, threaded.batches(2, 3, 12), strict=True):
        assert {name: value.tolist() for name, value in one.data.items()} == {
            name: value.tolist() for name, value in other.data.items()
        }
    assert "read-samples" in data.read_in


def test_data_that_draw_from_shared_generators_are_not_read_in_threads(caplog):
    data = Noisy(50)
    with caplog.at_level(logging.WARNING, "trainformer"):
        mine = NumpySource(data, 4, shuffle=True, seed=1, threads=4)
        assert_same(mine.batches(0), DatasetSource(Noisy(50), 4, shuffle=True, seed=1, num_workers=0).batches(0))
        list(mine.batches(1))
    assert "read-samples" not in data.read_in
    assert caplog.text.count("sample_rng()") == 1


def test_an_error_in_a_thread_arrives_with_the_sample_and_ends_the_threads():
    with pytest.raises(ValueError, match="sample 9 is broken") as caught:
        list(NumpySource(Noisy(40, shared=False, bad=(9,)), 4, threads=2).batches(0))
    assert "while reading sample 9 of Noisy" in caught.value.__notes__[0]
    batches = NumpySource(Noisy(400, shared=False), 4, threads=2).batches(0)
    next(batches)
    batches.close()
    for thread in threading.enumerate():
        if thread.name.startswith("read-samples"):
            thread.join(60)
            assert not thread.is_alive()


def test_samples_that_cannot_be_read_are_left_out_and_said_once(caplog):
    source = NumpySource(Noisy(bad=(3,)), 4, skip_bad=True, pad_last=True)
    with caplog.at_level(logging.WARNING, "trainformer"):
        batches = list(source.batches(0))
        list(source.batches(1))
    assert [(batch.size, batch.bad) for batch in batches] == [(3, 1), (4, 0), (4, 0), (4, 0), (4, 0)]
    assert batches[0].data["_valid"].tolist() == [True, True, True, False]
    assert caplog.text.count("sample 3 cannot be read") == 1
    with pytest.raises(ValueError, match="sample 3 is broken"):
        list(NumpySource(Noisy(bad=(3,)), 4).batches(0))


# -- the last batch ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), share=st.integers(1, 5), parts=st.integers(1, 4), epoch=st.integers(0, 2))
def test_a_padded_source_has_one_shape_and_counts_every_sample_once(n, share, parts, epoch):
    batch = share * parts
    data = ArrayDataset({"i": np.arange(n), "x": np.arange(3 * n).reshape(n, 3)})
    sources = [
        NumpySource(data, batch, shuffle=True, seed=2, pad_last=True, shard=Shard(index, parts))
        for index in range(parts)
    ]
    order = [i for made in NumpySource(data, batch, shuffle=True, seed=2).batches(epoch) for i in made.data["i"]]
    seen = []
    for together in zip(*(source.batches(epoch) for source in sources), strict=True):
        for made in together:
            assert made.data["x"].shape == (share, 3)
            assert made.data["_valid"].dtype == bool
            assert made.data["_valid"].sum() == made.size
            seen += made.data["i"][made.data["_valid"]].tolist()
    assert seen == order
    assert sources[0].batches_per_epoch == -(-n // batch)


def test_padding_must_be_possible_and_meant():
    pairs = ArrayDataset((np.zeros((5, 2)), np.arange(5)))
    with pytest.raises(BadArgument, match=r"tuple.*drop_last=True"):
        next(NumpySource(pairs, 2, pad_last=True).batches(0))
    with pytest.raises(BadArgument, match="received both"):
        NumpySource(pairs, 2, pad_last=True, drop_last=True)
    with pytest.raises(BadArgument, match="multiple of 2"):
        NumpySource(ArrayDataset({"x": np.zeros(5)}), 3, pad_last=True, shard=Shard(0, 2))
    with pytest.raises(BadArgument, match="at least 8 samples"):
        NumpySource(pairs, 8, drop_last=True)
    with pytest.raises(DataError, match="at least one sample"):
        NumpySource([], 8)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(BadArgument, match="batch_size"):
            NumpySource(pairs, wrong)


def test_a_sampler_decides_and_repetitions_differ():
    data = [(np.float32(i), 0 if i else 1) for i in range(12)]
    sampler = ClassBalancedSampler(data, 24)
    mine = NumpySource(data, 6, sampler=sampler, seed=3)
    assert_same(mine.batches(1), DatasetSource(data, 6, sampler=sampler, seed=3, num_workers=0).batches(1))
    labels = np.concatenate([batch.data[1] for batch in mine.batches(1)])
    assert labels.sum() == 12
    drawn = next(NumpySource(Noisy(12), 24, sampler=sampler, seed=3).batches(1)).data["noise"]
    assert len(np.unique(drawn)) == drawn.size  # also where a sample comes twelve times


# -- what can be passed ------------------------------------------------------------------------------------


def test_inputs_of_all_kinds_give_the_same_batches(tmp_path):
    datasets = pytest.importorskip("datasets")
    grain = pytest.importorskip("grain")
    x, y = np.arange(14, dtype=np.int64).reshape(7, 2), np.arange(7)
    records = [{"x": a.tolist(), "y": int(b)} for a, b in zip(x, y, strict=True)]
    hf = datasets.Dataset.from_list(records)
    hf.to_json(tmp_path / "r.jsonl")
    hf.to_parquet(tmp_path / "r.parquet")
    kinds = [
        {"x": x, "y": y}, {"x": x.tolist(), "y": y.tolist()}, records, hf, {"train": hf}, tmp_path / "r.jsonl",
        str(tmp_path / "r.parquet"), grain.MapDataset.source(records),
        {"x": torch.from_numpy(x), "y": torch.from_numpy(y)},
    ]  # fmt: skip
    wanted = list(NumpySource(records, 3, shuffle=True, seed=9).batches(1))
    for kind in kinds:
        found = list(numpy_source(kind, 3, shuffle=True, seed=9).batches(1))
        assert [batch.data["x"].tolist() for batch in found] == [batch.data["x"].tolist() for batch in wanted]
        assert [batch.data["y"].tolist() for batch in found] == [batch.data["y"].tolist() for batch in wanted]
    assert [b.data[1].tolist() for b in numpy_source((x, y), 4).batches(0)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [b.data.tolist() for b in numpy_source(y, 4).batches(0)] == [[0, 1, 2, 3], [4, 5, 6]]


def test_inputs_that_mean_nothing_are_refused():
    grain = pytest.importorskip("grain")
    with pytest.raises(BadArgument, match="data to be a path"):
        as_data(3)
    with pytest.raises(DataError, match=r"one length.*3 rows in 'x', 2 rows in 'y'"):
        as_data({"x": np.zeros(3), "y": np.zeros(2)})
    with pytest.raises(BadArgument, match=r"'text' to be an array of numbers.*list of dicts"):
        as_data({"text": ["a", "b"]})
    with pytest.raises(BadArgument, match=r"endless repetition.*Leave out repeat\(\)"):
        numpy_source(grain.MapDataset.range(4).repeat(), 2)
    with pytest.raises(BadArgument, match="threads"):
        numpy_source([1, 2], 2, threads=-1)


def test_what_cannot_be_stacked_is_named():
    def first(samples):
        return next(NumpySource(samples, 2).batches(0))

    with pytest.raises(DataError, match=r"sample\['ids'\] to have one shape in all samples.*\(2,\), \(3,\)"):
        first([{"ids": [1, 2]}, {"ids": [1, 2, 3]}])
    with pytest.raises(DataError, match=r"sample\['meta'\]\['name'\] to be numbers.*str 'a'"):
        first([{"meta": {"name": "a"}}, {"meta": {"name": "b"}}])
    with pytest.raises(DataError, match=r"sample\[1\] to be numbers or arrays.*None"):
        first([(1, None), (2, None)])
    with pytest.raises(DataError, match=r"keys \['x', 'y'\] everywhere.*\['x'\]"):
        first([{"x": 1, "y": 1}, {"x": 1}])
    with pytest.raises(DataError, match="a sample, received None"):
        first([{"x": 1}, None])
    batch = first([{"a": torch.ones(2), "b": (1, [2.0, 3.0]), "c": True}] * 2).data
    assert batch["a"].dtype == np.float32
    assert batch["b"][1].tolist() == [[2.0, 3.0], [2.0, 3.0]]
    assert batch["c"].tolist() == [True, True]


def test_subsets_are_read_through_and_splits_are_those_of_torch(monkeypatch):
    data = builtin_arrays("digits")
    nested = Subset(Subset(data, range(50, 100)), [0, 5, 10])
    (batch,) = NumpySource(nested, 8).batches(0)
    assert batch.data["label"].tolist() == [data[i]["label"] for i in (50, 55, 60)]
    assert batch.origin.samples.tolist() == [50, 55, 60]
    train, val = split_dataset(data, 0.1, seed=4)
    assert isinstance(val, TorchSubset)
    monkeypatch.delitem(sys.modules, "torch.utils.data")
    without = split_dataset(data, 0.1, seed=4)
    assert isinstance(without[1], Subset)
    assert list(without[1].indices) == list(val.indices)
    assert list(without[0].indices) == list(train.indices)
    theirs, ours = extract_info(load_builtin("digits")), extract_info(data)
    assert ours.class_counts == theirs.class_counts
    assert ours.class_names == theirs.class_names == [str(digit) for digit in range(10)]
    assert extract_info(without[1]).class_counts == extract_info(val).class_counts
    images = load_builtin("digits").images.numpy()
    assert np.array_equal(images, data.arrays["image"])


def test_labels_of_arrays_are_found():
    assert extract_info(ArrayDataset((np.zeros((4, 2)), np.array([0, 2, 2, 1])))).class_counts == [1, 1, 2]
    assert extract_info(ArrayDataset({"x": np.zeros((4, 2)), "target": np.ones(4)})).target_mean == 1.0
    assert extract_info(ArrayDataset({"x": np.zeros((4, 2))})).num_classes is None

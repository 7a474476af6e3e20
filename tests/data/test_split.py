"""Splits: disjoint, complete, exact in size, stratified, and reproducible."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split
from torch.utils.data import IterableDataset, Subset, TensorDataset

from trainformer.core.errors import BadArgument, DataError
from trainformer.data.labels import labels_of
from trainformer.data.metadata import extract_info
from trainformer.data.split import split_dataset


def labelled(labels: list[int]) -> list[tuple[str, int]]:
    return [(f"sample {index}", label) for index, label in enumerate(labels)]


def indices(*parts: Subset) -> list[list[int]]:
    return [list(part.indices) for part in parts]


seeds = st.integers(0, 2**32)
many_labels = st.lists(st.integers(0, 6), min_size=2, max_size=60)


@given(many_labels, st.floats(0.01, 0.99), seeds)
def test_sizes_are_exact_and_nothing_is_lost_or_doubled(labels: list[int], share: float, seed: int) -> None:
    wanted = round(len(labels) * share)
    assume(0 < wanted < len(labels))
    train, val = indices(*split_dataset(labelled(labels), share, seed))

    assert len(val) == wanted
    assert sorted(train + val) == list(range(len(labels)))
    assert train == sorted(train)
    assert val == sorted(val)
    assert all(type(index) is int for index in train + val)


@given(many_labels, st.data(), seeds)
def test_every_class_stays_in_training_in_proportion(labels: list[int], data: st.DataObject, seed: int) -> None:
    counts = Counter(labels)
    room = len(labels) - len(counts)  # one sample of each class is spoken for
    assume(room > 0)
    val_size = data.draw(st.integers(1, room))
    train, val = split_dataset(labelled(labels), val_size, seed)
    in_train, in_val = Counter(label for _, label in train), Counter(label for _, label in val)

    assert set(in_train) == set(counts)
    assert in_val.total() == val_size
    splittable = sum(count for count in counts.values() if count > 1)
    for label, count in counts.items():
        if count > 1:
            quota = Fraction(val_size * count, splittable)
            assert in_val[label] >= int(quota)
            if all(int(Fraction(val_size * c, splittable)) + 1 < c for c in counts.values() if c > 1):
                assert in_val[label] <= int(quota) + 1


@given(many_labels, seeds)
def test_the_same_seed_gives_the_same_split(labels: list[int], seed: int) -> None:
    first = split_dataset(labelled(labels), 1, seed)

    assert indices(*first) == indices(*split_dataset(labelled(labels), 1, seed))


def test_different_seeds_give_different_splits() -> None:
    splits = {tuple(split_dataset(range(100), 0.3, seed)[1].indices) for seed in range(20)}

    assert len(splits) == 20


@pytest.mark.parametrize(
    ("counts", "share"), [([50, 30, 20], 0.1), ([50, 30, 20], 0.5), ([10, 10], 0.2), ([40, 400], 0.25)]
)
def test_where_quotas_are_whole_scikit_learn_agrees(counts: list[int], share: float) -> None:
    labels = np.repeat(np.arange(len(counts)), counts).tolist()
    theirs = train_test_split(labels, test_size=share, stratify=labels, random_state=0)
    ours = split_dataset(labelled(labels), share, seed=0)

    for mine, other in zip(ours, theirs, strict=True):
        assert Counter(label for _, label in mine) == Counter(other)


def test_without_labels_the_split_is_plain_and_sizes_match_scikit_learn() -> None:
    dataset = TensorDataset(torch.arange(40.0))
    train, val = split_dataset(dataset, 0.25, seed=3)

    assert [len(train), len(val)] == [len(part) for part in train_test_split(range(40), test_size=0.25)]
    assert sorted(float(x) for part in (train, val) for (x,) in part) == list(range(40))


def test_ties_are_broken_at_random() -> None:
    """Of a hundred classes of four, a tenth cannot cover all: it must not always be the same ones."""
    labels = [label for label in range(100) for _ in range(4)]
    validated: set[int] = set()
    for seed in range(40):
        chosen = Counter(label for _, label in split_dataset(labelled(labels), 0.1, seed)[1])
        assert set(chosen.values()) == {1}
        validated |= set(chosen)

    assert len(validated) > 90


def test_every_sample_is_as_likely_as_another_of_its_class() -> None:
    drawn = Counter(index for seed in range(2000) for index in split_dataset(labelled([0] * 5), 2, seed)[1].indices)

    # 800 expected each; five standard deviations of the binomial are 110
    assert all(abs(drawn[index] - 800) < 110 for index in range(5))


def test_classes_of_one_sample_stay_in_training() -> None:
    train, val = split_dataset(labelled([7, 0, 0, 0, 0, 3]), 3, seed=0)

    assert sorted(label for _, label in train) == [0, 3, 7]
    assert [label for _, label in val] == [0, 0, 0]


def test_too_rare_classes_disable_stratification_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    train, val = split_dataset(labelled(list(range(10))), 0.3, seed=0)

    assert (len(train), len(val)) == (7, 3)
    assert "the split is not stratified" in caplog.text


def test_the_global_generators_are_preserved() -> None:
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    _, val = split_dataset(labelled([0, 1] * 10), 0.2, seed=0)

    assert len(val) == 4
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_splits_differ_from_the_order_of_the_first_epoch() -> None:
    """Both begin with the run's seed; if they drew the same numbers, validation would be the head of epoch 0."""
    from trainformer.data.order import epoch_order

    head = set(epoch_order(1000, seed=42, epoch=0, shuffle=True)[:100].tolist())

    assert len(head & set(split_dataset(range(1000), 100, seed=42)[1].indices)) < 50


def test_the_parts_keep_classes_and_labels() -> None:
    dataset = TensorDataset(torch.zeros(12, 1), torch.arange(12) % 3)
    train, val = split_dataset(dataset, 3, seed=0)

    assert labels_of(val).tolist() == [0, 1, 2]
    assert extract_info(train).class_counts == [3, 3, 3]
    again, rest = split_dataset(train, 3, seed=0)  # a split can be split
    assert (len(again), labels_of(rest).tolist()) == (6, [0, 1, 2])


def test_no_sample_is_loaded() -> None:
    class Unreadable:
        targets = (0, 1) * 5

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("a sample was loaded")

    assert [len(part) for part in split_dataset(Unreadable(), 0.2, seed=0)] == [8, 2]


@pytest.mark.parametrize("val_split", [0.0, 1.0, -0.1, 1.5, float("nan"), True, "0.1", None])
def test_a_share_must_be_between_0_and_1(val_split: Any) -> None:
    with pytest.raises(BadArgument, match="val_split to be"):
        split_dataset(range(10), val_split, seed=0)


@pytest.mark.parametrize(("val_split", "do"), [(0, "from 1 to 9"), (10, "from 1 to 9"), (0.01, "val_split=1")])
def test_an_empty_part_is_an_error_that_says_what_to_do(val_split: float, do: str) -> None:
    with pytest.raises(BadArgument, match=f"both training and validation.*{do}"):
        split_dataset(range(10), val_split, seed=0)


@pytest.mark.parametrize("val_split", [np.int64(3), np.float64(0.3), np.float32(0.3)])
def test_numpy_numbers_are_numbers(val_split: Any) -> None:
    assert len(split_dataset(range(10), val_split, seed=0)[1]) == 3


def test_too_little_data() -> None:
    for dataset in ([], [("a", 0)]):
        with pytest.raises(DataError, match="at least 2 samples"):
            split_dataset(dataset, 0.5, seed=0)


def test_streams_cannot_be_split() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            raise AssertionError("the stream was consumed")

        def __len__(self) -> int:
            return 10

    with pytest.raises(DataError, match=r"Stream.*val_data"):
        split_dataset(Stream(), 0.1, seed=0)

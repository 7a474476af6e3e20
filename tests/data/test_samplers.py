"""Samplers: the content of an epoch is counted, and every order is compared with an independent implementation."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from trainformer.core import BadArgument, DataError
from trainformer.data.folder import ImageFolder
from trainformer.data.samplers import (
    ClassBalancedSampler,
    EpochSampler,
    ListedSampler,
    PKSampler,
    RepeatedAugmentSampler,
    make_sampler,
)


class Labels(Dataset):
    """Knows its labels, and fails if a sample is read."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was read")


def digits_like(size: int = 60, classes: int = 5, seed: int = 0) -> Labels:
    return Labels(np.random.default_rng(seed).integers(0, classes, size))


some_labels = st.lists(st.integers(0, 6), min_size=1, max_size=60)
quick = settings(max_examples=60, deadline=None)

MAKERS: dict[str, Any] = {
    "balanced": lambda data, **options: ClassBalancedSampler(data, **options),
    "pk": lambda data, **options: PKSampler(data, 2, 3, num_batches=7, **options),
    "repeated": lambda data, **options: RepeatedAugmentSampler(data, 3, **options),
}
every_kind = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


# -- all of them -------------------------------------------------------------------------------------------


@every_kind
def test_an_order_is_a_function_of_seed_and_epoch_alone(make: Any) -> None:
    data = digits_like()
    sampler, twin = make(data, seed=5), make(data, seed=1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = [sampler.order(epoch) for epoch in range(4)]
    assert all(order.dtype == np.int64 for order in first)
    random.seed(9)
    torch.manual_seed(9)
    for epoch in (3, 0, 2, 1):  # in another order, from another sampler, after other random numbers
        assert np.array_equal(twin.order(epoch, 5), first[epoch])
    assert len({order.tobytes() for order in first}) == 4
    assert not np.array_equal(sampler.order(0), twin.order(0))
    torch.manual_seed(0)
    random.setstate(before[0])
    list(sampler)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]


@every_kind
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shares_of_ranks_are_disjoint_and_complete(make: Any, ranks: int) -> None:
    data = digits_like(61)
    whole = make(data)
    whole.set_epoch(2)
    shares = []
    for rank in range(ranks):
        share = make(data, num_replicas=ranks, rank=rank)
        share.set_epoch(2)
        shares.append(list(share))
        assert len(share) == len(shares[-1])
        assert np.array_equal(share.order(2), whole.order(2))
        assert len(share.whole()) == share.num_samples == len(whole)
    assert Counter(index for share in shares for index in share) == Counter(whole.order(2).tolist())
    blocks = [whole.order(2)[i : i + whole.block].tolist() for i in range(0, len(whole), whole.block)]
    for rank, share in enumerate(shares):
        assert share == [index for block in blocks[rank::ranks] for index in block]


@every_kind
@pytest.mark.parametrize("after", [0, 1, 17, 40])
def test_iteration_resumes_in_the_middle(make: Any, after: int) -> None:
    data = digits_like()
    sampler = make(data, num_replicas=1, rank=0)
    sampler.set_epoch(3)
    seen = []
    for index in sampler:
        seen.append(index)
        if len(seen) == max(after, 1):
            state = sampler.state_dict()
    if after == 0:
        state = make(data).state_dict() | {"epoch": 3}
    resumed = make(data)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.set_epoch(3)  # the loader announces the epoch it resumes in
    assert list(resumed) == seen[after:]
    assert list(resumed) == seen  # once only: the next iteration is a whole epoch
    resumed.load_state_dict(state)
    resumed.set_epoch(4)
    assert list(resumed) == resumed.order(4).tolist()


@every_kind
def test_samplers_work_in_a_users_loader(make: Any) -> None:
    labels = torch.arange(60) % 5
    sampler = make(TensorDataset(torch.arange(60), labels))
    loader = DataLoader(TensorDataset(torch.arange(60), labels), batch_size=6, sampler=sampler)
    assert len(loader) == -(-len(sampler) // 6)
    assert torch.cat([x for x, _ in loader]).tolist() == sampler.order(0).tolist()


@every_kind
def test_invalid_ranks(make: Any) -> None:
    with pytest.raises(BadArgument, match="rank to be from 0 to 1, received 2"):
        make(digits_like(), num_replicas=2, rank=2)


# -- labels ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, count in (("ant", 5), ("bee", 2), ("cat", 3)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.png").write_bytes(b"not an image: reading it would fail")
    return tmp_path


def hf_data(labels: list[int]) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abc"))})
    rows = {"image": [{"bytes": b"no image", "path": None}] * len(labels), "label": labels}
    return datasets.Dataset.from_dict(rows, features=features)


def test_labels_are_found_wherever_data_keep_them(folder: Path) -> None:
    want = [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
    for data in (
        ImageFolder(folder),
        TensorDataset(torch.zeros(10, 1), torch.tensor(want)),
        hf_data(want),
        Labels(torch.tensor(want)),
        Subset(Subset(Labels([9, *want, 9]), range(11)), range(1, 11)),
    ):
        order = ClassBalancedSampler(data, num_samples=30).order(0)
        assert Counter(np.asarray(want)[order].tolist()) == {0: 10, 1: 10, 2: 10}
    part = Subset(ImageFolder(folder), [0, 1, 8, 9])
    assert Counter(part.dataset.targets[part.indices[i]] for i in ClassBalancedSampler(part).order(0)) == {0: 2, 2: 2}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        raise AssertionError("the stream was consumed")


@pytest.mark.parametrize(
    "data", [Labels(["a", "b"]), Labels([0.5, 1.5]), Stream(), [1, 2, 3]], ids=["names", "numbers", "stream", "list"]
)
@pytest.mark.parametrize("make", [ClassBalancedSampler, PKSampler])
def test_unknown_labels_are_an_error_that_helps(data: Any, make: Any) -> None:
    with pytest.raises(DataError, match=f"for {make.__name__}, received .*attribute `targets`"):
        make(data)


@pytest.mark.parametrize("make", [ClassBalancedSampler, PKSampler, RepeatedAugmentSampler])
def test_empty_data(make: Any) -> None:
    with pytest.raises(DataError, match="at least"):
        make(Labels(np.zeros(0, dtype=np.int64)))


# -- balanced ----------------------------------------------------------------------------------------------


@quick
@given(labels=some_labels, num_samples=st.one_of(st.none(), st.integers(1, 100)), epoch=st.integers(0, 5))
def test_classes_are_balanced_and_small_ones_used_in_whole_passes(
    labels: list[int], num_samples: int | None, epoch: int
) -> None:
    sampler = ClassBalancedSampler(Labels(labels), num_samples, seed=3)
    order = sampler.order(epoch).tolist()
    assert len(order) == len(sampler) == (num_samples or len(labels))
    per_class = Counter(labels[index] for index in order)
    counts = [per_class[label] for label in set(labels)]
    assert max(counts) - min(counts) <= 1
    for label in set(labels):
        members = {index for index, other in enumerate(labels) if other == label}
        drawn = [index for index in order if labels[index] == label]
        for start in range(0, len(drawn), len(members)):
            one_pass = drawn[start : start + len(members)]
            assert len(set(one_pass)) == len(one_pass)
            assert set(one_pass) <= members


def test_remainders_go_to_other_classes_in_other_epochs() -> None:
    labels = np.repeat(np.arange(5), 10)
    sampler = ClassBalancedSampler(Labels(labels), num_samples=7)
    lucky = {tuple(np.flatnonzero(np.bincount(labels[sampler.order(epoch)], minlength=5) == 2)) for epoch in range(40)}
    assert {label for pair in lucky for label in pair} == set(range(5))


def test_every_sample_of_a_large_class_has_the_same_chance() -> None:
    labels = np.repeat([0, 1], [90, 10])
    sampler = ClassBalancedSampler(Labels(labels), num_samples=20)
    seen = np.zeros(100)
    places = np.zeros(2)
    for epoch in range(3000):
        order = sampler.order(epoch)
        seen += np.bincount(order, minlength=100)
        places += np.bincount(labels[order[:5]], minlength=2)
    assert np.all(seen[90:] == 3000)
    expectation = 3000 / 9  # binomial: four standard deviations are 69
    assert np.abs(seen[:90] - expectation).max() < 80
    assert abs(places[0] / places.sum() - 0.5) < 0.02  # shuffled: no class comes first


@pytest.mark.parametrize("number", [0, -1, 2.5, True])
def test_bad_numbers(number: Any) -> None:
    with pytest.raises(BadArgument, match="num_samples to be a positive integer"):
        ClassBalancedSampler(digits_like(), number)
    with pytest.raises(BadArgument, match="k to be a positive integer"):
        PKSampler(digits_like(), 2, number)


# -- P classes, K samples ----------------------------------------------------------------------------------


@quick
@given(data=st.data(), labels=some_labels, k=st.integers(1, 6), num_batches=st.one_of(st.none(), st.integers(1, 20)))
def test_batches_of_p_classes_with_k_samples(data: Any, labels: list[int], k: int, num_batches: int | None) -> None:
    sizes = Counter(labels)
    p = data.draw(st.integers(1, len(sizes)))
    sampler = PKSampler(Labels(labels), p, k, num_batches, seed=2)
    order = sampler.order(1).tolist()
    assert sampler.batch_size == p * k
    assert len(order) == len(sampler) == sampler.num_batches * p * k
    assert sampler.num_batches == (num_batches or max(1, len(labels) // (p * k)))
    turns: Counter[int] = Counter()
    for start in range(0, len(order), p * k):
        batch = order[start : start + p * k]
        assert all(count == k for count in Counter(labels[index] for index in batch).values())
        assert len({labels[index] for index in batch}) == p
        for place in range(0, p * k, k):
            group = batch[place : place + k]
            label = labels[group[0]]
            assert {labels[index] for index in group} == {label}
            times = Counter(group)
            assert max(times.values()) == -(-k // sizes[label])  # no repetition that could be avoided
        turns.update({labels[index] for index in batch})
        assert max(turns.values()) - min(turns[label] for label in sizes) <= 1
    for label in sizes:
        seen: Counter[int] = Counter({index: 0 for index, other in enumerate(labels) if other == label})
        for index in order:
            if labels[index] == label:
                seen[index] += 1
                assert max(seen.values()) - min(seen.values()) <= 1  # all are used before one is used again


def test_more_classes_than_there_are() -> None:
    with pytest.raises(BadArgument, match=r"p to be at most 5, the number of classes in the data, received 8"):
        PKSampler(digits_like(), p=8)


def test_every_class_is_as_likely_in_every_batch() -> None:
    labels = np.arange(70) % 7
    sampler = PKSampler(Labels(labels), 3, 2)
    first = Counter(int(label) for epoch in range(1400) for label in labels[sampler.order(epoch)[:6:2]])
    assert all(abs(count - 600) < 75 for count in first.values())  # binomial: four standard deviations are 74


# -- repetitions -------------------------------------------------------------------------------------------


@quick
@given(size=st.integers(1, 50), repeats=st.integers(1, 6), round_number=st.integers(0, 3))
def test_repetitions_are_neighbours_and_a_round_sees_everything(size: int, repeats: int, round_number: int) -> None:
    sampler = RepeatedAugmentSampler(size, repeats, seed=4)
    seen: set[int] = set()
    for epoch in range(round_number * repeats, (round_number + 1) * repeats):
        order = sampler.order(epoch)
        assert len(order) == len(sampler) == size
        groups = [order[i : i + repeats] for i in range(0, size, repeats)]
        assert all(len(set(group.tolist())) == 1 for group in groups)
        assert len({int(group[0]) for group in groups}) == len(groups)
        seen.update(order.tolist())
    assert seen == set(range(size))


def test_one_repetition_is_shuffling() -> None:
    assert sorted(RepeatedAugmentSampler(digits_like(), 1).order(0).tolist()) == list(range(60))


# -- by name -----------------------------------------------------------------------------------------------


def test_sampler_names() -> None:
    data = digits_like(100, 10)
    assert make_sampler(None, data, batch_size=8, seed=0) is None
    balanced = make_sampler("balanced", data, batch_size=8, seed=3)
    assert np.array_equal(balanced.order(1), ClassBalancedSampler(data, seed=3).order(1))
    pk = make_sampler("pk:2", data, batch_size=8, seed=3)
    assert (pk.p, pk.k, pk.seed) == (4, 2, 3)
    assert make_sampler("repeated", data, batch_size=8, seed=0).repeats == 3
    assert make_sampler("repeated:4", data, batch_size=8, seed=0).repeats == 4
    tokens = [{"input_ids": [0] * size} for size in (2, 9, 1, 8)]
    assert make_sampler("length", tokens, batch_size=2, seed=0).order(0).tolist() in ([1, 3, 0, 2], [3, 1, 0, 2])


@pytest.mark.parametrize(
    ("batch_size", "classes", "p", "k"), [(32, 10, 8, 4), (64, 10, 8, 8), (6, 10, 2, 3), (9, 4, 3, 3), (4, 5, 2, 2)]
)
def test_pk_alone_chooses_numbers_that_fit(batch_size: int, classes: int, p: int, k: int) -> None:
    sampler = make_sampler("pk", Labels(np.arange(200) % classes), batch_size=batch_size, seed=0)
    assert (sampler.p, sampler.k) == (p, k)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("balancd", "received 'balancd'. Did you mean 'balanced'"),
        ("balanced:3", "Known: 'balanced'"),
        ("pk:x", "positive integer in 'pk:N', received 'pk:x'"),
        ("repeated:0", "received 'repeated:0'"),
        ("pk:3", r"batch_size to be a multiple of 3.*received 32. Pass batch_size=30"),
        ("pk:2", r"at least 16 classes.*received 5. Pass sampler='pk:8', or batch_size=10"),
        (3, "a function of the data, received 'int'"),
        (lambda data: None, "to return a sampler, received None"),
        (iter([1]), "a sampler with a length"),
    ],
)
def test_invalid_samplers(spec: Any, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        make_sampler(spec, digits_like(), batch_size=32, seed=0)


def test_a_pk_sampler_must_fit_the_batch() -> None:
    sampler = PKSampler(digits_like(), 4, 3, num_replicas=2, rank=1)
    with pytest.raises(BadArgument, match=r"batch_size=12, for a PKSampler of p=4 .* received 32. Pass batch_size=12"):
        make_sampler(sampler, digits_like(), batch_size=32, seed=0)
    got = make_sampler(sampler, digits_like(), batch_size=12, seed=0)
    assert len(got) == len(got.order(0)) == sampler.num_samples  # the engine divides the whole epoch itself
    assert (sampler.rank, sampler.num_replicas) == (1, 2)


class Alternating:
    """A sampler of somebody else's, with epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([self.epoch % 5, random.randrange(5), int(np.random.randint(5))])


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(60)),
        lambda: RandomSampler(range(60), generator=torch.Generator().manual_seed(1)),
        lambda: WeightedRandomSampler([1.0] * 60, 30),
        lambda: DistributedSampler(range(60), num_replicas=1, rank=0),
        Alternating,
        lambda: ClassBalancedSampler,  # a class is a function of the data
    ],
    ids=["random", "own generator", "weighted", "distributed", "epochs", "class"],
)
def test_foreign_samplers_become_functions_of_seed_and_epoch(make: Any) -> None:
    data = digits_like()
    sampler = make_sampler(make(), data, batch_size=4, seed=7)
    state = torch.get_rng_state(), random.getstate()
    first = [sampler.order(epoch, 7).tolist() for epoch in range(3)]
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert len({tuple(order) for order in first}) == 3
    torch.manual_seed(123)
    random.seed(123)
    again = make_sampler(make(), data, batch_size=4, seed=7)
    assert [again.order(epoch, 7).tolist() for epoch in (2, 0, 1)] == [first[2], first[0], first[1]]
    assert all(len(order) == len(sampler) for order in first)


def test_the_sampler_of_pytorch_metric_learning_can_be_used() -> None:
    samplers = pytest.importorskip("pytorch_metric_learning.samplers")
    data = digits_like()
    theirs = samplers.MPerClassSampler(data.targets, m=4, batch_size=8, length_before_new_iter=40)
    sampler = make_sampler(theirs, data, batch_size=8, seed=0)
    order = sampler.order(0, 0)
    assert np.array_equal(order, sampler.order(0, 0))
    for start in range(0, 40, 8):
        assert sorted(Counter(data.targets[order[start : start + 8]].tolist()).values()) == [4, 4]


def test_a_users_generator_is_preserved() -> None:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    ListedSampler(RandomSampler(range(9), generator=generator), 9).order(0)
    assert torch.equal(generator.get_state(), state)


def test_a_function_of_the_data_gets_the_data() -> None:
    data = digits_like()
    sampler = make_sampler(lambda given: PKSampler(given, 2, 4), data, batch_size=8, seed=0)
    assert isinstance(sampler, PKSampler)
    listed = make_sampler(lambda given: SequentialSampler(given), data, batch_size=8, seed=0)
    assert listed.order(5).tolist() == list(range(60))


def test_custom_orders_are_used_unchanged() -> None:
    class Mine:
        def order(self, epoch: int, seed: int) -> np.ndarray:
            return np.array([epoch])

        def __len__(self) -> int:
            return 1

    mine = Mine()
    assert make_sampler(mine, digits_like(), batch_size=8, seed=0) is mine


class InPlace:
    """Shuffles its own list: what an epoch holds depends on those before."""

    def __init__(self) -> None:
        self.indices = list(range(9))

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Any:
        random.shuffle(self.indices)
        return iter(self.indices)


def test_a_sampler_that_mutates_itself_is_copied() -> None:
    theirs = InPlace()
    sampler = ListedSampler(theirs, 9)
    first = sampler.order(1).tolist()
    sampler.order(0)
    assert sampler.order(1).tolist() == first
    assert theirs.indices == list(range(9))


class Short:
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter([0, 1])


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (BatchSampler(SequentialSampler(range(6)), 2, False), r"one index at a time, received \[0, 1\].*batch_sampler"),
        ([0, 60], "indices from 0 to 59, received 60"),
        ([-1], "received -1"),
        (Short(), r"give 5 indices, as its len\(\) says, received 2"),
    ],
)
def test_foreign_samplers_that_cannot_work(sampler: Any, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        make_sampler(sampler, digits_like(), batch_size=2, seed=0).order(0)


def test_streams_cannot_be_sampled() -> None:
    with pytest.raises(DataError, match="with a length"):
        make_sampler("repeated", Stream(), batch_size=2, seed=0)


def test_a_custom_sampler_needs_a_length_and_an_order() -> None:
    class Reversed(EpochSampler):
        @property
        def num_samples(self) -> int:
            return 4

        def order(self, epoch: int, seed: int | None = None) -> np.ndarray:
            return np.arange(4)[::-1]

    assert list(Reversed(num_replicas=2, rank=1)) == [2, 0]


def test_ranks_are_those_of_the_process_group() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        sampler = PKSampler(digits_like(), 2, 3, num_batches=7)
        named = make_sampler("balanced", digits_like(), batch_size=8, seed=0)
    finally:
        torch.distributed.destroy_process_group()
    assert (sampler.num_replicas, sampler.rank, len(sampler)) == (3, 1, 2 * 6)
    assert len(named) == len(named.order(0)) == 60  # the engine gets the whole epoch
